"""The property: sharded equals unsharded, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from flatparam_comm import run_threads
from integration_tests.parity.runs import Named, assert_same_tensors
from integration_tests.parity.sharded import join_parts
from integration_tests.programs.recipes import Configuration, Program
from integration_tests.programs.running import (
    Record,
    Sabotage,
    aliases_of,
    run_locally,
    run_sharded,
    thresholds_of,
)


def check(program: Program, configuration: Configuration, sabotage: Sabotage | None = None) -> None:
    """Demand of a program on so many ranks the losses, norms, gradients and parameters of one process.

    Every group of ranks that together hold the parameters is compared, so copies of a shard must be equal, too.

    Args:
        sabotage: is done to the sharded model before training, to see that it is found.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run_locally(program, configuration)
        with thresholds_of(configuration):
            found = run_threads(configuration.ranks, run_sharded, program, configuration, sabotage)
    for rank, record in enumerate(found):
        compare_numbers(record.numbers[0], expected.numbers[rank], rank)
    aliases = aliases_of(program)
    size = configuration.group_size
    for start in range(0, configuration.ranks, size):
        _compare_group(found[start : start + size], expected, aliases, f"ranks from {start}")


def compare_numbers(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], rank: int) -> None:
    assert len(found) == len(expected), f"rank {rank}: {len(found)} losses and the like, not {len(expected)}"
    for number, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"rank {rank}: number {number} is {mine}, not {theirs}"


def _compare_group(records: Sequence[Record], expected: Record, aliases: dict[str, str], who: str) -> None:
    for what in ("gradients", "parameters"):
        for step, theirs in enumerate(getattr(expected, what)):
            mine = join_parts([getattr(record, what)[step] for record in records])
            mine = {aliases[name]: tensor for name, tensor in mine.items()}
            assert_same_tensors(mine, theirs, f"{who}, step {step}, {what}:")
    for record in records:
        for number, theirs in enumerate(expected.looks):
            mine = record.looks[number]
            for name, tensor in mine.items():
                _compare_look(name, tensor, theirs, aliases, who)
            assert {aliases[name] for name in mine} == set(theirs), f"{who}: looking shows {set(mine)}"


def _compare_look(name: str, tensor: torch.Tensor, theirs: Named, aliases: dict[str, str], who: str) -> None:
    true = theirs[aliases[name]]
    assert true is not None
    assert torch.equal(tensor, true), f"{who}: looking at {name} shows {tensor}, not {true}"
