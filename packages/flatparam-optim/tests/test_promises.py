"""The names of this add-on that `flatparam_runtime` promises."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import flatparam_optim
import flatparam_runtime
from flatparam_comm.testing import PATIENCE

FROZEN = Path(__file__).parents[2] / "flatparam" / "tests" / "frozen_api.json"


@pytest.mark.parametrize("name", flatparam_runtime._MOVED["flatparam_optim"].split())
def test_promised_names_are_this_packages(name: str) -> None:
    """Each is listed where it is promised, is the same object as here, and comes without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(flatparam_runtime, name) is getattr(flatparam_optim, name)
    assert name in flatparam_runtime.__all__
    assert name in json.loads(FROZEN.read_text(encoding="utf-8"))["flatparam_runtime"]


def test_a_name_is_taken_from_here_when_it_is_asked_for() -> None:
    """The runtime comes without this package, which its first name brings along."""
    program = (
        "import sys, flatparam_runtime\n"
        "before = 'flatparam_optim' in sys.modules\n"
        "from flatparam_runtime import Routes\n"
        "print(before, Routes.__module__, vars(flatparam_runtime)['Routes'] is Routes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.stdout, done.stderr) == ("False flatparam_optim.matrices.routes True\n", "")
