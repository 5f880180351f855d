"""The dtypes that a checkpoint can hold, and their names in a manifest."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

from flatparam_files.disk import DTYPES, CheckpointError, join_path

__all__ = ["dtype_name", "dtype_named", "file_dtype"]

_NAMES: Final = MappingProxyType(
    {dtype: str(dtype).removeprefix("torch.") for dtype in (*DTYPES, torch.complex32, torch.complex128)}
)
_BY_NAME: Final = MappingProxyType({name: dtype for dtype, name in _NAMES.items()})


def dtype_name(dtype: torch.dtype, at: tuple[str, ...] = ()) -> str:
    """The name of `dtype` in a manifest.

    Raises:
        CheckpointError: for one that cannot be saved, naming the tensor `at` these keys.
    """
    if dtype not in _NAMES:
        path = join_path(at)
        raise CheckpointError(
            f"{path!r}: tensors of {dtype} cannot be saved", fqn=path, hint="convert it before"
        )
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name in a manifest.

    Raises:
        ValueError: if there is none.
    """
    if name not in _BY_NAME:
        raise ValueError(f"unknown dtype {name!r}")
    return _BY_NAME[name]


def file_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype under which a file holds the bytes of `dtype`: bytes, if safetensors does not have it."""
    return dtype if dtype in DTYPES else torch.uint8
