"""Ranks that begin with different weights are warned before the first pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives, SingleCollectives, Topology
from flatparam_runtime import UnitPlan, shard_module
from flatparam_runtime.unit.initial_weights import FEW, InitialWeights, _sum, _sum_of_few

from .models import Stack, batch
from .worlds import run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]


class Weight(nn.Module):
    """A parameter of any dtype, which the forward pass leaves alone."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def two_steps(collectives: Collectives, change: str, use_orig_params: bool) -> None:
    """A module whose weights may be different on rank 1."""

    def make() -> Stack:
        stack = seeded(Stack)
        if collectives.rank == 1 and change != "nothing":
            with torch.no_grad():
                stack.blocks[1].up.bias[2] += 1e-6
        return stack

    module = sharded(make, collectives, units=BLOCKS, use_orig_params=use_orig_params)
    if change == "loaded since":
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(1.0)
    for _ in range(2):
        module(batch()).sum().backward()


def warnings_of(world_size: int, fn: Callable[..., None], *args: Any) -> list[str]:
    """The warnings of all ranks, which are threads."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(world_size, fn, *args)
    return [str(warning.message) for warning in caught]


def test_other_weights_are_named(use_orig_params: bool) -> None:
    """If one bit of one parameter differs, every rank warns once: of the parameter, the ranks, and what to do."""
    messages = warnings_of(3, two_steps, "one element", use_orig_params)
    assert len(messages) == 3
    for message in messages:
        for words in ("parameter 'up.bias' of unit 'blocks.1'", "on ranks [1]", "sync_module_states=True"):
            assert words in message


@pytest.mark.parametrize("change", ["nothing", "loaded since"])
def test_equal_weights_are_not(change: str, use_orig_params: bool) -> None:
    """If the weights are equal, or weights were loaded into the shards since, no rank warns."""
    assert warnings_of(2, two_steps, change, use_orig_params) == []


def any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of random bytes."""
    nbytes = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8).view(dtype).view(shape)


@each_row("shape", [(), (0,), (1,), (3, 5), (FEW.value,)])
@each_row("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128, torch.float8_e5m2, torch.int8])
def test_few_elements_are_added_up_as_many(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A small parameter has the same checksum in Python and by torch's operator, whatever its bits and its strides."""
    parameter = nn.Parameter(any_bits(shape, dtype).t() if len(shape) == 2 else any_bits(shape, dtype), False)
    assert _sum_of_few(parameter) == _sum(parameter).item()
    large = nn.Parameter(torch.cat([parameter.detach().reshape(-1), torch.zeros(FEW.value + 1, dtype=dtype)]), False)
    found = InitialWeights.of(["small", "large"], [parameter, large]).checksums()
    assert found["small"] == found["large"] == _sum(parameter).item()


def test_a_single_rank_computes_no_checksum() -> None:
    """With one rank there is nothing to compare."""
    unit = shard_module(nn.Linear(2, 2), UnitPlan(Topology(SingleCollectives())))
    assert unit.held.initial is None


@each_row("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.complex128, torch.int8, torch.bool])
def test_every_dtype_has_a_checksum(dtype: torch.dtype) -> None:
    """Parameters of any dtype are compared, by their bits."""

    def rank(collectives: Collectives) -> None:
        module = Weight(torch.ones(3, dtype=dtype) if collectives.rank == 0 else torch.zeros(3, dtype=dtype))
        shard_module(module, UnitPlan(Topology(collectives)))
        module(torch.ones(1))

    messages = warnings_of(2, rank)
    assert len(messages) == 2
    assert all("'weight'" in message for message in messages)
