"""Sharding a module in place, by hooks alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, FlatParamError, SingleCollectives, Topology
from flatparam_runtime import Unit, UnitPlan, shard_module, unit_of, units_in

from .models import WIDTH, Block, Stack, batch
from .worlds import (
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


def plan(collectives: Collectives | None = None, *, use_orig_params: bool = False) -> UnitPlan:
    return UnitPlan(Topology(collectives or SingleCollectives()), use_orig_params=use_orig_params)


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank, near=module)).square().mean()
    return out


def test_the_module_stays_what_it_is(use_orig_params: bool) -> None:
    """Class, submodules, ``forward`` and the paths of submodules are as before; nothing is wrapped around it."""
    module = Stack()
    before = (type(module), [name for name, _ in module.named_modules()], module.forward.__func__)  # type: ignore[attr-defined]
    unit = shard_module(module, plan(use_orig_params=use_orig_params))
    assert before == (
        type(module),
        [name for name, _ in module.named_modules()],
        module.forward.__func__,  # type: ignore[attr-defined]  # mypy sees a callable
    )
    assert "forward" not in vars(module)
    assert unit.module is module
    assert unit_of(module) is unit
    assert unit_of(module.stem) is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("units", [(), ("blocks.0", "blocks.1"), ("blocks.0.up", "blocks.0", "head")])
def test_training_is_that_of_a_local_module(
    ranks: int, units: tuple[str, ...], use_orig_params: bool, free_after_forward: bool, device: torch.device
) -> None:
    """Forward by ``module(x)`` and backward give, bit by bit, the gradients of a local module; then all is freed."""

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(
            Stack,
            collectives,
            units=units,
            device=device,
            use_orig_params=use_orig_params,
            free_after_forward=free_after_forward,
            free_after_unsynced_backward=free_after_forward,
        )
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack, device), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_values_survive_sharding(ranks: int, use_orig_params: bool) -> None:
    """The full parameters are, bit by bit, those that the module had."""

    def read(collectives: Collectives) -> dict[str, Tensor]:
        return full_parameters(sharded(Stack, collectives, units=["blocks.1"], use_orig_params=use_orig_params))

    expected = dict(seeded(Stack).named_parameters())
    for found in run(ranks, read):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_module_is_sharded_once() -> None:
    """A second call for the same module raises and names its class."""
    module = Block()
    shard_module(module, plan())
    with pytest.raises(FlatParamError, match="Block is a unit already"):
        shard_module(module, plan())


def test_a_unit_takes_what_no_other_holds() -> None:
    """A unit shards the parameters below it that no inner unit has, and only those."""
    module = Stack()
    inner = shard_module(module.blocks[0], plan())
    outer = shard_module(module, plan())
    inner_names = {fqn for handle in inner.handles for fqn in handle.layout.fqns}
    outer_names = {fqn for handle in outer.handles for fqn in handle.layout.fqns}
    assert inner_names == {"up.weight", "up.bias", "down.weight"}
    assert outer_names == {n for n, _ in Stack().named_parameters() if not n.startswith("blocks.0.")}


def test_ignored_modules_stay_whole(use_orig_params: bool) -> None:
    """Parameters of ignored modules stay the same objects, whole, on every rank, and keep the rank's own gradient."""

    def step(collectives: Collectives) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
        module = seeded(Stack)
        ignored = list(module.blocks[0].parameters())
        shard_module(module, plan(collectives, use_orig_params=use_orig_params), ignored_modules=[module.blocks[0]])
        assert all(a is b for a, b in zip(ignored, module.blocks[0].parameters(), strict=True))
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        assert ignored[0].grad is not None
        return ignored[0].detach(), ignored[0].grad, full_gradients(module)

    local = mean_gradients(seeded(Stack), loss, 2)
    for rank, (value, gradient, found) in enumerate(run(2, step)):
        own = seeded(Stack)
        loss(own, rank).backward()
        assert torch.equal(value, own.blocks[0].up.weight)
        assert torch.equal(gradient, own.blocks[0].up.weight.grad)  # type: ignore[arg-type]  # there is one
        check_same(found, {n: g for n, g in local.items() if not n.startswith("blocks.0.")})


def test_ignored_parameters_stay_whole(use_orig_params: bool) -> None:
    """An ignored parameter is neither sharded nor reduced, while its module's others are."""

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = seeded(Stack)
        weight = module.stem.weight
        shard_module(module, plan(collectives, use_orig_params=use_orig_params), ignored_parameters=[weight])
        loss(module, collectives.rank).backward()
        assert module.stem.weight is weight
        assert weight.grad is not None
        return full_gradients(module)

    local = mean_gradients(seeded(Stack), loss, 2)
    for found in run(2, step):
        check_same(found, {n: g for n, g in local.items() if n != "stem.weight"})


class Wide(nn.Module):
    """A module without parameters around one that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(self.act(x))
        return out


def test_a_unit_may_have_no_parameters(ranks: int) -> None:
    """Units without parameters run, take no memory, and move no bytes of their own."""

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Wide, collectives, units=["act", "block"])
        empty = unit_of(module.act)
        assert empty is not None
        assert empty.handles == ()
        assert empty.unsharded_nbytes == 0
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Wide), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(self.embed(tokens)))
        return out


def test_a_tied_parameter_gets_the_sum_of_its_uses(ranks: int, use_orig_params: bool) -> None:
    """A parameter that two modules share is one slot, is shown under both names, and gets both uses' gradient."""

    def tied_loss(module: nn.Module, rank: int) -> Tensor:
        out: Tensor = module(torch.tensor([rank, 1, 4])).square().mean()
        return out

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Tied, collectives, units=["block"], use_orig_params=use_orig_params)
        tied_loss(module, collectives.rank).backward()
        found = full_gradients(module)
        zero_gradients(module)
        module.embed.register_forward_hook(lambda *_: seen.append(module.embed.weight is module.head.weight))
        seen: list[bool] = []
        module(torch.tensor([0]))
        assert seen == [True]
        return found

    expected = mean_gradients(seeded(Tied), tied_loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_a_parameter_replaced_after_sharding_is_named(ranks: int) -> None:
    """Without originals, a parameter that the user replaced raises at the next forward; putting it back heals it."""

    def replace(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Stack, collectives, units=["blocks.0"])
        kept = module.stem._parameters["weight"]
        module.stem._parameters["weight"] = nn.Parameter(torch.ones(WIDTH, WIDTH))
        with pytest.raises(FlatParamError, match=r"parameter 'stem.weight' was replaced"):
            module(batch())
        module.stem._parameters["weight"] = kept
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), loss, ranks)
    for found in run(ranks, replace):
        check_same(found, expected)


@pytest.mark.parametrize("name", ["stem", "blocks.0.up"], ids=["root", "inner"])
def test_an_original_replaced_after_sharding_is_taken_over(ranks: int, name: str) -> None:
    """With originals, the full values of a new object are what the next step computes with, and it gets the gradient."""

    def replaced(module: nn.Module) -> nn.Module:
        module.get_submodule(name).weight = nn.Parameter(torch.arange(WIDTH * WIDTH).reshape(WIDTH, WIDTH) / 10)
        return module

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = replaced(sharded(Stack, collectives, units=["blocks.0"], use_orig_params=True))
        new = module.get_submodule(name).weight
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        assert module.get_submodule(name).weight is new
        return full_gradients(module)

    expected = mean_gradients(replaced(seeded(Stack)), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_a_gathered_unit_may_be_shown_before_its_first_forward(ranks: int) -> None:
    """Unsharding a unit by hand before the first forward pass changes nothing about the training that follows."""

    def step(collectives: Collectives) -> dict[str, Tensor | None]:
        module = sharded(Stack, collectives)
        unit = unit_of(module)
        assert isinstance(unit, Unit)
        unit.unshard()
        assert module.stem.weight.shape == (WIDTH, WIDTH)
        unit.reshard()
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return full_gradients(module)

    expected = mean_gradients(seeded(Stack), loss, ranks)
    for found in run(ranks, step):
        check_same(found, expected)


def test_other_libraries_modules_are_units(use_orig_params: bool) -> None:
    """A module that keeps its own list of weights (an LSTM) and one with several inputs (attention) are units."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            hidden, _ = self.lstm(x[None])
            out: Tensor = self.attention(hidden, hidden, value=hidden)[0]
            return out

    module = sharded(Mixed, SingleCollectives(), units=["lstm", "attention"], use_orig_params=use_orig_params)
    for _ in range(2):
        zero_gradients(module)
        loss(module, 0).backward()
        check_at_rest(module)
    check_same(full_gradients(module), mean_gradients(seeded(Mixed), loss, 1))


def test_a_unit_dies_with_its_module() -> None:
    """A sharded module that nobody holds is freed, with its units and their memory."""
    module = sharded(Stack, SingleCollectives(), units=["blocks.0"])
    # A thread of autograd's own would let go of it a moment later.
    with torch.autograd.set_multithreading_enabled(False):
        module(batch()).sum().backward()
    references = [
        weakref.ref(module),
        *(weakref.ref(handle.flat_param) for u in units_in(module) for handle in u.handles),
    ]
    orphan = weakref.ref(units_in(module)[0])
    del module
    gc.collect()
    assert [r() for r in references] == [None] * len(references)
    assert orphan() is None


def test_a_unit_names_a_module_that_is_gone() -> None:
    """A unit whose module does not exist any more says so, and what to do."""
    unit = shard_module(nn.Linear(2, 2), plan())
    gc.collect()
    with pytest.raises(FlatParamError, match=r"unit 'Linear' does not exist any more: keep a reference"):
        _ = unit.module


def test_the_graph_keeps_the_model(ranks: int) -> None:
    """A backward pass through a model that nobody holds any more runs, and gives the gradient of the inputs."""

    def step(collectives: Collectives) -> Tensor:
        x = batch(collectives.rank).requires_grad_()
        output = sharded(Stack, collectives, units=["blocks.0"])(x)
        gc.collect()
        output.sum().backward()
        assert x.grad is not None
        return x.grad

    for rank, found in enumerate(run(ranks, step)):
        x = batch(rank).requires_grad_()
        seeded(Stack)(x).sum().backward()
        assert x.grad is not None
        assert torch.equal(found, x.grad)


def test_values_are_given_while_sharding(ranks: int, use_orig_params: bool) -> None:
    """`initialise` packs a value for every parameter of a module on the meta device, which no rank ever holds whole."""

    def step(collectives: Collectives) -> dict[str, Tensor]:
        with torch.device("meta"):
            module = Block()
        values = dict(seeded(Block).named_parameters())

        def initialise(pack: Callable[[str, Tensor], None]) -> None:
            for name, value in values.items():
                pack(name, value)

        shard_module(
            module,
            plan(collectives, use_orig_params=use_orig_params),
            device=torch.device("cpu"),
            initialise=initialise,
        )
        return full_parameters(module)

    for found in run(ranks, step):
        check_same(dict(found), dict(seeded(Block).named_parameters()))


@each_row("kept", [False, True])
def test_a_parameter_whose_unit_is_gone(kept: bool) -> None:
    """A parameter that was sharded with a module that does not exist any more is refused by name."""
    gone, module = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    handles = shard_module(gone, plan(use_orig_params=True)).handles
    if not kept:
        handles = ()
    module.weight = gone.weight
    del gone
    gc.collect()
    with pytest.raises(FlatParamError, match="parameter 'weight'.* belongs to a") as raised:
        shard_module(module, plan(use_orig_params=True))
    assert ("a flat parameter that no unit holds" in str(raised.value)) == bool(handles)
