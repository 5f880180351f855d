"""Enums and configuration objects are torch's, name by name, value by value, field by field."""

import dataclasses
import enum
import pickle
from typing import Any

import pytest
import torch.distributed.fsdp as theirs
from each_row import each_row
from torch import nn

import flatparam as ours
from flatparam.compat import as_config, as_enum

ENUMS = ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"]
CONFIGS = [
    "MixedPrecision",
    "CPUOffload",
    "StateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "ShardedStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "LocalOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "StateDictSettings",
]


def pair(name: str) -> tuple[Any, Any]:
    return getattr(ours, name), getattr(theirs, name)


@each_row("name", ENUMS)
def test_members_and_values(name: str) -> None:
    """The same names in the same order with the same values; callers look members up by both."""
    mine, other = pair(name)
    assert issubclass(mine, enum.Enum)
    assert [(m.name, m.value) for m in mine] == [(m.name, m.value) for m in other]
    assert [str(m) for m in mine] == [str(m) for m in other]
    for member in other:
        assert mine(member.value).name == member.name
        assert mine[member.name].value == member.value


@each_row("name", CONFIGS)
def test_fields_and_defaults(name: str) -> None:
    """The same fields in the same order with the same defaults, in a mutable dataclass; ours may follow them."""
    mine, other = pair(name)
    described = [
        [(f.name, f.default if f.default is not dataclasses.MISSING else "required") for f in dataclasses.fields(kind)]
        for kind in (mine, other)
    ]
    assert described[0][: len(described[1])] == described[1]
    assert {name for name, _ in described[0][len(described[1]) :]} <= {"dim_0_chunks"}
    assert not mine.__dataclass_params__.frozen
    assert [base.__name__ for base in mine.__mro__] == [base.__name__ for base in other.__mro__]


@each_row("name", CONFIGS[:-1])
def test_fields_can_be_set_later(name: str) -> None:
    """Client libraries change a configuration after they have made it."""
    config = pair(name)[0]()
    for field in dataclasses.fields(config):
        setattr(config, field.name, "something else")
        assert getattr(config, field.name) == "something else"


@each_row("name", [*ENUMS, *CONFIGS[:-1]])
def test_pickling(name: str) -> None:
    """Each of them can be sent to another process."""
    mine = pair(name)[0]
    value = next(iter(mine)) if issubclass(mine, enum.Enum) else mine()
    assert pickle.loads(pickle.dumps(value)) == value


@each_row("name", ENUMS)
def test_torchs_members_are_translated(name: str) -> None:
    """Each member of torch's enum becomes ours of that name, and ours stays what it is."""
    mine, other = pair(name)
    for member in other:
        assert as_enum(mine, member, "argument") is mine[member.name]
        assert as_enum(mine, mine[member.name], "argument") is mine[member.name]


@each_row("name", CONFIGS[:-1])
def test_torchs_configurations_are_translated(name: str) -> None:
    """Each of torch's dataclasses becomes ours with the same values, and ours stays the same object."""
    mine, other = pair(name)
    asked = other()
    for field in dataclasses.fields(asked):
        if isinstance(field.default, bool):
            setattr(asked, field.name, not field.default)
    found = as_config(mine, asked, "argument")
    assert type(found) is mine
    assert dataclasses.asdict(found).items() >= dataclasses.asdict(asked).items()
    own = mine()
    assert as_config(mine, own, "argument") is own


def test_torchs_configuration_of_a_subclass_is_translated() -> None:
    """Where a base class is expected, torch's subclass becomes our subclass."""
    found = as_config(ours.StateDictConfig, theirs.FullStateDictConfig(rank0_only=True), "state_dict_config")
    assert found == ours.FullStateDictConfig(rank0_only=True)


@each_row("value", [1, "FULL_SHARD", None, theirs.BackwardPrefetch.BACKWARD_PRE, nn.Linear])
def test_anything_else_is_no_member(value: Any) -> None:
    """Numbers, strings and members of other enums are refused, with the argument's name and what was found."""
    with pytest.raises(TypeError, match=r"sharding_strategy: expected a ShardingStrategy, found") as caught:
        as_enum(ours.ShardingStrategy, value, "sharding_strategy")
    assert repr(value) in str(caught.value)


@each_row("value", [{}, True, theirs.CPUOffload(), ours.MixedPrecision])
def test_anything_else_is_no_configuration(value: Any) -> None:
    """Dicts, flags, other dataclasses and the class itself are refused, with the argument's name."""
    with pytest.raises(TypeError, match="mixed_precision: expected a MixedPrecision, found"):
        as_config(ours.MixedPrecision, value, "mixed_precision")
