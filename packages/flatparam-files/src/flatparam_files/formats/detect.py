"""A checkpoint of any format: its format is found out, it is opened as a source, and its bytes are verified."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from flatparam_core import Span
from flatparam_files.checkpoint.manifest import MANIFEST
from flatparam_files.checkpoint.reader import CheckpointReader, is_checkpoint, open_checkpoint
from flatparam_files.checkpoint.soundness import BytesRead, Check, Soundness, checks_of_directory, examine
from flatparam_files.disk.checkpoint_error import CheckpointError
from flatparam_files.disk.source import Source, chunk_spans
from flatparam_files.disk.system import AnyPath, ByteFile
from flatparam_files.formats.dcp_reader import ACCELERATE_DIRECTORIES, is_dcp, open_dcp
from flatparam_files.formats.deepspeed import is_deepspeed, open_deepspeed
from flatparam_files.formats.hugging_face import INDEX_FILE, SINGLE_FILE, open_hugging_face
from flatparam_files.formats.stored_tensors import Storage
from flatparam_files.formats.torch_archive import is_archive
from flatparam_files.formats.torch_files import ACCELERATE_FILES, PYTORCH_FILES, open_torch_file
from flatparam_files.formats.whole_sources import StoredSource, stored_source


class UnknownFormatError(CheckpointError):
    """There is nothing at a path that is known to be a checkpoint."""


def _open_own(path: Path) -> Source:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory, and a checkpoint of flatparam is one", path=path)
    return stored_source(open_checkpoint(path))


_OPEN: Final[Mapping[str, Callable[..., Source]]] = {
    "flatparam": _open_own,
    "safetensors": open_hugging_face,
    "torch": open_torch_file,
    "dcp": open_dcp,
    "deepspeed": open_deepspeed,
}
_TOGETHER: Final = ("torch", "dcp")
FORMATS: Final = tuple(_OPEN)
"""The formats that can be read."""


def open_source(*paths: AnyPath, format: str | None = None, prefix: str | None = None) -> Source:
    """Open a checkpoint of any format that is known, to be read piece by piece, without ranks and without the model.

    Args:
        paths: a file or a directory; or two that belong together, such as a model's and an optimizer's.
        format: one of `FORMATS`, if it shall not be found out.
        prefix: of files of torch, and directories of torch.distributed.checkpoint, the keys above the model and the
            optimizer, joined by `/`: `app`, if the program saved `{"app": AppState(model, optimizer)}`. By default
            they are found, if there is one place only.

    Raises:
        CheckpointError: if there is nothing, nothing that is known, or something damaged.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise UnknownFormatError(f"the path {path} does not exist", path=path, hint="check the path")
    inner = [each for path in paths for each in _inside(Path(path))]
    formats = {format} if format is not None else {_format_of(path) for path in inner}
    named = ", ".join(map(str, paths))
    if len(formats) != 1:
        raise CheckpointError(f"{named} are of different formats: {', '.join(sorted(formats))}")
    (chosen,) = formats
    if chosen not in _OPEN:
        raise UnknownFormatError(
            f"expected the name of a format, found {chosen!r}", hint=f"expected one of {', '.join(FORMATS)}"
        )
    if len(inner) != 1 and chosen not in _TOGETHER:
        raise CheckpointError(
            f"expected one path, found {named}",
            hint="only files of torch, and directories of torch.distributed.checkpoint, can be given together",
        )
    if prefix is not None and chosen not in _TOGETHER:
        raise CheckpointError(
            f"{named} is of the format {chosen}, in which there is nothing above the model and the optimizer",
            hint="leave the prefix out",
        )
    return _OPEN[chosen](*inner, **({} if prefix is None else {"prefix": prefix}))


def _inside(path: Path) -> list[Path]:
    """Return the paths to open: `path` itself, or what accelerate, or PEFT for an adapter, keeps in a directory.

    A manifest stands for its directory.
    """
    if path.name == MANIFEST and path.is_file():
        return [path.parent]
    for names in (ACCELERATE_DIRECTORIES, ACCELERATE_FILES):
        if (path / names[0]).exists():
            return [path / name for name in names if (path / name).exists()]
    adapter = path / "adapter_model.safetensors"
    has_model = any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    return [adapter if adapter.is_file() and not has_model else path]


def _format_of(path: Path) -> str:
    if path.is_dir():
        return _format_of_directory(path)
    if path.name.endswith(".bin.index.json"):
        return "torch"
    if path.suffix in (".safetensors", ".json"):
        return "safetensors"
    if is_archive(path):
        return "torch"
    raise UnknownFormatError(
        f"{path} is neither what torch.save writes (since torch 1.6) nor a .safetensors file",
        path=path,
        hint="if it is an older file of torch, load it and save it again",
    )


def _format_of_directory(path: Path) -> str:
    if is_checkpoint(path):
        return "flatparam"
    if is_dcp(path):
        return "dcp"
    if (path / INDEX_FILE).is_file() or (path / SINGLE_FILE).is_file():
        return "safetensors"
    if is_deepspeed(path):
        return "deepspeed"
    if any((path / name).is_file() for name in PYTORCH_FILES):
        return "torch"
    names = sorted(each.name for each in path.iterdir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise UnknownFormatError(
        f"{path} is not a checkpoint of a known format; it holds {shown or 'nothing'}",
        path=path,
        hint=(
            f"expected {MANIFEST} or step-* (flatparam), .metadata (torch.distributed.checkpoint), "
            f"{INDEX_FILE}, {SINGLE_FILE} or pytorch_model.bin (Hugging Face), or latest (DeepSpeed)"
        ),
    )


# Whether its bytes are what its format says that they are


def verify_source(source: Source, observe: Callable[[int], object] = lambda nbytes: None) -> Soundness:
    """Read every byte of a checkpoint, and compare it with the checksums that its format has.

    Args:
        source: what `open_source` returned.
        observe: is called with the bytes of each piece that was read.
    """
    if not isinstance(source, (StoredSource, CheckpointReader)):
        raise TypeError(f"expected what open_source returns, found {type(source).__name__}")
    opened = stored_source(source)
    checks = _checks_of_tensors(opened) if opened.reader is None else checks_of_directory(opened.reader)
    return examine(checks, observe)


def _checks_of_tensors(source: StoredSource) -> Iterator[Check]:
    """Check the parts of files that tensors lie in, each once. To find one is a check: a file may be read for it."""
    found: list[Storage] = []

    def find_next(storages: Iterator[Storage]) -> Iterable[BytesRead]:
        found[:] = itertools.islice(storages, 1)
        return ()

    seen: set[Storage] = set()
    for stored in source.stored.values():
        storages = stored.storages()
        found.clear()
        yield functools.partial(find_next, storages)
        while found:
            if found[0] not in seen:
                seen.add(found[0])
                yield functools.partial(_check_storage, found[0])
            found.clear()
            yield functools.partial(find_next, storages)


def _check_storage(storage: Storage) -> Iterator[BytesRead]:
    """Compare the checksum of a storage; read it if it has none."""
    with ByteFile(storage.file) as file:
        storage.check(file)
        if not storage.crc:
            for span in chunk_spans(Span(storage.start, storage.start + storage.nbytes), 1):
                file.read(span.start, span.numel)
    yield BytesRead(storage.nbytes, is_proven=storage.crc != 0)
