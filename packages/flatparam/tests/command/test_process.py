"""The command `flatparam` as a process: what it answers before anything large is imported."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import flatparam


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    """What the console script `flatparam` does with these arguments."""
    script = "import sys\nfrom flatparam.command import main\nstatus = main()\n"
    names = "print(*sorted({name.partition('.')[0] for name in sys.modules if name.startswith('flatparam')}), file=sys.stderr)\n"
    return subprocess.run(
        [sys.executable, "-c", f"{script}{names}sys.exit(status)", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def test_version() -> None:
    """--version says which versions of flatparam and torch are installed."""
    pytest.importorskip("flatparam_files")
    done = start("--version")
    assert (done.stdout, done.stderr) == (
        f"flatparam {flatparam.__version__}, torch {metadata.version('torch')}\n",
        "",
    )


def test_help_does_not_import_torch() -> None:
    """What only reads the arguments comes at once: nothing that takes seconds is imported."""
    pytest.importorskip("flatparam_files")
    code = (
        "import sys\n"
        "from flatparam.command import main\n"
        "for arguments in (['--help'], ['ckpt', 'export', '--help'], ['trace', '--help'], ['--version']):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit:\n"
        "        pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'flatparam_core')))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_checkpoints_need_no_other_layer(command: str, tmp_path: Path) -> None:
    """`flatparam ckpt` imports the core and the add-on that it is of, and no other layer."""
    pytest.importorskip("flatparam_files")
    torch.save({"w": torch.zeros(2)}, tmp_path / "a.pt")
    done = start("ckpt", command, tmp_path / "a.pt")
    assert done.returncode == 0
    imported = set(done.stderr.split())
    assert imported >= {"flatparam", "flatparam_core", "flatparam_files"}
    assert not imported & {"flatparam_comm", "flatparam_runtime", "flatparam_state"}


def test_everything_exported_is_there() -> None:
    """Each name of the package is listed, its modules are found when they are asked for, and no other is."""
    assert {*flatparam.__all__} <= {*dir(flatparam)}
    assert flatparam.wrap.ModuleWrapPolicy is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = flatparam.no_such_thing
