"""An environment with one torch on one Python: made, used, and taken away again, as it takes five gigabytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .rows import Row

__all__ = ["Environment", "RowError", "environment", "find_python"]

ROOT: Final = Path(__file__).resolve().parents[2]
HOME: Final = ROOT / "build" / "matrix"
DIST: Final = ROOT / "dist"
LADDER: Final = ("flatparam-core", "flatparam-comm", "flatparam-runtime", "flatparam-state", "flatparam")
DISK_NEEDED_GB: Final = 9  # torch's wheels while they are unpacked, and what they are unpacked to

_PYTHON: Final = "Scripts/python.exe" if os.name == "nt" else "bin/python"

#: What the tests need beside torch; the versions are those of tools/constraints.txt.
TOOLS: Final = (
    *("attrs", "tqdm", "typing-extensions", "xxhash"),
    *("hypothesis", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "safetensors"),
)
#: Leaves the bytecode of what the tests import: without it, each process of a test would compile it again.
WARM_UP: Final = (
    "import torch, torch.distributed.fsdp, torch.distributed.checkpoint, torch.distributed.tensor"
)


class RowError(Exception):
    """A row cannot be tested here: a sentence for the user."""


@dataclass(frozen=True)
class Environment:
    """A Python with one torch, the tools of the tests and the five packages."""

    python: Path

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run this Python in the root of the checkout; its standard output is in the result."""
        done = subprocess.run(
            [str(self.python), *arguments], cwd=ROOT, env=_variables(), stdout=subprocess.PIPE, text=True
        )
        if check and done.returncode != 0:
            raise RowError(f"{' '.join(arguments[:4])} ... failed: {_telling_line(done.stdout)}")
        return done

    def show(self, *arguments: str) -> int:
        """Run it, showing what it prints; returns the exit code."""
        return subprocess.run([str(self.python), *arguments], cwd=ROOT, env=_variables()).returncode


@contextmanager
def environment(row: Row, *, keep: bool) -> Iterator[Environment]:
    """The row's environment, made where it is not there, and removed afterwards unless it is to be kept."""
    home = HOME / row.name
    made, complete = Environment(home / _PYTHON), home / "complete"
    try:
        if not complete.exists():
            _make(row, home, made)
            complete.touch()
        # As wheels, as they are released; what they depend on is there, so that pip sees whether the ranges fit.
        made.run("-m", "pip", "uninstall", "-qq", "--yes", *LADDER)
        made.run("-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(DIST), *LADDER)
        yield made
    finally:
        if not keep:
            shutil.rmtree(home, ignore_errors=True)


def find_python(version: str) -> str:
    """Return the command of an interpreter of this minor version: one on the PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    of_pyenv = sorted(pyenv.glob(f"{version}.*/bin/python"), key=_numbers, reverse=True)
    for command in (f"python{version}", *map(str, of_pyenv)):
        print_version = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
        try:
            said = subprocess.run([command, "-c", print_version], capture_output=True, text=True)
        except OSError:
            continue
        if said.stdout.strip() == version:
            return command
    raise RowError(f"Python {version} with venv is neither on the PATH nor in {pyenv}: install it")


def _make(row: Row, home: Path, made: Environment) -> None:
    interpreter = find_python(row.python)
    HOME.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(home, ignore_errors=True)
    free = shutil.disk_usage(HOME).free / 1e9
    if free < DISK_NEEDED_GB:
        raise RowError(f"an environment needs about {DISK_NEEDED_GB} GB in {HOME}, and {free:.1f} are free")
    subprocess.run([interpreter, "-m", "venv", str(home)], check=True)
    constraints = home / "constraints.txt"
    locked = (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8")
    constraints.write_text(re.sub(r"(?m)^torch==.*$", f"torch=={row.torch}", locked), encoding="utf-8")
    pip = ("-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check")
    made.run(*pip, "--no-compile", f"torch=={row.torch}")
    made.run(*pip, "--constraint", str(constraints), *TOOLS)
    made.run("-W", "ignore", "-c", WARM_UP)


def _variables() -> Mapping[str, str]:
    """The variables that everything runs with: no other packages than the environment's, and one thread."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _numbers(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.parent.parent.name)]


def _telling_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "see above"
