"""Versions in a folder, for any number of receivers, who come and go; in memory, if the folder is there."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor
from typing_extensions import Self

from flatparam_files import CheckpointError
from flatparam_files.checkpoint.fields import seal, unseal
from flatparam_files.disk.limits import MAX_PUBLISHED_NBYTES
from flatparam_files.disk.system import ByteFile, bytes_of, bytes_view, make_directory, new_file, open_regular
from flatparam_publish.catalogue import Catalogue
from flatparam_publish.channel import Delivery, NewVersion, Packet, Update, VersionId
from flatparam_publish.publish_error import PublishError, all_or_error
from flatparam_publish.slicing import Slicing
from flatparam_runtime import Topology

_MANIFEST: Final = "latest.json"
_SUFFIX: Final = ".flatparam"
"""Of the files of packets and catalogues: what has this suffix and is in no manifest is deleted."""


@final
class Mailbox:
    """A folder through which versions go to receivers on this host, or wherever the folder is mounted.

    It has the bytes of one version with all values, the *base*, and the changes since. Changes that together would take
    more bytes than the base are replaced by a new one. A file never changes, and a version is there when the manifest,
    which is replaced in one step, names it. So a receiver reads a whole version, whoever is killed, and starts at any
    time, also when the publisher is gone. There is no limit to the receivers, and the publisher does not know them.

    Only one publisher at a time uses a folder. Each rank makes a `Mailbox` of the same folder and slicing.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, slicing: Slicing | None = None, private: bool = False
    ) -> None:
        """Use `folder`, which is made if it is not there.

        Args:
            slicing: the parts of tensors that receivers have; by default all of them.
            private: when something is published, let nobody but this user enter the folder, and read its files;
                otherwise the umask decides.
        """
        self.folder = Path(folder)
        self._is_private = private
        self._slicing = slicing or Slicing()
        self._seen: tuple[tuple[int, ...], VersionId | None] = ((), None)
        self._room = 0

    @classmethod
    def in_memory(cls, name: str, *, slicing: Slicing | None = None) -> Self:
        """Use the folder `name` of this user in the memory of this host.

        Raises:
            PublishError: if the system has no such memory, or somebody else has a folder of this name there.
        """
        root = Path("/dev/shm")
        if not root.is_dir():
            raise PublishError("this system has no /dev/shm: choose a folder, and pass it to Mailbox(folder)")
        if not name or Path(name).name != name:
            raise ValueError(f"Mailbox.in_memory: expected a name without '/', found {name!r}")
        folder = root / f"flatparam-{os.getuid()}-{name}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise PublishError(f"{folder} belongs to a different user: choose a different name")
        return cls(folder, slicing=slicing)

    def __repr__(self) -> str:
        return f"Mailbox({str(self.folder)!r})"

    @property
    def slicing(self) -> Slicing:
        """The parts of tensors that receivers have."""
        return self._slicing

    def clear(self) -> None:
        """Delete the files of publications in the folder, and the folder itself if it is empty then."""
        for path in [*self.folder.glob(f"*{_SUFFIX}"), self.folder / _MANIFEST]:
            path.unlink(missing_ok=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    # The publisher's side

    def held(self, topology: Topology) -> VersionId | None:
        """Return the version that the manifest names, as the first rank reads it."""
        names = str(self.folder.absolute()), os.path.realpath(self.folder)
        answers = _on_all(topology, lambda: (names, self._latest() if topology.is_first else None))
        for rank, ((named, real), _) in enumerate(answers):
            first, first_real = answers[0][0]
            if named != first and real != first_real:
                raise PublishError(
                    f"rank {rank}: expected the folder of rank 0, {first}, found {named}; give every rank one folder"
                )
        told = answers[0][1]
        self._room = told[1] if told else 0
        return told[0] if told else None

    def _latest(self) -> tuple[VersionId, int] | None:
        make_directory(self.folder, is_private=self._is_private)
        found = self._readable()
        return (found.version, found.room) if found else None

    def _readable(self) -> _Manifest | None:
        """The manifest; a damaged one counts as none, and is replaced, and so is one that leaves no room for more."""
        try:
            found = self._read(MAX_PUBLISHED_NBYTES // 2)
        except PublishError:
            return None
        return found if found is not None and found.parts == self._slicing.size else None

    def deliver(self, new: NewVersion, topology: Topology) -> Delivery:
        """Write the packets of all ranks, and then the manifest."""
        packets = _on_all(topology, lambda: self._write(new, new.before is None, "", topology))
        version = new.id_with(packets)
        nbytes = sum(packet.nbytes for of_rank in packets for packet in of_rank)
        step = _Step(version, new.before, tuple(map(tuple, packets)))
        base = step if new.before is None else None
        if new.before is not None and nbytes > self._room:
            packets = _on_all(topology, lambda: self._write(new, True, "base-", topology))
            base = _Step(version, None, tuple(map(tuple, packets)))
        _on_all(topology, lambda: self._commit(new, step, base) if topology.is_first else None)
        return Delivery(version, nbytes)

    def _write(self, new: NewVersion, wants_all: bool, kind: str, topology: Topology) -> list[Packet]:
        """Write the packets of this rank."""
        stem = f"{new.stream}-{new.number:08d}-{kind}{topology.rank:05d}"
        writers = [_PacketWriter(self.folder / f"{stem}-{part:03d}{_SUFFIX}") for part in range(self._slicing.size)]
        try:
            for part, piece in new.frames(wants_all):
                writers[part].write(piece)
            return [writer.packet() for writer in writers]
        finally:
            for writer in writers:
                writer.close()

    def _commit(self, new: NewVersion, step: _Step, base: _Step | None) -> None:
        """Name the version in the manifest, and delete what it does not name."""
        before = self._readable()
        if new.before is not None and (before is None or before.version != new.before):
            raise PublishError(
                f"{self.folder} was changed by a different publisher while version {new.number} was written"
            )
        catalogue = f"{new.stream}-{new.catalogue.digest[:16]}-catalogue{_SUFFIX}"
        if not (self.folder / catalogue).exists():
            self._replace(self.folder / catalogue, new.catalogue.encode())
        deltas: tuple[_Step, ...] = () if step.before is None else (step,)
        if base is None:
            assert before is not None, "there are changes to something"
            base, deltas = before.base, (*before.deltas, step)
        cuts = self._slicing.cuts(new.catalogue)
        manifest = _Manifest(self._slicing.size, cuts, catalogue, new.catalogue.digest, base, deltas)
        self._replace(self.folder / _MANIFEST, manifest.encode())
        named = {*manifest.files()}
        for path in self.folder.glob(f"*{_SUFFIX}"):
            if path.name not in named:
                path.unlink(missing_ok=True)

    def _replace(self, path: Path, data: bytes) -> None:
        if len(data) > MAX_PUBLISHED_NBYTES:
            raise PublishError(
                f"{path} would have {len(data):,} bytes, and receivers read {MAX_PUBLISHED_NBYTES:,} at most; publish "
                "fewer tensors, or by fewer ranks"
            )
        temporary = path.with_name(f"{path.name}.new{_SUFFIX}")
        # A writer has died, or somebody has put something there that is not to be written to.
        temporary.unlink(missing_ok=True)
        with new_file(temporary, buffering=1 << 16) as file:
            file.write(data)
        temporary.replace(path)

    # The receiver's side

    def fetch(self, held: VersionId | None, part: int | None, check: Callable[[Catalogue], object]) -> list[Update]:
        """Return the steps from `held` to the version that the manifest names; the newest base first if there is a gap.

        Raises:
            PublishError: if a file is damaged, `part` does not exist, or the publisher cuts tensors in a different way.
        """
        while True:
            seen = self._look()
            if not seen or (seen, held) == self._seen:
                return []
            manifest = self._read()
            if manifest is None:
                return []
            try:
                updates = self._updates(manifest, held, part, check)
            except PublishError:
                # The publisher has replaced the manifest, and deleted what the one before named.
                if self._look() != seen:
                    continue
                raise
            self._seen = seen, manifest.version
            return updates

    def _look(self) -> tuple[int, ...]:
        """Return which file the manifest is; empty if there is none."""
        try:
            found = os.stat(self.folder / _MANIFEST)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise PublishError(f"{self.folder / _MANIFEST} cannot be read: {error.strerror or error}") from error
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _read(self, most: int = MAX_PUBLISHED_NBYTES) -> _Manifest | None:
        path = self.folder / _MANIFEST
        if not os.path.lexists(path):
            return None
        data = _bytes_of(path, most)
        try:
            return _Manifest.decode(data)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise PublishError(f"{path} is damaged: {error}; publish all values again") from error

    def _updates(
        self, manifest: _Manifest, held: VersionId | None, asked: int | None, check: Callable[[Catalogue], object]
    ) -> list[Update]:
        if self._slicing.size != manifest.parts:
            raise PublishError(
                f"{self.folder}: the publisher's slicing has {manifest.parts} parts, and this one {self._slicing.size}"
            )
        part = 0 if asked is None and manifest.parts == 1 else asked
        if part is None or not 0 <= part < manifest.parts:
            raise PublishError(
                f"{self.folder}: expected a part from 0 to {manifest.parts - 1}, as the publisher's slicing has them, "
                f"found {part}: pass Receiver(part=), the rank among the receivers"
            )
        steps = manifest.steps_from(held)
        if not steps:
            return []
        catalogue = self._catalogue(manifest, part)
        for step in steps:
            nbytes = sum(of_rank[part].nbytes for of_rank in step.packets)
            if step.before is None and nbytes < catalogue.nbytes:
                raise PublishError(
                    f"{self.folder}: version {step.version.number} has {nbytes:,} bytes for tensors of "
                    f"{catalogue.nbytes:,}; publish all values again"
                )
        check(catalogue)
        return [Update(step.version, step.before, catalogue, tuple(self._packets(step, part))) for step in steps]

    def _catalogue(self, manifest: _Manifest, part: int) -> Catalogue:
        data = _bytes_of(self.folder / manifest.catalogue, MAX_PUBLISHED_NBYTES)
        if hashlib.sha256(data).hexdigest() != manifest.catalogue_sha256:
            raise PublishError(f"{self.folder / manifest.catalogue} is damaged; publish all values again")
        whole = Catalogue.decode(data)
        if len(whole.tensors) != len(manifest.cuts):
            raise PublishError(
                f"{self.folder / _MANIFEST} is about {len(manifest.cuts)} tensors, and {manifest.catalogue} about "
                f"{len(whole.tensors)}; publish all values again"
            )
        self._slicing.check_cuts(whole, manifest.cuts)
        return self._slicing.catalogue(whole, part)

    def _packets(self, step: _Step, part: int) -> Iterator[Tensor]:
        for of_rank in step.packets:
            packet = of_rank[part]
            if packet.nbytes:
                yield self._mapped(packet)

    def _mapped(self, packet: Packet) -> Tensor:
        path = self.folder / packet.file
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                found = os.fstat(file.fileno()).st_size
                is_whole = found == packet.nbytes
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if is_whole else b""
        except (CheckpointError, OSError) as error:
            raise PublishError(f"{path} cannot be read: {error}") from error
        if not is_whole or hashlib.sha256(data).hexdigest() != packet.sha256:
            raise PublishError(f"{path} is damaged; publish all values again")
        return torch.frombuffer(data, dtype=torch.uint8)


@final
class _PacketWriter:
    """Writes the file of one packet, if there is anything to write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = None
        self._digest = hashlib.sha256()
        self._nbytes = 0

    def write(self, piece: Tensor) -> None:
        """Add bytes."""
        if self._file is None:
            # Of a version that was not delivered.
            self._path.unlink(missing_ok=True)
            self._file = new_file(self._path, buffering=1 << 20)
        data = bytes_of(bytes_view(piece).cpu())
        self._digest.update(data)
        self._nbytes += self._file.write(data)

    def packet(self) -> Packet:
        """Close the file; returns what it has."""
        self.close()
        return Packet(self._nbytes, self._digest.hexdigest(), self._path.name if self._nbytes else "")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _bytes_of(path: Path, most: int) -> bytes:
    """Return the contents of a regular file of at most so many bytes.

    Raises:
        PublishError: if it is anything else, is larger, or cannot be read.
    """
    try:
        with ByteFile(path) as file:
            if file.nbytes > most:
                raise PublishError(f"{path}: {file.nbytes:,} bytes are too many; expected at most {most:,}")
            return bytes(file.read(0, file.nbytes))
    except CheckpointError as error:
        raise PublishError(str(error)) from error


def _on_all(topology: Topology, action: Callable[[], Any]) -> list[Any]:
    """Return the results of `action()`, one for each rank; a PublishError on every rank, if it raises on one."""
    fact: Any = None
    error: BaseException | None = None
    try:
        fact = action()
    except BaseException as caught:
        error = caught
    return all_or_error(lambda said: topology.exchange(said, label="publish"), fact, error)


@final
@attrs.frozen
class _Step:
    """A version in the folder: all values, or the changes to the version before."""

    version: VersionId
    before: VersionId | None
    packets: tuple[tuple[Packet, ...], ...]
    """Of each rank, those for each part."""

    @property
    def nbytes(self) -> int:
        """The bytes of its packets."""
        return sum(packet.nbytes for of_rank in self.packets for packet in of_rank)

    def tree(self) -> Any:
        """As values of JSON."""
        packets = [[[each.nbytes, each.sha256, each.file] for each in of_rank] for of_rank in self.packets]
        before = self.before and attrs.astuple(self.before)
        return {"version": attrs.astuple(self.version), "before": before, "packets": packets}

    @classmethod
    def of_tree(cls, tree: Any) -> Self:
        """Return the object of which `tree` made the tree."""
        packets = tuple(tuple(_packet(each) for each in of_rank) for of_rank in tree["packets"])
        before = tree["before"]
        return cls(_version(tree["version"]), _version(before) if before else None, packets)


def _version(tree: Any) -> VersionId:
    stream, number, identity = tree
    if not (isinstance(stream, str) and type(number) is int and isinstance(identity, str)):
        raise ValueError(f"expected a version, found {tree!r}")
    return VersionId(stream, number, identity)


def _packet(tree: Any) -> Packet:
    nbytes, sha256, file = tree
    if type(nbytes) is not int or nbytes < 0 or not isinstance(sha256, str):
        raise ValueError(f"{tree!r} describes no packet")
    if Path(file).name != file or bool(file) != bool(nbytes):
        raise ValueError(f"expected the name of a file in the folder, found {file!r}")
    return Packet(nbytes, sha256, file)


@final
@attrs.frozen
class _Manifest:
    """The contents of the folder: one version with all values, and changes that lead to the newest version."""

    parts: int
    cuts: tuple[int | None, ...]
    """The dimension that is cut of each tensor of the catalogue, if one is."""
    catalogue: str
    catalogue_sha256: str
    base: _Step
    deltas: tuple[_Step, ...]

    @property
    def version(self) -> VersionId:
        """The newest version."""
        return self.deltas[-1].version if self.deltas else self.base.version

    @property
    def room(self) -> int:
        """The bytes of changes that can be added before a new base is due."""
        return self.base.nbytes - sum(step.nbytes for step in self.deltas)

    def steps_from(self, held: VersionId | None) -> list[_Step]:
        """Return the steps from `held` to the newest version."""
        if held == self.version:
            return []
        for number, step in enumerate(self.deltas):
            if step.before == held and held is not None:
                return list(self.deltas[number:])
        # The change that led to the base is there too, for those who had the version before.
        return [self.base, *(step for step in self.deltas if step.version.number > self.base.version.number)]

    def files(self) -> Iterator[str]:
        """Yield the names of all files but the manifest."""
        yield self.catalogue
        for step in (self.base, *self.deltas):
            yield from (packet.file for of_rank in step.packets for packet in of_rank)

    def encode(self) -> bytes:
        """Return it as JSON."""
        tree = {
            "format": 1,
            "parts": self.parts,
            "cuts": self.cuts,
            "catalogue": [self.catalogue, self.catalogue_sha256],
            "base": self.base.tree(),
            "deltas": [step.tree() for step in self.deltas],
        }
        return seal(tree)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read the bytes that `encode` returned; a ValueError, TypeError or KeyError if they are damaged."""
        tree = unseal(data)
        if tree["format"] != 1:
            raise ValueError(f"expected format 1, found {tree['format']!r}")
        catalogue, sha256 = tree["catalogue"]
        if Path(catalogue).name != catalogue:
            raise ValueError(f"expected the name of a file in the folder, found {catalogue!r}")
        parts, base = tree["parts"], _Step.of_tree(tree["base"])
        steps = (base, *(_Step.of_tree(each) for each in tree["deltas"]))
        if type(parts) is not int or any(len(of_rank) != parts for step in steps for of_rank in step.packets):
            raise ValueError(f"its packets are not for {parts!r} parts")
        if base.before is not None or any(step.before is None for step in steps[1:]):
            raise ValueError("it does not begin with all values, or goes on with them")
        return cls(parts, tuple(tree["cuts"]), catalogue, sha256, base, steps[1:])
