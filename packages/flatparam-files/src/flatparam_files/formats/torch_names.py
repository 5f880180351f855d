"""The names that a pickle of `torch.save` may mention, and what each becomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, final

import attrs
import torch

from flatparam_files.disk import TensorInfo
from flatparam_files.formats.pickle_reader import AdmittedNames, Global, is_key
from flatparam_files.formats.stored.stored_tensors import Storage, StridedTensor

__all__ = ["STORAGE_NAMES", "TORCH_NAMES", "TypedStorage", "dtype_names", "plain_dict"]

# The dtypes of the storage classes that torch pickles a tensor with. The others go as an `UntypedStorage` and a dtype.
STORAGE_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
}


def dtype_names() -> dict[str, torch.dtype]:
    """Return every dtype of this torch by its dotted name."""
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def _tensor(
    storage: TypedStorage, offset: int, size: Any, strides: tuple[int, ...], _: Any, hooks: Any, *rest: Any
) -> StridedTensor:
    """`_rebuild_tensor_v2`; in `_v3` the dtype follows the hooks, and in both the metadata may be last."""
    dtype = storage.dtype if storage.dtype is not None or not rest else rest[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no dtype")
    flags = rest[-1] if rest and isinstance(rest[-1], Mapping) else {}
    conjugated, negated = bool(flags.get("conj")), bool(flags.get("neg"))
    return StridedTensor(
        TensorInfo(size, dtype), storage.storage, offset, tuple(strides), conjugated, negated
    )


def _parameter(data: StridedTensor, *_: Any) -> StridedTensor:
    if not isinstance(data, StridedTensor):
        raise TypeError("expected a tensor to make a parameter of, found something else")
    return data


def _with_attributes(function: Any, kind: Any, arguments: tuple[Any, ...], state: Any = None) -> Any:
    """Return a tensor or parameter that somebody has set attributes on, as FSDP1 does: without them."""
    if not isinstance(function, Global) or not function.name.startswith("torch._utils._rebuild_"):
        raise TypeError("a tensor is made by something else than torch's functions")
    return TORCH_NAMES.functions[function.name](*arguments)


def _encoded(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded as {encoding!r}")
    return text.encode("latin1")


def _bytes(data: bytes = b"") -> bytes:
    # Of a number, `bytes` would make that many zeros.
    if not isinstance(data, bytes):
        raise TypeError("bytes are made of something else")
    return data


def _size(sizes: tuple[int, ...] = ()) -> tuple[int, ...]:
    if not all(type(size) is int for size in sizes):
        raise TypeError("a size is not an integer")
    return tuple(sizes)


def _set(items: list[Any]) -> set[Any]:
    if not all(map(is_key, items)):
        raise TypeError("a set holds containers")
    return set(items)


def plain_dict(items: Any = ()) -> dict[Any, Any]:
    """A dictionary of pairs, as an OrderedDict is pickled; a TypeError if a key is none that a pickle may have."""
    pairs = items.items() if isinstance(items, Mapping) else [(key, value) for key, value in items]
    if not all(is_key(key) for key, _ in pairs):
        raise TypeError("a container is the key of a dictionary")
    return dict(pairs)


TORCH_NAMES: Final = AdmittedNames(
    values={
        **dtype_names(),
        "torch.storage.UntypedStorage": None,
        "torch.Tensor": None,
        "torch.nn.parameter.Parameter": None,
        **{f"torch.{name}": dtype for dtype, name in STORAGE_NAMES.items()},
        "torch.strided": "strided",
    },
    functions={
        "collections.OrderedDict": plain_dict,
        # The state of PyTorch's MultiStepLR has one.
        "collections.Counter": lambda counts: Counter(plain_dict(counts)),
        "torch._utils._rebuild_tensor_v2": _tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch._tensor._rebuild_from_type_v2": _with_attributes,
        "torch.Size": _size,
        "torch.device": lambda kind, index=None: kind if index is None else f"{kind}:{index}",
        "_codecs.encode": _encoded,
        "builtins.bytearray": _bytes,
        # Protocol 2 calls it without arguments for empty bytes.
        "builtins.bytes": _bytes,
        "builtins.set": _set,
        "builtins.complex": lambda real, imaginary: complex(real, imaginary),
    },
    hint=(
        "If you trust whoever wrote it, load it with torch.load(..., weights_only=False) and save again only "
        "tensors and plain values"
    ),
)


@final
@attrs.frozen
class TypedStorage:
    """A storage as a pickle names it; `dtype` is None for one of bytes."""

    storage: Storage
    dtype: torch.dtype | None
