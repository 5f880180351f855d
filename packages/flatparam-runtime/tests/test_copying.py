"""Copies of sharded modules, and modules that are loaded from a file."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm import Collectives, FlatParamError, RanksOnly, owner_of, process_group_of, shared_memory
from flatparam_comm.testing import run_processes
from flatparam_runtime import no_sync, register_forward_method, summon_full_params, tree_of, unit_of, units_in

from .models import Stack, batch
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


def through_a_file(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    read: nn.Module = torch.load(file, weights_only=False)
    return read


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {"deepcopy": copy.deepcopy, "torch.save": through_a_file}


class Tied(Stack):
    """A stack whose blocks share a weight, which the unit of one block holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Callable[[nn.Module], nn.Module]:
    return WAYS[request.param]


@pytest.mark.parametrize("model", [Stack, Tied])
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
def test_a_copy_trains_by_itself(
    way: Callable[[nn.Module], nn.Module],
    model: type[Stack],
    trained: bool,
    ranks: int,
    use_orig_params: bool,
) -> None:
    """A copy has the values of the original, trains to the gradients of the unsharded model, and shares no memory."""

    def step(collectives: Collectives) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        module = sharded(model, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        if trained:
            loss(module, collectives.rank).backward()
            module.zero_grad()
        twin = way(module)
        assert [name for name, _ in twin.named_parameters()] == [name for name, _ in module.named_parameters()]
        loss(twin, collectives.rank).backward()
        assert all(p.grad is None for p in module.parameters())
        check_at_rest(twin)
        gradients = full_gradients(twin)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not any(values.any() for values in full_parameters(twin).values())
        loss(module, collectives.rank).backward()
        check_at_rest(module)
        return gradients, full_gradients(module)

    expected = mean_gradients(seeded(model), loss, ranks)
    for found, own in run(ranks, step):
        check_same(found, expected)
        check_same(own, expected)


def test_a_copy_that_was_never_run_is_stepped(way: Callable[[nn.Module], nn.Module], use_orig_params: bool) -> None:
    """A copy computes with changes to its parameters before its first pass, such as those of a moving average."""

    def average(collectives: Collectives) -> dict[str, Tensor]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        twin = way(module)
        with torch.no_grad():
            for mean, parameter in zip(twin.parameters(), module.parameters(), strict=True):
                mean.mul_(0.5).add_(parameter, alpha=0.5).add_(1.0)
        with summon_full_params(twin):
            return {name: parameter.detach().clone() for name, parameter in twin.named_parameters()}

    for values in run(2, average):
        for name, parameter in seeded(Stack).named_parameters():
            assert torch.equal(values[name], parameter + 1.0)


def test_the_copy_of_a_part(use_orig_params: bool) -> None:
    """A unit that is copied without the model around it is a root of its own."""

    def part(collectives: Collectives) -> tuple[Tensor, Tensor]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        block = copy.deepcopy(module.blocks[0])
        unit = unit_of(block)
        assert unit is not None
        assert tree_of(unit).units == (unit,)
        out: Tensor = block(batch())
        return out, seeded(Stack).blocks[0](batch())

    for found, expected in run(2, part):
        assert torch.equal(found, expected)


def test_settings_are_copied_and_passes_are_not(way: Callable[[nn.Module], nn.Module], ranks: int) -> None:
    """Copied inside ``no_sync``, a copy does not synchronise; its registered methods are its own."""

    def settings(collectives: Collectives) -> None:
        module = sharded(Stack, collectives, units=BLOCKS)
        register_forward_method(module.stem, "extra_repr")
        with no_sync(module):
            twin = way(module)
        assert [unit.reducer.synchronises for unit in units_in(twin)] == [False] * 3
        assert [unit.reducer.synchronises for unit in units_in(module)] == [True] * 3
        assert twin.stem.__dict__["extra_repr"].module is twin.stem

    run(ranks, settings)


def test_originals_of_a_copy_belong_to_it(way: Callable[[nn.Module], nn.Module]) -> None:
    """`owner_of` leads from a parameter of the copy to the handle of the copy."""

    def owners(collectives: Collectives) -> None:
        module = sharded(Stack, collectives, use_orig_params=True)
        twin = way(module)
        loss(twin, 0).backward()
        for one in (module, twin):
            owner = owner_of(one.stem.weight)
            assert owner is not None
            assert owner[0] is unit_of(one).handles[0]

    run(1, owners)


@pytest.mark.parametrize("where", ["summoned", "forward"])
def test_inside_a_pass_it_is_refused(way: Callable[[nn.Module], nn.Module], where: str) -> None:
    """While full parameters are in use, a copy raises an error, which says when copies can be made."""

    def refused(collectives: Collectives) -> None:
        module = sharded(Stack, collectives, units=BLOCKS)

        def attempt(*_: object) -> None:
            with pytest.raises(FlatParamError, match="only outside of a pass"):
                way(module)

        if where == "summoned":
            with summon_full_params(module):
                attempt()
        else:
            module.stem.register_forward_hook(attempt)
        loss(module, collectives.rank).backward()
        check_at_rest(module)

    run(2, refused)


def test_a_file_belongs_to_a_rank() -> None:
    """A model that was pickled on one rank is refused on another, which says what to do."""

    def written(collectives: Collectives) -> bytes:
        file = io.BytesIO()
        torch.save(sharded(Stack, collectives), file)
        return file.getvalue()

    def read(collectives: Collectives, data: bytes) -> None:
        with pytest.raises(ValueError, match=r"rank 1 of 2 .* found rank \d of 3; save its state_dict"):
            torch.load(io.BytesIO(data), weights_only=False)

    data = run(2, written)[1]
    run(3, read, data)


def copied_over_shared_memory(collectives: Collectives) -> list[Grads]:
    """The gradients of a model over shared memory, and those of its copies."""
    module = sharded(Stack, shared_memory(process_group_of(collectives)), units=BLOCKS)
    loss(module, collectives.rank).backward()
    found = []
    for each in (module, *(way(module) for way in WAYS.values())):
        zero_gradients(each)
        loss(each, collectives.rank).backward()
        found.append(full_gradients(each))
    return found


@pytest.mark.long
@pytest.mark.processes
def test_copies_over_shared_memory() -> None:
    """A model whose ranks share memory is copied as any other: each copy computes the same gradients."""
    for original, *copies in run_processes(2, copied_over_shared_memory):
        assert len(copies) == 2
        for each in copies:
            check_same(each, original)


def test_a_copy_asks_no_group_that_was_destroyed() -> None:
    """A model can be copied after its process groups were destroyed, as programs do that average weights at the end."""
    alive = [True]

    class Ranks:
        def rank(self) -> int:
            assert alive, "the group is gone"
            return 0

        def size(self) -> int:
            assert alive, "the group is gone"
            return 2

    module = sharded(Stack, RanksOnly(Ranks()), units=BLOCKS)
    alive.clear()
    twin = copy.deepcopy(module)
    for parameter, copied in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, copied)
        assert parameter.data_ptr() != copied.data_ptr()


@pytest.mark.parametrize("first", [lambda module: module(batch(0)), lambda module: module(batch(0)).sum().backward()])
def test_a_copy_after_a_forward_pass_that_nothing_followed(
    first: Callable[[nn.Module], object], ranks: int, use_orig_params: bool
) -> None:
    """A copy of a model whose full parameters are still in memory shows its shards, and trains like the original."""

    def copied(collectives: Collectives) -> list[dict[str, Tensor]]:
        module = sharded(Stack, collectives, units=["blocks.0"], use_orig_params=use_orig_params)
        first(module)
        other = copy.deepcopy(module)
        found = []
        for each in (module, other):
            each.zero_grad()
            optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
            each(batch(collectives.rank)).square().sum().backward()
            optimizer.step()
            found.append(full_parameters(each))
        return found

    for one, other in run(ranks, copied):
        for name, value in one.items():
            assert torch.equal(other[name], value), name
