"""`flatparam --print-completion`."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flatparam_files")


def written(shell: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Start the command in a process of its own."""
    command = [sys.executable, *options, "-m", "flatparam", "--print-completion", shell]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_bash_completes(tmp_path: Path) -> None:
    """Bash completes commands, their commands and options, and the paths of files."""
    pytest.importorskip("shtab")
    done = written("bash")
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "completion").write_text(done.stdout)
    (tmp_path / "weights.pt").touch()
    asked = (
        "source completion; shopt -s progcomp\n"
        'try() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); '
        '_shtab_flatparam "${@:$#}" "${@: -2:1}"; echo "${COMPREPLY[@]}"; }\n'
        "try flatparam ck\ntry flatparam ckpt in\ntry flatparam ckpt verify --no\ntry flatparam ckpt verify we\n"
    )
    found = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split("\n")[:4] == ["ckpt", "inspect", "--no-progress", "weights.pt"]


def test_an_unknown_shell_and_no_shtab(tmp_path: Path) -> None:
    """A shell that it does not know is refused, and without shtab it says what to install; both with the status 2."""
    assert "invalid choice: 'fish'" in written("fish").stderr
    code = (
        "import sys; sys.modules['shtab'] = None\n"
        "from flatparam.command import main\n"
        "main(['--print-completion', 'bash'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install shtab" in done.stderr
