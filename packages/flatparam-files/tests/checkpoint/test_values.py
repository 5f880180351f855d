"""Python values as JSON and back: exact, complete, and nothing but values."""

import json
import math
import random
from collections import Counter, OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_files.checkpoint.fields import seal, unseal
from flatparam_files.checkpoint.values import OMIT, decode, encode
from flatparam_files.disk.checkpoint_error import CheckpointError


def there_and_back(value: Any) -> Any:
    """Through JSON text."""
    tensors: dict[str, torch.Tensor] = {}
    tree = json.loads(json.dumps(encode(value, ("extra",), tensors), allow_nan=False))
    return decode(tree, tensors.__getitem__)


def assert_same(found: Any, expected: Any) -> None:
    """Assert equal types and values, all the way down."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [type(key) for key in found] == [type(key) for key in expected]
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, (torch.Tensor, np.ndarray)):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert (found == expected).all()
    elif isinstance(expected, float) and math.isnan(expected):
        assert math.isnan(found)
    else:
        assert repr(found) == repr(expected)


VALUES: dict[str, Any] = {
    "plain": {"a": None, "b": [True, 1, -2.5, "ü\ud800", 1e-320, 0.1 + 0.2, -0.0]},
    "not finite": [math.inf, -math.inf, math.nan],
    "big": 2**200,
    "keys": {1: "a", "1": "b", 2.5: "c", None: "d", (1, "x"): "e"},
    "dollar": {"$tensor": "no", "a": {"$dict": 1}},
    "sequences": ((), [], (1, (2,)), {3}, frozenset({4}), torch.Size([1, 2])),
    "mappings": OrderedDict(b=1, a=Counter({3: 2})),
    "bytes": b"\0\xff",
    "complex": [1 + 2j, complex(math.inf, -0.0)],
    "torch": [torch.float8_e4m3fn, torch.device("cuda", 1)],
    "tensors": {"a/b": torch.arange(3), "%": [torch.tensor(1.5), torch.empty(0, 2)], 1: torch.ones(1), "1": torch.zeros(1)},
    "numpy": [np.arange(6, dtype=np.uint32).reshape(2, 3), np.float32(0.1), np.int64(-3), np.bool_(True), np.float64(0.5)],
    "rng": [random.Random(1).getstate(), np.random.RandomState(2).get_state(), torch.get_rng_state()],
    "generator": np.random.default_rng(3).bit_generator.state,
    "scheduler": torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), [3, 3]).state_dict(),
}  # fmt: skip


@each_row("name", VALUES)
def test_values_come_back_as_they_were(name: str) -> None:
    """The same types, the same order, the same bits."""
    assert_same(there_and_back(VALUES[name]), VALUES[name])


def test_parameters_come_back_as_tensors() -> None:
    """A parameter is saved for its values."""
    assert_same(there_and_back([nn.Parameter(torch.ones(2))]), [torch.ones(2)])


@each_row(
    "value",
    [object(), print, partial(print), nn.Linear(1, 1), np.array(["text"]), np.arange(3, dtype=">i4"), type, torch.ones(2).to_sparse(),
     torch.ones(1, device="meta"), np.datetime64("2020-01-01"), bytearray(b"a"), iter([])],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_anything_else_is_refused_with_its_place(value: Any) -> None:
    """The error has the path, and says what to save instead."""
    with pytest.raises(CheckpointError, match=r"'extra/data/1' is .*save what it consists of") as caught:
        encode({"data": [0, value]}, ("extra",), {})
    assert caught.value.fqn == "extra/data/1"


def test_a_value_within_itself_is_refused() -> None:
    """Without end there is no file."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        encode(value, (), {})


def test_tensors_can_be_left_out() -> None:
    """A dict then lacks the entry, and a list keeps the places of the others."""
    value = {"a": torch.ones(1), "b": [1, torch.ones(1), 2], "c": {1: torch.ones(1), 2: 3}}
    tree = encode(value, (), {})
    assert decode(tree, lambda _: OMIT) == {"b": [1, None, 2], "c": {2: 3}}


@each_row(
    "tree",
    [{"$code": "1"}, {"$tuple": 3}, {"$dict": [1]}, {"$dict": [[[], 1]]}, {"$float": "1"}, {"$int": "z"},
     {"$numpy": ["object", 1]}, {"$complex": [1]}, {"$complex": ["a", 1]}, {"$bytes": "*"}, {"$dtype": "x"},
     {"$device": "x"}, {"$inline": ["float32", [9], ""]}, {"$inline": 1}, {"$size": ["a"]}, {"$counter": [[1]]},
     {"$set": [[]]}],
    ids=str,
)  # fmt: skip
def test_trees_that_nobody_encoded_are_refused(tree: Any) -> None:
    """With a ValueError, whatever is inside."""
    with pytest.raises(ValueError, match=r"."):
        decode(tree, lambda _: OMIT)


def test_a_sealed_file_shows_every_changed_bit() -> None:
    """Each single bit, each missing and each added byte; only the original is accepted."""
    data = seal({"a": [1, 2.5, "ü", None, True], "b": {"c": -0.0}})
    assert unseal(data) == {"a": [1, 2.5, "ü", None, True], "b": {"c": -0.0}}
    changed = [bytes([*data[:i], data[i] ^ (1 << bit), *data[i + 1 :]]) for i in range(len(data)) for bit in range(8)]
    changed += [data[:i] for i in range(len(data))] + [data + b" ", b" " + data, data.replace(b",", b", ", 1)]
    for each in changed:
        with pytest.raises(ValueError, match=r"."):
            unseal(each)
