"""LeafWatch: gradients that are waited for one by one, or collected together, always have the same bits."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatparam_comm import Collectives, SingleCollectives, Topology
from flatparam_core import flatten_module
from flatparam_runtime import UnitPlan, shard_module, units_in
from flatparam_runtime.unit.module import LeafWatch, leaf_watches

from .models import WIDTH, Block, Branches, Chain, Stack, batch
from .worlds import check_at_rest, check_same, check_training, full_gradients, run, seeded, sharded

BLOCKS = ["blocks.0", "blocks.1"]
Loss = Callable[[nn.Module, int], Tensor]


@attrs.define(eq=False)
class Hidden:
    """An output that the runtime cannot look into."""

    value: Tensor
    __slots__ = ("value",)


class Hiding(nn.Module):
    """A module whose inner block hides its output in a given way."""

    def __init__(self, hide: Callable[[Tensor], Any], show: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.inner = Giving(hide)
        self.head = nn.Linear(WIDTH, 2)
        self.show = show

    def forward(self, x: Tensor) -> Tensor:
        given = self.inner(x)
        out: Tensor = self.head(self.show(self.inner.last if given is None else given))
        return out


class Giving(Block):
    """A block that gives its result in a form of its own, and remembers it."""

    def __init__(self, hide: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.hide = hide
        self.last: Any = None

    def forward(self, x: Tensor) -> Any:
        self.last = super().forward(x)
        return self.hide(self.last)


class Sometimes(nn.Module):
    """A module that uses its second layer only if that is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.rarely = nn.Linear(WIDTH, WIDTH)
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return self.rarely(out) if self.is_on else out


class OneOfTwo(nn.Module):
    """A stem, and a unit of which a part is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.part = Sometimes()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(self.stem(x))
        return out


def sometimes(module: nn.Module, rank: int, step: int) -> Tensor:
    """A loss that the second layer of `part` has a share in only in even steps."""
    module.get_submodule("part").is_on = step % 2 == 0  # type: ignore[assignment]  # it is no module
    return loss(module, rank, step)


def hooks(module: nn.Module) -> dict[str, int]:
    """The number of leaves of each unit that have a hook of their own."""
    return {
        unit.name: sum(len(watch.hooked) for _, _, watch in leaf_watches(unit.handles)) for unit in units_in(module)
    }


def loss(module: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = module(batch(rank, step)).square().mean()
    return out


def losses(count: int) -> list[Loss]:
    return [functools.partial(loss, step=step) for step in range(count)]


def watched(*numels: int, trained: bool = True) -> LeafWatch:
    """The watch over one flat parameter of float32 vectors with these numbers of elements."""
    module = nn.ParameterList(nn.Parameter(torch.ones(numel)) for numel in numels)
    for parameter in module.parameters():
        parameter.requires_grad_(trained)
    (handle,) = flatten_module(module, rank=0, world_size=1, use_orig_params=False, precision=None)
    output, shard = handle.begin_unshard()
    output.copy_(shard)
    handle.finish_unshard()
    return LeafWatch.over(handle, lambda index: lambda leaf: None)


def counted(watch: LeafWatch) -> list[int]:
    return [len(leaf._post_accumulate_grad_hooks or ()) for leaf in watch.leaves]


def test_no_leaf_has_a_hook_at_first() -> None:
    """Whatever its size, a leaf begins without a hook."""
    watch = watched(1, 2**20, 5)
    assert (watch.hooked, watch.unhooked, counted(watch)) == ([], [0, 1, 2], [0, 0, 0])


def test_frozen_leaves_may_be_trained_later() -> None:
    """A frozen leaf is watched as a trained one, also once it has a hook, and stays frozen."""
    watch = watched(3, 1, trained=False)
    assert (watch.hooked, watch.unhooked) == ([], [0, 1])
    watch.hook([0])
    assert (watch.hooked, watch.unhooked, counted(watch)) == ([0], [1], [1, 0])
    assert [leaf.requires_grad for leaf in watch.leaves] == [False, False]


def test_hooks_are_added_once() -> None:
    """`hook` gives a leaf one hook, and the leaf is no longer among those without."""
    watch = watched(2, 2, 2)
    watch.hook([1])
    watch.hook([])
    assert (watch.hooked, watch.unhooked, counted(watch)) == ([1], [0, 2], [0, 1, 0])


def test_how_many_hooks_a_model_has() -> None:
    """Units with inputs that get gradients have none; the outermost one, whose input gets none, has all."""
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    for step in range(3):
        loss(module, 0, step).backward()
        assert hooks(module) == {"(root)": 4, "blocks.0": 0, "blocks.1": 0}


@each_row("is_leaf", [False, True])
def test_a_root_whose_input_gets_a_gradient(is_leaf: bool) -> None:
    """The input's gradient says when the root is done, so that its leaves need no hook.

    A leaf's gradient comes before that of the weight which it is multiplied with; the weight gets a hook then.
    """
    module = sharded(Stack, SingleCollectives(), units=BLOCKS)
    for step in range(2):
        x = batch(0, step).requires_grad_()
        module(x if is_leaf else x * 1.0).sum().backward()
        assert hooks(module) == {"(root)": int(is_leaf), "blocks.0": 0, "blocks.1": 0}
        check_at_rest(module)


def test_units_without_inputs_that_get_gradients(ranks: int, use_orig_params: bool) -> None:
    """The first unit of a chain, whose input needs no gradient, trains to the same bits as the others."""
    check_training(Chain, losses(3), ranks, units=[*BLOCKS, "blocks.2"], use_orig_params=use_orig_params)


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "nothing": (lambda out: None, lambda seen: seen),
    "an object": (Hidden, lambda seen: seen.value),
    "a function": (lambda out: lambda: out, lambda seen: seen()),
}


@each_row("form", FORMS)
def test_hidden_outputs(form: str, ranks: int, use_orig_params: bool) -> None:
    """A unit that hides its output trains to the same bits, since each of its gradients has a hook."""
    how = FORMS[form]
    check_training(lambda: Hiding(*how), losses(3), ranks, units=["inner"], use_orig_params=use_orig_params)


def test_a_parameter_without_a_gradient_in_some_step(ranks: int, use_orig_params: bool) -> None:
    """A leaf that is left out in every other step has the right gradient in each."""
    steps = [functools.partial(sometimes, step=step) for step in range(4)]
    check_training(OneOfTwo, steps, ranks, units=["part"], use_orig_params=use_orig_params)


def test_a_missing_gradient_is_not_waited_for() -> None:
    """A leaf that no graph reaches gets no hook, since it has no gradient to report."""
    module = sharded(OneOfTwo, SingleCollectives(), units=["part"])
    for step in range(4):
        sometimes(module, 0, step).backward()
        check_at_rest(module)
        assert hooks(module)["part"] == 0


@each_row("way", ["ll", "lrl", "rllr"])
def test_a_unit_that_is_called_twice(way: str, ranks: int, use_orig_params: bool) -> None:
    """Each call adds to the same leaves' gradients, which are collected when the last call is done."""

    def both(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(batch(rank), way).square().mean()
        return out

    check_training(Branches, [both] * 2, ranks, units=["left", "right"], use_orig_params=use_orig_params)


class Again(nn.Module):
    """A stem and two blocks, of which each is computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, ranks: int, use_orig_params: bool) -> None:
    """Units that are computed again in backward train to the same bits, by either kind of checkpoint."""
    check_training(lambda: Again(reentrant), losses(3), ranks, units=BLOCKS, use_orig_params=use_orig_params)


def create_graph(module: nn.Module, rank: int) -> None:
    """A backward whose gradients have a graph of their own."""
    loss(module, rank).backward(create_graph=True)


def retained(module: nn.Module, rank: int) -> None:
    """Three backwards through one graph."""
    total = loss(module, rank)
    total.backward(retain_graph=True)
    total.backward(retain_graph=True)
    total.backward()


def asked_for_input(module: nn.Module, rank: int) -> None:
    """`autograd.grad` of an input, which accumulates nothing, and then a backward."""
    x = batch(rank).requires_grad_()
    total = module(x).square().mean()
    torch.autograd.grad(total, x, retain_graph=True)
    total.backward()


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@each_row("way", [create_graph, retained, asked_for_input])
def test_other_backwards(way: Callable[[nn.Module, int], None], ranks: int, use_orig_params: bool) -> None:
    """Graphs of gradients, several backwards of one graph, and `autograd.grad` give the bits of the plain model."""

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        # The input is the same on every rank, so that the mean is what each rank has.
        way(module, 0)
        check_at_rest(module)
        return full_gradients(module)

    local = seeded(Stack)
    way(local, 0)
    expected = {name: parameter.grad for name, parameter in local.named_parameters()}
    for found in run(ranks, step):
        check_same({name: grad if grad is None else grad.detach() for name, grad in found.items()}, expected)


def test_a_cast_forgets_the_watches_of_the_old_leaves() -> None:
    """A unit whose parameters are cast drops the old leaves at once, with their memory and the watches over them."""
    module = nn.Linear(3, 2)
    unit = shard_module(module, plan=UnitPlan(Topology(SingleCollectives())))
    old: list[weakref.ReferenceType[nn.Parameter]] = []
    for dtype in (torch.float32, torch.float64) * 3:
        module.to(dtype)
        unit.stamp()  # as before each pass: this looks where the parameters are now
        assert [leaf() for leaf in old] == [None] * len(old)
        module(torch.ones(1, 3, dtype=dtype)).sum().backward()
        old = [weakref.ref(leaf) for handle in unit.handles for leaf in handle.leaves]
        assert old
