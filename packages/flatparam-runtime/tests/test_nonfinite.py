"""Gradients that are not finite: what `nonfinite` does about them, beside one process that does the same by hand."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, FlatParamError, RankError, Topology, run_threads
from flatparam_comm.testing import rectangle
from flatparam_runtime import (
    DivergenceError,
    NonfiniteError,
    clip_grad_norm_,
    no_sync,
    notice_optimizers,
    skipped_steps,
    tree_of,
    unit_of,
)

from .worlds import full_parameters, run, seeded, sharded

STEPS = 6
#: The step, the micro-batch and the rank whose loss is not finite.
BAD = (2, 0, 1)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 2))


def _batch(step: int, micro: int, rank: int, factor: float = float("inf")) -> Tensor:
    made = torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return made * factor if (step, micro, rank) == BAD else made


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    # tanh of infinity is finite: 0 * inf in its gradient is not a number.
    return model(batch).square().mean()


def _alone(ranks: int, micros: int, make: Callable[..., torch.optim.Optimizer], clip: bool) -> dict[str, Tensor]:
    """One process that leaves the bad step out."""
    model = seeded(_model)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        for micro in range(micros):
            for rank in range(ranks):
                (_loss(model, _batch(step, micro, rank)) / ranks).backward()
        if all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)


def _rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=0.01, foreach=True)


@pytest.mark.pairs("shape", "accumulate")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("accumulate", ["once", "no_sync", "reduced"])
@pytest.mark.parametrize("make", [_adam, _sgd, _rmsprop])
@pytest.mark.parametrize("shape", ["one", "two", "hybrid", "offloaded", "clipped"])
def test_a_step_is_left_out_as_one_process_leaves_it_out(
    shape: str, make: Callable[..., torch.optim.Optimizer], accumulate: str, use_orig_params: bool
) -> None:
    """Parameters and optimizer end where they end if one process does not take that step; it is counted once."""
    ranks = {"one": 1, "hybrid": 4}.get(shape, 2)
    micros = 1 if accumulate == "once" else 3
    plan: dict[str, Any] = {"storage_device": torch.device("cpu")} if shape == "offloaded" else {}
    if ranks == 1:
        expected = _alone_shifted(micros, make)
    else:
        expected = _alone(ranks, micros, make, shape == "clipped")

    def rank(world: Collectives) -> tuple[dict[str, Tensor], int]:
        notice_optimizers()
        where: Collectives | Topology = rectangle(world, 2) if shape == "hybrid" else world
        model = sharded(_model, where, units=["0", "2"], nonfinite="skip", use_orig_params=use_orig_params, **plan)
        optimizer = make(model.parameters())
        for step in range(STEPS):
            for micro in range(micros):
                batch = _batch(step, micro, world.rank + (ranks == 1))
                if accumulate == "no_sync" and micro < micros - 1:
                    with no_sync(model):
                        _loss(model, batch).backward()
                else:
                    _loss(model, batch).backward()
            if shape == "clipped":
                clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model), skipped_steps(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run(ranks, rank)
    for parameters, skipped in results:
        assert skipped == 1
        assert parameters.keys() == expected.keys()
        for name, value in parameters.items():
            torch.testing.assert_close(value, expected[name], msg=name)


def _alone_shifted(micros: int, make: Callable[..., torch.optim.Optimizer]) -> dict[str, Tensor]:
    """One process with the batches of rank 1."""
    model = seeded(_model)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        for micro in range(micros):
            _loss(model, _batch(step, micro, 1)).backward()
        if step != BAD[0]:
            optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _state(optimizer: torch.optim.Optimizer) -> list[Any]:
    return copy.deepcopy([optimizer.param_groups, [*optimizer.state.values()]])


@each_row("use_orig_params", [True, False])
def test_an_error_names_rank_and_parameter_and_changes_nothing(use_orig_params: bool) -> None:
    """Every rank raises in the same pass, with the rank whose batch it was; training can go on from there."""

    def rank(world: Collectives) -> tuple[str, str, bool]:
        notice_optimizers()
        model = sharded(_model, world, units=["0", "2"], nonfinite="raise", use_orig_params=use_orig_params)
        optimizer = _adam(model.parameters())
        message = again = ""
        same = False
        for step in range(STEPS):
            before = full_parameters(model), _state(optimizer)
            try:
                _loss(model, _batch(step, 0, world.rank)).backward()
            except NonfiniteError as error:
                message = str(error)
                try:
                    optimizer.step()
                except NonfiniteError as second:
                    again = str(second)
                after = full_parameters(model), _state(optimizer)
                same = str(before) == str(after)
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert skipped_steps(model) == 0
        return message, again, same

    for number, (message, again, same) in enumerate(run(2, rank)):
        assert same
        assert message == again
        assert message.startswith(f"rank {number}: gradients are infinite or not a number: rank 1 has computed that of")
        assert "'0.weight'" in message
        assert "call zero_grad()" in message


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize(("given", "passes", "told"), [(2e38, 1, ""), (2e38, 2, "has the sum of 'weight'")])
def test_a_sum_that_overflows_is_found(given: float, passes: int, told: str, use_orig_params: bool) -> None:
    """Each rank's own gradients are finite, and their sum over two passes is not."""

    def rank(world: Collectives) -> str:
        model = sharded(_Weights, world, nonfinite="raise", use_orig_params=use_orig_params)
        try:
            for _ in range(passes):
                model(torch.full((4,), given)).backward()
        except NonfiniteError as error:
            return str(error)
        return ""

    for message in run(2, rank):
        assert told in message
        assert bool(message) == bool(told)


def test_large_gradients_are_finite() -> None:
    """A sum of finite numbers that is infinite is no gradient that is not finite."""

    def rank(world: Collectives) -> int:
        notice_optimizers()
        model = sharded(lambda: nn.Linear(64, 4, bias=False), world, nonfinite="skip")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-38)
        (model(torch.ones(1, 64)) * 3e38).sum().backward()
        optimizer.step()
        return skipped_steps(model)

    assert run(2, rank) == [0, 0]


def test_nothing_is_looked_at_unless_asked() -> None:
    """By default no gradient is read, and the comparison is as long as ever."""

    def rank(world: Collectives) -> tuple[bool, bool]:
        notice_optimizers()
        model = sharded(_model, world, units=["0"])
        optimizer = _sgd(model.parameters())
        _loss(model, torch.full((2, 4), float("nan"))).backward()
        optimizer.step()
        unit = unit_of(model)
        assert unit is not None
        tree = tree_of(unit)
        finite = all(bool(value.isfinite().all()) for value in full_parameters(model).values())
        return tree.guard is None, finite

    assert run(2, rank) == [(True, False)] * 2


def test_unused_parameters_are_found_too() -> None:
    """A parameter that this rank alone does not use waits for the ranks' comparison; the others' gradient counts."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return self.left(x) + (self.right(x) * float("inf") if both else 0.0)

    def rank(world: Collectives) -> int:
        notice_optimizers()
        model = sharded(Branches, world, nonfinite="skip")
        optimizer = _sgd(model.parameters())
        before = full_parameters(model)
        model(torch.ones(1, 4), both=world.rank == 1).sum().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        after = full_parameters(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        return skipped_steps(model)

    assert run(2, rank) == [1, 1]


def test_a_closure_is_looked_at_after_it_has_run() -> None:
    """A step with a closure computes its gradients inside: they decide, and not those of the pass before."""

    def rank(world: Collectives) -> tuple[list[bool], int]:
        notice_optimizers()
        model = sharded(_model, world, units=["0"], nonfinite="skip")
        optimizer = _adam(model.parameters())
        moved = []
        for factor in (1.0, float("nan"), 1.0):

            def closure(factor: float = factor) -> Tensor:
                optimizer.zero_grad()
                loss = _loss(model, torch.ones(2, 4) * factor)
                loss.backward()
                return loss

            before = full_parameters(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step(closure)
            after = full_parameters(model)
            moved.append(any(not torch.equal(before[name], after[name]) for name in before))
        return moved, skipped_steps(model)

    assert run(2, rank) == [([True, False, True], 1)] * 2


def test_two_optimizers_leave_out_the_same_step() -> None:
    """Both optimizers of one model leave their step out; it is one step."""

    def rank(world: Collectives) -> int:
        notice_optimizers()
        model = sharded(_model, world, units=["0"], nonfinite="skip", use_orig_params=True)
        first, *others = model.parameters()
        optimizers = [_adam([first]), _sgd(others)]
        before = full_parameters(model)
        _loss(model, _batch(*BAD) if world.rank == 1 else torch.ones(2, 4)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for optimizer in optimizers:
                optimizer.step()
        after = full_parameters(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not any(optimizer.state for optimizer in optimizers)
        return skipped_steps(model)

    assert run(2, rank) == [1, 1]


def test_the_gradients_stay_to_be_looked_at() -> None:
    """A step that is left out leaves the gradients where they are, and warns of the first one only."""

    def rank(world: Collectives) -> list[str]:
        notice_optimizers()
        model = sharded(_model, world, nonfinite="skip")
        optimizer = _adam(model.parameters())
        told = []
        for _ in range(2):
            _loss(model, torch.full((2, 4), float("nan"))).backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            told += [str(warning.message) for warning in caught]
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.zero_grad()
        assert skipped_steps(model) == 2
        return told

    (told,) = run(1, rank)
    assert len(told) == 1
    assert re.search(r"leaves out a step on all ranks: .* rank 0 has the sum of '0.weight'", told[0])


@each_row("nonfinite", ["skip", "raise"])
def test_optimizers_in_backward_are_refused(nonfinite: str) -> None:
    """An optimizer that steps inside backward comes before the verdict: refused, by name."""

    def fused(world: Collectives) -> None:
        model = sharded(_model, world, nonfinite=nonfinite, use_orig_params=True)
        for parameter in model.parameters():
            vars(parameter)["_in_backward_optimizers"] = [torch.optim.SGD([parameter], lr=0.1)]
        _loss(model, torch.ones(2, 4)).backward()

    with pytest.raises(
        FlatParamError, match=r"'0.weight' has an optimizer that steps in the backward pass.*nonfinite="
    ):
        run(1, fused)

    def hooked(world: Collectives) -> None:
        notice_optimizers()
        model = sharded(_model, world, nonfinite=nonfinite, use_orig_params=True)
        optimizer = _sgd(model.parameters())
        batch = torch.ones(2, 4, requires_grad=True)
        batch.register_hook(lambda _: optimizer.step())
        _loss(model, batch).backward()

    with pytest.raises(FlatParamError, match=r"SGD steps in the backward pass.*nonfinite='ignore'"):
        run(1, hooked)


def test_the_strictest_unit_decides() -> None:
    """One unit that asks is enough for its tree."""

    def rank(world: Collectives) -> str:
        from flatparam_runtime import UnitPlan, shard_module

        model = seeded(_model)
        shard_module(model[0], UnitPlan(Topology(world), nonfinite="raise"))
        shard_module(model, UnitPlan(Topology(world)))
        with pytest.raises(NonfiniteError) as raised:
            _loss(model, torch.full((2, 4), float("nan"))).backward()
        return str(raised.value)

    assert all("rank 0 has computed" in message for message in run(2, rank))


def test_ranks_that_ask_for_different_things() -> None:
    """The ranks' settings are compared before the first pass."""

    def rank(world: Collectives) -> None:
        model = sharded(_model, world, nonfinite="raise" if world.rank else "ignore")
        _loss(model, torch.ones(2, 4)).backward()

    with pytest.raises(RankError) as raised:
        run_threads(2, rank)
    assert isinstance(raised.value.__cause__, DivergenceError)
    assert "rank 0 has nonfinite of unit '(root)': ignore; rank 1 has nonfinite" in str(raised.value.__cause__)


def test_a_value_that_is_none_of_the_three() -> None:
    """It is refused by name."""
    with pytest.raises(ValueError, match=r"nonfinite: expected 'raise', 'skip' or 'ignore', found 'warn'"):
        run(1, lambda world: sharded(_model, world, nonfinite="warn"))
