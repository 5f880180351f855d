"""The order of events in a step equals a list that was written down beforehand, from what FSDP1 does.

The chain is ``root.0 -> unit 1 -> unit 2 -> root.3``: the root has parameters before and after its two units.

Three rules are ours. A unit whose inputs need no gradient is freed when autograd is done, not with its last gradient,
because a reentrant recomputation may still want its parameters, and nothing says when the last of these was. From the
second step on FULL_SHARD does not free the unit that ends last before the root, whose backward comes first. And on the
CPU a reduction is over before the next unit gathers and computes, so that its memory is free for them.
"""

from __future__ import annotations

import attrs
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import run_threads
from integration_tests.parity import models
from integration_tests.parity.schedules import Passes, accumulate, evaluate, lines, one_step, record
from integration_tests.parity.sharded import Setting
from integration_tests.parity.zoo import Case, batch, named, seeded, squares


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), models.Block(6), models.Block(6), nn.Linear(6, 2))


CHAIN = Case("chain", seeded(chain), squares(3, 4), ("1", "2"))


def schedule(case: Case, setting: Setting, passes: Passes = one_step, *, step: int = 1) -> dict[str, list[str]]:
    first, second = run_threads(2, lambda group: record(group, case, setting, passes, step=step))
    assert first == second, "the ranks differ"
    return first


FORWARD = {
    # Every unit is gathered when it begins and freed when it ends; unit 2 and the root are kept, since their backward
    # comes at once.
    "FULL_SHARD": """
        unshard (root) use (root)
        unshard 1 use 1 reshard 1
        unshard 2 use 2
    """,
    # Nothing is freed.
    "SHARD_GRAD_OP": "unshard (root) use (root) unshard 1 use 1 unshard 2 use 2",
}

# Which unit ends last is known from the step before.
FIRST_FORWARD = {"FULL_SHARD": FORWARD["FULL_SHARD"] + "reshard 2", "SHARD_GRAD_OP": FORWARD["SHARD_GRAD_OP"]}

FORWARD_AHEAD = {
    # The gather of the next unit begins before this one computes; of the last there is no next.
    "FULL_SHARD": """
        unshard (root) unshard 1 use (root)
        unshard 2 use 1 reshard 1
        use 2
    """,
    "SHARD_GRAD_OP": "unshard (root) unshard 1 use (root) unshard 2 use 1 use 2",
}

# A unit is freed before its reduction begins; the reduction is over when the backward of the next one begins. The root
# comes last, with the gradients of both its layers; it has collected one at the very beginning.
REDUCTIONS = """
    reshard 2 reduce 2
    finish 2 reshard 1 reduce 1
    reshard (root) finish 1 reduce (root) finish (root)
"""

BACKWARD = {
    # The gather of the unit before is under way when this one computes.
    ("FULL_SHARD", "BACKWARD_PRE"): """
        unshard 1                           # when the backward of unit 2 begins, which was kept
        reshard 2 reduce 2
        finish 2 use 1
        reshard 1 reduce 1
        reshard (root) finish 1 reduce (root) finish (root)
    """,
    # It begins when this one has been freed, and before its reduction begins.
    ("FULL_SHARD", "BACKWARD_POST"): """
        reshard 2 unshard 1 reduce 2
        finish 2 use 1
        reshard 1 reduce 1
        reshard (root) finish 1 reduce (root) finish (root)
    """,
    ("FULL_SHARD", None): """
        reshard 2 reduce 2
        finish 2 unshard 1 use 1
        reshard 1 reduce 1
        reshard (root) finish 1 reduce (root) finish (root)
    """,
    # Everything is there.
    ("SHARD_GRAD_OP", "BACKWARD_PRE"): REDUCTIONS,
    ("SHARD_GRAD_OP", "BACKWARD_POST"): REDUCTIONS,
    ("SHARD_GRAD_OP", None): REDUCTIONS,
}

FIRST_BACKWARD = {
    "FULL_SHARD": """
        unshard 2                           # when the root's backward begins
        unshard 1 use 2
        reshard 2 reduce 2
        finish 2 use 1
        reshard 1 reduce 1
        reshard (root) finish 1 reduce (root) finish (root)
    """,
    "SHARD_GRAD_OP": REDUCTIONS,
}


@each_row(("strategy", "order"), BACKWARD)
@each_row("ahead", [False, True])
def test_a_step(strategy: str, order: str | None, ahead: bool) -> None:
    """The second step of the chain, for every strategy and way of prefetching, is as written."""
    setting = Setting(strategy, forward_prefetch=ahead, backward_prefetch=order)
    forward = (FORWARD_AHEAD if ahead else FORWARD)[strategy]
    assert schedule(CHAIN, setting) == {
        "forward": lines(forward),
        "backward": lines(BACKWARD[strategy, order]),
    }


@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_the_first_step_cannot_look_ahead(strategy: str) -> None:
    """In the first step nobody knows the order: no unit is gathered ahead in forward, and none kept for its backward.

    Backward prefetching works in it, after the root's backward too.
    """
    setting = Setting(strategy, forward_prefetch=True)
    expected = {"forward": lines(FIRST_FORWARD[strategy]), "backward": lines(FIRST_BACKWARD[strategy])}
    assert schedule(CHAIN, setting, step=0) == expected


@each_row("ahead", [False, True])
@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_exposure_has_no_say(strategy: str, ahead: bool) -> None:
    """With use_orig_params=True the schedule is the same."""
    flat, original = (
        schedule(CHAIN, Setting(strategy, exposure, forward_prefetch=ahead)) for exposure in (False, True)
    )
    assert flat == original


def test_no_sync_full_shard() -> None:
    """FULL_SHARD frees every unit after its unsynchronised backward, and reduces nothing until the synchronised one."""
    quiet = """
        unshard 1 reshard 2
        use 1 reshard 1
        reshard (root)
    """
    assert schedule(CHAIN, Setting("FULL_SHARD"), accumulate) == {
        "quiet forward": lines(FORWARD["FULL_SHARD"]),
        "quiet backward": lines(quiet),
        "forward": lines(FORWARD["FULL_SHARD"]),
        "backward": lines(BACKWARD["FULL_SHARD", "BACKWARD_PRE"]),
    }


def test_no_sync_shard_grad_op() -> None:
    """SHARD_GRAD_OP keeps the full parameters after an unsynchronised backward, so the next forward gathers nothing."""
    assert schedule(CHAIN, Setting("SHARD_GRAD_OP"), accumulate) == {
        "quiet forward": lines(FORWARD["SHARD_GRAD_OP"]),
        "quiet backward": [],
        "forward": [],
        "backward": lines(REDUCTIONS),
    }


def test_nested_units() -> None:
    """An inner unit is gathered while the outer ones are held, and freed first; in the backward pass likewise.

    The outer one ends last before the root, so it is kept in between.

    The root's layer comes after its units, so its gradients are the first. Still, its reduction waits for its turn, which
    is the last on every rank: another rank may have used parameters of the root before its units, too.
    """
    outer, middle, inner = "0", "0.inner", "0.inner.inner"
    forward = f"""
        unshard (root) use (root)
        unshard {outer} use {outer}
        unshard {middle} use {middle}
        unshard {inner} use {inner}
        reshard {inner} reshard {middle}
    """
    backward = f"""
        unshard {middle}                    # ahead of need, when the backward of the outer one begins
        unshard {inner} use {middle}
        use {inner}
        reshard {inner} reduce {inner}
        reshard {middle} finish {inner} reduce {middle}
        reshard (root) reshard {outer}      # at the end of the pass: nothing tells it before
        finish {middle} reduce {outer}
        finish {outer} reduce (root) finish (root)
    """
    expected = {"forward": lines(forward), "backward": lines(backward)}
    assert schedule(named("nested"), Setting("FULL_SHARD")) == expected


CHECKPOINTED = """
    unshard (root) use (root)
    unshard blocks.0 use blocks.0 reshard blocks.0
    unshard blocks.1 use blocks.1 reshard blocks.1
    unshard blocks.2 use blocks.2
"""

RECOMPUTED = """
    unshard blocks.1 reshard blocks.2 reduce blocks.2
    finish blocks.2 unshard blocks.0 use blocks.1 reshard blocks.1 reduce blocks.1
    finish blocks.1 use blocks.0 reshard blocks.0 reduce blocks.0
    reshard (root) finish blocks.0 reduce (root) finish (root)
"""


@each_row("name", ["checkpoint-around-unit", "checkpoint-in-unit", "reentrant-in-unit"])
def test_checkpointing(name: str) -> None:
    """Recomputation finds the parameters where the unit's own backward has them: the schedule is that without it."""
    expected = {"forward": lines(CHECKPOINTED), "backward": lines(RECOMPUTED)}
    assert schedule(named(name), Setting("FULL_SHARD")) == expected


def test_reentrant_checkpointing_around_a_unit() -> None:
    """A reentrant recomputation is the unit's own forward call, so its prefetch comes when *its* backward begins.

    The unit's first call runs without recording, so it does not keep the last unit's parameters either.
    """
    recomputed = """
        unshard blocks.2                    # when the root's backward begins
        use blocks.2                        # recomputed
        unshard blocks.1 reshard blocks.2 reduce blocks.2
        use blocks.1
        finish blocks.2 unshard blocks.0 reshard blocks.1 reduce blocks.1
        use blocks.0
        finish blocks.1 reshard blocks.0 reduce blocks.0
        reshard (root) finish blocks.0 reduce (root) finish (root)
    """
    expected = {"forward": lines(CHECKPOINTED + "reshard blocks.2"), "backward": lines(recomputed)}
    assert schedule(named("reentrant-around-unit"), Setting("FULL_SHARD")) == expected


@each_row("name", ["checkpoint-around-unit", "reentrant-around-unit"])
def test_checkpointing_shard_grad_op(name: str) -> None:
    """SHARD_GRAD_OP gathers each unit once, also where its forward pass runs without recording, to be repeated."""
    forward = [event for event in lines(CHECKPOINTED) if "reshard" not in event]
    backward = [event for event in lines(RECOMPUTED) if not event.startswith(("unshard", "use"))]
    assert schedule(named(name), Setting("SHARD_GRAD_OP")) == {"forward": forward, "backward": backward}


@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_evaluation(strategy: str) -> None:
    """Without recording every unit is freed when it ends, the root too: the next pass may follow a step."""
    forward = "unshard (root) use (root) unshard 1 use 1 reshard 1 unshard 2 use 2 reshard 2 reshard (root)"
    assert schedule(CHAIN, Setting(strategy), evaluate) == {"evaluation": lines(forward)}


def test_a_unit_called_twice() -> None:
    """Each call gathers and frees; the backward of both calls is one stretch, with the unit between them inside it.

    ``between`` began after ``block`` first did, so its reduction comes first. The second call of ``block`` ends last, so
    it keeps the parameters for both.
    """
    forward = """
        unshard (root) use (root)
        unshard block use block reshard block
        unshard between use between reshard between
        unshard block use block
    """
    backward = """
        unshard between                     # when the second call's backward begins
        use between reshard between reduce between
        reshard block finish between reduce block
        reshard (root) finish block reduce (root) finish (root)
    """
    assert schedule(named("twice"), Setting("FULL_SHARD")) == {
        "forward": lines(forward),
        "backward": lines(backward),
    }


def with_gradient_of_inputs(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of an input that is itself to get a gradient."""
    return model(batch(step, rank, 3, 4).requires_grad_()).square().mean()


def test_a_root_whose_input_needs_a_gradient() -> None:
    """Then the root collects and is freed with its input's gradient, and before its reduction, as any other unit."""
    backward = """
        unshard 1 reshard 2 reduce 2
        finish 2 use 1 reshard 1 reduce 1
        reshard (root) finish 1 reduce (root) finish (root)
    """
    case = attrs.evolve(CHAIN, loss=with_gradient_of_inputs)
    assert schedule(case, Setting("FULL_SHARD"))["backward"] == lines(backward)
