"""How many bytes a rank sends in a step: exactly what a formula says.

With ``W`` ranks, each gather and each reduction of ``N`` bytes sends ``N (W - 1) / W``. ``F[k]`` are the bytes of unit
``k``'s full parameters, ``G[k]`` those of its trainable ones; unit 0 is the root. ``L`` are those of the unit that ends
last before the root, which FULL_SHARD keeps for its backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
from each_row import each_row

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, run_threads
from flatparam_runtime import units_in
from integration_tests.parity.schedules import Passes, accumulate, evaluate, one_step
from integration_tests.parity.sharded import Setting, optimizer_of, wrap
from integration_tests.parity.zoo import named

Sent = dict[str, dict[str, int]]


def sent(group: Collectives, name: str, setting: Setting, passes: Passes) -> tuple[list[int], list[int], Sent]:
    """``F`` and ``G`` of the model, and for each part of the second step the bytes sent by every kind of collective."""
    case = named(name)
    ledger = ByteLedger()
    model = wrap(case, setting, RecordingCollectives(group, ledger))
    optimizer = optimizer_of(model, setting)
    found: Sent = {}
    for _ in range(2):
        optimizer.zero_grad()
        ledger.reset()
        for part in passes(model, functools.partial(case.loss, model, rank=group.rank)):
            found[part] = {op: totals.sent_nbytes for op, totals in ledger.by_op().items()}
            ledger.reset()
        optimizer.step()
    units = units_in(model)
    full = [unit.unsharded_nbytes for unit in units]
    trained = [sum(h.buffer.nbytes for h in unit.handles if h.flat_param.requires_grad) for unit in units]
    return full, trained, found


def part_of(world_size: int, sizes: Sequence[int]) -> int:
    total, rest = divmod(sum(sizes) * (world_size - 1), world_size)
    assert not rest, "flat parameters are padded so that every rank has the same share"
    return total


FINGERPRINT = 16
"""Bytes that the ranks compare beside a byte for each trained parameter: what they did, and its complement."""

LAST = {
    "nested": 1,  # the outer one, in which the others are
    "reentrant-around-unit": None,  # it runs without recording, to be gathered again for its recomputation
}
"""The unit that is kept, where it is not the one that comes last in the model."""


def kept(name: str, F: Sequence[int]) -> int:
    """``L``."""
    last = LAST.get(name, -1)
    return 0 if last is None else F[last]


NAMES = (
    "plain",
    "frozen",
    "nested",
    "transformer",
    "dtypes",
    "checkpoint-around-unit",
    "reentrant-around-unit",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("prefetch", [(False, None), (True, "BACKWARD_PRE"), (True, "BACKWARD_POST")])
def test_a_step_of_full_shard(name: str, ranks: int, prefetch: tuple[bool, str | None]) -> None:
    """FULL_SHARD gathers every unit twice but the root and the last, and reduces what is trained once.

    However it prefetches.
    """
    setting = Setting("FULL_SHARD", True, "sgd", *prefetch)
    for F, G, found in run_threads(ranks, sent, name, setting, one_step):
        flags = found["backward"].pop("all_reduce")
        again = part_of(ranks, [*F[1:], -kept(name, F)])
        gathers = {"all_gather": again} if again else {}
        assert found == {
            "forward": {"all_gather": part_of(ranks, F)},
            "backward": {**gathers, "reduce_scatter": part_of(ranks, G)},
        }
        trained = sum(p.requires_grad for p in named(name).build().parameters())
        assert flags == math.ceil(2 * (trained + FINGERPRINT) * (ranks - 1) / ranks)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_of_shard_grad_op(name: str, ranks: int, ahead: bool) -> None:
    """SHARD_GRAD_OP gathers everything once, in the forward pass, and reduces what is trained once."""
    setting = Setting("SHARD_GRAD_OP", forward_prefetch=ahead)
    for F, G, found in run_threads(ranks, sent, name, setting, one_step):
        del found["backward"]["all_reduce"]
        assert found == {
            "forward": {"all_gather": part_of(ranks, F)},
            "backward": {"reduce_scatter": part_of(ranks, G)},
        }


def test_frozen_parameters_are_not_reduced() -> None:
    """What is reduced of the model with frozen parameters is less than what is gathered, by what is frozen."""
    ((F, G, _), _) = run_threads(2, sent, "frozen", Setting("FULL_SHARD", True), one_step)
    frozen = [p for p in named("frozen").build().parameters() if not p.requires_grad]
    assert sum(F) - sum(G) >= 4 * sum(p.numel() for p in frozen) > 0


def test_no_sync() -> None:
    """A backward pass inside no_sync reduces nothing, and sends nothing else; the next one reduces as much as ever."""
    for F, G, found in run_threads(2, sent, "nested", Setting("FULL_SHARD"), accumulate):
        del found["backward"]["all_reduce"]
        gathers = {"all_gather": part_of(2, F)}
        again = {"all_gather": part_of(2, [*F[1:], -kept("nested", F)])}
        assert found == {
            "quiet forward": gathers,
            "quiet backward": again,
            "forward": gathers,
            "backward": {**again, "reduce_scatter": part_of(2, G)},
        }


def test_no_sync_without_freeing() -> None:
    """Under SHARD_GRAD_OP two micro-batches, the first in no_sync, together send what one step does."""
    for F, G, found in run_threads(2, sent, "nested", Setting("SHARD_GRAD_OP"), accumulate):
        del found["backward"]["all_reduce"]
        assert found == {
            "quiet forward": {"all_gather": part_of(2, F)},
            "quiet backward": {},
            "forward": {},
            "backward": {"reduce_scatter": part_of(2, G)},
        }


@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_evaluation(strategy: str) -> None:
    """Evaluation gathers everything once, and compares what the ranks did; it sends nothing else."""
    for F, _, found in run_threads(3, sent, "transformer", Setting(strategy), evaluate):
        compared = math.ceil(2 * FINGERPRINT * 2 / 3)
        assert found == {"evaluation": {"all_gather": part_of(3, F), "all_reduce": compared}}
