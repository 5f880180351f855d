"""The environments in which the sessions of nox run, and our packages in them, as wheels of this checkout.

`shared` is .venv, which tools/run.py makes; `own` makes one in .nox, with versions and tools of its own. Each keeps
notes of what was installed, so that a session that finds the same does not install it again. noxfile.py says what runs.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import run as setup
from house import PACKAGES

if TYPE_CHECKING:
    import nox

__all__ = [
    *(
        "DIST",
        "OFFLINE",
        "ROOT",
        "SITE",
        "TESTED",
        "TESTS",
        "WORKERS",
        "Environment",
        "installed",
        "own",
        "pytest_in",
        "python_of",
        "shared",
    ),
    "split_packages",
]

ROOT: Final = Path(__file__).resolve().parent.parent
DIST: Final = ROOT / "dist"
TESTS: Final = ("integration_tests", *(f"packages/{name}/tests" for name in PACKAGES))
#: Programs of other projects ask no index, and say less.
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
# Not `--quiet`: that keeps warnings from being counted, so that nothing is strict any more.
os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
SITE: Final = ("-m", "mkdocs", "build", "--strict", "-f", "tools/mkdocs.yml")
# How many processes pytest takes at once; more than there are cores is right beside a machine that others keep busy.
WORKERS: Final = os.environ.get("FLATPARAM_TEST_WORKERS", str(min(os.cpu_count() or 1, 4)))
#: Each wheel, unpacked, in a folder that is named after the package.
UNPACKED: Final = DIST / "unpacked"
FROM_DIST: Final = ("--no-index", "--find-links", str(DIST), "--no-compile", "--disable-pip-version-check")

#: pip leaves what pytest has compiled of a plugin, in a folder that could be imported.
LOOK: Final = """
import importlib.util, shutil, sys, sysconfig
for name in sys.argv[1:]:
    found = importlib.util.find_spec(name)
    if found is not None and found.origin is None:
        shutil.rmtree(f"{sysconfig.get_path('purelib')}/{name}")
importlib.invalidate_caches()
sys.exit([*filter(importlib.util.find_spec, sys.argv[1:])] or 0)
"""
Variables = Mapping[str, "str | None"]
# One thread, and bytecode is kept, whatever the shell says: each process of a test would compile our packages again.
TESTED: Final[Variables] = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": None}
# And no other packages than the environment's.
ISOLATED: Final[Variables] = {**TESTED, "PYTHONPATH": None, "PYTHONHOME": None}

# What the tests need in an environment of its own, beside what our packages depend on.
TEST_TOOLS: Final = (
    *("torch", "build", "hatchling", "expecttest", "hypothesis", "numpy", "pytest", "pytest-timeout"),
    *("pytest-xdist", "safetensors", "tomli"),
)
# Leaves the bytecode of what the tests import: without it, each process of a test would compile it again.
WARM_UP: Final = "import torch, torch.distributed.fsdp, torch.distributed.checkpoint, torch.distributed.tensor"


class Environment:
    """A Python with packages, and a session of nox that runs it."""

    def __init__(
        self,
        session: nox.Session,
        folder: Path,
        extras: Sequence[str] = (),
        variables: Variables | None = None,
    ) -> None:
        """Take the environment in `folder`; what is run there gets `variables`, and `extras` come with our packages."""
        self._session = session
        self._folder = folder
        self._extras = extras
        self._variables = variables or {}
        self.python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
        self.constraints = folder / "constraints.txt"
        """The locked versions."""

    def run(self, *arguments: str, env: Variables | None = None, **options: Any) -> Any:
        """Run the environment's Python in the root of the checkout."""
        variables = {**self._variables, **(env or {})}
        return self._session.run(str(self.python), *arguments, env=variables, external=True, **options)

    def pytest(
        self, *arguments: str, workers: str = WORKERS, spread: str = "worksteal", env: Variables | None = None
    ) -> None:
        """Run pytest in `workers` processes, each with one thread for torch."""
        self.run(*pytest_in(workers, spread), *arguments, env={**TESTED, **(env or {})})

    def install(self, *arguments: str, env: Variables | None = None) -> None:
        """Have pip install the locked versions."""
        pip = ("-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")
        self.run(*pip, "--constraint", str(self.constraints), *arguments, env=env)

    def install_packages(self) -> None:
        """Have the packages of these sources in the environment, with what they depend on and the extras."""
        if self.has_note("packages", fingerprint_of_sources()):
            return
        self.build_wheels()
        self._session.log("Installing the packages and what they depend on")
        self.run("-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", *FROM_DIST, *PACKAGES)
        self.complete_packages()

    def complete_packages(self) -> None:
        """Install what is not there yet of our packages and their extras, and note of which sources they are."""
        self.run("-m", "pip", "install", "--quiet", *FROM_DIST, "--no-deps", *PACKAGES)
        self.install(*PACKAGES, *self._extras)
        self.note("packages", (DIST / ".sources").read_text())

    def remove_packages(self) -> None:
        """Have none of our packages in the environment, and see that none can be imported."""
        self.note("packages", "none")
        self.run("-m", "pip", "uninstall", "-qq", "--yes", *PACKAGES)
        self.run("-I", "-c", LOOK, *(each.replace("-", "_") for each in PACKAGES), log=False)

    def alone(self, names: Collection[str]) -> Variables:
        """Return the variables with which the environment's Python has these packages of ours: their wheels, unpacked.

        After `remove_packages` it has no others.
        """
        self.build_wheels()
        return {**TESTED, "PYTHONPATH": os.pathsep.join(str(UNPACKED / name) for name in names)}

    def build_wheels(self) -> None:
        """Build the sdists, and from each its wheel, into dist/, unless those there are of these sources."""
        stamp, sources = DIST / ".sources", fingerprint_of_sources()
        if stamp.exists() and stamp.read_text() == sources:
            return
        shutil.rmtree(DIST, ignore_errors=True)
        self._session.log("Building the sdist and the wheel of each package into dist/")
        variables = {**os.environ, **self._variables}
        told = functools.partial(
            subprocess.run,
            cwd=ROOT,
            env={name: value for name, value in variables.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        build = (str(self.python), "-m", "build", "--no-isolation", "--outdir", str(DIST))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = dict(zip(PACKAGES, pool.map(told, ([*build, f"packages/{name}"] for name in PACKAGES)), strict=True))
        if failed := {name: each.stdout for name, each in made.items() if each.returncode}:
            self._session.error("\n".join([f"These could not be built: {', '.join(failed)}", *failed.values()]))
        for name in PACKAGES:
            (wheel,) = DIST.glob(f"{name.replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(UNPACKED / name)
        stamp.write_text(sources)

    def has_note(self, about: str, text: str) -> bool:
        """Whether this is what was noted last."""
        file = self._folder / f"{about}-installed.txt"
        return file.exists() and file.read_text(encoding="utf-8") == text

    def note(self, about: str, text: str) -> None:
        """Keep `text` in the environment."""
        (self._folder / f"{about}-installed.txt").write_text(text, encoding="utf-8")

    def remove(self) -> None:
        """Delete the environment, which takes about five gigabytes."""
        shutil.rmtree(self._folder, ignore_errors=True)


def pytest_in(workers: str, spread: str = "worksteal") -> list[str]:
    """Return what Python is given to run pytest in `workers` processes, or in its own if that is 0."""
    return ["-m", "pytest", *(["-n", workers, "--dist", spread] if workers != "0" else [])]


def shared(session: nox.Session) -> Environment:
    """Return .venv, which tools/run.py makes, or sees to be complete."""
    environment = Environment(session, setup.VENV, extras=("flatparam[train]",))
    there = environment.python.exists()
    python = str(environment.python) if there else sys.executable
    session.run(python, "tools/run.py", "env", external=True, silent=there)
    return environment


def installed(session: nox.Session) -> Environment:
    """Return .venv with the packages of these sources."""
    environment = shared(session)
    environment.install_packages()
    return environment


def own(
    session: nox.Session,
    name: str,
    *tools: str,
    python: str = sys.executable,
    versions: Mapping[str, str] | None = None,
) -> Environment:
    """Return the environment .nox/NAME of `python`, with torch, the tests' tools, `tools` and all our packages.

    The versions are those of tools/constraints.txt, with `versions` in place of the ones that it has.
    """
    folder, variables = ROOT / ".nox" / name, dict(ISOLATED)
    if "deepspeed" in tools:
        # It compiles an extension at its first start, in a minute or two.
        variables.update(DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=str(folder / "extensions"))
    environment = Environment(session, folder, variables=variables)
    locked = locked_to(versions or {})
    contents = "\n".join([python, *TEST_TOOLS, *tools, locked])
    if not environment.has_note("tools", contents):
        environment.remove()
        session.run(python, "-m", "venv", str(folder), external=True)
        environment.constraints.write_text(locked, encoding="utf-8")
        environment.install(*TEST_TOOLS)
        if "deepspeed" in tools:
            # Its setup looks at torch, and would compile for a GPU. It compiles what it needs when it is first used.
            environment.install("setuptools", "wheel")
            environment.install("--no-build-isolation", *tools, env={"DS_BUILD_OPS": "0"})
        elif tools:
            environment.install(*tools)
        environment.run("-W", "ignore", "-c", WARM_UP)
        environment.note("tools", contents)
    environment.install_packages()
    return environment


def locked_to(versions: Mapping[str, str]) -> str:
    """Return the locked versions, with those of `versions` instead for the packages that it names."""
    lines = setup.constraints().splitlines()
    kept = [line for line in lines if re.split(r"[=<> ]", line, maxsplit=1)[0] not in versions]
    return "\n".join([*kept, *(f"{name}=={version}" for name, version in versions.items())]) + "\n"


def python_of(session: nox.Session, version: str) -> str:
    """Return the path of a Python of this version; fail the session if there is none on the PATH."""
    found = sys.executable if sys.version.startswith(f"{version}.") else shutil.which(f"python{version}")
    return found or session.error(f"Expected a python{version} on the PATH, found none")


def fingerprint_of_sources() -> str:
    """Return a digest of all that goes into the wheels."""
    digest = hashlib.sha256()
    for path in sorted([ROOT / "LICENSE", *(ROOT / "packages").rglob("*")]):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def split_packages(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into the packages that they begin with, `flatparam-` left out or not, and the rest."""
    names = {name.removeprefix("flatparam-"): name for name in PACKAGES} | {name: name for name in PACKAGES}
    chosen: list[str] = []
    for argument in arguments:
        if argument not in names:
            break
        chosen.append(names[argument])
    return chosen, list(arguments[len(chosen) :])
