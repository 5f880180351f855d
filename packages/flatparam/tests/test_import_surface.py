"""What can be imported, and what importing does."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from each_row import each_row

import flatparam
import flatparam.wrap
from flatparam_comm.testing import PATIENCE

NAMES = [
    "FullyShardedDataParallel",
    "ShardingStrategy",
    "BackwardPrefetch",
    "MixedPrecision",
    "CPUOffload",
    "StateDictType",
    "StateDictConfig",
    "FullStateDictConfig",
    "LocalStateDictConfig",
    "ShardedStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "LocalOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "StateDictSettings",
    "OptimStateKeyType",
    "FlatParameter",
]

WRAP_NAMES = [
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "enable_wrap",
    "wrap",
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_or_policy",
    "_module_wrap_policy",
    "_wrap_module_cls_individually",
    "_recursive_wrap",
    "_Policy",
    "_ConfigAutoWrap",
]


PROGRAM = """
import json, sys, warnings, torch
modules, seed = set(sys.modules), torch.get_rng_state()
warnings.simplefilter("error")
warnings.filterwarnings("ignore", "the world has one rank")
import flatparam, flatparam.wrap, flatparam.sharded_grad_scaler, flatparam.algorithms._comm_hooks
facts = {"group": torch.distributed.is_initialized(), "seed": torch.equal(seed, torch.get_rng_state())}
from flatparam_comm import SingleCollectives
module = torch.nn.Sequential(torch.nn.Linear(2, 2))
policy = flatparam.wrap.ModuleWrapPolicy({torch.nn.Linear})
model = flatparam.FullyShardedDataParallel(module, SingleCollectives(), auto_wrap_policy=policy)
model(torch.ones(1, 2)).sum().backward()
model.load_state_dict(model.state_dict())
facts["fsdp"] = sorted(name for name in set(sys.modules) - modules if name.startswith("torch.distributed.fsdp"))
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """What a fresh interpreter, in which every warning is an error, says after importing, wrapping and training."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@each_row("name", NAMES)
def test_the_names_of_torchs_package(name: str) -> None:
    """S-001: each name of `torch.distributed.fsdp` is public here, for something of the same name."""
    assert name in flatparam.__all__
    ours, theirs = getattr(flatparam, name), getattr(torch.distributed.fsdp, name)
    assert ours.__name__ == theirs.__name__
    assert ours is not theirs


@each_row("name", WRAP_NAMES)
def test_the_names_of_torchs_wrap_module(name: str) -> None:
    """S-002: each name of `torch.distributed.fsdp.wrap` that policies are built from is in `flatparam.wrap`."""
    assert hasattr(torch.distributed.fsdp.wrap, name)
    assert hasattr(flatparam.wrap, name)
    assert name.startswith("_") or name in flatparam.wrap.__all__


def test_all_public_names_of_torchs_wrap_module() -> None:
    """S-002: whatever `torch.distributed.fsdp.wrap` has in `__all__`, `flatparam.wrap` has too."""
    assert set(torch.distributed.fsdp.wrap.__all__) <= set(flatparam.wrap.__all__)


def test_every_public_name_exists() -> None:
    """`__all__` lists nothing that is neither there nor in an add-on that the error says to install."""
    for name in flatparam.__all__:
        try:
            assert hasattr(flatparam, name), name
        except ModuleNotFoundError as error:
            assert f"pip install {str(error.name).replace('_', '-')} (flatparam[all]" in str(error)
    assert len(set(flatparam.__all__)) == len(flatparam.__all__)


def test_importing_and_using_warns_of_nothing(fresh: dict[str, Any]) -> None:
    """The package imports, wraps, trains, saves and loads with every warning made an error."""
    assert fresh


def test_torchs_fsdp_is_left_alone(fresh: dict[str, Any]) -> None:
    """Neither importing nor wrapping nor training loads any part of `torch.distributed.fsdp`."""
    assert fresh["fsdp"] == []


def test_importing_changes_nothing_around_it(fresh: dict[str, Any]) -> None:
    """No process group is started and no random number is drawn."""
    assert (fresh["group"], fresh["seed"]) == (False, True)
