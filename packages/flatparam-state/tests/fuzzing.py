"""A fuzzer of every reader: `nox -s fuzz -- --minutes 10`.

Property: whatever the bytes of a checkpoint are, a reader returns, or raises CheckpointError; it takes little memory,
and it ends. Mutations know the formats: a changed manifest is sealed anew, a changed pickle gets the right checksum.
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
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from flatparam_comm import SingleCollectives
from flatparam_runtime import Span
from flatparam_state.checkpoint import Checkpointer, CheckpointError, verify_checkpoint
from flatparam_state.checkpoint.manifest import read_sealed
from flatparam_state.checkpoint.manifest.sealed import _sealed
from flatparam_state.files.source import Source
from flatparam_state.formats import open_source, verify_source, write_hugging_face

from .formats.samples import state

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
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 5)).sum().backward()
    optimizer.step()
    extra = {
        "a": (1, {2}, 2**80, 1.5, complex(1, 2)),
        "b": torch.Size([3]),
        "c": torch.ones(3),
        "d": {1: b"x"},
    }
    with Checkpointer(root, model, optimizer, ranks=SingleCollectives()) as checkpointer:
        checkpointer.save(5, extra=extra)
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
    if choose.randrange(2):
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
            return
        else:
            data = mutated(data, choose)
    else:
        data = mutated(data, choose)
    file.write_bytes(data)


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


class Fuzzer:
    """Copies of checkpoints, changed at random and read."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._directory, self._seed = directory, seed
        self.paths = {name: make(directory / name) for name, make in MAKE.items()}
        for name, path in self.paths.items():
            assert read(path), f"{name} is sound, and was refused"

    def case(self, name: str, number: int) -> bool:
        """Carry out one case, the same whenever it is; whether the changed checkpoint was taken."""
        choose = random.Random(f"{self._seed} {name} {number}")
        whole = self.paths[name]
        home = self._directory / "changed"
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(whole if whole.is_dir() else whole.parent, home)
        files = sorted(path for path in home.rglob("*") if path.is_file() and path.name != "lock")
        for file in choose.sample(files, choose.choice([1, 1, min(2, len(files))])):
            change(file, choose)
        return read(home if whole.is_dir() else home / whole.name)


def limit_memory() -> None:
    """Let this process have `MEMORY_NBYTES` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    """Fuzz for some minutes; returns 1, and says how to repeat it, if a case breaks the property."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--case", nargs=2, metavar=("FORMAT", "NUMBER"), help="repeat one case of a seed")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        fuzzer = Fuzzer(Path(directory), chosen.seed)
        limit_memory()
        if chosen.case:
            sys.stdout.write(f"taken: {fuzzer.case(chosen.case[0], int(chosen.case[1]))}\n")
            return 0
        ends, number, taken = time.monotonic() + 60 * chosen.minutes, 0, dict.fromkeys(MAKE, 0)
        while time.monotonic() < ends:
            for name in MAKE:
                # A hang raises in the case itself, with its traceback.
                signal.signal(signal.SIGALRM, _hang)
                signal.alarm(SECONDS)
                try:
                    taken[name] += fuzzer.case(name, number)
                except BaseException:
                    traceback.print_exc()
                    sys.stdout.write(f"to repeat it: --seed {chosen.seed} --case {name} {number}\n")
                    return 1
                finally:
                    signal.alarm(0)
            number += 1
        sys.stdout.write(f"seed {chosen.seed}: {number} cases of each format; taken: {taken}\n")
    return 0


def _hang(number: int, frame: object) -> None:
    raise TimeoutError(f"a reader takes longer than {SECONDS} seconds")


if __name__ == "__main__":
    sys.exit(main())
