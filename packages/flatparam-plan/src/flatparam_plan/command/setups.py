"""How the arguments of `flatparam plan` say that a program is to be run."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from flatparam_files.command import ArgumentsError
from flatparam_plan.hardware import device_of
from flatparam_plan.training import Setup

__all__ = ["setups_of"]


def setups_of(chosen: argparse.Namespace) -> list[Setup]:
    """One setup, or several to compare."""
    strategies = chosen.compare.split(",") if chosen.compare else [chosen.strategy or "full"]
    if len(strategies) > 1 and len(chosen.world) > 1:
        raise ArgumentsError("give either several world sizes or several strategies to compare")
    device = chosen.device or ("cpu" if chosen.profile is None else device_of(chosen.profile))
    if chosen.check and device != "cpu":
        raise ArgumentsError(
            "--check runs on this CPU, and the plan is of an accelerator's schedule: add --device cpu"
        )
    wrap: Any = tuple(chosen.wrap) if chosen.wrap else chosen.wrap_numel
    return [
        Setup(
            world_size=world,
            ranks_per_host=chosen.ranks_per_host,
            rank=chosen.rank,
            strategy=strategy,
            wrap=wrap,
            param_dtype=_dtype(chosen.dtype),
            reduce_dtype=_dtype(chosen.reduce_dtype),
            optimizer=chosen.optimizer,
            cpu_offload=chosen.offload,
            checkpointing=tuple(chosen.checkpointing),
            use_orig_params=chosen.use_orig_params,
            accumulate=chosen.accumulate,
            max_norm=chosen.clip,
            forward_prefetch=chosen.forward_prefetch,
            backward_prefetch=chosen.backward_prefetch,
            transport=chosen.transport,
            device=device,
        )
        for world in chosen.world
        for strategy in strategies
    ]


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
