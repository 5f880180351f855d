"""Several models of one shape on one group of ranks: actor and critic, teacher and student, the two of a GAN."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Sequence

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, RankError, SingleCollectives, Topology, run_threads
from flatparam_runtime import DivergenceError, UnitPlan, shard_module, summon_full_params

from .models import Stack, batch
from .worlds import sharded

Models = Sequence[nn.Module]


def _models(world: Collectives, how: str, **plan: object) -> Models:
    models = []
    for number in range(2):
        torch.manual_seed(number if how == "different" else 0)
        models.append(Stack())
    if how == "copied":
        first = sharded(Stack, world, units=["blocks.0"], **plan)
        return [first, copy.deepcopy(first)]
    found = []
    for model in models:
        state = model.state_dict()
        module = sharded(Stack, world, units=["blocks.0"], **plan)
        with summon_full_params(module):
            module.load_state_dict({k: v for k, v in state.items()}, strict=False)
        found.append(module)
    return found


def train(model: nn.Module) -> None:
    model(batch(0)).square().mean().backward()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(batch(0))


@each_row("pass_", [train, evaluate], ids=lambda each: each.__name__)
@each_row("how", ["different", "equal", "copied"])
@each_row("strategy", [{}, {"free_after_forward": False}], ids=["zero3", "zero2"])
def test_another_order_on_one_rank_is_named(
    pass_: Callable[[nn.Module], None], how: str, strategy: dict[str, object], use_orig_params: bool
) -> None:
    """Two models that one rank calls in the other order, after both were called, are told before a step, on every rank."""

    def rank(world: Collectives) -> None:
        models = _models(world, how, use_orig_params=use_orig_params, **strategy)
        for model in models:
            pass_(model)
        # An accelerator tells of it in the next pass.
        for _ in range(2):
            for model in models if world.rank == 0 else models[::-1]:
                pass_(model)

    with pytest.raises(RankError) as raised:
        run_threads(2, rank)
    error = raised.value.__cause__
    assert isinstance(error, DivergenceError)
    assert "the ranks run different models: rank 0 runs the Stack that was called first as number" in str(error)


@each_row("how", ["different", "loaded", "copied"])
def test_another_order_at_the_first_call_is_told(how: str, use_orig_params: bool) -> None:
    """Before the first gather: an error if the weights differ, and a warning if nobody knows, since they were changed."""

    def rank(world: Collectives) -> None:
        if how == "different":
            models: Models = []
            for number in range(2):
                torch.manual_seed(number)
                module = Stack()
                shard_module(module, UnitPlan(Topology(world), use_orig_params=use_orig_params))
                models = [*models, module]
        else:
            models = _models(world, "different" if how == "loaded" else how, use_orig_params=use_orig_params)
        for model in models if world.rank == 0 else models[::-1]:
            evaluate(model)

    if how == "different":
        with pytest.raises(RankError, match=r"call different models first: rank 0 calls the Stack that is unit \d"):
            run_threads(2, rank)
    else:
        told = r"call different models first.*if they are the same model, all is well"
        # A copy is in another state than its original, which may be told next.
        with pytest.warns(UserWarning, match=told), contextlib.suppress(RankError):
            run_threads(2, rank)


def test_models_of_different_places_in_the_program_may_be_the_same() -> None:
    """A rank that has sharded a model more before, and never calls it, trains with the others: weights tell that it may."""

    def rank(world: Collectives) -> Tensor:
        if world.rank == 0:
            sharded(Stack, world)
        model = sharded(Stack, world)
        train(model)
        return next(model.parameters()).grad  # type: ignore[return-value]  # there is one

    assert len(run_threads(2, rank)) == 2


def test_the_same_order_on_all_ranks_is_right(use_orig_params: bool) -> None:
    """Two models that all ranks call alternately, also nested in one loss, are no divergence; nor is a garbage collection."""

    def rank(world: Collectives) -> int:
        one, other = _models(world, "equal", use_orig_params=use_orig_params)
        for step in range(3):
            train(one)
            evaluate(other)
            (one(batch(step)).square().mean() + other(batch(0)).square().mean()).backward()
            if step == world.rank:
                gc.collect()
        return step

    assert run_threads(2, rank) == [2, 2]


def test_a_rank_alone_calls_as_it_likes() -> None:
    """Models of one rank each are compared with nobody."""

    def rank(world: Collectives) -> int:
        models = [Stack() for _ in range(world.rank + 1)]
        for model in models:
            shard_module(model, UnitPlan(Topology(SingleCollectives())))
            train(model)
        shared = sharded(Stack, world)
        train(shared)
        train(shared)
        return len(models)

    assert run_threads(2, rank) == [1, 2]
