"""Every check there is, and the main job: `nox -l` lists them, `nox -s NAME` runs one, plain `nox` runs what CI runs.

What `tests` runs happens in one environment, .venv, which tools/run.py makes on first use (torch is large, so once is
enough); what needs other versions, or other projects, gets an environment of its own (tools/environments.py). In both
our own packages are wheels built from this checkout, so what is tested is what would be released.
"""

import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
from environments import (
    DIST,
    OFFLINE,
    ROOT,
    SITE,
    TESTED,
    TESTS,
    WORKERS,
    installed,
    own,
    pytest_in,
    python_of,
    shared,
    split_packages,
)
from house import PACKAGES, tested_with
from longer import LONGER, PROGRAMS, integration
from matrix.rows import PYTHONS, Row, all_rows, lowest_versions, named_row
from turns import Beside, Program, in_turn

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"


@nox.session
def tests(session: nox.Session) -> None:
    """Every check below, in order, with the time each took at the end: what CI runs."""
    # mypy reads the sources, so it can run while packages come and go.
    typing = Beside({"types": Program(TYPES)})
    others = Beside({"docs": Program(BLOCKS, TESTED), "site": Program(SITE), "wheels": Program(WHEELS)})
    # Types want what the extras bring, which stays while packages go.
    checks: dict[str, Callable[[nox.Session], None]] = {"lint": lint, "install": install}
    checks |= {"types begin": typing.start, "layers": layers, "alone": alone, "types": typing.finish}
    checks |= {"install again": install, "others begin": others.start, "integration": integration}
    checks |= {others.name: others.finish}
    in_turn(session, {**checks, "gpu": gpu})


def install(session: nox.Session) -> None:
    """Installation: every package with what it depends on, for the checks that follow."""
    installed(session)


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and ruff's format over the whole repository."""
    environment = shared(session)
    environment.run("-m", "ruff", "check", ".")
    environment.run("-m", "ruff", "format", "--check", ".")


@nox.session
def layers(session: nox.Session) -> None:
    """The walls: who imports whom and by which names, dependencies, the shape of a package, and its lines at most."""
    environment = shared(session)
    environment.run("tools/check_layers.py")
    environment.run("tools/structure")
    sources = {"PYTHONPATH": os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)}
    session.run(str(environment.python.parent / "lint-imports"), "--no-cache", env=sources, external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Types: mypy, strict, over the sources of every package, the tools and this file."""
    installed(session).run(*TYPES)


TYPES = ("-m", "mypy", *(f"packages/{name}/src" for name in PACKAGES), "tools", "noxfile.py")


@nox.session
def alone(session: nox.Session) -> None:
    """Each package alone: its tests with nothing above it but what they name in their extra (`-- core comm -k x`).

    Nothing of ours is installed: each test run has the wheels that it is to have on its path, so several run at once.
    """
    chosen, extra = split_packages(session.posargs)
    environment = shared(session)
    environment.remove_packages()
    # The guard's tests mostly wait. The longest begin first.
    at_once = 2 * max(1, int(WORKERS))
    names = sorted(chosen or PACKAGES, key=_size_of_tests, reverse=True)
    processes = str(at_once // len(names) if at_once > len(names) else 0)
    how = (*pytest_in(processes), "-q", "-m", "not gpu and not long", *extra)
    for name in names:
        session.log(f"Testing {name} with {', '.join(tested_with(name))} and nothing else of ours")
    programs = {name: Program((*how, f"packages/{name}/tests"), environment.alone(tested_with(name))) for name in names}
    testing = Beside(programs, workers=at_once)
    testing.start(session)
    testing.finish(session)


def _size_of_tests(name: str) -> int:
    return sum(file.stat().st_size for file in (ROOT / "packages" / name / "tests").rglob("*.py"))


@nox.session
def sums(session: nox.Session) -> None:
    """One hash for every way to train with exact sums, unequal work, and what both cost; `--ways 5` for less."""
    installed(session).run("tools/sums.py", *session.posargs)


@nox.session
def meshes(session: nox.Session) -> None:
    """Pairs and triples of mesh dimensions, beside torch: docs/meshes.md; `--short`, `--products`, or `--peers`."""
    # What transformers shards takes an environment that has it.
    environment = own(session, "plan", "transformers") if "--peers" in session.posargs else installed(session)
    environment.run("-m", "integration_tests.meshes.page", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Documentation: execute every Python block of the docs and the READMEs, and build the site, strictly."""
    blocks(session)
    installed(session).run(*SITE)


def blocks(session: nox.Session) -> None:
    """Documentation: execute every Python block of the docs and the READMEs, and what else docs tests."""
    installed(session).pytest("-m", "not long", "docs", *session.posargs)


BLOCKS = (*pytest_in("0"), "-q", "-m", "not long", "docs")


@nox.session
def sanitise(session: nox.Session) -> None:
    """Tests, and every combination of settings, on the simulated device, looked through for races (`-- --every 10`)."""
    environment = installed(session)
    environment.pytest("-p", "integration_tests.simulated.plugin", "-m", "not gpu", *TWINS)
    environment.run("-m", "integration_tests.simulated.sweep", *session.posargs)


# Where there are worlds of threads; the others' files and bytes do not depend on the device.
TWINS = (
    *(f"packages/{name}/tests" for name in ("flatparam-comm", "flatparam-runtime", "flatparam-state")),
    *("packages/flatparam/tests", "--ignore=packages/flatparam/tests/command"),
    *("packages/flatparam-clients/tests", "--ignore=packages/flatparam-clients/tests/test_run.py"),
    "packages/flatparam-optim/tests",
    "packages/flatparam-sums/tests",
    "packages/flatparam-plan/tests/test_recorder.py",
    *(
        f"packages/flatparam-checkpoint/tests/test_{name}.py"
        for name in ("averages", "optimizer_holes", "pretrained_files", "unread")
    ),
    *("packages/flatparam-publish/tests", "--ignore=packages/flatparam-publish/tests/test_kills.py"),
    *("integration_tests/lifted", "integration_tests/matrices", "integration_tests/test_load_pretrained.py"),
)


@nox.session
def gpu(session: nox.Session) -> None:
    """With a GPU: the tests that need one, and what is measured for docs/gpu; says what it skips (`-- -k x`: tests)."""
    environment = shared(session)
    devices = int(str(environment.run("-W", "ignore", "-c", COUNT_DEVICES, silent=True)).split()[-1])
    if devices == 0:
        session.warn("There is no GPU here: every test marked `gpu` is skipped, and nothing is measured.")
        return
    if devices == 1:
        session.warn("There is one GPU, so the tests of NCCL between GPUs are skipped; all others run on it.")
    environment.install_packages()
    if not session.posargs:
        environment.run("tools/gpu", "--budget", "600")  # the tests are a part of it
        return
    # One process: the tests share the GPUs, and measure memory on them.
    environment.pytest("-m", "gpu", *TESTS, *session.posargs, workers="0")


# Those that torch has collectives for; it can have none for the GPU of a Mac.
COUNT_DEVICES = """
import torch
found = torch.accelerator.current_accelerator(check_available=True)
print(0 if found is None or found.type == "mps" else torch.accelerator.device_count())
"""


@nox.session
def versions(session: nox.Session) -> None:
    """Tests with other versions: `-- torch-2.15 -k x`, `-- python-3.12`, `-- lowest`; all, into the docs, without."""
    named = [each for each in session.posargs if each == "lowest" or each.startswith(("torch-", "python-"))]
    extra = [each for each in session.posargs if each not in named]

    def test(row: Row, locked: Mapping[str, str], *how: str) -> None:
        environment = own(session, row.name, python=python_of(session, row.python), versions=locked)
        environment.run("tools/matrix", *how, *extra)

    def enter(row: Row, _: nox.Session) -> None:
        try:
            test(row, {"torch": row.torch}, "--enter")
        finally:  # it takes five gigabytes
            shutil.rmtree(ROOT / ".nox" / row.name, ignore_errors=True)

    if named == ["lowest"]:
        test(Row("lowest", PYTHONS[0]), lowest_versions())
    elif named:
        test(row := named_row(named), {"torch": row.torch})
    else:
        in_turn(session, {str(row): functools.partial(enter, row) for row in all_rows()})


@nox.session
def bench(session: nox.Session) -> None:
    """The benchmark with every peer, in an environment of its own; not in `tests` (`-- steps --workloads wide`)."""
    environment = own(session, "bench", "deepspeed", "fairscale", "matplotlib")
    whole = [[each] for each in ("steps", "instructions", "growth", "optimizer", "profile", "page")]
    for command in [session.posargs] if session.posargs else whole:
        environment.run("tools/bench", *command)


@nox.session
def clients(session: nox.Session) -> None:
    """Programs of accelerate, transformers, PEFT, TRL and Lightning, in an environment of their own; not in `tests`.

    Of trainers that would need ray or a GPU, the wheels are downloaded, and only their functions for FSDP1 are run.
    """
    projects = (
        "accelerate",
        "bitsandbytes",
        "diffusers",
        "transformers",
        "peft",
        "torchao",
        "trl",
        "lightning",
    )
    environment = own(session, "clients", *projects)
    wheels = str(ROOT / "build" / "client-wheels")
    download = ("-m", "pip", "download", "--quiet", "--constraint", str(environment.constraints), "--no-deps")
    for name in ("verl", "rlinf", "mosaicml", "fairseq2", "llama-cookbook", "torchtitan"):
        # The tests of what the index does not have are skipped.
        environment.run(*download, "--only-binary", ":all:", "--dest", wheels, name, success_codes=[0, 1])
    cells = ROOT / "build" / "client-cells.jsonl"
    cells.unlink(missing_ok=True)
    quiet = {**OFFLINE, "FLATPARAM_CLIENT_WHEELS": wheels, "FLATPARAM_CLIENT_CELLS": str(cells)}
    environment.pytest("integration_tests/clients", *session.posargs, env=quiet)
    if not session.posargs:
        # The tables of docs/guides/client-peft.md and from-fsdp2.md.
        environment.run("-m", "integration_tests.clients.page", env=quiet)
        environment.run("-m", "integration_tests.clients.cells", str(cells), env=quiet)


@nox.session
def release(session: nox.Session) -> None:
    """Release a package, in a commit and a tag (`-- core 0.2.0 --dry-run`); without: build, check, install all."""
    environment = shared(session)
    if session.posargs:
        environment.run("tools/release", *session.posargs)
        return
    environment.build_wheels()
    environment.run(*WHEELS)
    environment.run("tools/offline_install.py", str(DIST))


WHEELS = ("tools/check_wheels.py", str(DIST))


@nox.session
def run(session: nox.Session) -> None:
    """What is needed less often, by its name: `-- train`, `-- fuzz --minutes 30`, ...; without a name: its list."""
    name, *arguments = session.posargs or [""]
    if name in PROGRAMS:
        # Ctrl-C reaches the ranks of a job directly; they are given the time to finish a checkpoint.
        command = (*PROGRAMS[name], *arguments)
        installed(session).run(*command, interrupt_timeout=120, terminate_timeout=30)
    elif name in LONGER:
        LONGER[name](session, arguments)
    else:
        about = {name: " ".join(command) for name, command in PROGRAMS.items()}
        about |= {name: (function.__doc__ or "").splitlines()[0] for name, function in LONGER.items()}
        lines = [f"  {name:<18} {said}" for name, said in sorted(about.items())]
        session.error("\n".join([f"Expected one of these names, found {name!r}:", *lines]))
