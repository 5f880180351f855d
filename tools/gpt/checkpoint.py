"""Checkpoints: the whole model and the whole optimizer by name, whatever they are sharded over.

The only file that calls FSDP's state-dict interface.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor

from flatparam import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel, StateDictType

from .checkpoint_shelf import MODEL_FILE, OPTIMIZER_FILE, Checkpoint, Shelf
from .learner import Learner
from .options import Recipe
from .ranks import Ranks

_SEPARATOR: Final = "/"
"""Between a parameter's FQN and the name of one of its optimizer states; neither can hold it."""


@frozen
class FullState:
    """Everything that is trained, on the CPU; empty on all ranks but the first when it was gathered.

    ``moments`` maps ``<FQN>/<state name>`` to a tensor of the parameter's shape, or to the step count (0-d).
    ``groups`` are the optimizer's param groups with FQNs under ``params``, ready for JSON.
    """

    model: dict[str, Tensor]
    moments: dict[str, Tensor]
    groups: list[dict[str, Any]]


def save(shelf: Shelf, learner: Learner, ranks: Ranks, *, step: int, recipe: Recipe) -> Path | None:
    """Write a checkpoint of ``step`` steps done; a collective. Returns where it is, on the first rank only."""
    state = _gather(learner)
    if not ranks.is_first:
        return None
    header = {"step": step, "ranks": ranks.size, "recipe": recipe.to_json(), "groups": state.groups}
    with shelf.committing(header) as folder:
        save_file(_unshared(state.model), folder / MODEL_FILE)
        save_file(_unshared(state.moments), folder / OPTIMIZER_FILE)
    newest = shelf.newest()
    return newest.path if newest is not None else None


def load(checkpoint: Checkpoint, learner: Learner) -> None:
    """Put a checkpoint, written by any number of ranks, into ``learner``; every rank reads the files."""
    state = FullState(
        model=load_file(checkpoint.path / MODEL_FILE),
        moments=load_file(checkpoint.path / OPTIMIZER_FILE),
        groups=checkpoint.header["groups"],
    )
    _install(learner, state)


def _gather(learner: Learner) -> FullState:
    model, optimizer = learner.model, learner.optimizer
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        ):
            weights = model.state_dict()
            by_name = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    else:
        weights, by_name = model.state_dict(), _named(learner, optimizer.state_dict())
    moments = {
        f"{fqn}{_SEPARATOR}{name}": torch.as_tensor(value)
        for fqn, slots in by_name.get("state", {}).items()
        for name, value in slots.items()
    }
    return FullState(weights, moments, by_name.get("param_groups", []))


def _install(learner: Learner, state: FullState) -> None:
    model, optimizer = learner.model, learner.optimizer
    by_name = _nested(state)
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(
            model,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=False),
            FullOptimStateDictConfig(rank0_only=False),
        ):
            model.load_state_dict(state.model)
            of_this_rank = FullyShardedDataParallel.optim_state_dict_to_load(
                model=model, optim=optimizer, optim_state_dict=by_name
            )
    else:
        model.load_state_dict(state.model)
        of_this_rank = _numbered(learner, by_name)
    optimizer.load_state_dict(of_this_rank)


def _nested(state: FullState) -> dict[str, Any]:
    """FSDP's form of a full optimizer state dict: ``{"state": {fqn: {name: tensor}}, "param_groups": [...]}``."""
    nested: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.moments.items():
        fqn, name = key.split(_SEPARATOR)
        nested.setdefault(fqn, {})[name] = tensor
    return {"state": nested, "param_groups": [dict(group) for group in state.groups]}


def _named(learner: Learner, numbered: dict[str, Any]) -> dict[str, Any]:
    """An ordinary optimizer's state dict with FQNs in the place of numbers."""
    fqns = [fqn for fqn, _ in learner.model.named_parameters()]
    groups = [{**group, "params": [fqns[i] for i in group["params"]]} for group in numbered["param_groups"]]
    return {"state": {fqns[i]: slots for i, slots in numbered["state"].items()}, "param_groups": groups}


def _numbered(learner: Learner, named: dict[str, Any]) -> dict[str, Any]:
    """The other way round; numbers go up within a group, because torch matches a group's parameters by position."""
    numbers = {fqn: i for i, (fqn, _) in enumerate(learner.model.named_parameters())}
    groups = [
        {**group, "params": sorted(numbers[fqn] for fqn in group["params"])}
        for group in named["param_groups"]
    ]
    return {"state": {numbers[fqn]: slots for fqn, slots in named["state"].items()}, "param_groups": groups}


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as safetensors takes them: on the CPU, contiguous, and no two in one storage (tied ones are)."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    return separate
