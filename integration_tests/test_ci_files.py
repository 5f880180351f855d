"""The workflow and the hooks of pre-commit are YAML, and what they call exists."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from house import PACKAGES
from matrix.rows import HOME_PYTHON, PYTHONS, TORCHES

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
LOCKED = (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8")


def test_what_is_called_exists(nox_sessions: set[str], programs: set[str]) -> None:
    """Every session that the workflow, the hooks and the documentation name is one of the noxfile, and so each program."""
    named = {*sessions_of_workflow(), *sessions_of_hooks(), *sessions_of_pages()}
    assert {"tests", "run -- coverage", "versions -- lowest", "alone -- core", "lint", "types"} <= named
    for call in named:
        session, _, arguments = call.partition(" -- ")
        assert session in nox_sessions, call
        assert session != "run" or not arguments or arguments.split()[0] in programs, call


def test_the_list_of_sessions_fits_on_a_screen(nox_sessions: set[str], programs: set[str]) -> None:
    """`nox -l` has at most fifteen lines; the others are programs of `run`, whose names `nox -s run` says."""
    assert len(nox_sessions) <= 15
    assert {"train", "coverage", "overlap", "fuzz"} <= programs


def test_every_version_is_in_the_workflow() -> None:
    """Each torch and each Python of the table, the lowest versions and each package run in CI."""
    torches = {f"versions -- torch-{torch.rpartition('.')[0]}" for torch in TORCHES}
    pythons = {f"versions -- python-{python}" for python in PYTHONS if python != HOME_PYTHON}
    packages = {f"alone -- {name.removeprefix('flatparam-')}" for name in PACKAGES}
    assert torches | pythons | packages | {"versions -- lowest", "tests"} <= set(sessions_of_workflow())


def test_a_job_has_the_python_of_its_session() -> None:
    """The interpreter that a job sets up is the one that its session asks for."""
    for row in WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["include"]:
        wanted = re.search(r"python-(.*)", row["session"])
        default = PYTHONS[0] if row["session"] == "versions -- lowest" else HOME_PYTHON
        assert row["python"] == (wanted[1] if wanted else default), row


def test_hooks_have_the_locked_nox() -> None:
    """A hook runs the version of nox that everything else runs."""
    for repository in HOOKS["repos"]:
        for hook in repository["hooks"]:
            for requirement in hook["additional_dependencies"]:
                assert requirement in LOCKED.splitlines()


def test_the_command_of_ci_is_the_readmes() -> None:
    """`tests` stays the one command: .ci/run, the workflow and the README call the same script."""
    assert "tools/run.py test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "tools/run.py test" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "tools/run.py test" in str(WORKFLOW["jobs"]["tests"]["steps"])


def nox(*arguments: str) -> str:
    """What nox prints."""
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def nox_sessions() -> set[str]:
    """The names under which nox finds its sessions."""
    return set(re.findall(r"(?m)^[*-] (\S+)", nox("--list-sessions")))


@pytest.fixture(scope="module")
def programs() -> set[str]:
    """The names that `nox -s run` says it knows."""
    return set(re.findall(r"(?m)^  (\S+)", nox("--no-color", "-s", "run")))


def sessions_of_workflow() -> Iterator[str]:
    """What the jobs' steps call, with the values of their matrices put in."""
    for job in WORKFLOW["jobs"].values():
        commands = " ".join(step.get("run", "") for step in job["steps"])
        for name in re.findall(r" -s (\$\{\{ matrix.session \}\}|.+)", commands):
            yield from values_of(job["strategy"]["matrix"]) if "matrix.session" in name else [name]


def sessions_of_pages() -> Iterator[str]:
    """What the documentation, the tests and the tools say that nox runs; each of several sessions by itself."""
    folders = ("docs", "integration_tests", "tools", *ROOT.glob("packages/*/tests"))
    pages = [path for folder in folders for kind in ("*.md", "*.py") for path in (ROOT / folder).rglob(kind)]
    for path in [*pages, *ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md")]:
        for call in re.findall(r"nox -s ([a-z][a-z -]*[a-z])", path.read_text(encoding="utf-8")):
            names, dashes, arguments = call.partition(" -- ")
            yield from (f"{name}{dashes}{arguments}" for name in names.split())


def values_of(matrix: dict[str, Any]) -> list[str]:
    """The sessions of a job's matrix."""
    return [*matrix.get("session", ()), *(row["session"] for row in matrix.get("include", ()))]


def sessions_of_hooks() -> Iterator[str]:
    """What the hooks call."""
    for repository in HOOKS["repos"]:
        for hook in repository["hooks"]:
            yield hook["entry"].removeprefix("nox -s ")
