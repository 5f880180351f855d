"""Our half: wrapped models in every form of state, and the checkpoints that ours writes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException

import flatparam
from flatparam import FullyShardedDataParallel, StateDictType
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from integration_tests.state.sample import UNITS, State, adamw, build, train, trained
from integration_tests.state.torch_files import Files, mesh_of_world

FSDP = FullyShardedDataParallel

#: The forms of state: full, as we own it, in FSDP1's chunks, as DTensor, and flat.
FORMS = ("full", "sharded", "chunked", "dtensor", "local")

#: Who writes our checkpoints: the number of ranks, and the exposure.
OUR_WRITERS = ("2-flat", "2-originals", "3-flat")


def settings_of(form: str, **fields: Any) -> tuple[Any, Any, Any]:
    """The type, and the configurations of the model's and the optimizer's state."""
    if form == "full":
        return (
            StateDictType.FULL_STATE_DICT,
            flatparam.FullStateDictConfig(**fields),
            flatparam.FullOptimStateDictConfig(**fields),
        )
    if form == "local":
        return (
            StateDictType.LOCAL_STATE_DICT,
            flatparam.LocalStateDictConfig(**fields),
            flatparam.LocalOptimStateDictConfig(**fields),
        )
    chunks = {"dim_0_chunks": True} if form == "chunked" else {}
    return (
        StateDictType.SHARDED_STATE_DICT,
        flatparam.ShardedStateDictConfig(**chunks, **fields),
        flatparam.ShardedOptimStateDictConfig(**chunks, **fields),
    )


def ours(
    module: nn.Module,
    use_orig_params: bool = False,
    form: str = "full",
    units: tuple[type[nn.Module], ...] = UNITS,
    **arguments: Any,
) -> FSDP:
    """Our wrapper around these units and the root, set to this form of state; for "dtensor" with a mesh."""
    if form == "dtensor":
        arguments.setdefault("device_mesh", mesh_of_world())
    policy = ModuleWrapPolicy(set(units)) if units else None
    model = FSDP(module, auto_wrap_policy=policy, use_orig_params=use_orig_params, **arguments)
    FSDP.set_state_dict_type(model, *settings_of(form))
    return model


def numbers_of(mixed: bool) -> State:
    """The optimizer's part of a checkpoint of the sample, made without any wrapper."""
    group = adamw([nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"][0]
    names = [name for name, _ in build(mixed).named_parameters()]
    state = {name: dict(values) for name, values in trained(mixed).optimizer.items()}
    return {"state": state, "param_groups": [{**group, "params": names}]}


def restored(model: FSDP, optimizer: torch.optim.Optimizer, mixed: bool = False) -> None:
    """Give our model and its optimizer the state of `trained(mixed)`, from full tensors."""
    with FSDP.state_dict_type(model, *settings_of("full")):
        model.load_state_dict(trained(mixed).model)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, numbers_of(mixed)))


def full_state(model: FSDP) -> State:
    """The full state of our model, whatever form it is set to."""
    with FSDP.state_dict_type(model, *settings_of("full")):
        return dict(model.state_dict())


def full_optimizer_state(model: FSDP, optimizer: torch.optim.Optimizer) -> State:
    """The full state of the optimizer of our model."""
    with FSDP.state_dict_type(model, *settings_of("full")):
        return FSDP.optim_state_dict(model, optimizer)


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer a state for every parameter without changing any."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def load_distributed(
    wrapper: Any, model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, chunked: bool = False
) -> None:
    """Load a distributed checkpoint into a model in the form it is set to; `wrapper` is torch's FSDP1 or ours.

    torch's planner loses FSDP1's chunks of tensors that have fewer rows than there are ranks, and then mistakes the file
    for one of an old version; the option for `chunked` keeps it from that.
    """
    prime(optimizer)
    state = {"model": model.state_dict(), "optim": wrapper.optim_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(flatten_sharded_tensors=not chunked))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, state["optim"]))


def checkpoint_of(model: FSDP, optimizer: torch.optim.Optimizer) -> State:
    """What a distributed checkpoint holds."""
    return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def write_ours(group: Collectives, files: Files) -> None:
    """Every kind of checkpoint of ours; where that fails, the reason in its place."""
    for writer in [writer for writer in OUR_WRITERS if writer.startswith(str(group.size))]:
        for kind, write in WRITERS.items():
            path = files.ours(writer, kind)
            try:
                write(group, path, writer.endswith("originals"))
            except (Exception, CheckpointException):
                (path / "error.txt").write_text(traceback.format_exc(limit=-6))


def written_by_ours(files: Files, writer: str, kind: str) -> Path:
    """The path of a checkpoint that ours has written."""
    path = files.ours(writer, kind)
    error = path / "error.txt"
    assert not error.exists(), f"ours could not write it: {error.read_text()}"
    return path


def at_checkpoint(group: Collectives, use_orig_params: bool, form: str) -> tuple[FSDP, torch.optim.Optimizer]:
    """Our model and optimizer where `trained(mixed=use_orig_params)` is: trained there, but by 3 ranks, which round otherwise."""
    mixed = use_orig_params
    model = ours(build(mixed), use_orig_params, form)
    optimizer = adamw(model.parameters())
    if group.size == 2:
        train(model, optimizer, group.rank)
    else:
        restored(model, optimizer, mixed)
    return model, optimizer


def _write_full(group: Collectives, path: Path, use_orig_params: bool) -> None:
    checkpoint = checkpoint_of(*at_checkpoint(group, use_orig_params, "full"))
    if group.rank == 0:
        torch.save(checkpoint, path / "full.pt")


def _write_local(group: Collectives, path: Path, use_orig_params: bool) -> None:
    model, optimizer = at_checkpoint(group, use_orig_params, "local")
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, path / f"rank{group.rank}.pt")


def _writer(form: str) -> Callable[[Collectives, Path, bool], None]:
    def write(group: Collectives, path: Path, use_orig_params: bool) -> None:
        dcp.save(checkpoint_of(*at_checkpoint(group, use_orig_params, form)), checkpoint_id=path)

    return write


def _write_async(group: Collectives, path: Path, use_orig_params: bool) -> None:
    model, optimizer = at_checkpoint(group, use_orig_params, "dtensor")
    dcp.async_save(checkpoint_of(model, optimizer), checkpoint_id=path).result()


def _write_dsd(group: Collectives, path: Path, use_orig_params: bool) -> None:
    from flatparam.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(*at_checkpoint(group, use_orig_params, "full"))
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)


def _write_stateful(group: Collectives, path: Path, use_orig_params: bool) -> None:
    model, _ = at_checkpoint(group, use_orig_params, "sharded")
    dcp.save({"model": model}, checkpoint_id=path)


WRITERS: Mapping[str, Callable[[Collectives, Path, bool], None]] = {
    "full": _write_full,
    "sharded": _writer("sharded"),
    "chunked": _writer("chunked"),
    "dtensor": _writer("dtensor"),
    "local": _write_local,
    "async": _write_async,
    "dsd": _write_dsd,
    "stateful": _write_stateful,
}
