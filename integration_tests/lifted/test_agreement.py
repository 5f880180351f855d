"""What it costs to know that all ranks run the same program: row L-49 of the specification."""

from __future__ import annotations

import unittest.mock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, ForwardingCollectives, RecordingCollectives, run_threads
from flatparam_runtime import DivergenceError
from integration_tests.lifted.our_half import FSDP, seeded, square_loss
from integration_tests.lifted.torch_half import Outcomes, fsdp1

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""On the CPU torch gathers parameters by another function; this one is left to the check."""

COMPARED = 16
"""Bytes of the fingerprint that the ranks compare: what they did, and its complement."""


def layers(count: int) -> nn.Module:
    return seeded(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))))


def with_debug_level(level: Any, run: Any, *args: Any) -> Any:
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        return run(*args)
    finally:
        dist.set_debug_level(before)


def torch_checks(rank: int, units: int) -> int:
    """How many all-gathers the check of the order makes in the first step of this many units."""
    model = fsdp1(nn.Sequential(*(fsdp1(layer) for layer in layers(units))))
    with unittest.mock.patch.object(dist, GATHER, side_effect=getattr(dist, GATHER)) as gather:
        square_loss(model, 0, rank).backward()
    return gather.call_count


def torch_l49_count(group: Collectives) -> list[list[int]]:
    levels = (dist.DebugLevel.INFO, dist.DebugLevel.DETAIL)
    return [[with_debug_level(level, torch_checks, group.rank, units) for units in (2, 5)] for level in levels]


class Astray(nn.Module):
    """Rank 1 runs the two layers in the other order."""

    def __init__(self, rank: int, wrap: Any) -> None:
        super().__init__()
        self.first, self.second = (wrap(layer) for layer in layers(2))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            return self.second(self.first(x))
        return self.first(self.second(x))


def torch_l49_silence(group: Collectives) -> str:
    fsdp1(Astray(group.rank, fsdp1))(torch.ones(1, 4)).sum().backward()
    return "no word"


def torch_l49_detail(group: Collectives) -> str:
    return with_debug_level(dist.DebugLevel.DETAIL, torch_l49_silence, group)


def test_l49_torch_gathers_twice_for_every_unit(processes: Outcomes) -> None:
    """Torch checks with the debug level DETAIL only, by two gathers for each unit, and compares all pairs of ranks."""
    assert processes.values(torch_l49_count) == [[[0, 0], [2 * 2, 2 * 5]]] * 2


def test_l49_torch_says_nothing_without_detail(processes: Outcomes) -> None:
    """Torch trains ranks that run different layers without a word; only with DETAIL it raises."""
    assert processes.values(torch_l49_silence) == ["no word"] * 2
    processes.assert_raised(torch_l49_detail, "RuntimeError", "Forward order differs across ranks")


class Counted(ForwardingCollectives):
    """Counts the exchanges of values other than tensors, and keeps what they were."""

    __slots__ = ("values",)

    def __init__(self, inner: Collectives) -> None:
        super().__init__(inner)
        self.values: list[Any] = []

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        self.values.append((label, value))
        return self.inner.exchange(value, label=label)

    def _decorate(self, inner: Collectives) -> Collectives:
        return Counted(inner)


def compared(group: Collectives, units: int) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """For each of three steps the exchanges and, by label, what was all-reduced."""
    ledger = ByteLedger()
    counted = Counted(group)
    where = RecordingCollectives(counted, ledger)
    model = FSDP(nn.Sequential(*(FSDP(layer, where) for layer in layers(units))), where)
    exchanges, reduced = [], []
    for step in range(3):
        square_loss(model, step, group.rank).backward()
        exchanges.append(list(counted.values))
        reduced.append({label: t for label, t in ledger.by_label().items() if "gradient" in label})
        counted.values.clear()
        ledger.reset()
    return exchanges, reduced


@each_row("ranks", [2, 3, 8])
@each_row("units", [2, 5])
def test_l49_one_comparison_for_each_step(ranks: int, units: int) -> None:
    """From the second step on the ranks compare once: 16 bytes and a flag for each parameter, however many they are."""
    for exchanges, reduced in run_threads(ranks, compared, units):
        assert exchanges[1:] == [[], []]
        for of_step in reduced:
            ((_, totals),) = of_step.items()
            assert totals.count == 1
            assert totals.payload_nbytes == COMPARED + 2 * units


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_l49_a_digest_at_the_start(ranks: int) -> None:
    """Before the first pass the ranks compare one digest of all their units, of the same size for every model."""
    sizes = set()
    for units in (2, 5):
        for exchanges, _ in run_threads(ranks, compared, units):
            ((labelled,),) = [value for label, value in exchanges[0] if label == "units"]
            units_digest, weights_digest, *numbers = labelled.value
            sizes.add((len(units_digest), len(weights_digest), *map(type, numbers)))
    assert sizes == {(64, 64, int, int)}, (
        "one of the units, one of the weights; places in the program, and of the model"
    )


def test_l49_exchanges_of_the_first_step() -> None:
    """In the first step, and in no other, the ranks also tell each other of each collective before they begin it."""
    gathers_and_reductions = 3
    for units in (2, 5):
        for exchanges, _ in run_threads(2, compared, units):
            labels = [label for label, _ in exchanges[0]]
            assert labels == ["units", *["order"] * gathers_and_reductions * units]


def test_l49_ranks_that_go_astray_are_told() -> None:
    """Ranks that run different units raise, each of them, naming the units; nobody has to ask for it."""

    def rank(group: Collectives) -> str:
        model = FSDP(Astray(group.rank, FSDP))
        with pytest.raises(DivergenceError) as caught:
            square_loss(model, 0, group.rank).backward()
        return str(caught.value)

    for message in run_threads(2, rank):
        assert "unit 'first'" in message
        assert "unit 'second'" in message
        # An accelerator may be at a unit that is gathered ahead.
        ahead = torch.get_default_device().type != "cpu"
        for rank, name in enumerate(("first", "second")):
            assert f"rank {rank} was at the gather of unit {'' if ahead else repr(name)}" in message
