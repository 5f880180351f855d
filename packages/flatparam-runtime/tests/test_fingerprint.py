"""The cost of comparing ranks: the bytes that are sent, and the log that is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flatparam_comm import (
    ByteLedger,
    Collectives,
    ForwardingCollectives,
    RecordingCollectives,
    SingleCollectives,
    Topology,
)
from flatparam_runtime import UnitPlan, no_sync, shard_module
from flatparam_runtime.agreement.fingerprint import Fingerprint

from .models import Block, Chain, batch
from .worlds import run, seeded, sharded

LABEL = "parameters with a gradient"
FINGERPRINT_NBYTES = 16


class ExchangeCounter(ForwardingCollectives):
    """Collectives that count the messages that are no tensors."""

    count = 0

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        self.count += 1
        return super().exchange(value, label=label)

    def _decorate(self, inner: Collectives) -> Collectives:
        return ExchangeCounter(inner)


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


def test_what_agreeing_sends() -> None:
    """Steady training sends 16 bytes and one per parameter in each synced backward, 16 in an evaluation; else nothing."""

    def count(collectives: Collectives) -> None:
        ledger = ByteLedger()
        counter = ExchangeCounter(collectives)
        module = sharded(Chain, RecordingCollectives(counter, ledger), units=["blocks.0", "blocks.1"])
        flags = sum(len(list(block.parameters())) for block in seeded(Chain).blocks)

        def sent(step: Callable[[], object]) -> int:
            ledger.reset()
            step()
            totals = ledger.by_label().get(LABEL)
            assert totals is None or totals.count == 1
            return 0 if totals is None else totals.payload_nbytes

        def train() -> None:
            loss(module, collectives.rank).backward()

        assert sent(train) == FINGERPRINT_NBYTES + flags
        first = counter.count
        with no_sync(module):
            assert sent(train) == 0
        assert sent(train) == FINGERPRINT_NBYTES + flags
        assert sent(lambda: module(batch())) == 0
        with torch.no_grad():
            assert sent(lambda: module(batch())) == FINGERPRINT_NBYTES
        assert counter.count == first

    run(2, count)


def test_alone_nothing_is_sent() -> None:
    """A world of one sends nothing, since it has nothing to compare."""
    ledger = ByteLedger()
    counter = ExchangeCounter(SingleCollectives())
    module = sharded(Chain, RecordingCollectives(counter, ledger), units=["blocks.0"])
    loss(module, 0).backward()
    with torch.no_grad():
        module(batch())
    assert LABEL not in ledger.by_label()
    assert ledger.sent_nbytes == counter.count == 0


VALUES = st.integers(0, 2) | st.integers(0, 2**64 - 1)


@given(VALUES, VALUES)
def test_the_maximum_of_flags(one: int, other: int) -> None:
    """The bytewise maximum of two ranks' flags is a rank's own exactly if their values are the same."""
    flags = [Fingerprint(value).flags() for value in (one, other)]
    assert [len(each) for each in flags] == [FINGERPRINT_NBYTES] * 2
    combined = bytes(map(max, *flags))
    assert [combined == each for each in flags] == [one == other] * 2


def test_the_log_is_bounded() -> None:
    """The log is bounded while ranks do not agree, and empty after they have agreed."""
    module = sharded(Block, SingleCollectives())
    unit = shard_module(nn.Sequential(module), UnitPlan(Topology(SingleCollectives())))
    fingerprint = Fingerprint()
    for _ in range(40_000):
        fingerprint.note("gather", unit, 0, 4)
    assert not fingerprint.is_empty
    assert len(fingerprint.deeds({0: unit})) < 2**15
    fingerprint.agreed(fingerprint.noted)
    assert fingerprint.is_empty


def test_what_was_noted_since_a_comparison_is_kept() -> None:
    """Ranks that agree on what was done up to a comparison keep what they have done since, for a message."""
    module = sharded(Block, SingleCollectives())
    unit = shard_module(nn.Sequential(module), UnitPlan(Topology(SingleCollectives())))
    fingerprint = Fingerprint()
    fingerprint.note("gather", unit, 0, 4)
    compared = fingerprint.noted
    fingerprint.note("reduce", unit, 0, 8)
    fingerprint.agreed(compared)
    assert [(deed.kind, deed.nbytes) for deed in fingerprint.deeds({0: unit})] == [("reduce", 8)]
    fingerprint.agreed(compared)
    assert not fingerprint.is_empty
