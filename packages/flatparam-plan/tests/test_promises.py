"""The names of this add-on that `flatparam` promises, and the modules under their old names."""

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

from each_row import each_row

import flatparam_plan
from flatparam_comm.testing import PATIENCE

FROZEN = Path(__file__).parents[2] / "flatparam" / "tests" / "frozen_api.json"
PROMISED = [
    ("flatparam", "Plan"),
    ("flatparam", "PlanError"),
    ("flatparam", "plan"),
    ("flatparam.wrap", "PlannedPolicy"),
    ("flatparam.wrap", "planned"),
]


@each_row(("module", "name"), PROMISED)
def test_promised_names_are_this_packages(module: str, name: str) -> None:
    """Each is listed where it is promised, is the same object as here, and comes without a warning."""
    promising = importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(promising, name) is getattr(flatparam_plan, name)
    assert name in promising.__all__
    assert name in dir(flatparam_plan)
    assert name in json.loads(FROZEN.read_text(encoding="utf-8"))[module]


def test_every_public_name_exists() -> None:
    """`__all__` has no name that is not there."""
    assert [name for name in flatparam_plan.__all__ if not hasattr(flatparam_plan, name)] == []
    assert not hasattr(flatparam_plan, "nothing")


OLD = """
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    from flatparam.planning.measuring import measure
    from flatparam.planning.training import Setup, TrainingProgram, train
    import flatparam.planning.training
import flatparam_plan
assert (measure, Setup, TrainingProgram, train) == (
    flatparam_plan.measure, flatparam_plan.Setup, flatparam_plan.TrainingProgram, flatparam_plan.train
)
assert flatparam.planning.training.train is train
for each in told:
    print(each.category.__name__, each.filename, each.message)
"""


def test_modules_under_their_old_names() -> None:
    """They are the same objects, and the first import says where they went, to the line that imports."""
    done = subprocess.run([sys.executable, "-c", OLD], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    moved = "flatparam.planning has moved: import its names from flatparam_plan"
    assert done.stdout == f"DeprecationWarning <string> {moved}\n"
