"""The extra state of a module may be whatever a checkpoint can hold, a tensor too, and comes back as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives, Topology
from flatparam_comm.testing import run_threads
from flatparam_files import CheckpointError, open_source, verify_checkpoint, write_checkpoint, write_torch_file
from flatparam_runtime import UnitPlan, shard_module

from .small import ALONE

STATES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.arange(3.0),
    "number": lambda: torch.tensor(2),
    "empty": lambda: torch.empty(0, 4),
    "bfloat16": lambda: torch.full((2, 2), 1.5, dtype=torch.bfloat16),
    "strided": lambda: torch.arange(6).view(2, 3).t(),
    "array": lambda: numpy.arange(4),
    "none": lambda: None,
    "bytes": lambda: b"\0a",
    "text": lambda: "a",
    "integer": lambda: 7,
    "float": lambda: math.inf,
    "list": lambda: [torch.ones(1), 2, None],
    "tuple": lambda: (1, torch.ones(2)),
    "nothing in it": lambda: {},
    "numbered": lambda: {1: torch.ones(2), 2: "b"},
    "nested": lambda: {
        "scale": torch.arange(2),
        "none": None,
        "bytes": b"xy",
        "array": numpy.arange(3),
        "deep": {"list": [torch.ones(2), 1.5, (None, torch.zeros(1))]},
    },
}


class Scaled(nn.Linear):
    """A layer with an extra state."""

    def __init__(self, state: Any) -> None:
        super().__init__(4, 4)
        self.kept = {"state": state}

    def get_extra_state(self) -> Any:
        return self.kept["state"]

    def set_extra_state(self, state: Any) -> None:
        self.kept["state"] = state


def build(world: Collectives, make: Callable[[], Any], *, use_orig_params: bool) -> nn.Module:
    """Three of them: the unit itself, one inside of a unit, and one outside of all units."""
    model = nn.Sequential(Scaled(make()), nn.Sequential(Scaled(make()), nn.Tanh()), Scaled(make()))
    plan = UnitPlan(
        Topology(world),
        free_after_forward=True,
        free_after_unsynced_backward=True,
        use_orig_params=use_orig_params,
    )
    shard_module(model[0], plan)
    shard_module(model[1], plan)
    return model


def states(model: nn.Module) -> list[Any]:
    return [module.get_extra_state() for module in model.modules() if isinstance(module, Scaled)]


def assert_same(found: Any, expected: Any) -> None:
    """Assert equal types and values."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, numpy.ndarray):
        assert found.dtype == expected.dtype
        assert (found == expected).all()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("what", STATES)
def test_an_extra_state(what: str, use_orig_params: bool, tmp_path: Path) -> None:
    """What `save` took, `load` gives to each module, at the same and at a different world size."""

    def save(world: Collectives) -> None:
        model = build(world, STATES[what], use_orig_params=use_orig_params)
        with Checkpointer(tmp_path, model, ranks=world) as checkpointer:
            checkpointer.save(1)

    def load(world: Collectives) -> list[Any]:
        model = build(world, lambda: "before", use_orig_params=use_orig_params)
        loaded = Checkpointer(tmp_path, model, ranks=world).load()
        assert loaded is not None
        assert not loaded.missing
        assert not loaded.unexpected
        return states(model)

    run_threads(2, save)
    for size in (2, 3):
        for found in run_threads(size, load):
            assert_same(found, [STATES[what]()] * 3)


@each_row("through", ["flatparam", "torch"])
@each_row("what", ["tensor", "none", "bytes", "list", "tuple", "number"])
def test_an_extra_state_is_converted(what: str, through: str, tmp_path: Path) -> None:
    """A checkpoint that was made of ours, or of the file of torch that was made of it, has it too."""
    model = nn.Sequential(Scaled(STATES[what]()))
    with Checkpointer(tmp_path / "run", model, ranks=ALONE) as checkpointer:
        checkpointer.save(1)
    source = open_source(tmp_path / "run")
    if through == "torch":
        write_torch_file(source, tmp_path / "file.pt")
        source = open_source(tmp_path / "file.pt")
    write_checkpoint(source, tmp_path / "new")
    other = nn.Sequential(Scaled("before"))
    Checkpointer(tmp_path / "new", other, ranks=ALONE).load()
    expected = STATES[what]()
    # A tuple with tensors is a list in torch's file.
    assert_same(states(other), [list(expected) if through == "torch" and what == "tuple" else expected])


def test_an_extra_state_that_the_model_lacks(tmp_path: Path) -> None:
    """It is named like any other: refused, or with `strict=False` told."""
    with Checkpointer(tmp_path, nn.Sequential(Scaled(torch.ones(2))), ranks=ALONE) as checkpointer:
        checkpointer.save(1)
    other = Checkpointer(tmp_path, nn.Sequential(nn.Linear(4, 4)), ranks=ALONE)
    with pytest.raises(CheckpointError, match="the model lacks '0._extra_state'"):
        other.load()
    loaded = other.load(strict=False)
    assert loaded is not None
    assert loaded.unexpected == ("0._extra_state",)


class Schedule(torch.optim.SGD):
    """An optimizer that keeps something under a name of its own, beside the states of parameters."""

    def __init__(self, parameters: Any, own: dict[Any, Any]) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.state.update(own)


def kept() -> dict[Any, Any]:
    return {"global": {"n": 3, "scale": torch.arange(2.0), "deep": {"list": [torch.ones(1), None]}}, "phase": "warm"}


@each_row("ranks", [1, 2])
def test_what_an_optimizer_keeps_beside_the_states_of_parameters(
    ranks: int, use_orig_params: bool, tmp_path: Path
) -> None:
    """It comes back, as through torch's own `state_dict()`; rank 0's is saved."""

    def rank(world: Collectives) -> dict[Any, Any]:
        model = build(world, int, use_orig_params=use_orig_params)
        optimizer = Schedule(model.parameters(), kept())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        Checkpointer(tmp_path, model, optimizer, ranks=world).save(1)
        again = Schedule(model.parameters(), {})
        Checkpointer(tmp_path, model, again, ranks=world).load()
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, torch.Tensor):
                assert torch.equal(again.state[parameter]["momentum_buffer"], state["momentum_buffer"])
        return {key: value for key, value in again.state.items() if isinstance(key, str)}

    for found in run_threads(ranks, rank):
        assert str(found) == str(kept())


@each_row(("key", "says"), [(3, "an entry 3"), ("weight", "an entry 'weight'")])
def test_a_name_that_an_optimizer_may_not_have(key: Any, says: str, tmp_path: Path) -> None:
    """A number would be taken for a parameter, and so would the name of one."""
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=f"{says}, expected parameters, or names that no parameter has"):
        Checkpointer(tmp_path, model, Schedule(model.parameters(), {key: {"n": 1}}), ranks=ALONE).save(1)


class Counted(nn.Linear):
    """A layer that adds to its state dict by torch's method, which no Checkpointer calls to save it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "count"] = torch.tensor(5)


def test_what_a_module_adds_to_a_state_dict_by_itself_is_warned_of(tmp_path: Path) -> None:
    """It is in no checkpoint, and the warning names the module, the entry, and the place for it."""
    model = nn.Sequential(Counted(2, 2), Scaled(1))
    with pytest.warns(UserWarning, match=r"module '0' \(Counted\) adds 'count' .*get_extra_state") as caught:
        Checkpointer(tmp_path, model, ranks=ALONE).save(1)
    assert [each.filename for each in caught] == [__file__]


class Whole(nn.Linear):
    """A layer whose state is made of the full weight."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "mean"] = self.weight.view(4, 4).mean()


def test_a_module_that_cannot_say_what_it_adds(use_orig_params: bool, tmp_path: Path) -> None:
    """It fails on a part of its weight, and does not make a save fail."""

    def rank(world: Collectives) -> None:
        model = nn.Sequential(Whole(4, 4))
        shard_module(model, UnitPlan(Topology(world), use_orig_params=use_orig_params))
        Checkpointer(tmp_path, model, ranks=world).save(1)

    run_threads(2, rank)
    assert verify_checkpoint(tmp_path).is_sound
