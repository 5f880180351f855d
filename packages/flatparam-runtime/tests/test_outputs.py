"""Whatever a unit returns, its parameters are in memory again when its backward needs them."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import BackwardOrder, EventLog, PrefetchPlan, observe, units_in

from .models import Block, Reading, batch
from .worlds import check_at_rest, check_same, full_gradients, mean_gradients, run, seeded, sharded


class Named(NamedTuple):
    x: Tensor
    note: str


@dataclasses.dataclass
class Data:
    x: Any


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


class Thunk:
    """An output that returns its tensor when it is called, so that a search does not find the tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __call__(self) -> Tensor:
        return self.x


FORMS: dict[str, tuple[Any, Any]] = {
    "tensor": (lambda x: x, lambda out: out),
    "list": (lambda x: [x], lambda out: out[0]),
    "dict": (lambda x: {"a": {"b": (1, x)}}, lambda out: out["a"]["b"][1]),
    "named tuple": (lambda x: Named(x, "n"), lambda out: out.x),
    "dataclass": (lambda x: Data([x]), lambda out: out.x[0]),
    "slots": (lambda x: Slotted(Slotted(x)), lambda out: out.x.x),
    "two tensors": (lambda x: (x * 2, x + 1), lambda out: out[0] * out[1]),
    "one of two": (lambda x: (x * 2, x + 1), lambda out: out[1]),
    "with one that needs none": (lambda x: (x, x.detach()), lambda out: out[0] * out[1]),
    "views": (lambda x: x.unbind(0), lambda out: torch.stack(out)),
    "changed in place": (lambda x: x, lambda out: out.mul_(2)),
    "a part changed in place": (lambda x: x, lambda out: (out[:, 0].zero_(), out)[1]),
    "deque": (lambda x: collections.deque([x]), lambda out: out[0]),
    "callable object": (lambda x: Thunk(x), lambda out: out()),
    "closure": (lambda x: lambda: x, lambda out: out()),
    "generator": (lambda x: (y for y in [x]), lambda out: next(out)),
}
HALF_HIDDEN: dict[str, tuple[Any, Any]] = {
    "hidden beside shown": (lambda x: (x * 2, lambda: x + 1), lambda out: out[1]()),
    "hidden and shown": (lambda x: (x * 2, lambda: x + 1), lambda out: out[0] * out[1]()),
}


NO_PREFETCH = PrefetchPlan(0, BackwardOrder.NEVER)


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


@each_row("form", FORMS)
def test_any_form_of_output_trains(form: str, ranks: int) -> None:
    """A unit's output may be of any form, shown or hidden: gradients are those of a local module, and all is freed."""

    def make() -> Reading:
        return Reading(*FORMS[form])

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(make, collectives, units=["inner"])
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(make), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


@each_row("form", HALF_HIDDEN)
@each_row("frozen", [False, True])
def test_an_output_may_be_half_hidden(form: str, frozen: bool) -> None:
    """If only some tensors of an output can be seen, the others' backward reads no freed memory.

    This holds for a frozen unit, too, through which a gradient flows to its input.
    """

    def make() -> nn.Module:
        module = nn.Sequential(Block(), Reading(*HALF_HIDDEN[form]))
        if frozen:
            module[1].inner.requires_grad_(False)
        return module

    # Without prefetching, which may gather the unit in time by luck.
    module = sharded(make, SingleCollectives(), units=["1.inner"], prefetch=NO_PREFETCH)
    _fill_freed_memory_with_garbage(module)
    loss(module, 0).backward()
    check_same(full_gradients(module), mean_gradients(seeded(make), loss, 1))
    check_at_rest(module)


@each_row("form", ["callable object", "closure"])
def test_a_frozen_units_hidden_output(form: str) -> None:
    """A frozen unit whose output hides its tensors has its parameters for the gradient of its input."""

    def make() -> nn.Module:
        module = nn.Sequential(Block(), Reading(*FORMS[form]))
        module[1].inner.requires_grad_(False)
        return module

    # Without prefetching, which may gather the unit in time by luck.
    module = sharded(make, SingleCollectives(), units=["1.inner"], prefetch=NO_PREFETCH)
    _fill_freed_memory_with_garbage(module)
    loss(module, 0).backward()
    check_same(full_gradients(module), mean_gradients(seeded(make), loss, 1))
    check_at_rest(module)


def _fill_freed_memory_with_garbage(module: nn.Module) -> None:
    """After the forward, fill freed buffers with NaN: a read of them fails the test, and not the process."""

    def fill(*_: Any) -> None:
        for unit in units_in(module):
            for handle in unit.handles:
                if handle.buffer.tensor.untyped_storage().size() == 0:
                    handle.buffer.allocate()
                    handle.buffer.tensor.fill_(float("nan"))

    module.register_forward_hook(fill)


def test_an_output_without_gradient_is_freed(ranks: int) -> None:
    """An output that needs no gradient has no backward; its unit is freed like any other, and gets no gradient."""

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()
            self.head = Block()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.inner(x).detach())
            return out

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Detached, collectives, units=["inner", "head"], use_orig_params=True)
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Detached), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)
        assert found["inner.up.weight"] is None


class Nothing(nn.Module):
    """A module that keeps its tensors, and returns a different object."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.kept: list[Tensor] = []
        self.value = value

    def forward(self, x: Tensor) -> object:
        self.kept.append(self.second(self.first(x)))
        return self.value


@each_row("inside", ["plainly", "in an except block"])
@each_row("value", [None, 3, "text", (), {"a": 1}])
def test_an_output_without_tensors(value: object, inside: str) -> None:
    """A module may return no tensor at all: ``None`` is no failure, even while an exception is being handled."""
    module = sharded(lambda: Nothing(value), SingleCollectives())
    if inside == "plainly":
        assert module(batch()) == value
    else:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            assert module(batch()) == value
    module.kept.pop().sum().backward()
    check_at_rest(module)
    found = full_gradients(module)
    local = seeded(lambda: Nothing(value))
    local(batch())
    local.kept.pop().sum().backward()
    check_same(found, {name: parameter.grad for name, parameter in local.named_parameters()})
    with torch.no_grad():
        module(batch())
    check_at_rest(module)


def test_an_output_that_is_the_input(ranks: int) -> None:
    """A unit may hand its input through beside its output."""

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            self.second = Block()
            self.inner = Handing()

        def forward(self, x: Tensor) -> Tensor:
            hidden, same = self.inner(self.first(x))
            out: Tensor = self.second(hidden) * same
            return out

    class Handing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.block(x), x

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Through, collectives, units=["first", "second", "inner"])
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Through), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_hidden_outputs_cost_memory_and_nothing_else() -> None:
    """A unit whose output cannot be seen keeps its parameters between forward and backward: one gather, one free."""
    module = sharded(lambda: Reading(*FORMS["closure"]), SingleCollectives(), units=["inner"])
    log = EventLog()
    with observe(module, log):
        loss(module, 0).backward()
    assert [line for line in log.lines() if line.endswith("inner")] == [
        "unshard inner",
        "use inner",
        "reshard inner",
        "reduce inner",
        "finish inner",
    ]
