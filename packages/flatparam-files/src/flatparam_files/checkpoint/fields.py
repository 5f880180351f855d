"""The fields of the manifest's records, and JSON that shows every changed bit: one spelling of each value, and a hash.

Fields have validators of built records, checks of the JSON that they come from, and dtypes. All of them raise a
ValueError that says what was expected and found; a validator names the record and its field, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import attrs
import torch

from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.limits import MAX_MANIFEST_NBYTES, check_cost, parse_json
from flatparam_files.disk.safetensors import DTYPES
from flatparam_files.disk.source import join_path
from flatparam_files.disk.system import AnyPath, ByteFile, new_file, sync_file

Field: TypeAlias = "attrs.Attribute[Any]"
Validator: TypeAlias = "Callable[[Any, Field, Any], None]"

_DIGITS: Final = re.compile(r"[0-9a-f]{32}")
_COUNTS: Final = "at least 0 and at most 2**63 - 1"
_SHOWN: Final = 60


def bad_value(record: object, field: Field, value: object, expected: str) -> ValueError:
    """Return the error about a field of `record` whose `value` is not what was `expected`."""
    found = str(value)[:_SHOWN]
    return ValueError(f"{type(record).__name__}.{field.name}: expected {expected}, found {found!r}")


def count(record: object, field: Field, value: Any) -> None:
    """Validate a number of bytes, of elements, of a rank, a file or a step."""
    if not _is_count(value):
        raise bad_value(record, field, value, f"a number of {_COUNTS}")


def hash_digits(record: object, field: Field, value: Any) -> None:
    """Validate 128 bits in hexadecimal: a hash, or the id of a save."""
    if not isinstance(value, str) or not _DIGITS.fullmatch(value):
        raise bad_value(record, field, value, "32 hexadecimal digits")


def text(record: object, field: Field, value: Any) -> None:
    """Validate a string."""
    if not isinstance(value, str):
        raise bad_value(record, field, value, "a string")


def json_tree(record: object, field: Field, value: Any) -> None:
    """Validate what JSON can say: objects, lists, strings, numbers, booleans and `None`, nested in any way."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if type(item) is list:
            waiting.extend(item)
        elif type(item) is dict:
            for key in item:
                text(record, field, key)
            waiting.extend(item.values())
        elif item is not None and type(item) not in (str, int, float, bool):
            raise bad_value(record, field, item, "what JSON can say")


def instance_of(kind: type) -> Validator:
    """Return a validator of objects of the class `kind`."""

    def validate(record: object, field: Field, value: Any) -> None:
        if not isinstance(value, kind):
            raise bad_value(record, field, value, f"a {kind.__name__}")

    return validate


def tuple_of(each: Validator) -> Validator:
    """Return a validator of tuples whose items `each` validates."""

    def validate(record: object, field: Field, value: Any) -> None:
        if not isinstance(value, tuple):
            raise bad_value(record, field, value, "a tuple")
        for item in value:
            each(record, field, item)

    return validate


def mapping_of(each: Validator) -> Validator:
    """Return a validator of mappings from strings to values that `each` validates."""

    def validate(record: object, field: Field, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise bad_value(record, field, value, "a mapping")
        for key, item in value.items():
            text(record, field, key)
            each(record, field, item)

    return validate


def as_object(tree: Any) -> dict[str, Any]:
    """Return the JSON object `tree`."""
    if not isinstance(tree, dict):
        raise ValueError(f"expected an object, found {str(tree)[:_SHOWN]!r}")
    return tree


def as_list(tree: Any, length: int | None = None) -> list[Any]:
    """Return the JSON list `tree`, of `length` items if that is given."""
    if not isinstance(tree, list) or (length is not None and len(tree) != length):
        raise ValueError(f"expected a list of {length or 'any'} items, found {str(tree)[:_SHOWN]!r}")
    return tree


def as_text(tree: Any) -> str:
    """Return the JSON string `tree`."""
    if not isinstance(tree, str):
        raise ValueError(f"expected a string, found {str(tree)[:_SHOWN]!r}")
    return tree


def as_count(tree: Any) -> int:
    """Return the JSON number `tree`: an integer of at least 0, and of 63 bits at most."""
    if not _is_count(tree):
        raise ValueError(f"expected a number of {_COUNTS}, found {str(tree)[:_SHOWN]!r}")
    return int(tree)


def check_step(step: object) -> None:
    """Raise a ValueError if `step` cannot be the step of a checkpoint."""
    if not _is_count(step):
        raise ValueError(f"expected a step of {_COUNTS}, found {step!r}")


def _is_count(value: object) -> bool:
    """Return whether `value` can be a number of bytes, of elements, of a rank, a file or a step."""
    return type(value) is int and 0 <= value < 2**63


# The dtypes that a checkpoint can hold, and their names in a manifest


_NAMES: Final = MappingProxyType(
    {dtype: str(dtype).removeprefix("torch.") for dtype in (*DTYPES, torch.complex32, torch.complex128)}
)
_BY_NAME: Final = MappingProxyType({name: dtype for dtype, name in _NAMES.items()})


def dtype_name(dtype: torch.dtype, at: tuple[str, ...] = ()) -> str:
    """Return the name of `dtype` in a manifest; a CheckpointError, about the tensor `at` these keys, if it has none."""
    if dtype not in _NAMES:
        path = join_path(at)
        raise CheckpointError(f"{path!r}: tensors of {dtype} cannot be saved", fqn=path, hint="convert it before")
    return _NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name in a manifest; a ValueError if there is none."""
    if name not in _BY_NAME:
        raise ValueError(f"expected a dtype that checkpoints know, found {name!r}")
    return _BY_NAME[name]


def file_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype under which a file holds the bytes of `dtype`: bytes, if safetensors does not have it."""
    return dtype if dtype in DTYPES else torch.uint8


def seal(content: Any) -> bytes:
    """Return the bytes that stand for `content` (what JSON has; floats finite, keys strings) and for nothing else.

    Raises:
        CheckpointError: if it consists of so many values that no reader would take it.
    """
    text = _canonical(content)
    try:
        check_cost(text)
    except ValueError as error:
        raise CheckpointError(
            f"the values of a checkpoint are too many: {error}", hint="save long lists of numbers as tensors"
        ) from error
    return _sealed(text)


def _sealed(text: bytes) -> bytes:
    digest = hashlib.sha256(text).hexdigest().encode()
    return b'{"sha256":"' + digest + b'","content":' + text + b"}\n"


def _canonical(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def unseal(data: bytes) -> Any:
    """Return the content of which `seal` made `data`; a ValueError if any byte has changed, saying so."""
    tree = parse_json(data)
    if not isinstance(tree, dict) or list(tree) != ["sha256", "content"]:
        raise ValueError("it does not have the form of a sealed file")
    content = tree["content"]
    try:
        again = _sealed(_canonical(content))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if again != data:
        raise ValueError("its hash says that it was changed after it was written")
    return content


def read_sealed(path: AnyPath, *, follows_links: bool = True) -> Any:
    """Return the content of a sealed file.

    Args:
        follows_links: whether it may be a symbolic link to a regular file.

    Raises:
        CheckpointError: if it is not there, is no regular file, or is not as it was written.
    """
    with ByteFile(path, follows_links=follows_links) as file:
        if file.nbytes > MAX_MANIFEST_NBYTES:
            raise CheckpointError(f"{path}: {file.nbytes:,} bytes are too many", path=path)
        data = bytes(file.read(0, file.nbytes))
    try:
        return unseal(data)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: damaged: {error}", path=path, hint="use a different checkpoint, or restore the file from a copy"
        ) from error


def write_sealed(path: Path, content: Any) -> None:
    """Write `content` to the new file `path`, and wait until it is on the disk; a FileExistsError if it is there."""
    with new_file(path) as file:
        view = memoryview(seal(content))
        while view:
            view = view[file.write(view) :]
        sync_file(file)
