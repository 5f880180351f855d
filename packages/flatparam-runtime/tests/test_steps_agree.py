"""Ranks that step their optimizers differently: an error on every rank, at the end of the next pass."""

from __future__ import annotations

import re

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives, RankError, run_threads
from flatparam_runtime import (
    DivergenceError,
    clip_grad_norm_,
    holder_of_parameter,
    notice_optimizers,
    unit_of,
    units_in,
)

from .worlds import sharded


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def _train(world: Collectives, how: str, optimizer_class: type[torch.optim.Optimizer]) -> list[float]:
    notice_optimizers()
    model = sharded(_model, world, units=["0"])
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]  # each of them takes it
    losses = []
    # The pass after the step compares; an accelerator tells of it in the one behind that.
    for step in range(5):
        odd = world.rank == 1 and step == 2
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        losses.append(float(loss))
        if odd and how == "left out":
            continue
        if odd and how == "another rate":
            optimizer.param_groups[0]["lr"] = 0.2
        optimizer.step()
        if odd and how == "twice":
            optimizer.step()
        optimizer.zero_grad()
    return losses


@each_row("optimizer_class", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@each_row(
    ("how", "told"),
    [
        ("left out", r"rank 0 was at the step of \w+\(lr=0.1.*; rank 1 was at the gather of unit"),
        ("another rate", r"rank 0 was at the step of \w+\(lr=0.1.*; rank 1 was at the step of \w+\(lr=0.2"),
        ("twice", r"rank 0 was at the gather of unit .*; rank 1 was at the step of \w+\(lr=0.1"),
    ],
)
def test_a_rank_that_steps_differently(how: str, told: str, optimizer_class: type[torch.optim.Optimizer]) -> None:
    """A step that one rank leaves out, repeats, or takes with another learning rate is named on every rank."""
    with pytest.raises(RankError) as raised:
        run_threads(2, _train, how, optimizer_class)
    error = raised.value.__cause__
    assert isinstance(error, DivergenceError)
    assert "the ranks have stepped differently" in str(error)
    assert re.search(told, str(error)), error


def test_ranks_that_step_alike() -> None:
    """The same steps on all ranks, by a schedule, are no divergence."""

    def rank(world: Collectives) -> list[float]:
        notice_optimizers()
        model = sharded(_model, world, units=["0"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        for _ in range(100):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            losses.append(float(loss))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return losses

    first, second = run_threads(2, rank)
    assert first == second
    assert first[-1] < first[0]


def _two_parts(world: Collectives, use_orig_params: bool, told: str) -> int:
    notice_optimizers()
    torch.manual_seed(0)
    # Each part is the root of a tree of its own.
    parts = [sharded(_model, world, units=["0"], use_orig_params=use_orig_params) for _ in range(2)]
    held = [list(part.parameters()) for part in parts]
    order = held if world.rank == 0 else held[::-1]
    optimizer = torch.optim.Adam([p for each in order for p in each], lr=0.01)
    for step in range(4):
        for part in parts:
            part(torch.ones(2, 4)).square().mean().backward()
        if step == 1 and told == "left out" and world.rank:
            optimizer.param_groups[0]["params"] = order[1]
        optimizer.step()
        optimizer.zero_grad()
    return step


def test_the_order_of_parameters_does_not_matter(use_orig_params: bool) -> None:
    """An optimizer of several trees, which lists them in another order on each rank, steps all alike."""
    assert run_threads(2, _two_parts, use_orig_params, "") == [3, 3]


def test_a_tree_that_one_rank_does_not_step_is_named(use_orig_params: bool) -> None:
    """An optimizer that leaves out one of its trees on one rank is found, whatever it lists first."""
    with pytest.raises(RankError) as raised:
        run_threads(2, _two_parts, use_orig_params, "left out")
    assert "the ranks have stepped differently" in str(raised.value.__cause__)


def _between_passes(world: Collectives, what: str, use_orig_params: bool, ranks: tuple[int, ...]) -> int:
    notice_optimizers()
    model = sharded(_model, world, units=["0"], use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        odd = world.rank in ranks and step == 1
        model(torch.ones(2, 4)).square().mean().backward()
        clip_grad_norm_(
            model,
            2.0 if odd and what == "max_norm" else 1.0,
            3.0 if odd and what == "norm_type" else 2.0,
        )
        optimizer.step()
        if not (odd and what == "zero_grad"):
            optimizer.zero_grad()
        if odd and what == "zero_grad twice":
            optimizer.zero_grad()
    return step


def test_clipping_that_is_refused_is_not_noted(use_orig_params: bool) -> None:
    """A rank whose norm is refused and which then clips as the others do has done the same."""

    def rank(world: Collectives) -> None:
        model = sharded(_model, world, units=["0"], use_orig_params=use_orig_params)
        for _ in range(2):
            model(torch.ones(2, 4)).square().mean().backward()
            if world.rank:
                with pytest.raises(ValueError, match="expected the order of a norm"):
                    clip_grad_norm_(model, 1.0, 0.0)
            clip_grad_norm_(model, 1.0)

    run_threads(2, rank)


CHANGES = {
    "max_norm": r"rank 0 was at the clip_grad_norm_\(max_norm=1.0, norm_type=2.0\); rank 1 was at the clip_grad_norm_\(max_norm=2.0",
    "norm_type": r"rank 1 was at the clip_grad_norm_\(max_norm=1.0, norm_type=3.0\)",
    "zero_grad": r"rank 0 was at the zero_grad\(\); rank 1 was at the reduce of unit",
}


@each_row("what", CHANGES)
def test_what_ranks_do_between_passes_is_compared(what: str, use_orig_params: bool) -> None:
    """Clipping with another norm on one rank, or a zero_grad() that is left out, is an error at the end of the next pass."""
    with pytest.raises(RankError) as raised:
        run_threads(2, _between_passes, what, use_orig_params, (1,))
    error = raised.value.__cause__
    assert isinstance(error, DivergenceError)
    assert "the ranks have not done the same between passes" in str(error)
    assert re.search(CHANGES[what], str(error)), error


@each_row("what", [*CHANGES, "zero_grad twice"])
def test_the_same_on_all_ranks_is_no_divergence(what: str, use_orig_params: bool) -> None:
    """What all ranks do, and a zero_grad() that has nothing more to drop, is as it should be."""
    assert run_threads(2, _between_passes, what, use_orig_params, (0, 1)) == [3, 3]
    if what == "zero_grad twice":
        assert run_threads(2, _between_passes, what, use_orig_params, (1,)) == [3, 3]


LISTS = ["one of all", "weights and biases", "groups", "one for each"]


def _optimizers(model: nn.Module, lists: str, filtered: bool) -> dict[str, torch.optim.Optimizer]:
    """Optimizers by name; with `filtered`, of what this rank has elements of, and none of nothing."""
    named = [(name, p) for name, p in model.named_parameters() if p.numel() or not filtered]
    kinds = {end: [p for name, p in named if name.endswith(end)] for end in ("weight", "bias")}
    rates = {"weight": 0.1, "bias": 0.2}
    if lists == "one of all":
        found = {"all": [p for _, p in named]}
    elif lists == "weights and biases":
        found = kinds
    elif lists == "groups":
        groups = [{"params": held, "lr": rates[end]} for end, held in kinds.items() if held]
        return {"all": torch.optim.SGD(groups)} if groups else {}
    else:
        found = {name: [p] for name, p in named}
    return {name: torch.optim.SGD(held, lr=rates.get(name, 0.1)) for name, held in found.items() if held}


def _of_lists(world: Collectives, lists: str, filtered: bool, keeps: bool, left_out: str) -> int:
    notice_optimizers()
    # Of the second model, the last ranks have nothing; of the first unit, the first rank has no bias.
    models = [
        sharded(make, world, units=units, use_orig_params=True, free_after_forward=not keeps)
        for make, units in ((_model, ["0"]), (lambda: nn.Linear(4, 1, bias=False), []))
    ]
    optimizers = [_optimizers(model, lists, filtered) for model in models]
    for step in range(4):
        for model in models:
            model(torch.ones(2, 4)).square().mean().backward()
        for model, of_model in zip(models, optimizers, strict=True):
            for name, optimizer in of_model.items():
                if not (step == 2 and world.rank == 1 and left_out in name):
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 4))
                model(torch.ones(2, 4))
    return step


@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("filtered", [False, True], ids=["listed", "filtered"])
@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("world_size", [2, 5])
def test_ranks_may_list_only_what_they_have(world_size: int, lists: str, filtered: bool, keeps: bool) -> None:
    """An optimizer over a list that leaves out parameters without elements is no divergence, nor is none at all."""
    assert run_threads(world_size, _of_lists, lists, filtered, keeps, "-") == [3] * world_size


@each_row("lists", ["one of all", "weights and biases"])
@each_row("world_size", [2, 5])
def test_a_step_of_what_some_ranks_have_nothing_of_is_compared(world_size: int, lists: str) -> None:
    """A rank whose optimizers list everything, and that leaves out the step of one, is told."""
    with pytest.raises(RankError) as raised:
        run_threads(world_size, _of_lists, lists, False, False, "bias" if "bias" in lists else "all")
    assert isinstance(raised.value.__cause__, DivergenceError)
    assert "the ranks have stepped differently" in str(raised.value.__cause__)


def test_a_refused_call_is_no_divergence(use_orig_params: bool) -> None:
    """A rank whose `clip_grad_norm_` was refused for its arguments, and which calls again, has clipped once."""

    def clip(world: Collectives) -> None:
        model = sharded(_model, world, units=["0"], use_orig_params=use_orig_params)
        for _ in range(2):
            model(torch.ones(2, 4)).square().mean().backward()
            if world.rank == 1:
                with pytest.raises(ValueError, match="order of a norm"):
                    clip_grad_norm_(model, 1.0, 0.0)
            clip_grad_norm_(model, 1.0)

    run_threads(2, clip)


def test_an_optimizer_that_leaves_out_a_unit_is_named(use_orig_params: bool) -> None:
    """A rank whose optimizer has no parameter of one unit is told, with the units that each rank steps."""

    def train(world: Collectives) -> None:
        notice_optimizers()
        model = sharded(_model, world, units=["0"], use_orig_params=use_orig_params)
        held = [p for p in model.parameters() if world.rank == 0 or holder_of_parameter(p) is unit_of(model)]
        optimizer = torch.optim.SGD(held, lr=0.1)
        for _ in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    with pytest.raises(RankError) as raised:
        run_threads(2, train)
    error = raised.value.__cause__
    assert isinstance(error, DivergenceError)
    assert re.search(
        r"rank 0 was at the step of SGD.* on 2 units, '\(root\)' to '0'; rank 1 .* on unit '", str(error)
    ), error


@pytest.mark.parametrize(("first", "second"), [(2.0, 8.0), (None, 2.0)])
def test_ranks_that_divide_gradients_differently(
    first: float | None, second: float | None, use_orig_params: bool
) -> None:
    """A divisor that differs between ranks is told before a step, with both; in the first pass, too."""

    def train(world: Collectives) -> None:
        notice_optimizers()
        model = sharded(_model, world, units=["0"], use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for unit in units_in(model):
            unit.reducer.divide_factor = first if world.rank == 0 else second
        for _ in range(2):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()

    with pytest.raises(RankError) as raised:
        run_threads(2, train)
    error = raised.value.__cause__
    assert isinstance(error, DivergenceError)
    assert f"set_gradient_divide_factor({second!r}) of unit" in str(error)


def test_ranks_that_divide_gradients_alike() -> None:
    """A divisor of the user's that is the same everywhere is no divergence."""

    def train(world: Collectives) -> None:
        model = sharded(_model, world, units=["0"])
        for step in range(3):
            for unit in units_in(model):
                unit.reducer.divide_factor = 2.0 + step
            model(torch.ones(2, 4)).square().mean().backward()

    run_threads(2, train)
