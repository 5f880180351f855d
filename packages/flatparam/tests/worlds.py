"""Ranks, and what the state of a wrapped model is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives
from flatparam_comm.testing import rectangle, run_threads
from flatparam_core import clean_fqn


def on_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn(ranks, *args)` returns on each rank of a world of threads."""
    return run_threads(world_size, fn, *args)


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


def inputs(rank: int, count: int = 3, *shape: int) -> list[torch.Tensor]:
    """The batches of a rank, for the models that take three numbers."""
    return [torch.randn(shape or (4, 3), generator=torch.Generator().manual_seed(100 * n + rank)) for n in range(count)]


def train_on_mean(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: int,
    *,
    per_node: int | None = None,
    steps: int = 3,
) -> None:
    """What data-parallel training stands for: one step on the mean of the gradients that each rank's batch gives.

    Gradients are summed inside each node of `per_node` ranks first; where the number of ranks is a power of two, no
    division rounds, so the sum's order is all that there is to the bits.
    """
    per_node = per_node or ranks
    for n in range(steps):
        nodes = []
        for first in range(0, ranks, per_node):
            optimizer.zero_grad()
            for rank in range(first, first + per_node):
                model(inputs(rank)[n]).square().mean().backward()
            nodes.append([parameter.grad for parameter in model.parameters()])
        for parameter, gradients in zip(model.parameters(), zip(*nodes, strict=True), strict=True):
            parameter.grad = total(gradients) / ranks
        optimizer.step()


def total(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Their sum in order; `None` where the first is."""
    if tensors[0] is None:
        return None
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        result += tensor
    return result


def node_groups(world: Collectives, per_node: int = 2) -> tuple[Collectives, Collectives]:
    """The rank's groups inside its node and across nodes."""
    topology = rectangle(world, per_node)
    assert topology.replicate is not None
    return topology.shard, topology.replicate
