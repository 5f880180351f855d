"""Running the command in this process, and checkpoints to run it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from flatparam_files import open_source, write_checkpoint
from flatparam_files.command import main


@attrs.frozen
class Outcome:
    """What a call of the command left behind."""

    status: int
    out: str
    err: str


@attrs.frozen
class Caller:
    """`flatparam ckpt ...` in a directory."""

    directory: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> Outcome:
        """Run it; what is called like an entry of the directory is that entry."""
        self.capture.readouterr()
        try:
            status = main(["ckpt", *(self._argument(str(each)) for each in arguments)])
        except SystemExit as error:
            status = int(error.code or 0)
        out, err = self.capture.readouterr()
        return Outcome(status, out, err)

    def _argument(self, text: str) -> str:
        return text.replace("@", f"{self.directory}/")


def tree(seed: int = 0) -> dict[str, Any]:
    """A model, its optimizer's state, and an epoch."""
    torch.manual_seed(seed)
    shapes = {"blocks.0.weight": (6, 5), "blocks.0.bias": (6,), "head.weight": (3, 6)}
    return {
        "model": {name: torch.randn(shape) for name, shape in shapes.items()},
        "optimizer": {
            "state": {
                name: {"step": torch.tensor(4.0), "exp_avg": torch.randn(shape)} for name, shape in shapes.items()
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(shapes)}],
        },
        "epoch": 3,
    }


def make_all(directory: Path) -> None:
    """`a.pt` of torch.save, and `run`, a run of ours with the same as step 4 of two ranks."""
    torch.save(tree(), directory / "a.pt")
    write_checkpoint(open_source(directory / "a.pt"), directory / "run", world_size=2, step=4)


def entries(directory: Path) -> set[str]:
    """The names in a directory, hidden ones too."""
    return {path.name for path in directory.iterdir()}
