"""Compile the simulated device, once for each torch, each Python and each state of its source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

MODULE: Final = "_simulated_accelerator"
SOURCE: Final = Path(__file__).with_name("accelerator.cpp")
INCLUDED: Final = Path(__file__).with_name("capture.h")
FOLDER: Final = Path(
    os.environ.get("FLATPARAM_SIMDEV_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flatparam-simdev")
)
"""The folder of compiled modules: one for each torch, each Python and each state of the source."""


class CannotBuild(Exception):
    """Raised where there is no simulated device on this machine; the message says why."""


def built() -> Path:
    """Return the folder that the compiled module is in; compile it if need be, which takes a minute or two.

    Of several processes that ask at once, one compiles, and the others wait for it.

    Raises:
        CannotBuild: where there is no compiler, or where it fails.
    """
    folder = FOLDER / _version()
    module = folder / f"{MODULE}.so"
    if not module.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / "lock"):
            if not module.exists():
                _compile(module)
    return folder


def why_not() -> str:
    """Return why there is no simulated device on this machine; empty where there is one.

    It compiles the device if need be.
    """
    try:
        built()
    except CannotBuild as reason:
        return str(reason)
    return ""


def _version() -> str:
    """Return what the compiled module depends on, as the name of a folder."""
    source = hashlib.sha256(SOURCE.read_bytes() + INCLUDED.read_bytes()).hexdigest()[:12]
    return f"torch-{torch.__version__}-python-{platform.python_version()}-{source}"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for; it ends with this one, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(module: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if sys.platform != "linux" or compiler is None:
        raise CannotBuild("the simulated device is compiled when it is first used: that needs g++, on Linux")
    unfinished = module.with_suffix(f".{os.getpid()}")
    command = [*compiler.split(), *_flags(), str(SOURCE), "-o", str(unfinished), *_libraries()]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise CannotBuild(f"the simulated device does not compile with {compiler}: {outcome.stderr[:2000]}")
    unfinished.replace(module)


def _flags() -> list[str]:
    headers = _torch() / "include"
    included = (headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    shape = ["-O1", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={MODULE}"]
    return shape + [f"-I{path}" for path in included]


def _libraries() -> list[str]:
    where = _torch() / "lib"
    named = [f"-l{name}" for name in ("torch", "torch_cpu", "torch_python", "c10")]
    return [f"-L{where}", *named, f"-Wl,-rpath,{where}"]


def _torch() -> Path:
    return Path(torch.__file__).parent
