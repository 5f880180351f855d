"""The tensors in the inputs and outputs of a module."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from each_row import each_row
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flatparam_runtime.passes.tensors import map_tensors, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Data:
    value: Any
    other: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class Slotted:
    __slots__ = ("unset", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class SlottedChild(Slotted):
    __slots__ = ("extra",)

    def __init__(self, value: Any, extra: Any) -> None:
        super().__init__(value)
        self.extra = extra


class Private:
    __slots__ = ("__hidden",)

    def __init__(self, value: Any) -> None:
        self.__hidden = value


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class OneSlot:
    # A single string is legal, too.
    __slots__ = "value"

    def __init__(self, value: Any) -> None:
        self.value = value


class Colour(enum.Enum):
    RED = 1


@attrs.define
class Attrs:
    value: Any


# One tensor in each; the first two columns are enough to read what a nesting is.
HIDING_PLACES = {
    "itself": lambda t: t,
    "list": lambda t: [1, t, None],
    "tuple": lambda t: ("a", t),
    "named tuple": lambda t: Pair(t, 3),
    "dict": lambda t: {"a": t, "b": 1.5},
    "ordered dict": lambda t: collections.OrderedDict(a=t),
    "default dict": lambda t: collections.defaultdict(list, a=[t]),
    "dataclass": lambda t: Data(t),
    "frozen dataclass": lambda t: Frozen([t]),
    "attrs class": lambda t: Attrs(t),
    "object": lambda t: Plain(t),
    "object in object": lambda t: Plain(Plain({"deep": (t,)})),
    "slots": lambda t: Slotted(t),
    "inherited slots": lambda t: SlottedChild(None, t),
    "slots of a parent": lambda t: SlottedChild(t, None),
    "one slot": lambda t: OneSlot(t),
    "private slot": lambda t: Private(t),
    "deque": lambda t: collections.deque([t]),
    "user dict": lambda t: collections.UserDict(a=t),
    "set": lambda t: {t},
    "frozen set": lambda t: frozenset([t]),
    "packed sequence": lambda t: nn.utils.rnn.pack_sequence([t]),
    "distribution": lambda t: torch.distributions.Categorical(logits=t, validate_args=False),
    "deep": lambda t: [[[[[{"a": Data(Slotted([Pair(1, (t,))]))}]]]]],
}


@pytest.mark.parametrize("place", HIDING_PLACES)
def test_a_tensor_is_found_in(place: str) -> None:
    """The tensor is found, once, wherever it is."""
    tensor = torch.ones(2, requires_grad=True)
    found = list(tensors_in(HIDING_PLACES[place](tensor)))
    # A packed sequence holds a copy of the tensor and the sizes of the batch.
    if place == "packed sequence":
        assert sum(t.requires_grad for t in found) == 1
    elif place == "distribution":
        assert any(t.requires_grad for t in found)
    else:
        assert len(found) == 1
        assert found[0] is tensor


@each_row("value", [None, 1, 2.5, 1j, "text", b"bytes", Tensor, Colour.RED, [], {}, (), object()])
def test_nothing_is_found_in(value: object) -> None:
    """Values without tensors yield nothing, and nothing fails on them."""
    assert list(tensors_in(value)) == []
    assert map_tensors(lambda t: t + 1, value) is value


def test_modules_are_not_entered() -> None:
    """A module is not searched: its parameters are no outputs, though it is an object with attributes."""
    module = nn.Linear(2, 2)
    module.kept = torch.ones(1)
    assert list(tensors_in([module, Plain(module)])) == []


def test_functions_are_not_entered() -> None:
    """Functions and classes are not searched."""

    def function() -> None: ...

    function.tensor = torch.ones(1)  # type: ignore[attr-defined]  # that is the test
    assert list(tensors_in([function, Plain, len])) == []


def test_cycles_end() -> None:
    """Objects that contain themselves are searched once."""
    tensor = torch.ones(1)
    loop: list[Any] = [tensor]
    loop.append(loop)
    node = Plain(tensor)
    node.me = node  # type: ignore[attr-defined]  # that is the test
    mapping: dict[str, Any] = {"a": tensor}
    mapping["self"] = mapping
    for value in (loop, node, mapping, [loop, node, mapping]):
        assert [id(t) for t in tensors_in(value)] == [id(tensor)]


def test_a_tensor_in_two_places_is_found_once() -> None:
    """A tensor that occurs several times is yielded once, so that it gets one hook."""
    tensor = torch.ones(1)
    assert len(list(tensors_in([tensor, {"a": tensor}, Plain(tensor)]))) == 1


def test_a_deep_nesting_is_no_recursion() -> None:
    """Ten thousand levels are searched: the depth is not limited by the interpreter's stack."""
    tensor = torch.ones(1)
    value: Any = tensor
    for _ in range(10_000):
        value = [value]
    assert next(tensors_in(value)) is tensor


LEAVES = st.builds(lambda: torch.ones(1)) | st.none() | st.integers() | st.text(max_size=2)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Data, inner, inner),
    ),
    max_leaves=12,
)


def in_order(value: Any) -> list[Tensor]:
    """The tensors of a tree by plain recursion, left to right."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Data):
        value = [value.value, value.other]
    return [t for item in value for t in in_order(item)] if isinstance(value, (list, tuple)) else []


@given(TREES)
def test_tensors_come_in_order(tree: Any) -> None:
    """The tensors of any nesting are found from left to right, as on every other rank."""
    assert [id(t) for t in tensors_in(tree)] == [id(t) for t in in_order(tree)]


@given(TREES)
def test_mapping_replaces_each_tensor_in_its_place(tree: Any) -> None:
    """Mapping keeps the nesting and every type in it, and changes all tensors and nothing else."""
    replaced: dict[int, Tensor] = {}

    def double(tensor: Tensor) -> Tensor:
        return replaced.setdefault(id(tensor), tensor * 2)

    out = map_tensors(double, tree)
    assert [id(t) for t in in_order(out)] == [id(replaced[id(t)]) for t in in_order(tree)]
    assert shape(out) == shape(tree)
    assert all(float(t) == 1 for t in in_order(tree)), "the value that was given is left as it was"


def shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    if isinstance(value, dict):
        return dict, {key: shape(item) for key, item in value.items()}
    if isinstance(value, Data):
        return Data, shape(value.value), shape(value.other)
    return (type(value), [shape(item) for item in value]) if isinstance(value, (list, tuple)) else value


@given(TREES)
def test_mapping_nothing_gives_the_same_object(tree: Any) -> None:
    """If no tensor changes, the very object comes back."""
    assert map_tensors(lambda t: t, tree) is tree


def test_mapping_keeps_kinds_of_mappings() -> None:
    """An ordered dict stays one, with its order; a default dict stays one, with its factory."""
    tensor = torch.ones(1)
    ordered = map_tensors(lambda t: t * 2, collections.OrderedDict(b=tensor, a=1))
    assert isinstance(ordered, collections.OrderedDict)
    assert list(ordered) == ["b", "a"]
    default = map_tensors(lambda t: t * 2, collections.defaultdict(list, a=tensor))
    assert isinstance(default, collections.defaultdict)
    assert default["missing"] == []
    assert float(default["a"]) == 2


def test_mapping_keeps_what_a_dataclass_does_not_take() -> None:
    """The constructor computes a field that it does not take again."""

    @dataclasses.dataclass
    class WithSum:
        value: Tensor
        total: float = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.total = float(self.value.sum())

    assert map_tensors(lambda t: t * 2, WithSum(torch.ones(3))).total == 6.0


def test_mapping_passes_objects_through() -> None:
    """An object that the function cannot rebuild is returned as it is."""
    hidden = Plain(torch.ones(1))
    assert map_tensors(lambda t: t * 2, [hidden])[0] is hidden


def test_a_mapping_that_cannot_be_changed_is_made_anew() -> None:
    """A read-only mapping with a tensor in it becomes another of its type; without a tensor it stays the object it is."""
    shown = types.MappingProxyType({"a": torch.ones(2), "b": 1})
    out = map_tensors(lambda t: t * 2, shown)
    assert type(out) is types.MappingProxyType
    assert out["a"].tolist() == [2.0, 2.0]
    assert out["b"] == 1
    plain = types.MappingProxyType({"b": 1})
    assert map_tensors(lambda t: t * 2, plain) is plain
