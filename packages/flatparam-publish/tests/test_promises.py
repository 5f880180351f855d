"""The names of this add-on that `flatparam_state` and `flatparam` promise."""

import json
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from each_row import each_row

import flatparam_publish
import flatparam_state
from flatparam_comm.testing import PATIENCE

FROZEN = Path(__file__).parents[2] / "flatparam" / "tests" / "frozen_api.json"


@each_row("name", flatparam_publish.__all__)
def test_promised_names_are_this_packages(name: str) -> None:
    """Each is listed where it is promised, is the same object as here, and comes without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(flatparam_state, name) is getattr(flatparam_publish, name)
    assert name in flatparam_state.__all__
    assert name in json.loads(FROZEN.read_text(encoding="utf-8"))["flatparam_state"]


def test_a_name_is_taken_from_here_when_it_is_asked_for() -> None:
    """The state layer, with checkpoints, comes without this package, which its first name brings along."""
    program = (
        "import sys, flatparam_state.checkpoint\n"
        "before = 'flatparam_publish' in sys.modules\n"
        "from flatparam_state import Receiver\n"
        "print(before, Receiver.__module__, vars(flatparam_state)['Receiver'] is Receiver)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.stdout, done.stderr) == ("False flatparam_publish.receiver True\n", "")


def test_no_layer_has_a_module_under_the_old_name() -> None:
    """No page named these modules; whoever imports one is told that it is gone."""
    for name in ("publishing", "receiving"):
        with pytest.raises(ModuleNotFoundError, match=name):
            import_module(f"flatparam_state.{name}")
