"""States that do not fit: the same error on every rank, naming what is wrong, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatparam_comm import Collectives
from integration_tests.state.comparing import assert_model, difference
from integration_tests.state.ours import (
    FSDP,
    full_optimizer_state,
    full_state,
    numbers_of,
    ours,
    restored,
)
from integration_tests.state.sample import adamw, build
from integration_tests.state.torch_files import Files
from integration_tests.state.worlds import on_ranks

BOTH = [False, True]
FORMS = ["full", "sharded", "chunked", "dtensor"]


def without_row(state: dict[str, Any]) -> None:
    del state["row"]


def with_stranger(state: dict[str, Any]) -> None:
    state["codec.row"] = state["row"]


def with_wrong_shape(state: dict[str, Any]) -> None:
    state["row"] = state["head.weight"]


def with_a_number(state: dict[str, Any]) -> None:
    state["row"] = 3.0


#: What is wrong, and the words of the error.
WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "missing": (without_row, r"row"),
    "unexpected": (with_stranger, r"codec\.row"),
    "shape": (with_wrong_shape, r"row.*\n?.*3, 3"),
    "number": (with_a_number, r"row"),
}


def told_everywhere(group: Collectives, error: BaseException) -> None:
    """Demand that every rank has this error."""
    texts = group.exchange((type(error).__name__, str(error)), label="errors")
    assert len(set(texts)) == 1, texts


def buffers() -> list[str]:
    """The names of the sample's buffers."""
    return [name for name, _ in build().named_buffers()]


@on_ranks(2, form=FORMS, wrong=list(WRONG), originals=BOTH)
def test_model_states(group: Collectives, files: Files, form: str, wrong: str, originals: bool) -> None:
    """S-086: a missing, unexpected, misshapen or mistaken entry is one error on all ranks; no parameter is changed."""
    state = dict(ours(build(), originals, form).state_dict())
    spoil, words = WRONG[wrong]
    spoil(state)
    mine = ours(build(seed=1), originals, form)
    before = full_state(mine)
    with pytest.raises(RuntimeError, match=words) as caught:
        mine.load_state_dict(state)
    assert "_fsdp_wrapped_module" not in str(caught.value)
    told_everywhere(group, caught.value)
    assert_model(full_state(mine), before, but=buffers())  # which torch itself has loaded before it raises
    mine.load_state_dict(ours(build(), originals, form).state_dict())  # and it is as good as new
    assert difference(full_state(mine), dict(build().state_dict())) is None


@on_ranks(2, form=FORMS, originals=BOTH)
def test_a_state_of_another_unit_size(group: Collectives, files: Files, form: str, originals: bool) -> None:
    """A state of a wider model is one error on all ranks that names a parameter and both shapes."""
    state = dict(ours(torch.nn.Linear(5, 4), originals, form, units=()).state_dict())
    mine = ours(torch.nn.Linear(5, 3), originals, form, units=())
    before = full_state(mine)
    with pytest.raises(RuntimeError, match=r"weight") as caught:
        mine.load_state_dict(state)
    assert "4, 5" in str(caught.value)
    assert "3, 5" in str(caught.value)
    told_everywhere(group, caught.value)
    assert difference(full_state(mine), before) is None


@on_ranks(2, originals=BOTH)
def test_a_local_state_of_other_units(group: Collectives, files: Files, originals: bool) -> None:
    """S-084: a flat shard of another layout is one error on all ranks; nothing is changed."""
    state = dict(ours(build(), originals, "local").state_dict())
    mine = ours(build(seed=1), originals, "local", units=())
    before = full_state(mine)
    with pytest.raises(RuntimeError, match="_flat_param") as caught:
        mine.load_state_dict(state)
    told_everywhere(group, caught.value)
    assert difference(full_state(mine), before) is None


def no_groups(state: dict[str, Any]) -> dict[str, Any]:
    return {"state": state["state"]}


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    return {"state": dict(enumerate(state["state"].values())), "param_groups": [{"params": [0]}]}


def misshapen(state: dict[str, Any]) -> dict[str, Any]:
    row = {**state["state"]["row"], "exp_avg": torch.zeros(2, 3)}
    return {**state, "state": {**state["state"], "row": row}}


def homeless(state: dict[str, Any]) -> dict[str, Any]:
    (group,) = state["param_groups"]
    names = [name for name in group["params"] if name != "row"]
    return {**state, "param_groups": [{**group, "params": names}]}


WRONG_OPTIMIZER: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "no groups": (no_groups, "param_groups"),
    "numbered": (numbered, "rekey_optim_state_dict|names"),
    "misshapen": (misshapen, "exp_avg.*row|row.*exp_avg"),
    "homeless": (homeless, "row"),
}


@on_ranks(2, wrong=list(WRONG_OPTIMIZER), originals=BOTH, rank0_only=BOTH)
def test_optimizer_states(group: Collectives, files: Files, wrong: str, originals: bool, rank0_only: bool) -> None:
    """S-091: an optimizer state that does not fit is one error on all ranks, also where only rank 0 has it."""
    import flatparam

    mine = ours(build(), originals)
    optimizer = adamw(mine.parameters())
    restored(mine, optimizer)
    before = full_optimizer_state(mine, optimizer)
    spoil, words = WRONG_OPTIMIZER[wrong]
    given = spoil(numbers_of(False)) if group.rank == 0 or not rank0_only else {}
    config = flatparam.FullOptimStateDictConfig(rank0_only=rank0_only)
    with (
        FSDP.state_dict_type(mine, flatparam.StateDictType.FULL_STATE_DICT, None, config),
        pytest.raises(Exception, match=words) as caught,
    ):
        FSDP.optim_state_dict_to_load(mine, optimizer, given, load_directly=True)
    assert isinstance(caught.value, (ValueError, RuntimeError))
    told_everywhere(group, caught.value)
    assert difference(full_optimizer_state(mine, optimizer), before) is None


@on_ranks(2, form=["full", "sharded"])
def test_a_parameter_of_no_model(group: Collectives, files: Files, form: str) -> None:
    """S-090: an optimizer over a parameter that the model has not is one error on all ranks."""
    mine = ours(build(), True, form)
    optimizer = adamw([*mine.parameters(), torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises((RuntimeError, ValueError), match="parameter") as caught:
        FSDP.optim_state_dict(mine, optimizer)
    told_everywhere(group, caught.value)
