"""Checkpoints that torch itself writes, on two gloo processes: by its FSDP1 in every form, and by its FSDP2."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from flatparam_comm import Collectives
from integration_tests.state.comparing import assert_model, assert_optimizer
from integration_tests.state.sample import AFTER, OF_RANK, UNITS, adamw, build, train, trained

CPU = torch.device("cpu")

#: torch's own settings by the name of the form; offloading is off because on the CPU it crashes or saves wrong values.
FORMS: dict[str, tuple[Any, Any, Any]] = {
    "full": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(offload_to_cpu=False),
    ),
    "sharded": (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    ),
    "dtensor": (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(_use_dtensor=True),
        ShardedOptimStateDictConfig(offload_to_cpu=False, _use_dtensor=True),
    ),
    "local": (
        StateDictType.LOCAL_STATE_DICT,
        LocalStateDictConfig(),
        LocalOptimStateDictConfig(),
    ),
}


def mesh_of_world() -> DeviceMesh:
    """One dimension over all ranks."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def fsdp1(module: nn.Module, use_orig_params: bool, form: str = "full", **arguments: Any) -> Any:
    """torch's wrapper on the CPU, around the units of the sample and the root, set to this form of state."""
    if form == "dtensor":
        arguments.setdefault("device_mesh", mesh_of_world())
    model = FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy(set(UNITS)),
        use_orig_params=use_orig_params,
        device_id=CPU,
        **arguments,
    )
    FullyShardedDataParallel.set_state_dict_type(model, *settings_of(form))
    return model


def settings_of(form: str) -> tuple[Any, Any, Any]:
    """torch's settings, made anew: torch changes those that it is given."""
    return copy.deepcopy(FORMS[form])


def fsdp2(module: nn.Module) -> Any:
    """The same units, sharded by torch's FSDP2."""
    mesh = mesh_of_world()
    for unit in [m for m in module.modules() if isinstance(m, UNITS)]:
        fully_shard(unit, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


@attrs.frozen
class Files:
    """Where the checkpoints of these tests are."""

    root: Path

    def torchs(self, kind: str, use_orig_params: bool = True) -> Path:
        """What torch wrote on 2 ranks: a distributed checkpoint ("sharded", "dtensor", "fsdp2"), or .pt files."""
        return self._path("torch", kind, use_orig_params)

    def ours(self, writer: str, kind: str) -> Path:
        """What ours wrote; `writer` says on how many ranks and in which exposure, as in "2-flat"."""
        size, exposure = writer.split("-")
        return self._path(f"ours-{size}", kind, exposure == "originals")

    def _path(self, writer: str, kind: str, use_orig_params: bool) -> Path:
        path = self.root / writer / f"{kind}-{'originals' if use_orig_params else 'flat'}"
        path.mkdir(parents=True, exist_ok=True)
        return path


def write_torchs(group: Collectives, files: Files) -> None:
    """Have torch train and write each kind of checkpoint; and check that what it holds is what it should be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so at every turn
        for use_orig_params in (False, True):
            for form in FORMS:
                _write_fsdp1(group, form, use_orig_params, files.torchs(form, use_orig_params))
        _write_fsdp2(group, files.torchs("fsdp2"))


def _write_fsdp1(group: Collectives, form: str, use_orig_params: bool, path: Path) -> None:
    mixed = use_orig_params
    model = fsdp1(build(mixed), use_orig_params, form)
    optimizer = adamw(model.parameters())
    train(model, optimizer, group.rank)
    state = model.state_dict()
    if form == "local":
        torch.save({"model": state, "optim": optimizer.state_dict()}, path / f"rank{group.rank}.pt")
    else:
        checkpoint = {"model": state, "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        if form != "full":
            dcp.save(checkpoint, checkpoint_id=path)
        else:
            expected = trained(mixed)
            assert_model(state, expected.model, but=OF_RANK)
            assert_optimizer(checkpoint["optim"], expected.optimizer)
            if group.rank == 0:
                torch.save(checkpoint, path / "full.pt")
    if form == "full":
        train(model, optimizer, group.rank, AFTER)
        assert_model(model.state_dict(), trained(mixed).end, but=OF_RANK)


def _write_fsdp2(group: Collectives, path: Path) -> None:
    model = fsdp2(build(True))
    optimizer = adamw(model.parameters())
    train(model, optimizer, group.rank)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=path)
