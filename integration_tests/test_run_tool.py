"""tools/run.py sets up, hands over, and says in one sentence what is missing. No test here uses the network."""

import ast
import collections
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run
from house import ADDONS, LAYERS

OFFLINE = "WARNING: Retrying after NewConnectionError\nERROR: No matching distribution found for nox"
NO_SUCH_TORCH = "ERROR: No matching distribution found for torch==9.9"
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"

# Stands in for the environment's Python: pip fails where the test says so, and every call is written down.
FAKE_PYTHON = """#!{python}
import sys
with open({calls!r}, "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if {fail_when!r} and {fail_when!r} in " ".join(sys.argv[1:]):
    print({output!r})
    sys.exit(1)
"""

Usage = collections.namedtuple("Usage", "total used free")


class Machine:
    """A checkout in a temporary folder on a machine where nothing is wrong, until a test says what is."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        (root / "tools").mkdir()
        (root / "tools" / "constraints.txt").write_text("torch==9.9\nnox==1\n")
        monkeypatch.setattr(run, "ROOT", root)
        monkeypatch.setattr(run, "VENV", root / ".venv")
        monkeypatch.setattr(run, "CONSTRAINTS", root / "tools" / "constraints.txt")
        monkeypatch.delenv("FLATPARAM_TORCH", raising=False)
        self.free_disk(100e9)
        self.environment()

    def free_disk(self, free: float) -> None:
        self.monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(200e9, 0, free))

    def environment(self, fail_when: str = "", output: str = "") -> None:
        """Let `python -m venv` make an environment whose Python fails for a command that holds `fail_when`."""
        real_run = subprocess.run

        def make_venv_or_run(command, **options):  # type: ignore[no-untyped-def]
            if command[1:3] != ["-m", "venv"]:
                return real_run(command, **options)
            python = run.venv_python()
            python.parent.mkdir(parents=True)
            text = FAKE_PYTHON.format(
                python=sys.executable, calls=str(self.root / "calls"), fail_when=fail_when, output=output
            )
            python.write_text(text)
            python.chmod(0o755)
            return subprocess.CompletedProcess(command, 0, stdout="")

        self.monkeypatch.setattr(run.subprocess, "run", make_venv_or_run)

    def calls(self) -> list[str]:
        path = self.root / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    if os.name == "nt":
        pytest.skip("the stand-in for Python is a script with a shebang")
    return Machine(tmp_path, monkeypatch)


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what was said about the failure, which must be one line and no traceback."""
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    assert "Traceback" not in error
    return error


def test_it_parses_on_old_pythons() -> None:
    """Pythons that are too old get as far as being told so."""
    ast.parse(Path(run.__file__).read_text(encoding="utf-8"), feature_version=(3, 6))


def test_it_imports_the_standard_library_only() -> None:
    """A machine that has only Python can run it."""
    tree = ast.parse(Path(run.__file__).read_text(encoding="utf-8"))
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_it_sets_up_and_hands_over(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """From nothing: the tools, then torch, then nox with the arguments; every step has a numbered line."""
    assert run.main(["train", "--", "--steps", "5"]) == 0
    tools, torch, warm_up, nox = machine.calls()
    assert "pip install" in tools
    assert " nox " in tools
    assert torch.endswith(" torch==9.9")
    assert "import torch" in warm_up
    assert nox == f"-m nox --noxfile {machine.root / 'noxfile.py'} -s run -- train --steps 5"
    numbered = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert any("Making the environment" in line for line in numbered)
    assert any("torch==9.9" in line for line in numbered)


def test_a_second_call_goes_straight_on(machine: Machine) -> None:
    """An environment that is complete is used as it is, even when the disk is nearly full."""
    assert run.main(["env"]) == 0
    before = machine.calls()
    machine.free_disk(0.1e9)
    assert run.main(["test"]) == 0
    assert machine.calls()[len(before) :] == [f"-m nox --noxfile {machine.root / 'noxfile.py'} -s tests"]


def test_new_versions_are_installed_into_the_environment(machine: Machine) -> None:
    """When the locked versions change, the environment is brought up to date."""
    assert run.main(["env"]) == 0
    before = machine.calls()
    (machine.root / "tools" / "constraints.txt").write_text("torch==9.9\nnox==2\n")
    assert run.main(["env"]) == 0
    assert len(machine.calls()) == 2 * len(before)


def test_another_python_makes_another_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment made by another Python is made anew."""
    assert run.main(["env"]) == 0
    leftover = machine.root / ".venv" / "leftover"
    leftover.write_text("")
    monkeypatch.setattr(run.platform, "python_version", lambda: "3.99.0")
    assert run.main(["env"]) == 0
    assert not leftover.exists()


def test_an_interrupted_set_up_goes_on(machine: Machine) -> None:
    """A set-up that failed half-way is continued by the next call."""
    machine.environment(fail_when="torch==9.9", output=OFFLINE)
    assert run.main(["env"]) == run.FAILED
    run.venv_python().write_text(run.venv_python().read_text().replace("torch==9.9", "torch==0"))
    assert run.main(["env"]) == 0


def test_flatparam_torch_chooses_another_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable replaces the locked version of torch, and only that."""
    monkeypatch.setenv("FLATPARAM_TORCH", "2.11.0")
    assert run.main(["env"]) == 0
    assert any(call.endswith(" torch==2.11.0") for call in machine.calls())
    assert (machine.root / ".venv" / "constraints.txt").read_text() == "torch==2.11.0\nnox==1\n"


def test_flatparam_torch_must_be_a_version(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anything but a version is refused before anything is made."""
    monkeypatch.setenv("FLATPARAM_TORCH", "newest please")
    assert run.main(["env"]) == run.LACKING
    assert "must be a version such as 2.11.0" in complaint(capsys)


def test_the_exit_code_of_what_was_run(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is that of nox, and the last line says whether all is green."""
    machine.environment(fail_when="-m nox", output="")
    assert run.main(["test"]) == 1
    assert "Not green after" in capsys.readouterr().out.splitlines()[-1]


def test_arguments_of_test_go_to_nox(machine: Machine) -> None:
    """`test -- -s lint` runs nox with those arguments instead of every check."""
    assert run.main(["test", "--", "-s", "lint"]) == 0
    assert machine.calls()[-1].endswith("noxfile.py -s lint")


def test_packages_are_tested_from_their_sources(machine: Machine) -> None:
    """`test core comm` runs the tests of these packages by pytest, and hands the other arguments on to it."""
    for name in ("flatparam", "flatparam-core", "flatparam-comm"):
        (machine.root / "packages" / name / "tests").mkdir(parents=True)
    assert run.main(["test", "core", "flatparam-comm", "-k", "layout"]) == 0
    folders = [str(machine.root / "packages" / name / "tests") for name in ("flatparam-core", "flatparam-comm")]
    last = machine.calls()[-1]
    assert last.startswith("-m pytest -q -n ")
    assert last.endswith(" ".join([*folders, "-k", "layout"]))
    assert run.main(["test", "-s", "lint"]) == 0
    assert machine.calls()[-1].endswith("-s lint")


def test_python_too_old(machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Python 3.9 is told which one is needed."""
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    assert run.main(["test"]) == run.LACKING
    assert complaint(capsys).startswith("flatparam needs Python 3.10 or newer, and this is Python 3.9.18")
    assert machine.calls() == []


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_python_without_venv(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    """A Python whose distributor left out venv or ensurepip is told what to install."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == module else real(name, *a))
    assert run.main(["test"]) == run.LACKING
    assert f"lacks the standard module {module}" in complaint(capsys)


def test_disk_full(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Too little disk is said before anything is downloaded."""
    machine.free_disk(1.5e9)
    assert run.main(["test"]) == run.LACKING
    assert "only 1.5 GB are free" in complaint(capsys)
    assert machine.calls() == []


def test_an_environment_of_somebody_else(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """A `.venv` that this script did not make is never touched."""
    (machine.root / ".venv").mkdir()
    (machine.root / ".venv" / "precious").write_text("")
    assert run.main(["test"]) == run.LACKING
    assert "this script did not make it" in complaint(capsys)
    assert (machine.root / ".venv" / "precious").exists()


@pytest.mark.parametrize(
    ("fail_when", "output", "sentence"),
    [
        ("pip install", OFFLINE, "pip cannot reach its package index to install the tools"),
        ("torch==9.9", OFFLINE, "pip cannot reach its package index to install torch==9.9"),
        ("torch==9.9", NO_SUCH_TORCH, "torch==9.9 could not be installed for Python"),
        ("torch==9.9", FULL, "became full while installing torch==9.9"),
        ("pip install", "ERROR: something else", "the tools could not be installed for Python"),
        (
            "import torch",
            "ImportError: libgomp.so.1 is missing",
            "torch==9.9 was installed, but importing it fails",
        ),
    ],
)
def test_installations_that_fail(
    machine: Machine, capsys: pytest.CaptureFixture[str], fail_when: str, output: str, sentence: str
) -> None:
    """The network, the disk, a torch that does not exist here and one that does not work are told apart."""
    machine.environment(fail_when=fail_when, output=output)
    assert run.main(["test"]) == run.FAILED
    assert sentence in complaint(capsys)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command it explains itself."""
    assert run.main(["--help"]) == 0
    assert run.main([]) == run.LACKING
    assert "tools/run.py train" in capsys.readouterr().out


def installed(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """Return what the script gives pip for these arguments."""
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command, env=None: calls.append(command) or 0)
    assert run.main(["install", *arguments]) == 0
    builder, (python, *rest) = calls
    assert (builder[0], builder[-1]) == (python, "hatchling>=1.27")
    assert rest[:4] == ["-m", "pip", "install", "--no-build-isolation"]
    return [python, *(each.replace(str(run.ROOT / "packages") + "/", "") for each in rest[4:])]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), {*LAYERS, *ADDONS}),
        (("core",), {"flatparam-core"}),
        (
            ("flatparam-files", "onehost"),
            {"flatparam-files", "flatparam-core", "flatparam-onehost", "flatparam-comm"},
        ),
        (("simdev[worlds]",), {"flatparam-simdev[worlds]", "flatparam-comm", "flatparam-core"}),
    ],
)
def test_install_names_all_that_is_needed(
    names: tuple[str, ...], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call of pip, which finds none of them on an index, after one for what builds all; the rest goes to pip."""
    python, *found = installed(monkeypatch, *names, "--", "--no-deps")
    assert python == sys.executable
    assert found[-1] == "--no-deps"
    assert sorted(found[:-1]) == sorted(expected)


def test_install_into_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python of the environment installs; without one, and for an unknown package, a sentence says what to do."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("")
    assert installed(monkeypatch, "--into", str(tmp_path), "core")[0] == str(tmp_path / "bin" / "python")
    for arguments, sentence in (
        (["--into", str(tmp_path / "none")], f"-m venv {tmp_path}/none"),
        (["corre"], "There is no package 'flatparam-corre' here; there are flatparam, flatparam-"),
        (["--into"], "--into takes a virtual environment"),
        (["--into", str(tmp_path), "--wheels"], "--wheels takes a folder"),
    ):
        assert run.main(["install", *arguments]) == run.LACKING
        assert sentence in capsys.readouterr().err


def test_wheels_for_a_machine_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--wheels` pip collects the wheels of ours and of what they need, and installs nothing."""
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command, env=None: calls.append(command) or 0)
    assert run.main(["install", "--wheels", str(tmp_path), "core", "--", "--no-deps"]) == 0
    core = str(run.ROOT / "packages" / "flatparam-core")
    wheels = [sys.executable, "-m", "pip", "wheel", "--wheel-dir", str(tmp_path), "--no-build-isolation", core]
    assert calls[1:] == [[*wheels, "--no-deps"]]


def test_what_builds_the_packages_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then nothing is installed, and a sentence says why."""
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command, env=None: calls.append(command) or 1)
    assert run.main(["install", "core"]) == run.FAILED
    assert len(calls) == 1
    assert "pip could not install hatchling" in capsys.readouterr().err


def test_no_page_installs_from_an_index() -> None:
    """Nothing of ours is on one: a page that says `pip install flatparam` would send a reader to an error."""
    pages = [
        *(run.ROOT / "docs").rglob("*.md"),
        run.ROOT / "README.md",
        *run.ROOT.glob("packages/*/README.md"),
    ]
    command = re.compile(r"^\$ .*pip install\b(?!.* --no-index).*[ \"']flatparam", re.MULTILINE)
    assert [page.relative_to(run.ROOT) for page in pages if command.search(page.read_text("utf-8"))] == []
