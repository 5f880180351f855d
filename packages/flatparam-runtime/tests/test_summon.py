"""Every combination of arguments of `summon_full_params`, nested contexts, and passes inside."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, FlatParamError, Precision
from flatparam_runtime import summon_full_params, units_in

from .models import Stack, batch
from .worlds import (
    Grads,
    check_at_rest,
    check_same,
    check_training,
    full_gradients,
    full_parameters,
    mean_gradients,
    run,
    seeded,
    sharded,
)

BLOCKS = ["blocks.0", "blocks.1"]
NAMES = ("writeback", "rank0_only", "offload_to_cpu", "with_grads")
COMBINATIONS = [dict(zip(NAMES, each, strict=True)) for each in itertools.product([True, False], repeat=4)]


def told(asked: dict[str, bool]) -> str:
    return "+".join(name for name, wanted in asked.items() if wanted) or "nothing"


def loss(module: nn.Module, rank: int) -> Tensor:
    out: Tensor = module(batch(rank)).square().mean()
    return out


def values_of(module: nn.Module) -> Grads:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def scaled(values: Grads, factor: float) -> Grads:
    return {name: None if value is None else value * factor for name, value in values.items()}


@each_row("asked", COMBINATIONS, ids=told)
def test_any_combination(asked: dict[str, bool], ranks: int, use_orig_params: bool) -> None:
    """The requested parameters are shown on the requested ranks, and exactly the changes that are to be kept are kept."""

    def look(collectives: Collectives) -> tuple[Grads, Grads, Grads, Grads]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        loss(module, collectives.rank).backward()
        here = collectives.rank == 0 or not asked["rank0_only"]
        shards = [parameter.data_ptr() for parameter in module.parameters()]
        seen, seen_gradients = {}, {}
        with summon_full_params(module, **asked), torch.no_grad():
            if here:
                seen = values_of(module)
                seen_gradients = {
                    name: None if parameter.grad is None else parameter.grad.clone()
                    for name, parameter in module.named_parameters()
                }
                for parameter in module.parameters():
                    parameter.mul_(2.0)
                    if parameter.grad is not None:
                        parameter.grad.mul_(4.0)
            else:
                assert [p.data_ptr() for p in module.parameters()] == shards
        check_at_rest(module)
        return seen, seen_gradients, dict(full_parameters(module)), full_gradients(module)

    values = values_of(seeded(Stack))
    gradients = mean_gradients(seeded(Stack), loss, ranks)
    nothing: Grads = dict.fromkeys(values)
    kept = asked["writeback"]
    for rank, (seen, seen_gradients, after, gradients_after) in enumerate(run(ranks, look)):
        if rank == 0 or not asked["rank0_only"]:
            check_same(seen, values)
            check_same(seen_gradients, gradients if asked["with_grads"] else nothing)
        check_same(after, scaled(values, 2.0) if kept else values)
        check_same(gradients_after, scaled(gradients, 4.0) if kept and asked["with_grads"] else gradients)


SHOWN: list[dict[str, bool]] = [
    {"rank0_only": first, "with_grads": second} for first, second in itertools.product([False, True], repeat=2)
]


@pytest.mark.pairs("inner", "outer")
@pytest.mark.parametrize("outer", SHOWN, ids=told)
@pytest.mark.parametrize("inner", SHOWN, ids=told)
def test_one_inside_another(outer: dict[str, bool], inner: dict[str, bool], use_orig_params: bool) -> None:
    """An inner context that asks for no more than the outer shows it again; one that asks for more is refused."""
    enough = (inner["rank0_only"] or not outer["rank0_only"]) and (outer["with_grads"] or not inner["with_grads"])

    def nest(collectives: Collectives) -> Grads:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        loss(module, collectives.rank).backward()
        with summon_full_params(module, **outer):
            before = [id(parameter) for parameter in module.parameters()]
            if enough:
                with summon_full_params(module, **inner):
                    assert [id(parameter) for parameter in module.parameters()] == before
                    if collectives.rank == 0 or not outer["rank0_only"]:
                        nn.init.constant_(module.head.bias, 3.0)
            else:
                with (
                    pytest.raises(FlatParamError, match="an outer summon"),
                    summon_full_params(module, **inner),
                ):
                    pass
            assert [id(parameter) for parameter in module.parameters()] == before
        check_at_rest(module)
        return dict(full_parameters(module))

    expected = values_of(seeded(Stack))
    if enough:
        expected["head.bias"] = torch.full((3,), 3.0)
    for found in run(2, nest):
        check_same(found, expected)


@each_row("asked", SHOWN[1:], ids=told)
def test_nothing_is_computed_with_copies(asked: dict[str, bool], ranks: int) -> None:
    """A forward pass inside a context that only shows raises on every rank, and says so; after it training goes on."""

    def attempt(module: nn.Module, rank: int) -> Tensor:
        if units_in(module):
            with (
                summon_full_params(module, **asked),
                pytest.raises(FlatParamError, match="leave that context"),
            ):
                loss(module, rank)
        return loss(module, rank)

    check_training(Stack, [loss, attempt, attempt], ranks, units=BLOCKS)


@pytest.mark.parametrize("writeback", [True, False])
def test_training_inside(writeback: bool, ranks: int, use_orig_params: bool) -> None:
    """Steps of an optimizer of the shards inside are kept, whatever ``writeback``; the next forward inside sees them."""

    def steps(collectives: Collectives) -> tuple[Grads, Grads]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.25)
        with summon_full_params(module, writeback=writeback):
            loss(module, collectives.rank).backward()
            optimizer.step()
        check_at_rest(module)
        return dict(full_parameters(module)), full_gradients(module)

    local = seeded(Stack)
    gradients = mean_gradients(local, loss, ranks)
    stepped: Grads = {name: p.detach() - 0.25 * gradients[name] for name, p in local.named_parameters()}
    for found, found_gradients in run(ranks, steps):
        check_same(found_gradients, gradients)
        check_same(found, stepped)


@each_row("asked", COMBINATIONS, ids=told)
def test_mixed_precision(asked: dict[str, bool], use_orig_params: bool) -> None:
    """Parameters are shown and taken over in their own dtype, to the last bit, whatever the compute dtype."""

    def look(collectives: Collectives) -> None:
        precision = Precision(torch.bfloat16, keep_low_precision_grads=True)
        plan = {"precision": precision, "use_orig_params": use_orig_params}
        module = sharded(Stack, collectives, units=BLOCKS, **plan)
        module(batch().bfloat16()).float().sum().backward()
        with summon_full_params(module, **asked):
            assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
            if collectives.rank == 0 or not asked["rank0_only"]:
                check_same(values_of(module), values_of(seeded(Stack)))
                grads = {p.grad.dtype for p in module.parameters() if p.grad is not None}
                assert grads == ({torch.bfloat16} if asked["with_grads"] else set())
        check_same(dict(full_parameters(module)), values_of(seeded(Stack)))

    run(2, look)


def test_gradients_that_only_one_rank_holds() -> None:
    """A gradient whose parameter lies on one rank alone is shown on both, and the others' stay ``None``."""

    def look(collectives: Collectives) -> dict[str, Any]:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=True)
        module.stem(batch()).sum().backward()
        with summon_full_params(module, with_grads=True):
            return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}

    expected = mean_gradients(seeded(Stack), lambda m, _: m.stem(batch()).sum(), 1)
    for found in run(2, look):
        check_same(found, expected)
        assert [name for name, value in found.items() if value is not None] == ["stem.weight", "stem.bias"]


@pytest.mark.parametrize("asked", COMBINATIONS, ids=told)
def test_parameters_that_are_replaced(asked: dict[str, bool], ranks: int, use_orig_params: bool) -> None:
    """Casts put in the places of parameters are used inside, and gone at the end; with `writeback` they are refused."""

    def replace(collectives: Collectives) -> None:
        module = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        twin = sharded(Stack, collectives, units=BLOCKS, use_orig_params=use_orig_params)
        here = collectives.rank == 0 or not asked["rank0_only"]

        def cast() -> None:
            with summon_full_params(module, **asked):
                for owner in list(module.modules()) if here else []:
                    for name, parameter in list(owner.named_parameters(recurse=False)):
                        setattr(owner, name, nn.Parameter(parameter.detach().double()))
                if here and not asked["rank0_only"]:
                    # What is shown is what is used.
                    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64}

        if asked["writeback"]:
            with pytest.raises(FlatParamError, match="replaced by another object"):
                cast()
            return
        cast()
        for each in (module, twin):
            loss(each, collectives.rank).backward()
        check_same(full_parameters(module), full_parameters(twin))
        check_same(full_gradients(module), full_gradients(twin))

    if asked["writeback"] and asked["rank0_only"] and ranks > 1:
        pytest.skip("the first rank raises, and the others wait for it")
    run(ranks, replace)


def test_what_a_copy_is_replaced_with_is_written_back(ranks: int) -> None:
    """On the first rank the data and the gradients of summoned copies may be replaced: the shards get the new values."""

    def replace(collectives: Collectives) -> tuple[Grads, Grads]:
        module = sharded(Stack, collectives, units=["blocks.0"], use_orig_params=True)
        loss(module, collectives.rank).backward()
        with summon_full_params(module, rank0_only=True, with_grads=True):
            if collectives.rank == 0:
                for number, parameter in enumerate(module.parameters()):
                    assert parameter.grad is not None
                    parameter.data = torch.full_like(parameter.data, float(number))
                    parameter.grad = None if number == 0 else torch.full_like(parameter.grad, 10.0 + number)
        return dict(full_parameters(module)), full_gradients(module)

    names = [name for name, _ in seeded(Stack).named_parameters()]
    for values, gradients in run(ranks, replace):
        for number, name in enumerate(names):
            gradient = gradients[name]
            assert gradient is not None
            assert set(values[name].flatten().tolist()) == {float(number)}
            assert set(gradient.flatten().tolist()) == {10.0 + number if number else 0.0}
