"""Published tensors in safetensors files, as `from_pretrained` of transformers reads them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast, final

from torch import Tensor

from flatparam_files import TensorFileWriter, TensorInfo
from flatparam_files.formats import INDEX_FILE, SparseFile, appearing, check_new, divided, encode_index
from flatparam_publish.versions import Catalogue, PublishedTensor

__all__ = ["SafetensorsSink", "writing"]


@final
class SafetensorsSink:
    """Called with each tensor of a catalogue in order, it writes files that hold them."""

    def __init__(self, files: Sequence[tuple[Path, Mapping[str, PublishedTensor]]]) -> None:
        """`files` are written one after the other."""
        self._left = list(files)[::-1]
        self._stack = contextlib.ExitStack()
        self._in_file: list[str] = []
        self._writer: TensorFileWriter | None = None

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor."""
        if not self._in_file:
            self._begin()
        assert self._writer is not None, "a file was begun"
        self._writer.write(name, [tensor])
        self._in_file.pop()
        if not self._in_file:
            self._stack.close()

    def _begin(self) -> None:
        path, tensors = self._left.pop()
        self._in_file = list(tensors)
        infos: dict[str, TensorInfo] = {name: tensor.info for name, tensor in tensors.items()}
        file = self._stack.enter_context(SparseFile(path))
        self._writer = self._stack.enter_context(
            TensorFileWriter(cast("BinaryIO", file), infos, {"format": "pt"})
        )

    def stop(self) -> None:
        """Close what is open; after an error it is not whole."""
        with contextlib.suppress(ValueError, OSError):
            self._stack.close()


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], catalogue: Catalogue) -> Iterator[SafetensorsSink]:
    """A sink for the tensors of `catalogue`, in its order, whose files appear when all of them are written.

    Args:
        path: a new file, if the name ends with `.safetensors`; else a new directory, with an index if one file does not
            do.

    Raises:
        CheckpointError: if `path` exists, or cannot be written.
    """
    path = Path(path)
    check_new(path)
    tensors = {tensor.name: tensor for tensor in catalogue.tensors}
    with appearing(path) as temporary:
        if path.suffix == ".safetensors":
            files = [(temporary, tensors)]
        else:
            temporary.mkdir()
            parts = divided(tensors)
            files = [(temporary / name, part) for name, part in parts.items()]
            if len(files) > 1:
                (temporary / INDEX_FILE).write_bytes(encode_index(parts))
        sink = SafetensorsSink(files)
        try:
            yield sink
        finally:
            sink.stop()
