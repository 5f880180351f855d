"""The layouts of a unit: as few as its parameters need."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from flatparam_core.geometry.layout import FlatLayout
from flatparam_core.geometry.specs import ParamSpec

__all__ = ["plan_layouts"]


def plan_layouts(
    specs: Sequence[ParamSpec],
    *,
    world_size: int,
    alignment_nbytes: int = 0,
    shard_alignment_nbytes: int = 0,
    held_in: Sequence[torch.dtype] = (),
    shares: Sequence[float] = (),
) -> tuple[FlatLayout, ...]:
    """Plan as few flat parameters as the parameters of a unit need.

    One flat parameter holds one dtype, and either trainable or frozen parameters, so that frozen ones cost no
    gradient memory and no reduced bytes. Trainable layouts come first; within each the order is that of
    `FlatLayout.plan`. Equal parameters get the same layout objects, so that the repeated blocks of a model share them.

    Args:
        specs: the parameters, with the rule of each.
        world_size: see `FlatLayout.plan`.
        alignment_nbytes: see `FlatLayout.plan`.
        shard_alignment_nbytes: see `FlatLayout.plan`.
        held_in: see `FlatLayout.plan`.
        shares: see `FlatLayout.plan`.
    """
    return _plan_layouts(
        tuple(specs), world_size, (alignment_nbytes, shard_alignment_nbytes), tuple(held_in), tuple(shares)
    )


@functools.lru_cache(maxsize=256)
def _plan_layouts(
    specs: tuple[ParamSpec, ...],
    world_size: int,
    alignments: tuple[int, int],
    held_in: tuple[torch.dtype, ...],
    shares: tuple[float, ...],
) -> tuple[FlatLayout, ...]:
    groups: dict[tuple[bool, torch.dtype], list[ParamSpec]] = {}
    for spec in specs:
        groups.setdefault((not spec.requires_grad, spec.dtype), []).append(spec)
    # The sort is stable: dtypes stay in order of appearance.
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return tuple(
        FlatLayout.plan(
            group,
            world_size=world_size,
            alignment_nbytes=alignments[0],
            shard_alignment_nbytes=alignments[1],
            held_in=held_in,
            shares=shares,
        )
        for _, group in ordered
    )
