"""Full parameters that a module changes in place in its forward pass, which the shards do not see."""

from __future__ import annotations

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, SingleCollectives
from flatparam_comm.testing import run_processes
from flatparam_runtime import FlatParamError, summon_full_params

from .worlds import check_at_rest, run, seeded, sharded


class Clamped(nn.Module):
    """A layer that clamps its weight before it is used, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 3.0))
        self.clamps = True

    def forward(self, x: Tensor) -> Tensor:
        if self.clamps:
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
        return x @ self.weight


class Model(nn.Module):
    """A layer that changes its weight, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Clamped()
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


def output(module: nn.Module) -> Tensor:
    out: Tensor = module(torch.ones(2, 4)).sum()
    return out


@each_row("units", [[], ["first"], ["first", "last"]], ids=str)
def test_a_change_in_a_training_pass_is_refused(
    units: list[str], use_orig_params: bool, free_after_forward: bool
) -> None:
    """The pass raises an error that names the parameter, and the next one, without a change, works."""

    def program(collectives: Collectives) -> None:
        module = sharded(
            Model,
            collectives,
            units=units,
            use_orig_params=use_orig_params,
            free_after_forward=free_after_forward,
        )
        for _ in range(2):
            with pytest.raises(
                FlatParamError,
                match=r"weight.* were changed in place in its forward pass.*summon_full_params",
            ):
                output(module)
        module.first.clamps = False
        output(module).backward()
        check_at_rest(module)

    run(2, program)


def train_where_one_changes(collectives: Collectives) -> str:
    """The error of a step in which rank 1 alone changes a parameter."""
    module = sharded(Model, collectives, units=["first"])
    module.first.clamps = collectives.rank == 1
    with pytest.raises((FlatParamError, RuntimeError)) as caught:
        output(module).backward()
    return str(caught.value)


@pytest.mark.processes
def test_the_other_ranks_are_told() -> None:
    """If one rank alone changes a parameter, all raise within seconds: the others wait for it."""
    first, second = run_processes(2, train_where_one_changes)
    assert "changed in place" in second
    assert "rank 1 failed first in forward pass of unit 'first'" in first


def test_a_change_without_gradients_is_for_the_pass() -> None:
    """Evaluation computes with the changed parameter, as without flatparam, and the shards keep their values."""

    def program(collectives: Collectives) -> tuple[float, float]:
        module = sharded(Model, collectives, units=["first"])
        with torch.no_grad():
            found = output(module).item()
        with summon_full_params(module):
            return found, module.first.weight.sum().item()

    with torch.no_grad():
        expected = output(seeded(Model)).item()
    assert run(2, program) == [(expected, 48.0)] * 2


def test_a_change_inside_summon_full_params_is_kept(use_orig_params: bool) -> None:
    """There changes in place are what the context is for: a training pass inside accepts them."""

    def program(collectives: Collectives) -> float:
        module = sharded(Model, collectives, units=["first"], use_orig_params=use_orig_params)
        with summon_full_params(module):
            with torch.no_grad():
                module.first.weight.mul_(2.0)
            output(module).backward()
        module.first.clamps = False
        output(module).backward()
        with summon_full_params(module):
            return module.first.weight.sum().item()

    # The clamp in the pass inside comes last.
    assert run(2, program) == [8.0, 8.0]


def test_without_shards_the_change_is_in_the_parameter() -> None:
    """Original parameters that nothing shards are the full parameters: a change is kept, as without flatparam."""
    module = sharded(Model, SingleCollectives(), units=["first"], use_orig_params=True)
    output(module).backward()
    assert module.first.weight.detach().abs().max() == 0.5
