"""Ranks, and what the state of a wrapped model is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flatparam import FullyShardedDataParallel
from flatparam_comm.testing import run_threads
from flatparam_core import clean_fqn


def on_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn(ranks, *args)` returns on each rank of a world of threads."""
    return run_threads(world_size, fn, *args, timeout=30)


def wrapped_names(model: nn.Module, kind: type[nn.Module] = FullyShardedDataParallel) -> set[str]:
    """The names, in the unwrapped model, of the modules that `kind` wraps."""
    return {clean_fqn(name) for name, module in model.named_modules() if isinstance(module, kind)}


def facts_of(module: nn.Module) -> dict[str, Any]:
    """Everything that wrapping changes, by identity: for asserting that a refused module was not touched."""
    return {
        "modules": [(name, id(child)) for name, child in module.named_modules()],
        "parameters": [(name, id(p), p.data_ptr(), tuple(p.shape)) for name, p in module.named_parameters()],
        "buffers": [(name, id(b), b.data_ptr()) for name, b in module.named_buffers()],
        "values": [p.detach().clone().tolist() for p in module.parameters() if not p.is_meta],
        "marks": [sorted(vars(p)) for p in module.parameters()],
        "hooks": [
            [len(child._forward_hooks), len(child._forward_pre_hooks), len(child._state_dict_hooks)]
            for child in module.modules()
        ],
        "attributes": [sorted(vars(child)) for child in module.modules()],
    }


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Assert the same keys in the same order, and tensors equal in bits, dtype, shape and memory order."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        mine = found[name]
        assert type(mine) is type(value), name
        if isinstance(value, torch.Tensor):
            assert (mine.dtype, mine.shape, mine.stride()) == (value.dtype, value.shape, value.stride()), name
            assert torch.equal(mine, value), name
        else:
            assert mine == value, name


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: list[torch.Tensor]) -> None:
    """One step on each input."""
    for x in inputs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
