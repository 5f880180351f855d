"""JSON that shows every changed bit: one spelling for each value, and a hash of itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.limits import MAX_MANIFEST_NBYTES, check_cost, parse_json
from flatparam_files.disk.system import AnyPath, ByteFile, new_file, sync_file

__all__ = ["read_sealed", "seal", "unseal", "write_sealed"]


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
            f"the values of a checkpoint are too many: {error}",
            hint="save long lists of numbers as tensors",
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
            f"{path}: damaged: {error}",
            path=path,
            hint="use a different checkpoint, or restore the file from a copy",
        ) from error


def write_sealed(path: Path, content: Any) -> None:
    """Write `content` to the new file `path`, and wait until it is on the disk; a FileExistsError if it is there."""
    with new_file(path) as file:
        view = memoryview(seal(content))
        while view:
            view = view[file.write(view) :]
        sync_file(file)
