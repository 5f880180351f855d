"""After an exception in the middle of a step, the next step is as if that one had never been tried."""

from __future__ import annotations

import functools

import pytest
import torch

from flatparam_comm import Collectives, run_threads
from flatparam_core.testing import check_invariants
from flatparam_runtime import Phase, units_in
from integration_tests.parity import local
from integration_tests.parity.interruptions import OutOfLuck, raising_before, raising_in_backward_of
from integration_tests.parity.runs import Run, assert_same
from integration_tests.parity.sharded import (
    RankRun,
    Setting,
    held_gradients,
    held_parameters,
    join,
    optimizer_of,
    shard,
    wrap,
)
from integration_tests.parity.zoo import named

STEPS = 3

PLACES = {
    "before the first unit's": ("nested", raising_before, "0.before"),
    "in the innermost unit's forward": ("nested", raising_before, "0.inner.inner.inner"),
    "between the inner unit's and the outer one's end": ("nested", raising_before, "0.after"),
    "in the root's forward, after all units'": ("nested", raising_before, "1"),
    "in the root's own backward": ("nested", raising_in_backward_of, "1"),
    "in the outer unit's backward": ("nested", raising_in_backward_of, "0.after"),
    "in the innermost unit's backward": ("nested", raising_in_backward_of, "0.inner.inner.inner"),
    "after some units are reduced": ("nested", raising_in_backward_of, "0.before"),
    "in a unit that is called twice": ("twice", functools.partial(raising_before, call=1), "block.down"),
    "in a checkpointed unit's forward": ("checkpoint-around-unit", raising_before, "blocks.1.down"),
    "in a recomputation": (
        "checkpoint-around-unit",
        functools.partial(raising_before, call=1),
        "blocks.1.down",
    ),
    "in a recomputation inside a unit": (
        "checkpoint-in-unit",
        functools.partial(raising_before, call=1),
        "blocks.1.down",
    ),
    "in a reentrant recomputation": (
        "reentrant-around-unit",
        functools.partial(raising_before, call=1),
        "blocks.1.down",
    ),
    "in a backward inside a backward": ("reentrant-around-unit", raising_in_backward_of, "blocks.1.up"),
}


def interrupted_run(
    group: Collectives, place: str, error: type[BaseException], setting: Setting, wrapped: bool
) -> RankRun:
    """Every step is tried once with the failure, in step 1 twice; then once without."""
    name, raising, path = PLACES[place]
    case = named(name)
    model = (wrap if wrapped else shard)(case, setting, group)
    optimizer = optimizer_of(model, setting)
    run = RankRun([], [], [])
    for step in range(STEPS):
        for _ in range(2 if step == 1 else 1):
            with raising(model, path, error("as planned")), pytest.raises(error, match="as planned"):
                case.loss(model, step + 7, group.rank).backward()
        optimizer.zero_grad()  # what a failed backward pass has reduced already is in .grad, as on one process
        loss = case.loss(model, step, group.rank)
        loss.backward()
        run.losses.append(loss.detach())
        run.gradients.append(held_gradients(model))
        optimizer.step()
        run.parameters.append(held_parameters(model))
        for unit in units_in(model):
            assert unit.phase is Phase.IDLE
            assert not unit.calls
            for handle in unit.handles:
                check_invariants(handle)
                assert handle.buffer.held_nbytes == 0
                assert not handle.gradients.buffer.is_allocated
    return run


ERRORS = [(OutOfLuck, True), (RuntimeError, False), (KeyboardInterrupt, True), (KeyboardInterrupt, False)]
"""What is raised, and whether the model is wrapped."""


@pytest.mark.parametrize(
    ("place", "error", "wrapped", "strategy"),
    [
        # Each place with each error under one strategy, in turn; under the other one it is long.
        pytest.param(place, *error, strategy, marks=() if (a + b + c) % 2 == 0 else pytest.mark.long)
        for a, place in enumerate(PLACES)
        for b, error in enumerate(ERRORS)
        for c, strategy in enumerate(("FULL_SHARD", "SHARD_GRAD_OP"))
    ],
)
def test_the_next_step_knows_nothing_of_it(
    place: str, error: type[BaseException], wrapped: bool, strategy: str
) -> None:
    """All ranks raise in the same place, again and again; the steps between have the bits of an undisturbed run.

    And nothing is left over: every unit is idle and sharded, and no unsharded gradient is kept.
    """
    if place == "in a checkpointed unit's forward" and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 a checkpointed function that raises leaves its checkpoint's hooks behind")
    setting = Setting(strategy, wrapped, "adamw", forward_prefetch=error is KeyboardInterrupt)
    found = join(run_threads(2, interrupted_run, place, error, setting, wrapped))
    undisturbed = local.reduced(PLACES[place][0], 2, "adamw", flat=not wrapped)
    expected = Run(undisturbed.losses[:STEPS], undisturbed.gradients[:STEPS], undisturbed.parameters[:STEPS])
    assert_same(found, expected)
