"""Programs and functions of a session that are needed less often, by their names in `nox -s run`.

Each may take arguments: `nox -s run -- fuzz --minutes 30`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from environments import OFFLINE, ROOT, SITE, TESTS, installed, own, split_packages
from house import PACKAGES

if TYPE_CHECKING:
    import nox

__all__ = ["LONGER", "PROGRAMS", "integration"]

PROGRAMS: Mapping[str, Sequence[str]] = {
    "train": ("tools/train.py",),  # the main job: a GPT on two ranks over real text
    "complaints": ("-m", "integration_tests.complaints"),  # public ones, beside torch: docs/complaints.md
    "faults": ("-m", "integration_tests.faults.scoreboard"),  # every fault on one rank, beside torch's FSDP1
    "fuzz": ("-m", "packages.flatparam-files.tests.fuzzing"),  # changed files for every reader of checkpoints
    "layouts": ("tools/layouts_page.py",),  # the tables of docs/layouts.md
    "load": ("-m", "integration_tests.load"),  # long, wide, large and disturbed jobs; half an hour
    "overlap": (  # what is hidden behind computing, on the simulated device
        *("-m", "integration_tests.simulated.overlap"),
        *("--pictures", "build/overlap", "--docs", "docs/pictures"),
    ),
    "planted": ("tools/planted_faults.py",),  # faults of one line in each layer: the tests find them; an hour
    "programs": ("-m", "integration_tests.programs.searching"),  # random programs, sharded and not
}


def integration(session: nox.Session, arguments: Sequence[str] = ()) -> None:
    """Several layers, or several ranks, at once: integration_tests on CPU (arguments go to pytest)."""
    installed(session).pytest("-m", "not gpu and not long", "integration_tests", *arguments)


def long(session: nox.Session, arguments: Sequence[str]) -> None:
    """The tests that take long: whole grids of settings, tools from end to end, every workload; not in `tests`."""
    # Optimizers of whole matrices are in `run -- matrix-optimizers`.
    others = ("-k", "not is_exact_in_every_setting and not are_exact_in_every_setting")
    installed(session).pytest("-m", "long and not gpu", *others, "docs", *TESTS, *arguments)


def browser(session: nox.Session, arguments: Sequence[str]) -> None:
    """The site in a real browser (`apt install chromium`): search, copying, narrow and dark pages."""
    installed(session).run(*SITE)
    own(session, "browser", "playwright").run("tools/browse_site.py")


def coverage(session: nox.Session, arguments: Sequence[str]) -> None:
    """Lines and branches of each package that the tests run, 95 % at least (`core comm`)."""
    chosen, extra = split_packages(arguments)
    data = ROOT / "build" / "coverage"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    # All packages are measured (pyproject.toml), as the tests of a layer run those beneath it, too.
    measured = ("--cov", "--cov-report=", "--cov-config=pyproject.toml", "-m", "not gpu")
    environment = installed(session)
    for name in chosen or PACKAGES:
        file = {"COVERAGE_FILE": str(data / name)}
        environment.pytest(*measured, f"packages/{name}/tests", *extra, env=file)
    environment.run("tools/covered.py", *(str(data / name) for name in chosen or PACKAGES))


def deepspeed(session: nox.Session, arguments: Sequence[str]) -> None:
    """The import of DeepSpeed's checkpoints against DeepSpeed itself (`-k x`)."""
    environment = own(session, "deepspeed", "deepspeed")
    quiet = ("-o", "faulthandler_timeout=0")
    environment.pytest(*quiet, "integration_tests/deepspeed", *arguments, workers="0")


def matrix_optimizers(session: nox.Session, arguments: Sequence[str]) -> None:
    """Optimizers of whole matrices in every setting, to the bit, and beside others (docs/guides/optimizers.md)."""
    environment = installed(session)
    where = ("packages/flatparam-optim/tests", "integration_tests/matrices")
    environment.pytest("-m", "long", *where, *arguments)
    environment.run("tools/loss_curves.py")
    own(session, "matrix-optimizers", "deepspeed").run("tools/matrix_optimizers.py")


def models(session: nox.Session, arguments: Sequence[str]) -> None:
    """Real models, of transformers and diffusers: docs/models.md (`-k Llama`)."""
    environment = own(session, "models", "transformers", "diffusers")
    results = str(ROOT / "build" / "models.xml")
    how = ("-o", "faulthandler_timeout=0", f"--junitxml={results}")
    # The tests of a model stay together: they share what torch has trained.
    tests = ("integration_tests/models/test_models.py", *arguments)
    environment.pytest(*how, *tests, spread="loadgroup", env=OFFLINE)
    if not arguments:
        environment.run("tools/models_page.py", results)


def plan(session: nox.Session, arguments: Sequence[str]) -> None:
    """Plan eleven transformers and run them: docs/plans.md; fails if a plan is wrong (`times`, `choice`)."""
    own(session, "plan", "transformers").run("tools/plans", *arguments)


def pretrained(session: nox.Session, arguments: Sequence[str]) -> None:
    """What it costs to begin with weights in files: the table of docs/guides/pretrained.md (`--ranks 4`: print)."""
    installed(session).run("tools/pretrained_costs.py", *(arguments or ["--page"]))


def publish(session: nox.Session, arguments: Sequence[str]) -> None:
    """Publishing: 100 kills on each side, 1,000 versions, the table of the guide (`loop --rounds 50`, `costs`)."""
    environment = installed(session)
    if arguments:
        environment.run("tools/publishing", *arguments)
        return
    kills = "packages/flatparam-publish/tests/test_kills.py"
    environment.pytest(kills, env={"FLATPARAM_PUBLISH_KILLS": "100"})
    environment.run("tools/publishing", "syncs", "--versions", "1000")
    environment.run("tools/publishing", "--size", "small", "--pretraining", "60", "costs", "--page")


LONGER: Mapping[str, Callable[[nox.Session, Sequence[str]], None]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        *(browser, coverage, deepspeed, integration, long),
        *(matrix_optimizers, models, plan, pretrained, publish),
    )
}
