"""Whether the bytes of a checkpoint of any format are what its format says that they are."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from flatparam_core import Span
from flatparam_files.checkpoint.reader import CheckpointReader
from flatparam_files.checkpoint.soundness import BytesRead, Check, Soundness, checks_of_directory, examine
from flatparam_files.disk import ByteFile, Source, chunk_spans
from flatparam_files.formats.stored import Storage, Stored, StoredSource, stored_source

__all__ = ["verify_source"]


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
    """Check the parts of files that tensors lie in, each part once."""
    seen: set[Storage] = set()
    for stored in source.stored.values():
        yield from _checks_of_storages(stored, seen)


def _checks_of_storages(stored: Stored, seen: set[Storage]) -> Iterator[Check]:
    """Check one storage after the other. To find the next one is a check, too: a file may be read for it."""
    storages = stored.storages()
    while True:
        found: list[Storage] = []
        yield functools.partial(_find_next, storages, found)
        if not found:
            return
        if found[0] not in seen:
            seen.add(found[0])
            yield functools.partial(_check_storage, found[0])


def _find_next(storages: Iterator[Storage], found: list[Storage]) -> Iterator[BytesRead]:
    found.extend(itertools.islice(storages, 1))
    yield from ()


def _check_storage(storage: Storage) -> Iterator[BytesRead]:
    """Compare the checksum of a storage; read it if it has none."""
    with ByteFile(storage.file) as file:
        storage.check(file)
        if not storage.crc:
            for span in chunk_spans(Span(storage.start, storage.start + storage.nbytes), 1):
                file.read(span.start, span.numel)
    yield BytesRead(storage.nbytes, is_proven=storage.crc != 0)
