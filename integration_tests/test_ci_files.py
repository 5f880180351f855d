"""The workflow and the hooks of pre-commit are YAML, and what they call exists."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from matrix.rows import HOME_PYTHON, PYTHONS, TORCHES

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
LOCKED = (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8")


def test_what_is_called_exists(nox_sessions: set[str]) -> None:
    """Every session that the workflow and the hooks name is one of the noxfile."""
    named = {*sessions_of_workflow(), *sessions_of_hooks()}
    assert {"tests", "coverage", "oldest", "tests(core)", "lint", "types"} <= named
    assert named <= nox_sessions


def test_every_version_is_in_the_workflow(nox_sessions: set[str]) -> None:
    """Each torch and each Python of the table, the oldest versions and each layer run in CI."""
    torches = {f"tests-torch({torch.rpartition('.')[0]})" for torch in TORCHES}
    pythons = {f"tests-python-{python}" for python in PYTHONS if python != HOME_PYTHON}
    layers = {name for name in nox_sessions if re.fullmatch(r"tests\(\w+\)", name)}
    assert len(layers) == len(list((ROOT / "packages").iterdir()))
    assert torches | pythons | layers | {"oldest", "tests"} <= set(sessions_of_workflow())


def test_a_job_has_the_python_of_its_session() -> None:
    """The interpreter that a job sets up is the one that its session asks for."""
    for row in WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["include"]:
        wanted = re.search(r"python-(.*)", row["session"])
        default = PYTHONS[0] if row["session"] == "oldest" else HOME_PYTHON
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


@pytest.fixture(scope="module")
def nox_sessions() -> set[str]:
    """The names under which nox finds its sessions."""
    command = [sys.executable, "-m", "nox", "--list-sessions", "-f", str(ROOT / "noxfile.py")]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"(?m)^[*-] (\S+)", listed))


def sessions_of_workflow() -> Iterator[str]:
    """What the jobs' steps call, with the values of their matrices put in."""
    for job in WORKFLOW["jobs"].values():
        commands = " ".join(step.get("run", "") for step in job["steps"])
        for session in re.findall(r'-s ("[^"]+"|\S+)', commands):
            name = session.strip('"')
            yield from values_of(job["strategy"]["matrix"]) if name == "${{ matrix.session }}" else [name]


def values_of(matrix: dict[str, Any]) -> list[str]:
    """The sessions of a job's matrix."""
    return [*matrix.get("session", ()), *(row["session"] for row in matrix.get("include", ()))]


def sessions_of_hooks() -> Iterator[str]:
    """What the hooks call."""
    for repository in HOOKS["repos"]:
        for hook in repository["hooks"]:
            yield hook["entry"].removeprefix("nox -s ")
