"""The folder where checkpoints stand: found, committed whole or not at all, cleared away. Without torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from .errors import UserError
from .options import Recipe

FORMAT: Final = 1
MODEL_FILE: Final = "model.safetensors"
OPTIMIZER_FILE: Final = "optimizer.safetensors"
_HEADER_FILE: Final = "checkpoint.json"
_POINTER: Final = "latest"
_UNFINISHED: Final = ".unfinished-"


@frozen
class Checkpoint:
    """A committed checkpoint: its folder and its header."""

    path: Path
    header: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done when it was written; the next step's rows follow from this number and the recipe's seed."""
        return int(self.header["step"])

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise `UserError` that names the differences unless the checkpoint is of this recipe."""
        there, here = self.header["recipe"], recipe.to_json()
        differences = [
            f"{name} {there.get(name)} there, {here[name]} here"
            for name in here
            if there.get(name) != here[name]
        ]
        if differences:
            raise UserError(
                f"{self.path} is of another run ({'; '.join(differences)}). "
                "Give --fresh to start over, or --out another folder."
            )

    def check_files(self) -> None:
        """Raise `UserError` unless every file is as it was written."""
        for name, digest in self.header["sha256"].items():
            path = self.path / name
            if not path.is_file() or file_sha256(path) != digest:
                raise UserError(
                    f"{path} is missing or damaged (its hash is not the one in {_HEADER_FILE}). "
                    f"Remove {self.path}, or give --fresh to start over."
                )


@frozen
class Shelf:
    """``<out>/checkpoints``: a folder for each checkpoint, and the file ``latest`` with the name of the newest.

    A committed folder is never written to. The one before the newest is kept until the next commit.
    """

    folder: Path

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint, or None where there is none; `UserError` if it cannot be read."""
        pointer = self.folder / _POINTER
        if not pointer.is_file():
            return None
        path = self.folder / pointer.read_text(encoding="utf-8").strip()
        try:
            header = json.loads((path / _HEADER_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is not a readable checkpoint, though {pointer} names it ({error}). Give --fresh to start over."
            ) from error
        if header.get("format") != FORMAT:
            raise UserError(f"{path} has format {header.get('format')}; this version reads format {FORMAT}.")
        return Checkpoint(path, header)

    @contextmanager
    def committing(self, header: dict[str, Any]) -> Iterator[Path]:
        """Give an unfinished folder to write the files to; at the end, commit it under the name of its step.

        After a crash at any point ``latest`` names a whole checkpoint, or does not exist.
        """
        name = self._free_name(int(header["step"]))
        unfinished = self.folder / f"{_UNFINISHED}{name}"
        self._clear(unfinished)
        unfinished.mkdir(parents=True)
        yield unfinished
        digests = {path.name: file_sha256(path) for path in sorted(unfinished.iterdir())}
        text = json.dumps({"format": FORMAT, **header, "sha256": digests}, indent=1)
        (unfinished / _HEADER_FILE).write_text(text, encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            _flush_to_disk(path)
        unfinished.rename(self.folder / name)
        before = self._pointed_at()
        self._point_at(name)
        self._clear(*(each for each in self._all() if each.name not in (name, before)))

    def _free_name(self, step: int) -> str:
        name, number = f"step-{step:06d}", 1
        while (self.folder / name).exists():
            number += 1
            name = f"step-{step:06d}.{number}"
        return name

    def _pointed_at(self) -> str | None:
        pointer = self.folder / _POINTER
        return pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None

    def _point_at(self, name: str) -> None:
        temporary = self.folder / f".{_POINTER}"
        temporary.write_text(name + "\n", encoding="utf-8")
        _flush_to_disk(temporary)
        temporary.replace(self.folder / _POINTER)
        _flush_to_disk(self.folder)

    def _all(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if path.name.startswith(("step-", _UNFINISHED))]

    def _clear(self, *paths: Path) -> None:
        for path in paths:
            if path.exists():
                shutil.rmtree(path)


def file_sha256(path: Path) -> str:
    """The hash of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
