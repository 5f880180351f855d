"""Every check there is, and the main job: `nox -l` lists them, `nox -s NAME` runs one, plain `nox` runs what CI runs.

There are two kinds of sessions. What `tests` runs happens in one environment, .venv, which tools/run.py makes on first
use (torch is large, so once is enough). The sessions below "Environments of their own" get one from nox each, with the
versions that their names say, and `fill` installs into all of these. In both kinds our own packages are wheels built
from this checkout, so what is tested is what would be released.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))
import run as setup
from house import PACKAGES, tested_with
from matrix.lowest import lowest_versions
from matrix.rows import HOME_PYTHON, HOME_TORCH, PYTHONS, TORCHES

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
DIST = ROOT / "dist"

# How many processes pytest takes at once; more than there are cores is right beside a machine that others keep busy.
WORKERS = os.environ.get("FLATPARAM_TEST_WORKERS", str(min(os.cpu_count() or 1, 4)))

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "none"


# The sessions


@nox.session
def train(session: nox.Session) -> None:
    """The main job: train a GPT on two ranks over real text (`nox -s train -- --help`)."""
    install_all_layers(session)
    # Ctrl-C reaches the ranks directly; they are given the time to finish a checkpoint.
    python(session, "tools/train.py", *session.posargs, interrupt_timeout=120, terminate_timeout=30)


@nox.session
def tests(session: nox.Session) -> None:
    """Every check below, in order, with the time each took at the end: what CI runs."""
    others = Beside(("simulated", "types", "site", "wheels"))
    checks: dict[str, Callable[[nox.Session], None]] = {
        "lint": lint,
        "layers": layers,
        "alone": alone,
        "beside": others.start,
        "integration": integration,
        "docs": blocks,
        " ".join(others.names): others.finish,
        "gpu": gpu,
    }
    outcomes: dict[str, str] = {}
    failed: list[str] = []
    for number, (name, check) in enumerate(checks.items(), start=1):
        session.log(f"{number}/{len(checks)} {name}: {(check.__doc__ or '').splitlines()[0]}")
        started = time.monotonic()
        try:
            check(session)
        except Exception as error:  # nox's own; the next check runs all the same
            session.warn(f"{name} failed: {error}")
            failed.append(name)
        outcomes[name] = f"{'FAILED' if name in failed else 'ok':<7} {time.monotonic() - started:6.1f} s"
    for name, outcome in outcomes.items():
        session.log(f"{name:<12} {outcome}")
    if failed:
        session.error(f"Not green: {', '.join(failed)}. To repeat: nox -s {' '.join(failed)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and ruff's format over the whole repository."""
    prepare(session)
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")


@nox.session
def layers(session: nox.Session) -> None:
    """The walls: who imports whom and by which names, dependencies, the shape of a package, and its lines at most."""
    prepare(session)
    python(session, "tools/check_layers.py")
    python(session, "tools/structure", "--budgets")
    sources = os.pathsep.join(str(source_root(name)) for name in PACKAGES)
    session.run(str(PYTHON.parent / "lint-imports"), "--no-cache", env={"PYTHONPATH": sources}, external=True)


@nox.session
def alone(session: nox.Session) -> None:
    """Each layer alone: install core, test it, add comm, ..., add-ons, tools (`-- flatparam-comm -k x`: to comm)."""
    prepare(session)
    stop, extra = split_rung(session.posargs)
    build_wheels(session)
    uninstall_all_layers(session)
    for name in PACKAGES:
        there = tested_with(name)
        python(session, "-m", "pip", "install", "--quiet", *FROM_DIST, *there)
        for other in PACKAGES.keys() - set(there):
            # The wrapper brings all add-ons along.
            python(session, "-m", "pip", "uninstall", "-qq", "--yes", other)
            assert_absent(session, other)
        if stop is None or name == stop:
            session.log(f"Testing {name} with nothing above it, and no other add-on")
            pytest(session, "-m", "not gpu and not long", f"packages/{name}/tests", *extra)
        if name == stop:
            return
    python(session, "-m", "pip", "install", "--quiet", *FROM_DIST, *PACKAGES)
    complete_layers(session)


@nox.session
def types(session: nox.Session) -> None:
    """Types: mypy, strict, over the sources of every package, the tools and this file."""
    install_all_layers(session)
    sources = [str(source_root(name).relative_to(ROOT)) for name in PACKAGES]
    python(session, "-m", "mypy", *sources, "tools", "noxfile.py")


@nox.session
def integration(session: nox.Session) -> None:
    """Several layers, or several ranks, at once: integration_tests on CPU (arguments go to pytest)."""
    install_all_layers(session)
    pytest(session, "-m", "not gpu and not long", "integration_tests", *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """The tests that take long: whole grids of settings, tools from end to end, every workload; not in `tests`."""
    install_all_layers(session)
    where = ["integration_tests", *(f"packages/{name}/tests" for name in PACKAGES)]
    # Optimizers of whole matrices have a session of their own: `matrix-optimizers`.
    others = ("-k", "not is_exact_in_every_setting and not are_exact_in_every_setting")
    pytest(session, "-m", "long and not gpu", *others, "docs", *where, *session.posargs)


@nox.session(venv_backend="venv")
def plan(session: nox.Session) -> None:
    """Plan eleven transformers and run them: writes docs/plans.md, and fails if a number of a plan is wrong.

    `-- times` measures steps on this machine beside their prediction instead, `-- choice` what the planner chooses.
    It needs transformers, and so Python 3.11 or newer, and has an environment of its own.
    """
    fill(session, "transformers")
    session.run("python", "tools/plans", *session.posargs, env=ISOLATED)


@nox.session
def layouts(session: nox.Session) -> None:
    """The tables of padding of public models, planned anew into docs/layouts.md."""
    install_all_layers(session)
    python(session, "tools/layouts_page.py")


@nox.session(name="matrix-optimizers", venv_backend="venv")
def matrix_optimizers(session: nox.Session) -> None:
    """Optimizers of whole matrices in every setting, to the bit, and beside others (docs/guides/optimizers.md)."""
    install_all_layers(session)
    tests = ("packages/flatparam-optim/tests", "integration_tests/matrices")
    pytest(session, "-m", "long", *tests, *session.posargs)
    python(session, "tools/loss_curves.py")
    beside = fill_beside_deepspeed(session)
    session.run("python", "tools/matrix_optimizers.py", env=beside)


@nox.session
def programs(session: nox.Session) -> None:
    """Search for a random program that differs when it is sharded (`-- --examples 5000`, `-- --minutes 30`).

    `-- --of saving` and `-- --of processes` search for one that differs when it is saved and loaded.
    """
    install_all_layers(session)
    python(session, "-m", "integration_tests.programs.searching", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Every fault on one of two ranks, over gloo and shared memory, beside torch's FSDP1 (`-- --libraries gloo`)."""
    install_all_layers(session)
    python(session, "-m", "integration_tests.faults.scoreboard", *session.posargs)


@nox.session
def load(session: nox.Session) -> None:
    """Long, wide, large and disturbed jobs, with their figures (`-- --rows L1 L4`); half an hour, not in `tests`."""
    install_all_layers(session)
    python(session, "-m", "integration_tests.load", *session.posargs)


@nox.session
def publish(session: nox.Session) -> None:
    """Publishing: 100 kills on each side, 1,000 versions compared, the table of the guide anew; not in `tests`.

    `-- loop --rounds 50` runs a trainer and a generator instead, `-- costs` only prints the table.
    """
    install_all_layers(session)
    if session.posargs:
        python(session, "tools/publishing", *session.posargs)
        return
    kills = "packages/flatparam-publish/tests/test_kills.py"
    pytest(session, kills, env={"FLATPARAM_PUBLISH_KILLS": "100"})
    python(session, "tools/publishing", "syncs", "--versions", "1000")
    python(session, "tools/publishing", "--size", "small", "--pretraining", "60", "costs", "--page")


@nox.session
def pretrained(session: nox.Session) -> None:
    """What it costs to begin with weights in files, beside the usual ways: the table of docs/guides/pretrained.md anew.

    `-- --numel 1000000 --ranks 4` measures and prints something else.
    """
    install_all_layers(session)
    python(session, "tools/pretrained_costs.py", *(session.posargs or ["--page"]))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Changed files for every reader of checkpoints (`-- --minutes 30`; ten without it); not in `tests`."""
    install_all_layers(session)
    python(session, "-m", "packages.flatparam-files.tests.fuzzing", *session.posargs)


@nox.session
def overlap(session: nox.Session) -> None:
    """What is hidden behind computing, on the simulated device: a table, and pictures (`-- --ratios 0.5 1 2`)."""
    install_all_layers(session)
    pictures = ("--pictures", "build/overlap", "--docs", "docs/pictures")
    python(session, "-m", "integration_tests.simulated.overlap", *pictures, *session.posargs)


@nox.session
def simulated(session: nox.Session) -> None:
    """Compile the simulated device for its tests, which else compile it when they begin: a minute, once."""
    install_all_layers(session)
    python(session, "-c", "from flatparam_simdev import why_not; print(why_not())")


@nox.session
def sanitise(session: nox.Session) -> None:
    """Tests, and every combination of settings, on the simulated device, looked through for races (`-- --every 10`)."""
    install_all_layers(session)
    pytest(session, "-p", "integration_tests.simulated.plugin", "-m", "not gpu", *TWINS)
    python(session, "-m", "integration_tests.simulated.sweep", *session.posargs)


# Where there are worlds of threads; the others' files and bytes do not depend on the device.
TWINS = (
    "packages/flatparam-comm/tests",
    "packages/flatparam-runtime/tests",
    "packages/flatparam-state/tests",
    "packages/flatparam/tests",
    "--ignore=packages/flatparam/tests/command",
    "packages/flatparam-clients/tests",
    "--ignore=packages/flatparam-clients/tests/test_run.py",
    "packages/flatparam-optim/tests",
    "packages/flatparam-checkpoint/tests/test_averages.py",
    "packages/flatparam-checkpoint/tests/test_optimizer_holes.py",
    "packages/flatparam-checkpoint/tests/test_pretrained_files.py",
    "packages/flatparam-checkpoint/tests/test_unread.py",
    "packages/flatparam-publish/tests",
    "--ignore=packages/flatparam-publish/tests/test_kills.py",
    "integration_tests/lifted",
    "integration_tests/matrices",
    "integration_tests/test_load_pretrained.py",
)


@nox.session
def docs(session: nox.Session) -> None:
    """Documentation: execute every Python block of the docs and the READMEs, and build the site, strictly."""
    blocks(session)
    site(session)


def blocks(session: nox.Session) -> None:
    """Documentation: execute every Python block of the docs and the READMEs, and what else docs tests."""
    install_all_layers(session)
    pytest(session, "-m", "not long", "docs", *session.posargs)


@nox.session
def site(session: nox.Session) -> None:
    """Documentation: build the site, strictly, into build/site."""
    install_all_layers(session)
    quiet = {"NO_MKDOCS_2_WARNING": "1"}
    # Not `--quiet`: that keeps warnings from being counted, so that nothing is strict any more.
    python(session, "-m", "mkdocs", "build", "--strict", "-f", "tools/mkdocs.yml", env=quiet)


@nox.session
def wheels(session: nox.Session) -> None:
    """Releases: build each sdist and wheel, and check that what must be in them is."""
    prepare(session)
    build_wheels(session)
    python(session, "tools/check_wheels.py", str(DIST))


@nox.session
def gpu(session: nox.Session) -> None:
    """With a GPU: the tests that need one, and what is measured for docs/gpu; says what it skips (`-- -k x`: tests)."""
    prepare(session)
    found = session.run(str(PYTHON), "-W", "ignore", "-c", COUNT_DEVICES, silent=True, external=True)
    devices = int(str(found).split()[-1])
    if devices == 0:
        session.warn("There is no GPU here: every test marked `gpu` is skipped, and nothing is measured.")
        return
    if devices == 1:
        session.warn("There is one GPU, so the tests of NCCL between GPUs are skipped; all others run on it.")
    install_all_layers(session)
    if not session.posargs:
        python(session, "tools/gpu", "--budget", "600")  # the tests are a part of it
        return
    where = ["integration_tests", *(f"packages/{name}/tests" for name in PACKAGES)]
    # One process: the tests share the GPUs, and measure memory on them.
    pytest(session, "-m", "gpu", *where, *session.posargs, workers="0")


# Those that torch has collectives for; it can have none for the GPU of a Mac.
COUNT_DEVICES = """
import torch
found = torch.accelerator.current_accelerator(check_available=True)
print(0 if found is None or found.type == "mps" else torch.accelerator.device_count())
"""


@nox.session
def coverage(session: nox.Session) -> None:
    """Lines and branches of each package that the tests run, 95 % at least; not in `tests` (`-- core comm`)."""
    install_all_layers(session)
    chosen, extra = split_layers(session.posargs)
    data = ROOT / "build" / "coverage"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    for name in chosen:
        # All packages are measured (pyproject.toml), as the tests of a layer run those beneath it, too.
        measured = ("--cov", "--cov-report=", "--cov-config=pyproject.toml")
        data_file = {"COVERAGE_FILE": str(data / name)}
        pytest(session, *measured, "-m", "not gpu", f"packages/{name}/tests", *extra, env=data_file)
    python(session, "tools/covered.py", *(str(data / name) for name in chosen))


@nox.session
def release(session: nox.Session) -> None:
    """Release a package: changelog, version, neighbours' ranges, commit, tag (`-- core 0.2.0 --dry-run`)."""
    prepare(session)
    python(session, "tools/release", *session.posargs)


# Environments of their own


def layer_session(layer: str) -> None:
    """Define the session `tests(LAYER)`.

    nox would run every session of a parametrised `tests` if it were asked for `tests`, which is the name of the one
    command that CI runs. So these are sessions with names of their own, and the parentheses are a part of the name.
    """
    short = layer.removeprefix("flatparam-")

    def tests_of_layer(session: nox.Session) -> None:
        fill(session, layers=tested_with(layer))
        session.run(*PYTEST, "-m", "not gpu", f"packages/{layer}/tests", *session.posargs, env=ISOLATED)

    tests_of_layer.__doc__ = f"The tests of {layer}, in an environment with nothing above it (`-- -k x`)."
    nox.session(name=f"tests({short})", venv_backend="venv")(tests_of_layer)


for each_layer in PACKAGES:
    layer_session(each_layer)


@nox.session(name="tests-torch", python=HOME_PYTHON, venv_backend="venv")
@nox.parametrize("torch", TORCHES, ids=[torch.rpartition(".")[0] for torch in TORCHES])
def tests_torch(session: nox.Session, torch: str) -> None:
    """Layers and the short integration tests with this torch (`-- -k x`; on another Python: `--force-python 3.12`)."""
    test_row(session, {"torch": torch})


@nox.session(
    name="tests-python", python=[each for each in PYTHONS if each != HOME_PYTHON], venv_backend="venv"
)
def tests_python(session: nox.Session) -> None:
    """The same tests on this Python, with the one torch."""
    test_row(session, {"torch": HOME_TORCH})


@nox.session(python=PYTHONS[0], venv_backend="venv")
def oldest(session: nox.Session) -> None:
    """The same tests on the oldest Python with the lowest version of everything that the packages' ranges allow."""
    test_row(session, lowest_versions())


@nox.session
def matrix(session: nox.Session) -> None:
    """Run `tests-torch` and `tests-python` whole, one at a time, and enter what they find in docs/compatibility.md."""
    names = [f"tests-torch-{HOME_PYTHON}({torch.rpartition('.')[0]})" for torch in TORCHES]
    names += [f"tests-python-{python}" for python in PYTHONS if python != HOME_PYTHON]
    for name in names:
        session.notify(name, ["--enter", "--remove", *session.posargs])


@nox.session(venv_backend="venv")
def deepspeed(session: nox.Session) -> None:
    """The import of DeepSpeed's checkpoints against DeepSpeed itself, in an environment of its own; not in `tests`."""
    quick = fill_beside_deepspeed(session, "pytest", "pytest-timeout", "safetensors")
    quiet = ("-o", "faulthandler_timeout=0")
    session.run("python", "-m", "pytest", *quiet, "integration_tests/deepspeed", *session.posargs, env=quick)


@nox.session(venv_backend="venv")
def bench(session: nox.Session) -> None:
    """The benchmark with every peer, in an environment of its own; not in `tests` (`-- steps --workloads wide`)."""
    environment = fill_beside_deepspeed(session, "fairscale", "matplotlib")
    if session.posargs:
        session.run("python", "tools/bench", *session.posargs, env=environment)
        return
    for command in ("steps", "instructions", "growth", "optimizer", "profile", "page"):
        session.run("python", "tools/bench", command, env=environment)


@nox.session(venv_backend="venv")
def models(session: nox.Session) -> None:
    """Real models, of transformers and diffusers, in an environment of its own; not in `tests` (`-- -k Llama`)."""
    fill(session, "transformers", "diffusers")
    results = str(ROOT / "build" / "models.xml")
    # The tests of a model stay together: they share what torch has trained.
    spread = ("-n", WORKERS, "--dist", "loadgroup", "-o", "faulthandler_timeout=0", f"--junitxml={results}")
    quiet = {**ISOLATED, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    tests = "integration_tests/models/test_models.py"
    session.run("python", "-m", "pytest", *spread, tests, *session.posargs, env=quiet)
    if not session.posargs:
        session.run("python", "tools/models_page.py", results)  # docs/models.md


@nox.session(venv_backend="venv")
def clients(session: nox.Session) -> None:
    """Programs of accelerate, transformers, PEFT, TRL and Lightning, in an environment of their own; not in `tests`.

    Of trainers that would need ray or a GPU, the wheels are downloaded, and only their functions for FSDP1 are run.
    """
    fill(session, "accelerate", "bitsandbytes", "transformers", "peft", "torchao", "trl", "lightning")
    wheels = str(ROOT / "build" / "client-wheels")
    download = (
        "pip",
        "download",
        *locked_to(session, {}),
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        wheels,
    )
    for name in ("verl", "rlinf", "mosaicml", "fairseq2", "llama-cookbook"):
        # The tests of what the index does not have are skipped.
        session.run("python", "-m", *download, name, success_codes=[0, 1])
    quiet = {**ISOLATED, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    quiet["FLATPARAM_CLIENT_WHEELS"] = wheels
    session.run(*PYTEST, "integration_tests/clients", *session.posargs, env=quiet)
    if not session.posargs:
        # The table of docs/guides/client-peft.md.
        session.run("python", "-m", "integration_tests.clients.page", env=quiet)


# Checks side by side


class Beside:
    """Sessions of one process, which run in a nox of their own beside the checks that come between start and finish."""

    def __init__(self, names: Sequence[str]) -> None:
        """Take the sessions by their names."""
        self.names = tuple(names)
        self._output = ROOT / "build" / "beside.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, session: nox.Session) -> None:
        """Start the checks that need one process, beside those that follow."""
        install_all_layers(session)
        self._output.parent.mkdir(exist_ok=True)
        command = [str(PYTHON), "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", *self.names]
        session.log(f"Beside what follows: nox -s {' '.join(self.names)}")
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

    def finish(self, session: nox.Session) -> None:
        """What ran beside the others: the simulated device, types, the site of the documentation, the wheels."""
        if self._process is None:
            session.error("They could not be started")
        status = self._process.wait()
        session.log(self._output.read_text(encoding="utf-8", errors="replace"))
        if status != 0:
            session.error(f"nox returned {status}")


# Filling an environment of its own


# What the tests need beside what our packages depend on; the versions are those of tools/constraints.txt.
TEST_TOOLS = (
    "expecttest",
    "hypothesis",
    "numpy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "safetensors",
    "tomli",
)
PYTEST = ("python", "-m", "pytest", "-n", WORKERS, "--dist", "worksteal")
# One thread, and bytecode is kept, whatever the shell says: each process of a test would compile our packages again.
TESTED: dict[str, str | None] = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": None}
# And no other packages than the environment's.
ISOLATED: dict[str, str | None] = {**TESTED, "PYTHONPATH": None, "PYTHONHOME": None}
# Leaves the bytecode of what the tests import: without it, each process of a test would compile it again.
WARM_UP = "import torch, torch.distributed.fsdp, torch.distributed.checkpoint, torch.distributed.tensor"


def fill(
    session: nox.Session,
    *tools: str,
    layers: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
) -> None:
    """Install torch, the tests' tools, `tools` and our packages (all, or `layers`) into the session's environment.

    The versions are those of tools/constraints.txt, with `versions` in place of the ones that it has.
    """
    locked = locked_to(session, versions or {})
    session.install(*locked, "torch", "build", "hatchling", *TEST_TOOLS)
    if tools:
        session.install(*locked, *tools)
    install_wheels(session, locked, layers or PACKAGES)
    session.run("python", "-W", "ignore", "-c", WARM_UP, env=ISOLATED)


def fill_beside_deepspeed(session: nox.Session, *tools: str) -> dict[str, str | None]:
    """Install DeepSpeed, `tools` and our packages into the session's environment; return the variables it runs with."""
    locked = locked_to(session, {})
    session.install(*locked, "torch", "numpy", "setuptools", "wheel", "build", "hatchling")
    # Its setup looks at torch, and would compile for a GPU. It compiles what it needs on CPU when it is first used.
    on_cpu = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    session.install(*locked, "--no-build-isolation", "deepspeed", *tools, env=on_cpu)
    install_wheels(session, locked, PACKAGES)
    # It compiles an extension at its first start, in a minute or two.
    extensions = str(Path(session.virtualenv.location) / "extensions")
    return {**ISOLATED, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}


def locked_to(session: nox.Session, versions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the arguments with which pip takes the locked versions, or `versions` if they name a package."""
    kept = [
        line
        for line in setup.constraints().splitlines()
        if re.split(r"[=<> ]", line, maxsplit=1)[0] not in versions
    ]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    pins = [f"{name}=={version}" for name, version in versions.items()]
    constraints.write_text("\n".join([*kept, *pins]) + "\n", encoding="utf-8")
    return ("--quiet", "--constraint", str(constraints))


def install_wheels(session: nox.Session, locked: Sequence[str], layers: Collection[str]) -> None:
    """Install the wheels of `layers` and what they depend on, and no others: pip sees whether the ranges fit."""
    build_wheels(session, lambda *arguments: session.run("python", *arguments, silent=True))
    session.run("python", "-m", "pip", "uninstall", "-qq", "--yes", *PACKAGES)
    # The wrapper depends on add-ons, which then are taken out again.
    session.install("--quiet", "--no-deps", *FROM_DIST, *PACKAGES)
    session.install(*locked, *layers)
    others = [name for name in PACKAGES if name not in layers]
    if others:
        session.run("python", "-m", "pip", "uninstall", "-qq", "--yes", *others)


def test_row(session: nox.Session, versions: Mapping[str, str]) -> None:
    """Fill the environment with these versions and run the matrix's tests there (`--remove`: then remove it)."""
    arguments = [argument for argument in session.posargs if argument != "--remove"]
    try:
        fill(session, versions=versions)
        session.run("python", "tools/matrix", *arguments, env=ISOLATED)
    finally:
        if "--remove" in session.posargs:  # it takes five gigabytes
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)


# The environment that `tests` shares


def prepare(session: nox.Session) -> None:
    """Let tools/run.py make .venv, or see that it is complete."""
    there = PYTHON.exists()
    session.run(str(PYTHON) if there else sys.executable, "tools/run.py", "env", external=True, silent=there)


def python(session: nox.Session, *arguments: str, **options: Any) -> None:
    """Run the environment's Python in the root of the checkout."""
    session.run(str(PYTHON), *arguments, external=True, **options)


def pytest(
    session: nox.Session, *arguments: str, workers: str = WORKERS, env: Mapping[str, str] | None = None
) -> None:
    """Run pytest in `workers` processes, each with one thread for torch."""
    spread = ["-n", workers, "--dist", "worksteal"] if workers != "0" else []
    python(session, "-m", "pytest", *spread, *arguments, env={**TESTED, **(env or {})})


# Our own packages in it

FROM_DIST = ("--no-index", "--find-links", str(DIST), "--no-compile", "--disable-pip-version-check")


def source_root(name: str) -> Path:
    """Return the directory that holds the import package of a distribution."""
    return ROOT / "packages" / name / "src"


def fingerprint_of_sources() -> str:
    """Return a digest of all that goes into the wheels."""
    digest = hashlib.sha256()
    for path in sorted([ROOT / "LICENSE", *(ROOT / "packages").rglob("*")]):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build_wheels(session: nox.Session, run_python: Callable[..., Any] | None = None) -> None:
    """Build the sdists, and from each its wheel, into dist/, unless those there are of these sources.

    `run_python` runs a Python that has `build` and hatchling; without it .venv's does.
    """
    stamp, sources = DIST / ".sources", fingerprint_of_sources()
    if stamp.exists() and stamp.read_text() == sources:
        return
    shutil.rmtree(DIST, ignore_errors=True)
    session.log("Building the sdist and the wheel of each package into dist/")
    run_python = run_python or (lambda *arguments: python(session, *arguments, silent=True))
    for name in PACKAGES:
        run_python("-m", "build", "--no-isolation", "--outdir", str(DIST), f"packages/{name}")
    stamp.write_text(sources)


def uninstall_all_layers(session: nox.Session) -> None:
    """Take all packages out of the environment, and see that none can be imported."""
    (VENV / "layers-installed.txt").unlink(missing_ok=True)
    python(session, "-m", "pip", "uninstall", "-qq", "--yes", *PACKAGES)
    for name in PACKAGES:
        assert_absent(session, name)


def install_all_layers(session: nox.Session) -> None:
    """Have the packages of these sources in the environment, with the extras."""
    prepare(session)
    stamp, sources = VENV / "layers-installed.txt", fingerprint_of_sources()
    if stamp.exists() and stamp.read_text() == sources:
        return
    build_wheels(session)
    session.log("Installing the packages and the extras")
    pip = ("-m", "pip", "install", "--quiet")
    python(session, *pip, "--force-reinstall", "--no-deps", *FROM_DIST, *PACKAGES)
    complete_layers(session)


def complete_layers(session: nox.Session) -> None:
    """Install the extras beside the packages, and note of which sources they are: those of the wheels in dist/."""
    pip = ("-m", "pip", "install", "--quiet")
    locked = ("--no-compile", "--disable-pip-version-check", "--constraint", str(VENV / "constraints.txt"))
    python(session, *pip, *locked, "flatparam[train]")
    (VENV / "layers-installed.txt").write_text((DIST / ".sources").read_text())


def assert_absent(session: nox.Session, name: str) -> None:
    """Fail when the package can be imported."""
    module = name.replace("-", "_")
    check = (
        f"import importlib.util as u, sys; sys.exit(u.find_spec('{module}') and '{module} can be imported')"
    )
    python(session, "-I", "-c", check, log=False)


def split_layers(posargs: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of `coverage` into the packages that they begin with (all if with none) and the rest."""
    names = {name.removeprefix("flatparam-"): name for name in PACKAGES} | {name: name for name in PACKAGES}
    chosen: list[str] = []
    for argument in posargs:
        if argument not in names:
            break
        chosen.append(names[argument])
    return chosen or list(PACKAGES), list(posargs[len(chosen) :])


def split_rung(posargs: list[str]) -> tuple[str | None, list[str]]:
    """Split the arguments of `alone` into the rung to stop at, where one is named, and what is for pytest."""
    if posargs and posargs[0] in PACKAGES:
        return posargs[0], posargs[1:]
    return None, list(posargs)
