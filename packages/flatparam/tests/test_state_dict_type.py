"""Choosing the form of the state: by a call, or inside a context."""

from typing import Any

import pytest
import torch.distributed.fsdp as theirs
from each_row import each_row
from torch import nn

from flatparam import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import SingleCollectives

from .models import mlp

HERE = SingleCollectives()
FULL = StateDictType.FULL_STATE_DICT
DEFAULT = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=True))
OTHER = StateDictSettings(
    FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(False, True)
)


def settings_of(module: nn.Module) -> list[StateDictSettings]:
    """Those of each wrapper, innermost first."""
    return [FSDP.get_state_dict_type(wrapper) for wrapper in reversed(FSDP.fsdp_modules(module))]


def model() -> FSDP:
    return FSDP(mlp(), HERE, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def choose(module: nn.Module, settings: StateDictSettings) -> Any:
    return FSDP.set_state_dict_type(
        module, settings.state_dict_type, settings.state_dict_config, settings.optim_state_dict_config
    )


def test_the_default_is_fsdp1s(torch_world: None) -> None:
    """S-080: nothing chosen means what it means in torch: full, on each rank, optimizer state on the CPU."""
    import torch

    other = theirs.FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    expected = theirs.FullyShardedDataParallel.get_state_dict_type(other)
    found = FSDP.get_state_dict_type(model())
    assert found == DEFAULT
    assert str(found) == str(expected)


def test_setting_applies_to_all_and_returns_what_was() -> None:
    """S-080: every wrapper inside has the new settings; the old ones come back, to be set again."""
    wrapped = model()
    assert choose(wrapped, OTHER) == DEFAULT
    assert settings_of(wrapped) == [OTHER] * 4
    assert choose(wrapped, DEFAULT) == OTHER
    assert settings_of(wrapped) == [DEFAULT] * 4


def test_setting_in_a_plain_parent() -> None:
    """S-080: the module that is passed need not be a wrapper."""
    parent = nn.ModuleDict({"a": model(), "b": nn.Linear(1, 1), "c": model()})
    choose(parent, OTHER)
    assert settings_of(parent) == [OTHER] * 8


def test_a_configuration_may_be_left_out() -> None:
    """S-080: the type's default configuration is taken then."""
    wrapped = model()
    choose(wrapped, OTHER)
    FSDP.set_state_dict_type(wrapped, FULL)
    assert FSDP.get_state_dict_type(wrapped) == DEFAULT


@each_row(
    ("state", "optimizer"),
    [
        (LocalStateDictConfig(), None),
        (StateDictConfig(), None),
        ({"rank0_only": True}, None),
        (None, ShardedOptimStateDictConfig()),
        (None, OptimStateDictConfig()),
        (None, FullStateDictConfig()),
        (FullOptimStateDictConfig(), None),
        (theirs.ShardedStateDictConfig(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_configuration_of_another_form_is_refused(state: Any, optimizer: Any) -> None:
    """S-080: a configuration that is not the type's is a RuntimeError that names the type; nothing changes."""
    wrapped = model()
    with pytest.raises(RuntimeError, match="FULL_STATE_DICT"):
        FSDP.set_state_dict_type(wrapped, FULL, state, optimizer)
    assert settings_of(wrapped) == [DEFAULT] * 4


@each_row("kind", [1, "FULL_STATE_DICT", None, theirs.ShardingStrategy.FULL_SHARD])
def test_something_else_than_a_type_is_refused(kind: Any) -> None:
    """Only members of `StateDictType`, ours or torch's, choose a form."""
    with pytest.raises(TypeError, match="state_dict_type"):
        FSDP.set_state_dict_type(model(), kind)


def test_different_settings_are_an_error() -> None:
    """S-081: wrappers of one model that differ cannot be asked for their settings as one."""
    wrapped = model()
    choose(wrapped[2], OTHER)
    with pytest.raises(AssertionError, match="different"):
        FSDP.get_state_dict_type(wrapped)
    assert FSDP.get_state_dict_type(wrapped[2]) == OTHER


def test_the_context_sets_and_restores() -> None:
    """S-082: inside all wrappers have the settings; afterwards each has its own again, contexts may nest."""
    wrapped = model()
    third = StateDictSettings(FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig())
    with FSDP.state_dict_type(wrapped, FULL, OTHER.state_dict_config, OTHER.optim_state_dict_config):
        assert settings_of(wrapped) == [OTHER] * 4
        with FSDP.state_dict_type(wrapped, FULL, third.state_dict_config):
            assert settings_of(wrapped) == [third] * 4
        assert settings_of(wrapped) == [OTHER] * 4
    assert settings_of(wrapped) == [DEFAULT] * 4


def test_an_exception_in_the_context_restores_too() -> None:
    """L-10: torch leaves the new type set for ever; here each wrapper has its settings back."""
    wrapped = model()
    with (
        pytest.raises(ZeroDivisionError),
        FSDP.state_dict_type(wrapped, FULL, FullStateDictConfig(rank0_only=True)),
    ):
        raise ZeroDivisionError
    assert settings_of(wrapped) == [DEFAULT] * 4


def test_different_settings_are_not_half_replaced() -> None:
    """Setting all of wrappers that differ either works or is refused as in torch; it never sets some of them."""
    wrapped = model()
    choose(wrapped[2], OTHER)
    try:
        choose(wrapped, StateDictSettings(FULL, FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig()))
    except AssertionError:
        assert [FSDP.get_state_dict_type(wrapped[n]) for n in (0, 2, 4)] == [DEFAULT, OTHER, DEFAULT]
    else:
        assert FSDP.get_state_dict_type(wrapped).state_dict_config == FullStateDictConfig(rank0_only=True)


def test_the_callers_configuration_counts_when_it_is_used() -> None:
    """Clients change a configuration after they have passed it; that of ours is kept as the object that it is."""
    wrapped = model()
    config = FullStateDictConfig()
    FSDP.set_state_dict_type(wrapped, FULL, config)
    config.rank0_only = True
    assert FSDP.get_state_dict_type(wrapped).state_dict_config.rank0_only  # type: ignore[attr-defined]


def test_a_model_without_wrappers() -> None:
    """Asking and setting are harmless where there is nothing to set."""
    with FSDP.state_dict_type(mlp(), FULL):
        pass
    before = FSDP.set_state_dict_type(mlp(), FULL)
    assert (before.state_dict_type, before.state_dict_config, before.optim_state_dict_config) == (None,) * 3
    assert FSDP.get_state_dict_type(mlp()) is None
