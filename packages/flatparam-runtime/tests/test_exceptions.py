"""After an exception anywhere in a step, the next step is as if the failed one had not run, and no memory is lost."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatparam_comm import Collectives, FlatParamError, SingleCollectives
from flatparam_runtime import Phase, no_sync, summon_full_params, units_in

from .models import Block, Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    full_gradients,
    full_parameters,
    mean_gradients,
    run,
    seeded,
    sharded,
    zero_gradients,
)

BLOCKS = ["blocks.0", "blocks.1"]


class Boom(Exception):
    """The exception that a trap raises."""


@attrs.define(eq=False)
class Trap:
    """A function that raises ``error`` at its call number ``at`` while it is armed."""

    error: type[BaseException] = Boom
    at: int = 0
    armed: bool = False
    calls: int = 0

    def spring(self) -> None:
        """Raise, if this is the call at which to raise."""
        if self.armed:
            self.calls += 1
            if self.calls == self.at + 1:
                raise self.error("on purpose")


class Trapped(torch.autograd.Function):
    """The identity, with a trap in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.trap.spring()
        return gradients[0], None


class Fragile(nn.Module):
    """A stack of which every part can fail, in forward and in backward, before and after its computation."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.stack = Stack()
        self.forward_trap = Trap()
        self.backward_trap = Trap()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(self.stack.stem(self.point(x)))
        for block in self.stack.blocks:
            if self.reentrant is None:
                x = self.point(block(x))
            else:
                x = self.point(checkpoint(block, x, use_reentrant=self.reentrant))
        out: Tensor = self.point(self.stack.head(x))
        return out

    def point(self, x: Tensor) -> Tensor:
        self.forward_trap.spring()
        return Trapped.apply(x, self.backward_trap)  # type: ignore[no-any-return, no-untyped-call]


UNITS = [f"stack.{name}" for name in BLOCKS]
POINTS = 5


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank, near=module).requires_grad_()).square().mean()
    return out


def set_trap(module: Fragile, where: str, trap: Trap) -> None:
    """Put ``trap`` in forward, in backward, in an inner module or in a user's hook."""

    def spring_in_backward(block: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: trap.spring())

    if where == "forward":
        module.forward_trap = trap
    elif where == "backward":
        module.backward_trap = trap
    elif where == "inner forward":
        for block in module.stack.blocks:
            block.up.register_forward_hook(lambda *_: trap.spring())
    elif where == "user pre-hook":
        for block in module.stack.blocks:
            block.register_forward_pre_hook(lambda *_: trap.spring())
    elif where == "user hook":
        for block in (*module.stack.blocks, module):
            block.register_forward_hook(lambda *_: trap.spring())
    elif where == "user pre-hook before ours":
        for block in module.stack.blocks:
            block.register_forward_pre_hook(lambda *_: trap.spring(), prepend=True)
    else:
        assert where == "tensor hook"
        for block in module.stack.blocks:
            block.register_forward_hook(spring_in_backward)


PLACES = [
    *((place, at) for place in ("forward", "backward") for at in range(POINTS)),
    *((place, at) for place in ("inner forward", "user pre-hook", "user hook", "tensor hook") for at in (0, 1)),
    ("user pre-hook before ours", 1),
    ("user hook", 2),
]


@pytest.mark.parametrize(
    ("error", "kept"),
    [(Boom, False), (Boom, True), (KeyboardInterrupt, True)],
    ids=["dropped", "kept", "interrupt"],
)
@pytest.mark.parametrize(("place", "at"), PLACES, ids=[f"{place} {at}" for place, at in PLACES])
def test_the_next_step_is_as_ever(
    place: str, at: int, error: type[BaseException], kept: bool, free_after_forward: bool
) -> None:
    """An exception (or Ctrl-C) anywhere leaves everything usable: the next step's gradients are right, all is freed.

    This holds even if the caller keeps the exception, and with it every frame it went through, as notebooks do.
    """

    def steps(collectives: Collectives) -> Grads:
        module = sharded(Fragile, collectives, units=UNITS, free_after_forward=free_after_forward)
        trap = Trap(error, at)
        set_trap(module, place, trap)
        memory: list[BaseException] = []
        # The very first step fails, or a later one.
        for warm in (True, False):
            if not warm:
                loss(module, collectives.rank).backward()
            trap.armed, trap.calls = True, 0
            try:
                loss(module, collectives.rank).backward()
            except error as caught:
                if kept:
                    memory.append(caught)
            else:
                pytest.fail("the trap was never stepped on")
            trap.armed = False
            zero_gradients(module)
            loss(module, collectives.rank).backward()
            check_at_rest(module)
        return full_gradients(module)

    ranks = 2 if error is Boom and not kept else 1
    expected = mean_gradients(seeded(Fragile), loss, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)


@each_row("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
@each_row("units", [UNITS, []], ids=["inside", "around"])
@each_row("at", range(4))
def test_a_recomputation_that_fails(at: int, units: list[str], reentrant: bool) -> None:
    """An exception in a recomputation (which is a forward inside of a backward) is recovered from."""

    def make() -> Fragile:
        return Fragile(reentrant)

    def steps(collectives: Collectives) -> Grads:
        module = sharded(make, collectives, units=units)
        trap = Trap(Boom, at)
        for block in module.stack.blocks:
            block.up.register_forward_pre_hook(lambda *_: trap.spring())
        trap.armed = True
        # The first two calls are the forward's, the others are the recomputation's.
        with pytest.raises(Boom):
            loss(module, collectives.rank).backward()
        trap.armed = False
        zero_gradients(module)
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(make), loss, 1)
    for found in run(1, steps):
        check_same(found, expected)


def test_an_exception_that_the_model_catches(ranks: int) -> None:
    """A module that catches the exception of an inner unit goes on, and trains what it did use."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()
            self.trap = Trap(armed=True, at=0)
            self.first.up.register_forward_hook(lambda *_: self.trap.spring())

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(Boom):
                x = self.first(x)
            out: Tensor = self.second(x)
            return out

    def careful_loss(module: nn.Module, rank: int) -> Tensor:
        assert isinstance(module, Careful)
        module.trap.calls = 0
        return loss(module, rank)

    def steps(collectives: Collectives) -> Grads:
        module = sharded(Careful, collectives, units=["first", "second"], use_orig_params=True)
        careful_loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Careful), careful_loss, ranks)
    for found in run(ranks, steps):
        check_same(found, expected)
        assert found["first.up.weight"] is None


def test_a_call_inside_an_except_block() -> None:
    """A forward pass that is called while an exception is handled does not count as failed."""
    from flatparam_comm import SingleCollectives

    module = sharded(Fragile, SingleCollectives(), units=UNITS)
    try:
        raise Boom
    except Boom:
        loss(module, 0).backward()
        check_at_rest(module)
        check_same(full_gradients(module), mean_gradients(seeded(Fragile), loss, 1))


@contextlib.contextmanager
def failing(module: Fragile, place: str, error: type[BaseException]) -> Iterator[None]:
    """Run a step of ``module`` that fails, and then the body."""
    trap = Trap(error, 2, armed=True)
    set_trap(module, place, trap)
    with pytest.raises(error):
        loss(module, 0).backward()
    trap.armed = False
    yield


AFTERWARDS: dict[str, Callable[[nn.Module], object]] = {
    "summon": lambda module: _summon(module),
    "evaluate": lambda module: _evaluate(module),
    "inner unit": lambda module: module.get_submodule("stack.blocks.1")(batch()).sum().backward(),
    "no_sync": lambda module: _unsynced(module),
}


def _summon(module: nn.Module) -> None:
    with summon_full_params(module):
        assert {n: p.shape for n, p in module.named_parameters()} == {
            n: p.shape for n, p in Fragile().named_parameters()
        }


def _evaluate(module: nn.Module) -> None:
    with torch.no_grad():
        assert torch.equal(module(batch()), seeded(Fragile)(batch()))


def _unsynced(module: nn.Module) -> None:
    with no_sync(module):
        loss(module, 0).backward()
    loss(module, 0).backward()


@pytest.mark.pairs("place", "afterwards")
@pytest.mark.parametrize("afterwards", AFTERWARDS)
@pytest.mark.parametrize(
    ("place", "error"), list(itertools.product(["forward", "backward"], [Boom, KeyboardInterrupt]))
)
def test_whatever_comes_next(place: str, error: type[BaseException], afterwards: str) -> None:
    """Right after a failed step one can save (summon), evaluate, run an inner unit, or accumulate; then all rests."""
    from flatparam_comm import SingleCollectives

    module = sharded(Fragile, SingleCollectives(), units=UNITS)
    with failing(module, place, error):
        AFTERWARDS[afterwards](module)
        zero_gradients(module)
        loss(module, 0).backward()
        check_at_rest(module)
        check_same(full_gradients(module), mean_gradients(seeded(Fragile), loss, 1))


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_shards_and_reduced_gradients_are_kept(place: str, ranks: int) -> None:
    """A failed step changes no parameter, and no gradient that a step before it gave to a parameter."""

    def steps(collectives: Collectives) -> tuple[dict[str, Tensor], Grads]:
        module = sharded(Fragile, collectives, units=UNITS)
        loss(module, collectives.rank).backward()
        trap = Trap(Boom, 0, armed=True)
        set_trap(module, place, trap)
        with pytest.raises(Boom):
            loss(module, collectives.rank).backward()
        return full_parameters(module), full_gradients(module)

    local = seeded(Fragile)
    expected = mean_gradients(local, loss, ranks)
    for values, found in run(ranks, steps):
        assert all(torch.equal(values[n], p) for n, p in local.named_parameters())
        check_same(found, expected)


def test_a_failed_forward_keeps_what_was_collected(ranks: int) -> None:
    """Gradients collected in ``no_sync`` outlive a forward that fails after them, and are reduced with the next ones."""

    def steps(collectives: Collectives) -> Grads:
        module = sharded(Fragile, collectives, units=UNITS)
        with no_sync(module):
            loss(module, collectives.rank).backward()
        module.forward_trap = Trap(Boom, 2, armed=True)
        with pytest.raises(Boom):
            module(batch())
        module.forward_trap.armed = False
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    once = mean_gradients(seeded(Fragile), loss, ranks)
    for found in run(ranks, steps):
        check_same(found, {name: None if value is None else value * 2 for name, value in once.items()})


def test_a_failed_forward_frees_at_once() -> None:
    """When an exception has left the root's forward, every unit is idle and nothing is allocated, at once."""
    from flatparam_comm import SingleCollectives

    module = sharded(Fragile, SingleCollectives(), units=UNITS, free_after_forward=False)
    set_trap(module, "forward", Trap(Boom, 3, armed=True))
    with pytest.raises(Boom):
        module(batch())
    check_at_rest(module)
    assert {unit.phase for unit in units_in(module)} == {Phase.IDLE}


@pytest.mark.parametrize("warm", [False, True])
def test_a_transform_of_torch_func_is_refused(warm: bool, use_orig_params: bool) -> None:
    """With gradients it is, before anything is gathered, and training goes on; without, the transform computes."""

    def rank(collectives: Collectives) -> None:
        module = sharded(_linear, collectives, use_orig_params=use_orig_params)
        x = torch.arange(8.0).view(2, 4) / 8
        if warm:
            module(x).sum().backward()
            zero_gradients(module)
        with pytest.raises(FlatParamError, match=r"inside a transform of torch\.func \(vmap\).* under torch\.no_grad"):
            torch.func.vmap(module)(x)
        check_at_rest(module)
        transforms: dict[str, Callable[[], Any]] = {
            r"\(grad\)": lambda: torch.func.grad(lambda y: module(y).sum())(x),
            r"\(jvp\)": lambda: torch.func.jvp(module, (x,), (x,)),
            r"\(vmap, jvp\)": lambda: torch.func.jacfwd(module)(x),
        }
        for named, transform in transforms.items():
            for context in (torch.enable_grad(), torch.no_grad()):
                with (
                    context,
                    pytest.raises(FlatParamError, match=rf"{named}, whose tensors no collective can read"),
                ):
                    transform()
                check_at_rest(module)
        with torch.no_grad():
            if not warm:
                with pytest.raises(FlatParamError, match="after a first pass"):
                    torch.func.vmap(module)(x)
                module(x)
            assert torch.equal(torch.func.vmap(module)(x), module(x))
        module(x).sum().backward()
        assert all(gradient is not None for gradient in full_gradients(module).values())

    run(2, rank)


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


class Shared(nn.Module):
    """A layer in two units: in the root, and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.trap = nn.Linear(4, 4), Trap(armed=False)
        self.block = nn.Sequential(self.first, nn.Tanh())
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.first(x))
        self.trap.spring()
        out: Tensor = self.last(x)
        return out


def test_a_module_in_two_units(ranks: int, use_orig_params: bool) -> None:
    """After an exception in a forward pass, a module of two units is called as before, and by each of them."""

    def losses(module: Any) -> list[float]:
        found = []
        for step in range(4):
            module.trap.armed, module.trap.calls = step == 1, 0
            with contextlib.suppress(Boom):
                out = module(torch.ones(1, 4)).square().mean()
                out.backward()
                found.append(out.item())
        return found

    def rank(collectives: Collectives) -> list[float]:
        return losses(sharded(Shared, collectives, units=["block"], use_orig_params=use_orig_params))

    assert all(found == losses(seeded(Shared)) for found in run(ranks, rank))


@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept"])
def test_a_copy_after_a_failed_backward_pass(keeps: bool) -> None:
    """A pass that an exception has ended is over: the model can be copied at once, and the copy trains."""
    module = sharded(Fragile, SingleCollectives(), units=["stack.blocks.0"], free_after_forward=not keeps)
    module.backward_trap.armed = True
    with pytest.raises(Boom):
        module(batch(0)).square().mean().backward()
    module.backward_trap.armed = False
    twin = copy.deepcopy(module)
    module.zero_grad()
    for each in (module, twin):
        each(batch(0)).square().mean().backward()
    check_same(full_gradients(twin), full_gradients(module))
    check_at_rest(twin)
