"""Which form `state_dict()` has: by setter, by context, and as `get_state_dict_type` tells it."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn

import flatparam
from flatparam import StateDictType
from flatparam_comm import Collectives
from integration_tests.state.comparing import assert_model
from integration_tests.state.ours import FSDP, full_state, ours, settings_of
from integration_tests.state.sample import build
from integration_tests.state.torch_files import Files, fsdp1
from integration_tests.state.worlds import on_ranks

NAMES = ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"]


def told(settings: Any) -> tuple[Any, ...]:
    """The settings as names and fields, without the fields that torch has not."""
    model, optimizer = settings.state_dict_config, settings.optim_state_dict_config
    fields = [{k: v for k, v in vars(c).items() if k != "dim_0_chunks"} for c in (model, optimizer)]
    return settings.state_dict_type.name, type(model).__name__, type(optimizer).__name__, *fields


@on_ranks(1, name=NAMES)
def test_the_setter(group: Collectives, files: Files, name: str) -> None:
    """S-080, S-081: the setter sets every unit, with torch's default configurations, and returns what was set before.

    It does not warn that it is deprecated: here it is not.
    """
    mine, other = ours(build()), fsdp1(build(), False)
    FSDP.set_state_dict_type(mine, StateDictType.FULL_STATE_DICT)
    theirs.FullyShardedDataParallel.set_state_dict_type(other, theirs.StateDictType.FULL_STATE_DICT)
    before = FSDP.set_state_dict_type(mine, StateDictType[name])
    expected = theirs.FullyShardedDataParallel.set_state_dict_type(other, theirs.StateDictType[name])
    assert told(before) == told(expected)
    expected = theirs.FullyShardedDataParallel.get_state_dict_type(other)
    for unit in FSDP.fsdp_modules(mine):
        assert told(FSDP.get_state_dict_type(unit)) == told(expected)


@on_ranks(1, name=NAMES)
def test_the_context(group: Collectives, files: Files, name: str) -> None:
    """S-082: inside the context every unit has the form; after it, also after an exception, the form it had before."""
    mine = ours(build())
    FSDP.set_state_dict_type(mine, *settings_of("sharded", offload_to_cpu=True))
    before = FSDP.get_state_dict_type(mine)
    with FSDP.state_dict_type(mine, theirs.StateDictType[name]):
        found = {FSDP.get_state_dict_type(unit).state_dict_type for unit in FSDP.fsdp_modules(mine)}
        assert found == {StateDictType[name]}
    with contextlib.suppress(KeyError), FSDP.state_dict_type(mine, theirs.StateDictType[name]):
        raise KeyError
    for unit in FSDP.fsdp_modules(mine):
        assert told(FSDP.get_state_dict_type(unit)) == told(before)


@on_ranks(1)
def test_the_context_on_a_part(group: Collectives, files: Files) -> None:
    """S-082: the context on a unit leaves the others; S-081: then the whole model has no one form: AssertionError."""
    mine = ours(build())
    with FSDP.state_dict_type(mine.module.codec, *settings_of("local")):
        with pytest.raises(AssertionError, match="different"):
            FSDP.get_state_dict_type(mine)
        assert FSDP.get_state_dict_type(mine.module.codec).state_dict_type is StateDictType.LOCAL_STATE_DICT
    assert FSDP.get_state_dict_type(mine).state_dict_type is StateDictType.FULL_STATE_DICT


@on_ranks(1)
def test_no_units(group: Collectives, files: Files) -> None:
    """S-081, L-57: a model without units has no form, no units, and the context on it does nothing."""
    plain = nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert FSDP.fsdp_modules(plain) == []
    found = FSDP.get_state_dict_type(plain)
    expected = theirs.FullyShardedDataParallel.get_state_dict_type(plain)
    assert (found is None) == (expected is None) or found.state_dict_type is None
    with FSDP.state_dict_type(plain, StateDictType.SHARDED_STATE_DICT):
        assert type(plain.state_dict()["weight"]) is torch.Tensor


@on_ranks(2, form=["full", "sharded", "local"], wrong=["full", "sharded", "local"], part=["model", "optimizer"])
def test_a_configuration_of_another_form(group: Collectives, files: Files, form: str, wrong: str, part: str) -> None:
    """S-080: a configuration of another form, ours or torch's, is a RuntimeError on every rank and changes nothing."""
    if form == wrong:
        return
    mine = ours(build())
    before = told(FSDP.get_state_dict_type(mine))
    kind, model_config, optimizer_config = settings_of(form)
    for source in (flatparam, theirs):
        name = type(settings_of(wrong)[1 if part == "model" else 2]).__name__
        config = getattr(source, name)()
        arguments = (config, optimizer_config) if part == "model" else (model_config, config)
        with pytest.raises(RuntimeError, match="Config"):
            FSDP.set_state_dict_type(mine, kind, *arguments)
        with pytest.raises(RuntimeError, match="Config"), FSDP.state_dict_type(mine, kind, *arguments):
            pass
    assert told(FSDP.get_state_dict_type(mine)) == before


@on_ranks(2)
def test_local_and_a_mesh(group: Collectives, files: Files) -> None:
    """S-084: the local form does not go with a device mesh: RuntimeError at saving, with what to use instead."""
    mine = ours(build(), form="dtensor")
    with (
        FSDP.state_dict_type(mine, StateDictType.LOCAL_STATE_DICT),
        pytest.raises(RuntimeError, match=r"(?i)mesh"),
    ):
        mine.state_dict()
    assert_model(full_state(mine), build().state_dict())


@on_ranks(2, form=["sharded", "local"])
def test_a_unit_in_its_own_form(group: Collectives, files: Files, form: str) -> None:
    """A unit inside a model, whose form was set, saves and loads by itself in that form."""
    mine, other = ours(build(), True), ours(build(seed=1), True)
    for model in (mine, other):
        FSDP.set_state_dict_type(model.module.codec, *settings_of(form))
    state = mine.module.codec.state_dict()
    assert {type(value).__name__ for value in state.values()} == {"ShardedTensor"}
    other.module.codec.load_state_dict(state)
    FSDP.set_state_dict_type(other.module.codec, *settings_of("full"))  # as the others have
    codec = {f"codec.{name}": value for name, value in build().codec.state_dict().items()}
    assert_model(full_state(other), {**build(seed=1).state_dict(), **codec})


@on_ranks(2, form=["full", "sharded", "dtensor"])
def test_loading_tells_where_its_time_goes(group: Collectives, files: Files, form: str) -> None:
    """S-089: under TORCH_DISTRIBUTED_DEBUG=INFO loading logs a profile, on rank 0; without it it logs nothing."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("flatparam"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        mine = ours(build(), form=form)
        state = mine.state_dict()
        mine.load_state_dict(state)
        assert not [r for r in records if "profiling" in r.getMessage()]
        dist.set_debug_level(dist.DebugLevel.INFO)
        mine = ours(build(), form=form)
        mine.load_state_dict(state)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
        logger.removeHandler(handler)
        logger.setLevel(level)
    profiles = [r for r in records if "load_state_dict() profiling" in r.getMessage()]
    assert bool(profiles) == (group.rank == 0)
