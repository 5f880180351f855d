"""Activation checkpointing of both kinds: around units, inside units, and around several units."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import EventLog, no_sync, observe
from flatparam_runtime.passes import backward

from .models import Block, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    mean_gradients,
    run,
    seeded,
    sharded,
    zero_gradients,
)


class Checkpointed(nn.Module):
    """A module whose forward is run again in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


class Model(nn.Module):
    """A stem, three checkpointed parts and a head. The test chooses the units."""

    def __init__(self, reentrant: bool, part: Any = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.parts = nn.Sequential(*(Checkpointed(part(), reentrant) for _ in range(3)))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.parts(self.stem(x)))
        return out


def pair() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


NESTINGS: dict[str, tuple[Any, list[str]]] = {
    "the unit inside the checkpoint": (Block, [f"parts.{i}.inner" for i in range(3)]),
    "the checkpoint inside the unit": (Block, [f"parts.{i}" for i in range(3)]),
    "two units inside one checkpoint": (pair, [f"parts.{i}.inner.{j}" for i in range(3) for j in range(2)]),
    "units inside and outside": (
        pair,
        [name for i in range(3) for name in (f"parts.{i}.inner.0", f"parts.{i}")],
    ),
    "only the root": (Block, []),
    "the stem and the head": (Block, ["stem", "head"]),
}


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank, near=module).requires_grad_()).square().mean()
    return out


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
@pytest.mark.parametrize("nesting", NESTINGS)
def test_checkpointed_training(
    nesting: str, reentrant: bool, ranks: int, free_after_forward: bool, device: torch.device
) -> None:
    """Recomputation in either nesting gives, bit by bit, the gradients of the local model, twice; then all is freed."""
    part, units = NESTINGS[nesting]

    def make() -> Model:
        return Model(reentrant, part)

    def steps(collectives: Collectives) -> Grads:
        module = sharded(make, collectives, units=units, device=device, free_after_forward=free_after_forward)
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = None
            loss(module, collectives.rank).backward()
            check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(make, device), loss, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)


def all_operations(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


SELECTED: dict[str, Any] = {"all": all_operations, "products": [torch.ops.aten.addmm.default]}
"""The operations whose results selective checkpointing saves."""


@each_row("selected", SELECTED)
@each_row("nesting", NESTINGS)
def test_selective_checkpoints(nesting: str, selected: str, ranks: int, use_orig_params: bool) -> None:
    """Selective checkpointing saves operations of the model alone: not those of the gathers of units inside."""
    part, units = NESTINGS[nesting]

    class Selective(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, SELECTED[selected])
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
            return out

    def make() -> Model:
        model = Model(False, part)
        model.parts = nn.Sequential(*(Selective(part(), False) for _ in range(3)))
        return model

    def steps(collectives: Collectives) -> Grads:
        module = sharded(make, collectives, units=units, use_orig_params=use_orig_params)
        for _ in range(3):
            zero_gradients(module)
            loss(module, collectives.rank).backward()
            check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(make), loss, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)


@each_row("top", [True, False], ids=["root", "inner"])
@each_row("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
def test_a_units_own_checkpoints(reentrant: bool, top: bool) -> None:
    """A unit's own checkpointed modules are recomputed with their parameters, even when the rest of the unit is done.

    This holds for the root, and for an inner unit, if no gradient of an input tells that the unit is done.
    """

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(4, 4)
            self.middle = Block()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.middle, self.embed(x), use_reentrant=reentrant)
            out: Tensor = self.head(x)
            return out

    def make() -> nn.Module:
        return Owner() if top else nn.Sequential(Owner(), Block())

    def plain(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank)).square().mean()
        return out

    module = sharded(make, SingleCollectives(), units=["embed"] if top else ["0.embed", "0", "1"])
    plain(module, 0).backward()
    check_at_rest(module)
    check_same(full_gradients(module), mean_gradients(seeded(make), plain, 1))


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
def test_a_parameter_inside_of_a_checkpoint_and_outside(reentrant: bool, ranks: int) -> None:
    """The gradient of the one use does not stand for that of both: a unit is reduced once, when it has all."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.between = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.used, self.between(self.used(x)), use_reentrant=reentrant)
            return out

    def make() -> nn.Module:
        return nn.Sequential(Twice(), Block())

    def plain(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank)).square().mean()
        return out

    def step(collectives: Collectives) -> tuple[Grads, list[str]]:
        module, log = sharded(make, collectives, units=["0", "1"]), EventLog()
        with observe(module, log):
            plain(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module), [event.unit for event in log.events if event.kind == "reduce"]

    expected = mean_gradients(seeded(make), plain, ranks)
    for found, reduced in run(ranks, step):
        check_same(found, expected)
        assert reduced == ["1", "0"]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
def test_a_checkpoint_outside_of_any_unit(reentrant: bool, ranks: int) -> None:
    """A root that is itself checkpointed trains: its recomputation is not a new pass."""

    def around(module: nn.Module, rank: int) -> Tensor:
        x = batch(rank).requires_grad_()
        out: Tensor = checkpoint(module, x, use_reentrant=reentrant).square().mean()
        return out

    def make() -> nn.Module:
        return nn.Sequential(Block(), Block())

    def step(collectives: Collectives) -> Grads:
        module = sharded(make, collectives, units=["0", "1"])
        around(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(make), around, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
def test_two_forwards_with_checkpoints(reentrant: bool, ranks: int) -> None:
    """Several forwards before one backward, all checkpointed: every recomputation finds its unit's parameters."""

    def twice(module: nn.Module, rank: int) -> Tensor:
        return loss(module, rank) + loss(module, rank + 7)

    def step(collectives: Collectives) -> Grads:
        module = sharded(lambda: Model(reentrant), collectives, units=[f"parts.{i}.inner" for i in range(3)])
        twice(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(lambda: Model(reentrant)), twice, ranks)
    for found in run(ranks, step):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
def test_accumulation_with_checkpoints(reentrant: bool, ranks: int) -> None:
    """``no_sync`` and checkpointing together: the sum of two passes is reduced once."""

    def step(collectives: Collectives) -> tuple[Grads, int]:
        module = sharded(lambda: Model(reentrant), collectives, units=[f"parts.{i}.inner" for i in range(3)])
        log = EventLog()
        with observe(module, log):
            with no_sync(module):
                loss(module, collectives.rank).backward()
            loss(module, collectives.rank + 7).backward()
        check_at_rest(module)
        return full_gradients(module), sum(event.kind == "reduce" for event in log.events)

    local = seeded(lambda: Model(reentrant))
    parts = [mean_gradients(local, lambda m, r, s=s: loss(m, r + s), ranks) for s in (0, 7)]
    for found, reductions in run(ranks, step):
        assert reductions == 4
        for name, value in found.items():
            first, second = parts[0][name], parts[1][name]
            assert first is not None
            assert second is not None
            torch.testing.assert_close(value, first + second)


def test_early_stop_and_dropout(ranks: int) -> None:
    """A recomputation that stops early, and draws the same random numbers, is not a failure of the unit's forward."""

    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh())

    def seeded_loss(module: nn.Module, rank: int) -> Tensor:
        torch.manual_seed(rank)
        return loss(module, rank)

    def step(collectives: Collectives) -> Grads:
        module = sharded(
            lambda: Model(False, part),
            collectives,
            units=[f"parts.{i}.inner.{j}" for i in range(3) for j in (0, 2)],
        )
        seeded_loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(lambda: Model(False, part)), seeded_loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_recomputation_inside_a_unit_gathers_once() -> None:
    """A unit around its checkpoint is gathered once in backward; its recomputation runs with what is there."""
    module = sharded(lambda: Model(False), SingleCollectives(), units=[f"parts.{i}" for i in range(3)])
    output = module(batch())
    log = EventLog()
    with observe(module, log):
        output.sum().backward()
    for i in range(3):
        assert [line for line in log.lines() if line.endswith(f"parts.{i}")] == [
            f"unshard parts.{i}",
            f"use parts.{i}",
            f"reshard parts.{i}",
            f"reduce parts.{i}",
            f"finish parts.{i}",
        ]


@each_row("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
def test_recomputation_around_a_unit_gathers_once(reentrant: bool) -> None:
    """A unit inside a checkpoint is gathered once in backward, for its recomputation and its gradients together."""
    module = sharded(lambda: Model(reentrant), SingleCollectives(), units=[f"parts.{i}.inner" for i in range(3)])
    output = module(batch())
    log = EventLog()
    with observe(module, log):
        output.sum().backward()
    for i in range(3):
        name = f"parts.{i}.inner"
        assert [event.kind for event in log.events if event.unit == name] == [
            "unshard",
            "use",
            "reshard",
            "reduce",
            "finish",
        ]


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
def test_a_unit_inside_and_outside_of_a_checkpoint(reentrant: bool, ranks: int) -> None:
    """A unit that is recomputed while its gradients of another call are being reduced waits for that reduction."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.block, self.stem(x), use_reentrant=reentrant)
            out: Tensor = self.block(torch.sin(x))
            return out

    def step(collectives: Collectives) -> Grads:
        module = sharded(Twice, collectives, units=["stem", "block"])
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Twice), loss, ranks)
    for found in run(ranks, step):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_a_container_that_is_recomputed_gathers_nothing_of_the_units_around() -> None:
    """A recomputed module between a unit and the units inside it does not gather the outer unit."""

    def make() -> nn.Sequential:
        inner = (Checkpointed(nn.Sequential(Block()), reentrant=False) for _ in range(2))
        return nn.Sequential(*inner, nn.Linear(4, 1))

    module = sharded(make, SingleCollectives(), units=["0.inner.0", "1.inner.0"])
    log = EventLog()
    with observe(module, log):
        module(batch()).sum().backward()
    gathered = [event.unit for event in log.events if event.kind == "unshard"]
    assert gathered.count("(root)") == 1
    assert len(gathered) == 5


class FrozenBetween(nn.Module):
    """A layer, a frozen factor, a reentrant checkpoint and a head: the factor's backward comes last of the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(4, 4), Block(), nn.Linear(4, 4)
        self.factor = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.factor
        out: Tensor = self.head(checkpoint(self.middle, x, use_reentrant=True))
        return out


def test_what_is_read_after_an_inner_run(ranks: int) -> None:
    """Full parameters stay for what the backward pass reads last, though gradients of an inner run came when the unit
    was complete; the inputs get no gradient, which could tell that it is over."""

    def plain_loss(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank)).square().mean()
        return out

    def steps(collectives: Collectives) -> Grads:
        module = sharded(FrozenBetween, collectives, units=["first"])
        plain_loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(FrozenBetween), plain_loss, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)


class Noting(nn.Module):
    """Notes, whenever it runs, whether calls of the module inside go through a stand-in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.noted: list[bool] = []
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.noted.append("forward" in vars(self.linear))
        if self.fails and len(self.noted) > 1:
            raise ValueError("while it is recomputed")
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_unit_recomputes_runs_as_in_its_forward_pass(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If something is compiled, no stand-in is in the way while a unit's backward pass runs its modules again."""
    monkeypatch.setattr(backward, "compiles", lambda: True)
    module = sharded(lambda: nn.Sequential(Checkpointed(Noting(), reentrant), nn.Linear(4, 2)), SingleCollectives())
    part: Any = module.get_submodule("0.inner")
    for fails in (False, True, False):
        part.noted.clear()
        part.fails = fails
        loss = module(batch(0).requires_grad_()).sum()
        assert "forward" in vars(part.linear), "a call from outside finds the full parameters by it"
        if fails:
            with pytest.raises(ValueError, match="recomputed"):
                loss.backward()
            # The next pass clears up after the failed one.
            part.fails = False
            module(batch(0))
        else:
            loss.backward()
        assert part.noted[:2] == [False, False]
        assert "forward" in vars(part.linear)
    assert len(part.noted) == 2
    check_at_rest(module)


def test_what_dynamo_has_run_is_seen() -> None:
    """Nothing is compiled until something that `torch.compile` has made is called, whatever is imported."""
    program = """
import torch
from flatparam_runtime.autograd import compiles
assert not compiles()
import torch._dynamo
double = torch.compile(lambda x: x + x, backend="eager")
assert not compiles()
double(torch.ones(1))
assert compiles()
torch._dynamo.reset()
assert compiles()
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
