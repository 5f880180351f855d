"""Gradients that are collected in no_sync by units, or on ranks, that the reducing backward pass does not touch."""

from __future__ import annotations

from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, run_threads
from integration_tests.parity import models
from integration_tests.parity.local import reduce_by_rule, share_zeros
from integration_tests.parity.runs import Named, assert_same_tensors, gradients_of
from integration_tests.parity.sharded import FlatPart, Setting, held_gradients, join_parts, wrap
from integration_tests.parity.zoo import Case, batch, seeded, squares

CASE = Case("switch", seeded(models.Switch), squares(3, 4), ("left", "right"))


def losses(model: nn.Module, rank: int, *, precise_on: int | None) -> list[Tensor]:
    """The first runs the left unit alone, its float64 parameter on one rank only; the second the right unit alone."""
    first = model(batch(0, rank, 3, 4), left=True, right=False, precise=rank == precise_on)
    second = model(batch(1, rank, 3, 4), left=False, right=True)
    return [first.square().mean(), second.square().mean()]


def sharded_gradients(group: Collectives, setting: Setting, precise_on: int | None) -> list[FlatPart]:
    model = wrap(CASE, setting, group)
    first, second = losses(model, group.rank, precise_on=precise_on)
    with model.no_sync():
        first.backward()
    second.backward()
    return held_gradients(model)


def local_gradients(ranks: int, flat: bool, precise_on: int | None) -> Named:
    of_ranks = []
    model = CASE.build()
    for rank in range(ranks):
        model.zero_grad()
        for loss in losses(model, rank, precise_on=precise_on):
            loss.backward()
        of_ranks.append(gradients_of(model))
    for name, parameter in model.named_parameters():
        parameter.grad = reduce_by_rule([gradients[name] for gradients in of_ranks])
    if flat:
        share_zeros(model, CASE)
    return gradients_of(model)


@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@each_row("original", [False, True], ids=["flat", "original"])
@each_row("precise_on", [None, 0, 1], ids=["nowhere", "rank 0", "rank 1"])
def test_what_was_collected_by_other_units_is_reduced_too(
    strategy: str, original: bool, precise_on: int | None
) -> None:
    """A synchronised backward pass reduces what no_sync left in units that it does not run, on all ranks alike.

    Also where a flat parameter of such a unit (its float64 one) has a gradient on one rank only: all must reduce it.
    """
    setting = Setting(strategy, original)
    found = join_parts(run_threads(2, sharded_gradients, setting, precise_on))
    assert_same_tensors(found, local_gradients(2, not original, precise_on), "gradient")
