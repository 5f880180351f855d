"""The names of this add-on that `flatparam` and its classes promise, and modules under the names that they had there."""

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

from each_row import each_row
from torch import nn

import flatparam
import flatparam_clients
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import addons
from flatparam.algorithms._comm_hooks import default_hooks
from flatparam_clients import flat_parameter_names, wrapper_names
from flatparam_comm import SingleCollectives
from flatparam_comm.testing import PATIENCE
from flatparam_core import FlatParameter

FROZEN = Path(__file__).parents[2] / "flatparam" / "tests" / "frozen_api.json"
ELSEWHERE = [
    ("fsdp.sharded_grad_scaler", "sharded_grad_scaler", "ShardedGradScaler"),
    ("fsdp._debug_utils", "_debug_utils", "SimpleProfiler"),
    ("fsdp._trace_utils", "_trace_utils", "TracingConfig"),
    ("algorithms._comm_hooks", "algorithms._comm_hooks", "LOW_PRECISION_HOOKS"),
    ("algorithms._comm_hooks", "algorithms._comm_hooks", "default_hooks"),
]
"""Where a name is in `torch.distributed`, where it is in `flatparam`, and the name."""
HEAD = """
import sys, warnings
warnings.simplefilter("ignore")
import flatparam
from torch import nn
from flatparam_comm import SingleCollectives
"""


def said(program: str) -> str:
    """What a fresh process prints."""
    command = [sys.executable, "-c", HEAD + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@each_row("name", flatparam_clients.__all__)
def test_promised_names_are_this_packages(name: str) -> None:
    """Each is found where it was, is the same object as here, and comes without a warning."""
    module = flatparam if hasattr(flatparam, name) else default_hooks
    if name == "LOW_PRECISION_HOOKS":
        module = importlib.import_module("flatparam.algorithms._comm_hooks")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(module, name) is getattr(flatparam_clients, name)
    assert name in module.__all__


@each_row(("theirs", "ours", "name"), ELSEWHERE)
def test_names_elsewhere(theirs: str, ours: str, name: str) -> None:
    """S-003: what torch has beside the wrapper is in a module of the same name here, and is not torch's."""
    found = getattr(importlib.import_module(f"flatparam.{ours}"), name)
    assert found is not getattr(importlib.import_module(f"torch.distributed.{theirs}"), name)


@each_row("old", [*addons._MOVED, "flatparam.private._common_utils"])
def test_modules_under_their_old_names(old: str) -> None:
    """A module that has moved is found under its old name, however it is imported: the very same module."""
    new = importlib.import_module(addons._new_name(old) or "")
    assert importlib.import_module(old) is new
    package, _, name = old.rpartition(".")
    assert getattr(importlib.import_module(package), name) is new
    assert new.__name__.startswith("flatparam_clients.")
    assert new.__spec__ is not None
    assert new.__spec__.name == new.__name__


def test_the_first_import_of_a_module_that_has_moved() -> None:
    """In a fresh process, too, before anything else of the package is there."""
    program = (
        "import flatparam.private._runtime_utils as a, flatparam._debug_utils\n"
        "from flatparam.compat.installing import install\n"
        "from flatparam import _trace_utils\n"
        "import flatparam_clients.private._runtime_utils as b\n"
        "print(a is b, install is flatparam.install, _trace_utils.__name__)\n"
    )
    assert said(program) == "True True flatparam_clients.private._trace_utils\n"


@each_row(("owner", "home"), [(FSDP, wrapper_names), (FlatParameter, flat_parameter_names)])
def test_the_tables_of_promised_attributes(owner: type, home: object) -> None:
    """The wrapper's table names all attributes that are here, and no others; each becomes the one that is here."""
    names = addons._OF_WRAPPERS if owner is FSDP else addons._OF_FLAT_PARAMETERS
    assert sorted(names.split()) == sorted(home.NAMES)  # type: ignore[attr-defined]
    addons.fulfil(owner)
    for name, value in home.NAMES.items():  # type: ignore[attr-defined]
        assert vars(owner)[name] is value


FIRST_USES = {
    "model._handle.flat_param is model._flat_param": "True",
    "model._flat_param._param_infos[0].param_name": "weight",
    "hasattr(model._flat_param, '_mp_shard')": "False",
    "hasattr(model._unit.handles[0].flat_param, '_params')": "True",
    "flatparam.FullyShardedDataParallel.full_optim_state_dict.__name__": "full_optim_state_dict",
    "hasattr(type('Mine', (flatparam.FullyShardedDataParallel,), {}), '_all_handles')": "True",
    "setattr(model, '_sync_gradients', False) or model._unit.reducer.synchronises": "False",
    "setattr(model, '_assert_state', 3) or model._assert_state": "3",
    "model.training_state.name": "IDLE",
}


def test_the_first_use_of_a_promised_attribute() -> None:
    """Whatever a program does with it first, in a process that has only made a wrapper, it is FSDP1's.

    Each process is a fork of one that has made the wrapper.
    """
    program = (
        "import os\n"
        "model = flatparam.FullyShardedDataParallel(nn.Linear(2, 2), SingleCollectives())\n"
        f"for use in {list(FIRST_USES)}:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        before = 'flatparam_clients.wrapper_names' in sys.modules\n"
        "        print(use, '->', before, eval(use), flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, use\n"
    )
    assert said(program).splitlines() == [f"{use} -> False {value}" for use, value in FIRST_USES.items()]


def test_an_attribute_that_a_subclass_has_itself() -> None:
    """A subclass that defines a name keeps its own, and reaches ours by `super()`."""

    class Mine(FSDP):
        @property
        def _has_params(self) -> str:
            return f"mine, {super()._has_params}"

    model = Mine(nn.Linear(2, 2), SingleCollectives())
    assert model._has_params == "mine, True"


def test_the_frozen_names_are_those_of_the_wrapper() -> None:
    """The frozen list has the names that other programs call as names of `flatparam`, where they always were."""
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    assert {"install", "uninstall", "Installation"} <= set(frozen["flatparam"])
    assert "rekey_optim_state_dict" in frozen["flatparam"]["FullyShardedDataParallel"]
    assert set(frozen["flatparam.algorithms._comm_hooks.default_hooks"]) == set(default_hooks.__all__)


def test_a_program_runs_without_the_files(tmp_path: Path) -> None:
    """`flatparam run` needs no `flatparam_files`, which the other commands share."""
    program = tmp_path / "program.py"
    program.write_text("print('runs')\n")
    run = f"from flatparam.command import main\nprint(main(['run', {str(program)!r}]))\n"
    assert said(f"sys.modules['flatparam_files'] = None\n{run}") == "runs\n0\n"
