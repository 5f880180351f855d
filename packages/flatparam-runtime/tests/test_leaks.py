"""Hooks, objects and memory do not grow over fifty steps of any kind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatparam_comm import SingleCollectives, Topology
from flatparam_runtime import (
    PrefetchPlan,
    UnitPlan,
    no_sync,
    shard_module,
    summon_full_params,
    tree_of,
    units_in,
)

from .models import Stack, batch
from .worlds import sharded, zero_gradients

BLOCKS = ["blocks.0", "blocks.1"]
STEPS = 50


class Canary:
    """An object that lives in a graph, and is freed with it."""


class Kept(torch.autograd.Function):
    """The identity; its node in the graph holds a canary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, canary: Canary) -> Tensor:
        ctx.canary = canary
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Caged(nn.Module):
    """A stack with a canary in its graph, below every unit."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.canary: Canary | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stack.stem(x)
        for block in self.stack.blocks:
            x = block(x)
            if self.canary is not None:
                x = Kept.apply(x, self.canary)  # type: ignore[no-untyped-call]
        out: Tensor = self.stack.head(x)
        return out


UNITS = [f"stack.{name}" for name in BLOCKS]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Inside, objects are freed by counting references; autograd's own threads free them a moment later."""
    gc.collect()
    gc.disable()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        gc.enable()


@pytest.mark.parametrize("ending", ["backward", "dropped", "exception"])
def test_graphs_die_with_their_outputs(ending: str, device: torch.device) -> None:
    """A graph is freed as soon as its output is dropped, with or without backward, without the garbage collector."""
    module = sharded(Caged, SingleCollectives(), units=UNITS, device=device)
    with without_collector():
        for _ in range(3):
            module.canary = Canary()
            reference = weakref.ref(module.canary)
            output = module(batch(near=module))
            module.canary = None
            assert reference() is not None, "the graph holds it"
            shadow = weakref.ref(output)
            if ending == "backward":
                output.sum().backward()
            elif ending == "exception":
                output.register_hook(lambda gradient: gradient[:1])
                with pytest.raises(RuntimeError, match="changed the size"):
                    output.sum().backward()
            del output
            assert shadow() is None
            assert reference() is None


def test_inputs_do_not_keep_graphs() -> None:
    """A leaf that is an input in many steps does not hold on to what was computed from it."""
    module = sharded(Caged, SingleCollectives(), units=UNITS)
    x = batch().requires_grad_()
    with without_collector():
        module.canary = Canary()
        reference = weakref.ref(module.canary)
        module(x)
        module.canary = None
        assert reference() is None


def plain(module: Stack) -> None:
    module(batch()).sum().backward()


def forwards_only(module: Stack) -> None:
    module(batch())


def evaluation(module: Stack) -> None:
    with torch.no_grad():
        module(batch())


def accumulation(module: Stack) -> None:
    with no_sync(module):
        module(batch()).sum().backward()
    module(batch()).sum().backward()


def checkpointed(module: Stack) -> None:
    x = batch().requires_grad_()
    for reentrant in (False, True):
        out: Any = checkpoint(module.blocks[0], x, use_reentrant=reentrant)
        out.sum().backward()


def failing(module: Stack) -> None:
    with contextlib.suppress(RuntimeError):
        # The input has a wrong shape.
        module(torch.ones(2, 3))
    output = module(batch())
    # The gradient has a wrong shape in backward.
    output.register_hook(lambda gradient: gradient[:1])
    with contextlib.suppress(RuntimeError):
        output.sum().backward()


def inspected(module: Stack) -> None:
    with summon_full_params(module):
        pass


KINDS: list[Callable[[Stack], None]] = [
    plain,
    forwards_only,
    evaluation,
    accumulation,
    checkpointed,
    failing,
    inspected,
]


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_nothing_grows(kind: Callable[[Stack], None]) -> None:
    """After fifty steps there are as many objects as after five, and as many hooks, and as short an order to expect."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS, prefetch=PrefetchPlan(1))

    with torch.no_grad():
        # The first call makes one tree, instead of one for each unit that runs alone.
        module(batch())

    def steps(count: int) -> tuple[int, list[int], list[int]]:
        for _ in range(count):
            zero_gradients(module)
            kind(module)
        zero_gradients(module)
        gc.collect()
        leaves = [leaf for unit in units_in(module) for handle in unit.handles for leaf in handle.leaves]
        hooks = [len(leaf._post_accumulate_grad_hooks or ()) for leaf in leaves]  # type: ignore[attr-defined]
        hooks += [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()]
        expected = [len(each.began) + len(each.ended) for each in _passes(module)]
        return len(gc.get_objects()), hooks, expected

    objects, hooks, order = steps(5)
    later_objects, later_hooks, later_order = steps(STEPS)
    more = later_objects - objects
    # Fewer than one object at every other step comes from caches, and not from a leak.
    assert more < STEPS // 2, f"{more} more objects"
    assert later_hooks == hooks
    assert all(number <= 1 for number in hooks[: len(hooks) - len(list(module.modules()))])
    assert later_order == order


def _passes(module: nn.Module) -> list[Any]:
    trees = {tree_of(unit) for unit in units_in(module)}
    return [tree.last_forward for tree in trees if tree.last_forward is not None]


@each_row("backward", [True, False], ids=["backward", "dropped"])
def test_hooks_on_a_lasting_input_do_not_pile_up(backward: bool) -> None:
    """A leaf that is an input of every step (a prompt, an adversarial image) has as many hooks as after one."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    x = batch().requires_grad_()
    counts = []
    for _ in range(STEPS):
        x.grad = None
        total = module(x).sum()
        if backward:
            total.backward()
        del total
        counts.append(len(x._backward_hooks or ()))
    assert max(counts) <= 1, f"{counts[0]} hooks after the first step, {counts[-1]} after the last"


class Handing(nn.Module):
    """A module that returns a parameter of its own beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.prompt = nn.Parameter(torch.ones(3, 4))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.stack(self.prompt), self.prompt


@each_row("backward", [True, False], ids=["backward", "dropped"])
def test_hooks_on_a_lasting_output_do_not_pile_up(backward: bool) -> None:
    """A parameter that a module hands out (an ignored, whole one) does not collect a hook at each step."""
    module = Handing()
    prompt = module.prompt
    shard_module(module, UnitPlan(Topology(SingleCollectives())), ignored_parameters=[prompt])
    for _ in range(10):
        total = sum(each.sum() for each in module())
        assert isinstance(total, Tensor)
        if backward:
            total.backward()
        del total
    assert len(prompt._backward_hooks or ()) <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine")
def test_no_device_memory_is_lost() -> None:
    """After each of twenty steps on a GPU as many bytes are allocated; the twin on the CPU counts objects."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS, device="cuda")
    taken = []
    for _ in range(20):
        zero_gradients(module)
        module(batch(near=module)).sum().backward()
        taken.append(torch.cuda.memory_allocated())
    assert len(set(taken[2:])) == 1
