"""A fuzzer of every reader: `nox -s run -- fuzz --minutes 10`.

Property: whatever the bytes of a checkpoint are, a reader returns, or raises CheckpointError; it takes little memory,
and it ends. Mutations know the formats: a changed manifest is sealed anew, a changed pickle gets the right checksum.
Coverage guides the search: a case whose reading goes from a line to a line as none before it is changed further.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import flatparam_files
from flatparam_core import Span
from flatparam_files import CheckpointError, open_source, verify_checkpoint, verify_source, write_hugging_face
from flatparam_files.checkpoint.fields import _sealed, read_sealed
from flatparam_files.disk.source import Source

from .formats.samples import state
from .saved import save

LONGEST = 8
"""The changes that a case inherits, at most."""
MEMORY_NBYTES = 2**30
"""More than a reader takes of a file of some kilobytes, and than the process takes beside it."""
SECONDS = 60
"""A case that takes longer hangs; the slowest takes less than one second on a machine that is not busy."""
DEEPSPEED = Path(__file__).parent / "formats" / "deepspeed_fixture"

NASTY = [b"[", b"{", b'"', b"\\", b"-", b"9" * 25, b"1e999", b"null", b"[[[[[[[[", b"\xff\xfe", b"\0", b",", b":", b"NaN", b"(", b"t", b"R", b"Q",
         b"]", b"}", b")", b"\x94", b"q\x00", b"h\x00", b"\x93", b"\x8a\xff", b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", b"\xff\xff\xff\xff",
         b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04", b"c__builtin__\neval\n", b"\x80\x02", b".", b"0", b"\x7f", b"u", b"s", b"b"]  # fmt: skip
VALUES: list[Any] = [None, -1, 0, 1, 2**63, 2**70, 10**30, 1.5, 1e308, True, "", "x" * 100, "../../etc/passwd", "/dev/zero", [], {}, [[]], [2**62] * 70,
                     {"$tensor": "nowhere"}, {"$size": [2**70]}, {"$int": "0x" + "f" * 5000}, {"$dict": [[[], 1]]}, {"$complex": [1]},
                     {"$inline": ["float32", [2**40], ""]}, {"$numpy": ["float32", "a"]}, {"$bytes": "?"}, "complex128", "F64"]  # fmt: skip


def mutated(data: bytes, choose: random.Random) -> bytes:
    """Some bytes flipped, cut, doubled, moved, or replaced by what is likely to hurt."""
    changed = bytearray(data)
    for _ in range(choose.randint(1, 4)):
        at, length = choose.randrange(len(changed) + 1), choose.randint(1, 60)
        kind = choose.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << choose.randrange(8)
        elif kind == 1:
            changed[at:at] = choose.choice(NASTY) * choose.choice([1, 1, 1, 1000])
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = changed[at : at + length] * choose.choice([1, 1, 100])
        elif kind == 4:
            other = choose.randrange(len(changed) + 1)
            changed[at : at + length] = changed[other : other + length]
        elif kind == 5:
            changed[at : at + 4] = choose.choice(NASTY)
        else:
            changed[at : at + 8] = choose.choice([0, 1, 255, 2**31, 2**62, 2**64 - 1]).to_bytes(8, "little")
    return bytes(changed)


def mutated_tree(tree: Any, choose: random.Random) -> Any:
    """A tree of JSON with some values replaced, moved or removed."""
    tree = copy.deepcopy(tree)
    for _ in range(choose.randint(1, 3)):
        places = list(_places(tree))
        if not places:
            break
        where, key = choose.choice(places)
        other, name = choose.choice(places)
        if choose.randrange(3):
            where[key] = copy.deepcopy(choose.choice(VALUES))
        elif choose.randrange(2):
            where[key] = copy.deepcopy(other[name])
        else:
            del where[key]
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


# The checkpoints, and how each kind of file is changed


def _own(root: Path) -> Path:
    extra = {
        "a": (1, {2}, 2**80, 1.5, complex(1, 2)),
        "b": torch.Size([3]),
        "c": torch.ones(3),
        "d": {1: b"x"},
    }
    save(root, 5, extra)
    return root


def _torch(root: Path) -> Path:
    root.mkdir()
    torch.save(state(), root / "it.pt")
    return root / "it.pt"


def _dcp(root: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), checkpoint_id=root, no_dist=True)
    return root


def _safetensors(root: Path) -> Path:
    root.mkdir()
    safetensors.torch.save_file(state()["model"], root / "it.safetensors", {"k": "v"})
    return root / "it.safetensors"


def _shards(root: Path) -> Path:
    torch.save(state()["model"], root.with_suffix(".pt"))
    write_hugging_face(open_source(root.with_suffix(".pt")), root, max_shard_nbytes=20)
    return root


def _deepspeed(root: Path) -> Path:
    name = min(path.name for path in DEEPSPEED.iterdir() if path.is_dir())
    shutil.copytree(DEEPSPEED / name, root)
    return root


MAKE: dict[str, Callable[[Path], Path]] = {
    "flatparam": _own,
    "torch": _torch,
    "dcp": _dcp,
    "safetensors": _safetensors,
    "shards": _shards,
    "deepspeed": _deepspeed,
}


def change(file: Path, choose: random.Random) -> None:
    """Change a file of a checkpoint, in half of the cases so that its checksums and lengths stay right."""
    data = file.read_bytes()
    if choose.randrange(2) and _change_soundly(file, data, choose):
        return
    file.write_bytes(mutated(data, choose))


def _change_soundly(file: Path, data: bytes, choose: random.Random) -> bool:
    """Change a file within its format; returns False if earlier changes have left none."""
    try:
        if data.startswith(b'{"sha256"'):
            data = _sealed(_as_json(mutated_tree(read_sealed(file), choose)))
        elif file.suffix == ".safetensors" and len(data) > 8:
            end = 8 + int.from_bytes(data[:8], "little")
            header = _as_json(mutated_tree(json.loads(data[8:end]), choose))
            data = len(header).to_bytes(8, "little") + header + data[end:]
        elif file.suffix == ".json":
            data = _as_json(mutated_tree(json.loads(data), choose))
        elif file.suffix == ".pt":
            _change_pickle(file, choose)
            return True
        else:
            return False
    except (
        CheckpointError,
        ValueError,
        RecursionError,
        KeyError,
        zipfile.BadZipFile,
        OSError,
        EOFError,
        NotImplementedError,
    ):
        return False
    file.write_bytes(data)
    return True


def _as_json(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":")).encode()


def _change_pickle(file: Path, choose: random.Random) -> None:
    """Change the pickle of an archive, and write it with the right checksum."""
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, mutated(content, choose) if name.endswith("data.pkl") else content)


def read(path: Path) -> bool:
    """Read everything that is at `path`; whether it was taken. Anything but CheckpointError comes out."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source: Source = open_source(path)
            repr((source.values, source.facts))
            for name, info in source.tensors.items():
                if info.numel < 10**5:
                    for _ in source.read(name, Span(0, info.numel)):
                        pass
            verify_source(source)
            if source.format == "flatparam":
                verify_checkpoint(path)
    except CheckpointError as error:
        assert str(error)
        return False
    return True


class Ways:
    """The ways through the readers that cases have gone: pairs of lines of which one came after the other."""

    def __init__(self) -> None:
        self._home = str(Path(flatparam_files.__file__).parent)
        self._seen: set[tuple[Any, int, int]] = set()
        self.grew = False
        """Whether the last case has gone a new way."""

    def __len__(self) -> int:
        return len(self._seen)

    def __enter__(self) -> None:
        self.grew = False
        sys.settrace(self._enter)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(self._home):
            return None
        before, code = 0, frame.f_code

        def line(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            nonlocal before
            way = (code, before, frame.f_lineno)
            before = frame.f_lineno
            if way not in self._seen:
                self._seen.add(way)
                self.grew = True
            return line

        return line


class Fuzzer:
    """Copies of checkpoints, changed at random and read.

    A case is a chain of numbers: what each number does to a checkpoint is the same whenever it is done.
    """

    def __init__(self, directory: Path, seed: int, *, guided: bool = True) -> None:
        self._directory, self._seed = directory, seed
        self._guided = guided
        self.ways = {name: Ways() for name in MAKE}
        self.corpus: dict[str, list[tuple[int, ...]]] = {name: [()] for name in MAKE}
        """The cases of each format that went new ways."""
        self.paths = {name: make(directory / name) for name, make in MAKE.items()}
        for name, path in self.paths.items():
            with self._watched(name):
                assert read(path), f"{name} is sound, and was refused"

    def _watched(self, name: str) -> AbstractContextManager[None]:
        return self.ways[name] if self._guided else nullcontext()

    def chain(self, name: str, number: int) -> tuple[int, ...]:
        """The next case: one of the corpus, and a change more."""
        choose = random.Random(f"{self._seed} {name} {number} chain")
        corpus = self.corpus[name]
        # The last ones went the newest ways.
        return (*choose.choice([(), choose.choice(corpus), choose.choice(corpus[-10:])])[-LONGEST:], number)

    def case(self, name: str, chain: tuple[int, ...]) -> bool:
        """Carry out one case, and note whether it went a new way; returns whether the changed checkpoint was taken."""
        whole = self.paths[name]
        home = self._directory / "changed"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(whole if whole.is_dir() else whole.parent, home)
        for number in chain:
            choose = random.Random(f"{self._seed} {name} {number}")
            files = sorted(path for path in home.rglob("*") if path.is_file() and path.name != "lock")
            for file in choose.sample(files, choose.choice([1, 1, min(2, len(files))])):
                change(file, choose)
        with self._watched(name):
            taken = read(home if whole.is_dir() else home / whole.name)
        if self.ways[name].grew:
            self.corpus[name].append(chain)
            self.ways[name].grew = False
        return taken


def limit_memory() -> None:
    """Let this process have `MEMORY_NBYTES` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def chain_of(text: str) -> tuple[int, ...]:
    """The chain that `--case` was given: `12,57,103`."""
    return tuple(map(int, text.split(",")))


def main() -> int:
    """Fuzz for some minutes; returns 1, and says how to repeat it, if a case breaks the property."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--case", nargs=2, metavar=("FORMAT", "NUMBERS"), help="repeat one case of a seed")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        fuzzer = Fuzzer(Path(directory), chosen.seed)
        limit_memory()
        if chosen.case:
            sys.stdout.write(f"taken: {fuzzer.case(chosen.case[0], chain_of(chosen.case[1]))}\n")
            return 0
        ends, number, taken = time.monotonic() + 60 * chosen.minutes, 0, dict.fromkeys(MAKE, 0)
        while time.monotonic() < ends:
            for name in MAKE:
                # A hang raises in the case itself, with its traceback.
                signal.signal(signal.SIGALRM, _hang)
                signal.alarm(SECONDS)
                chain = fuzzer.chain(name, number)
                try:
                    taken[name] += fuzzer.case(name, chain)
                except BaseException:
                    traceback.print_exc()
                    told = ",".join(map(str, chain))
                    sys.stdout.write(f"to repeat it: --seed {chosen.seed} --case {name} {told}\n")
                    return 1
                finally:
                    signal.alarm(0)
            number += 1
        sys.stdout.write(f"seed {chosen.seed}: {number} cases of each format\n")
        for name in MAKE:
            ways, corpus = len(fuzzer.ways[name]), len(fuzzer.corpus[name])
            sys.stdout.write(f"{name}: {taken[name]} taken, {ways} ways, {corpus} cases that found one\n")
    return 0


def _hang(number: int, frame: object) -> None:
    raise TimeoutError(f"a reader takes longer than {SECONDS} seconds")


if __name__ == "__main__":
    sys.exit(main())
