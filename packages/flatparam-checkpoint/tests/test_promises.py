"""The names of this add-on and of the files that `flatparam_state` and `flatparam` promise."""

import json
import pickle
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Final

import pytest
from each_row import each_row

import flatparam_checkpoint
import flatparam_files
import flatparam_state
import flatparam_state.checkpoint
from flatparam_comm.testing import PATIENCE

FROZEN: Final = Path(__file__).parents[2] / "flatparam" / "tests" / "frozen_api.json"
OF_THE_WRAPPER: Final = ("PretrainedReport", "load_pretrained")
"""The names that were the wrapper's, and not the state layer's."""


def promised(module: str) -> set[str]:
    return {*json.loads(FROZEN.read_text(encoding="utf-8"))[module]}


@each_row("name", sorted({*flatparam_checkpoint.__all__}.difference(OF_THE_WRAPPER)))
def test_promised_names_are_this_packages(name: str) -> None:
    """Each is listed where it is promised, is the same object as here, and comes without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(flatparam_state, name) is getattr(flatparam_checkpoint, name)
    assert name in flatparam_state.__all__
    assert name in promised("flatparam_state")


def test_names_of_the_wrapper_are_still_promised() -> None:
    """`flatparam` has those that it had."""
    assert {*OF_THE_WRAPPER, "Checkpointer", "Loaded", "CheckpointError"} <= promised("flatparam")


@each_row("name", flatparam_state.checkpoint.__all__)
def test_the_older_module_of_checkpoints(name: str) -> None:
    """`flatparam_state.checkpoint`, which pages named, has the same objects."""
    home = flatparam_checkpoint if name in flatparam_checkpoint.__all__ else flatparam_files
    assert getattr(flatparam_state.checkpoint, name) is getattr(home, name)


def test_there_is_one_class_of_errors() -> None:
    """A `CheckpointError` by any of its names is caught by every other one, also after it was sent to a process."""
    kinds = {
        flatparam_files.CheckpointError,
        flatparam_state.CheckpointError,
        flatparam_state.checkpoint.CheckpointError,
    }
    (kind,) = kinds
    again = pickle.loads(pickle.dumps(kind("lost", rank=3, hint="look again")))
    assert (type(again), again.rank, str(again)) == (kind, 3, "lost; look again")


def test_a_name_is_taken_from_here_when_it_is_asked_for() -> None:
    """The state layer comes without this package and without the files, which the first name brings along."""
    program = (
        "import sys, flatparam_state.checkpoint\n"
        "print([name for name in ('flatparam_checkpoint', 'flatparam_files') if name in sys.modules])\n"
        "from flatparam_state import Checkpointer\n"
        "print(Checkpointer.__module__, vars(flatparam_state)['Checkpointer'] is Checkpointer)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.stdout, done.stderr) == ("[]\nflatparam_checkpoint.checkpointer True\n", "")


@each_row("name", ["pretrained", "checkpoint.save", "checkpoint.load"])
def test_no_layer_has_a_module_under_the_old_name(name: str) -> None:
    """No page named these modules; whoever imports one is told that it is gone."""
    with pytest.raises(ModuleNotFoundError, match=name):
        import_module(f"flatparam_state.{name}")
