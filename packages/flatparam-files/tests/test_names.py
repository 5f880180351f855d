"""The public names, which are imported when the first of them is asked for."""

import subprocess
import sys

import pytest

import flatparam_files
from flatparam_files import command


def test_every_name_is_there() -> None:
    """Each public name is listed and found, and no other is; so are those that commands share."""
    for module in (flatparam_files, command):
        assert {*module.__all__} <= {*dir(module)}
        assert all(getattr(module, name) is not None for name in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = flatparam_files.no_such_thing


@pytest.mark.parametrize("name", ["Box", "open_checkpoint", "CheckpointError", "open_source", "without_collector"])
def test_one_name_brings_all(name: str) -> None:
    """Whichever public name comes first, the others are there too, and importing the package alone imports no torch."""
    code = (
        "import sys, flatparam_files\n"
        "assert 'torch' not in sys.modules\n"
        f"flatparam_files.{name}\n"
        "assert set(flatparam_files.__all__) <= set(vars(flatparam_files))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
