"""Python values as JSON and back, exactly, and without running code: tensors by reference, anything unknown refused.

What JSON has not is an object with one key that begins with `$`, such as `{"$tuple": [1, 2]}`.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatparam_files.checkpoint.fields import dtype_name, dtype_named
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.limits import MAX_INTEGER_BITS, is_short_integer
from flatparam_files.disk.source import join_path
from flatparam_files.disk.system import bytes_view, tensor_of

_DEPTH: Final = 100
_SHOWN: Final = 100
_TENSORS: Final = (Tensor, nn.Parameter, nn.Buffer)
_NUMPY_SCALARS: Final = frozenset(
    f"{kind}{bits}" for kind, sizes in {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}.items()
    for bits in sizes
) | {"bool", "complex64", "complex128"}  # fmt: skip

OMIT: Final = object()
"""A resolver returns it for a tensor that is to be left out."""


def reference(path: str) -> dict[str, str]:
    """Return the stand-in for the tensor `path` in a tree."""
    return {"$tensor": path}


def inline(tensor: Tensor) -> dict[str, Any]:
    """Return a small tensor as a value of its own."""
    data = base64.b64encode(bytes(bytes_view(tensor.cpu()).tolist())).decode()
    return {"$inline": [dtype_name(tensor.dtype), list(tensor.shape), data]}


def encode(value: Any, at: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """Return the JSON tree of `value`.

    Args:
        value: dicts, lists, tuples, sets, strings, bytes, numbers, `None`, dtypes, devices, sizes, tensors, and arrays
            and scalars of numpy, nested in any way.
        at: the keys under which it stands.
        tensors: every tensor in it is added here, by its path.

    Raises:
        CheckpointError: for any other object, naming where it is.
    """
    return _Encoder(tensors).encode(value, at)


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def encode(self, value: Any, at: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if abs(value) < 2**63 else self._long(value, at)
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if len(at) > _DEPTH:
            raise _refused(at, f"nested more than {_DEPTH} deep, or in itself")
        if kind in _TENSORS:
            return self._tensor("$tensor", value.detach(), at)
        return self._other(value, kind, at)

    def _other(self, value: Any, kind: type, at: tuple[str, ...]) -> Any:
        if kind in (dict, OrderedDict, Counter):
            return self._mapping(value, kind, at)
        if kind in _SEQUENCES:
            items = [self.encode(item, (*at, str(index))) for index, item in enumerate(value)]
            return items if kind is list else {_SEQUENCES[kind]: items}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind is complex:
            return {"$complex": [self.encode(value.real, at), self.encode(value.imag, at)]}
        if kind is torch.dtype:
            return {"$dtype": dtype_name(value, at)}
        if kind is torch.device:
            return {"$device": str(value)}
        return self._numpy(value, at)

    def _long(self, value: int, at: tuple[str, ...]) -> Any:
        if not is_short_integer(value):
            raise _refused(at, f"an integer of {value.bit_length():,} bits, and {MAX_INTEGER_BITS:,} are the most")
        return {"$int": hex(value)}

    def _mapping(self, value: Mapping[Any, Any], kind: type, at: tuple[str, ...]) -> Any:
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, (*at, key)) for key, item in value.items()}
        pairs = [
            [self.encode(key, (*at, f"key {key!r}")), self.encode(item, (*at, str(key)))] for key, item in value.items()
        ]
        return {_MAPPINGS[kind]: pairs}

    def _tensor(self, tag: str, tensor: Tensor, at: tuple[str, ...]) -> Any:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise _refused(at, f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
        dtype_name(tensor.dtype, at)
        path = join_path(at)
        while path in self._tensors:
            path += "'"
        self._tensors[path] = tensor
        return {tag: path}

    def _numpy(self, value: Any, at: tuple[str, ...]) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray:
            try:
                return self._tensor("$ndarray", torch.from_numpy(value.copy()), at)
            except (TypeError, ValueError):
                raise _refused(at, f"an array of {value.dtype}, which torch does not have") from None
        if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in _NUMPY_SCALARS:
            return {"$numpy": [value.dtype.name, self.encode(value.item(), at)]}
        raise _refused(at, f"an object of {type(value).__module__}.{type(value).__qualname__}")


_SEQUENCES: Final[dict[type, str]] = {
    list: "",
    tuple: "$tuple",
    torch.Size: "$size",
    set: "$set",
    frozenset: "$frozenset",
}
_MAPPINGS: Final[dict[type, str]] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


def _refused(at: tuple[str, ...], what: str) -> CheckpointError:
    path = join_path(at)
    return CheckpointError(
        f"{path!r} is {what}: a checkpoint holds tensors and plain values only",
        fqn=path,
        hint="save what it consists of (its state_dict(), its numbers, its name) instead",
    )


def graft(tree: Any, parts: Sequence[str], value: Any) -> None:
    """Put `value` under the keys `parts` of an encoded tree, if what is on the way allows it."""
    for part, following in zip(parts, (*parts[1:], None), strict=True):
        tag = next(iter(tree), "") if isinstance(tree, dict) else ""
        key: Any
        items = tree[tag] if tag in _MAKE_MAPPING or tag in _MAKE_SEQUENCE else tree
        if tag in _MAKE_MAPPING:
            pair = next((each for each in items if str(each[0]) == part), None)
            if pair is None:
                items.append(pair := [part, {}])
            items, key = pair, 1
        else:
            key = int(part) if isinstance(items, list) else part
        if following is None:
            items[key] = value
        else:
            tree = items[key] if isinstance(items, list) else items.setdefault(key, {})


def decode(tree: Any, resolve: Callable[[str], Any]) -> Any:
    """Return the value of which `encode` made `tree`.

    Args:
        resolve: gives the tensor of a path, or `OMIT`: then a dict lacks the entry, and a list has None there.

    Raises:
        ValueError: if `tree` is no such tree, saying why.
    """
    value = _Decoder(resolve).decode(tree, 0)
    return None if value is OMIT else value


class _Decoder:
    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve

    def decode(self, tree: Any, depth: int) -> Any:
        if depth > 2 * _DEPTH:
            raise ValueError("its values are nested too deeply")
        if isinstance(tree, list):
            return self._items(tree, depth)
        if not isinstance(tree, dict):
            return tree
        tag = next(iter(tree), "")
        if tag == "$tensor":
            return self._resolve(str(tree[tag]))
        if not tag.startswith("$"):
            found = {key: self.decode(item, depth + 1) for key, item in tree.items()}
            return {key: item for key, item in found.items() if item is not OMIT}
        try:
            return self._tagged(tag, tree[tag], depth + 1)
        except CheckpointError:
            raise
        except (TypeError, LookupError, ArithmeticError, RuntimeError, ImportError, AttributeError) as error:
            raise ValueError(f"cannot restore {tag} of {str(tree[tag])[:100]!r}: {error}") from error

    def _items(self, items: Any, depth: int) -> list[Any]:
        if not isinstance(items, list):
            raise ValueError("expected a list of values, found something else")
        found = [self.decode(item, depth + 1) for item in items]
        return [None if item is OMIT else item for item in found]

    def _tagged(self, tag: str, content: Any, depth: int) -> Any:
        if tag in _MAKE_SEQUENCE:
            return _MAKE_SEQUENCE[tag](self._items(content, depth))
        if tag in _MAKE_MAPPING:
            pairs = [(self.decode(key, depth), self.decode(item, depth)) for key, item in content]
            return _MAKE_MAPPING[tag]((key, item) for key, item in pairs if item is not OMIT)
        if tag == "$ndarray":
            tensor = self._resolve(str(content))
            return tensor if tensor is OMIT else tensor.numpy()
        if tag == "$inline":
            name, shape, data = content
            dtype = dtype_named(name)
            return tensor_of(bytearray(base64.b64decode(data, validate=True)), dtype).reshape(shape)
        if tag == "$complex":
            real, imaginary = self._items(content, depth)
            return complex(real, imaginary)
        if tag == "$numpy":
            return self._numpy_scalar(content, depth)
        if tag not in _MAKE_PLAIN or not isinstance(content, str):
            raise ValueError(f"unknown kind of value {tag!r}")
        return _MAKE_PLAIN[tag](content)

    def _numpy_scalar(self, content: Any, depth: int) -> Any:
        name, value = self._items(content, depth)
        if name not in _NUMPY_SCALARS:
            raise ValueError(f"expected a kind of scalar that checkpoints know, found {name!r}")
        # Only who has saved a scalar of numpy needs numpy to load it.
        import numpy

        return numpy.dtype(name).type(value)


def _sizes(sizes: list[Any]) -> list[int]:
    for size in sizes:
        if type(size) is not int or not 0 <= size < 2**63:
            raise ValueError(f"expected sizes from 0 to 2^63 - 1, found {str(size)[:_SHOWN]}")
    return sizes


def _long_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_BITS // 4 + len("-0x"):
        raise ValueError(
            f"expected an integer of at most {MAX_INTEGER_BITS:,} bits, found {len(text):,} hexadecimal digits"
        )
    return int(text, 16)


_MAKE_SEQUENCE: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "$tuple": tuple,
    "$size": lambda sizes: torch.Size(_sizes(sizes)),
    "$set": set,
    "$frozenset": frozenset,
}
_MAKE_MAPPING: Final[dict[str, Callable[[Any], Any]]] = {
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}
_MAKE_PLAIN: Final[dict[str, Callable[[str], Any]]] = {
    "$int": _long_integer,
    "$float": lambda text: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[text],
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$dtype": dtype_named,
    "$device": torch.device,
}
