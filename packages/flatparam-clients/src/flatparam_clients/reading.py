"""The plans and reads of torch.distributed.checkpoint: one checkpoint on all ranks, whatever an optimizer has."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from flatparam.addons import load
from flatparam.compat import Patch
from flatparam_state.forms.tiling import is_sharded_tensor
from flatparam_state.optimizer.first_state import FirstState


def patch_of_planner() -> Patch:
    """The patch by which torch's planner takes a parameter that a checkpoint has no state of for one never stepped.

    A program of FSDP1 loads into an optimizer without any state, and demands none. From ours it gets a state to load
    into for each parameter, and a checkpoint has none of those that were never stepped.

    Of a tensor with fewer rows than ranks, some ranks have no chunk. The planner forgets it there, and then takes the
    checkpoint for one of an old torch, in which it finds nothing.
    """
    planner = importlib.import_module("torch.distributed.checkpoint.default_planner").DefaultLoadPlanner
    theirs = planner.create_local_plan

    @functools.wraps(theirs)
    def create_local_plan(self: Any) -> Any:
        if self.flatten_state_dict and self.metadata is not None:
            _put_back_forgotten(self)
            _leave_out_unstepped(self, self.metadata.state_dict_metadata)
        return theirs(self)

    return Patch(planner, "create_local_plan", create_local_plan)


def _put_back_forgotten(planner: Any) -> None:
    """Plan for the tensors that were left out because this rank has no part of them: there is nothing to read."""
    there, paths = flatten_state_dict(planner.original_state_dict)
    for key, value in there.items():
        if key not in planner.state_dict and is_sharded_tensor(value):
            planner.state_dict[key], planner.mappings[key] = value, paths[key]


def _leave_out_unstepped(planner: Any, there: Collection[str]) -> None:
    """Clear the entries of parameters of which nothing is `there`, and plan nothing for them."""
    keys: dict[int, list[str]] = {}
    entries: dict[int, FirstState] = {}
    for key, path in planner.mappings.items():
        entry = _first_state_at(planner.original_state_dict, path)
        if entry is not None:
            entries[id(entry)] = entry
            keys.setdefault(id(entry), []).append(key)
    for number, entry in entries.items():
        if not any(key in there for key in keys[number]):
            entry.clear()
            for key in keys[number]:
                del planner.state_dict[key], planner.mappings[key]


def _first_state_at(state: Any, path: tuple[Any, ...]) -> FirstState | None:
    """Return the entry of a parameter that `path` leads through."""
    for step in path:
        if isinstance(state, FirstState):
            return state
        if not isinstance(state, Mapping):
            return None
        state = state.get(step)
    return None


@final
@attrs.frozen
class _Source:
    """The checkpoint that one rank reads, as its local plan tells the coordinator."""

    path: str
    digest: str | None
    """Of its metadata; None if this rank has none there, as on a disk that ranks do not share."""


def patches_of_reader() -> Iterator[Patch]:
    """Yield the patches by which torch's reader compares the checkpoints that ranks read.

    The first rank reads the metadata, and each rank the files beside its own: of two checkpoints, the model would be a
    mixture. A trainer that chooses the best one on each rank by itself may choose differently.
    """
    reader = importlib.import_module("torch.distributed.checkpoint.filesystem").FileSystemReader
    local, everywhere = reader.prepare_local_plan, reader.prepare_global_plan

    @functools.wraps(local)
    def prepare_local_plan(self: Any, plan: Any) -> Any:
        return dataclasses.replace(local(self, plan), storage_data=_source_of(self))

    @functools.wraps(everywhere)
    def prepare_global_plan(self: Any, plans: list[Any]) -> Any:
        _check_one([plan.storage_data for plan in plans])
        return everywhere(self, [dataclasses.replace(plan, storage_data=None) for plan in plans])

    yield Patch(reader, "prepare_local_plan", prepare_local_plan)
    yield Patch(reader, "prepare_global_plan", prepare_global_plan)


def _source_of(reader: Any) -> _Source:
    try:
        with reader.fs.create_stream(reader.fs.concat_path(reader.path, ".metadata"), "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except Exception:  # whatever a file system of others raises; torch's own reading says what is wrong
        digest = None
    return _Source(str(reader.path), digest)


def _check_one(sources: Sequence[object]) -> None:
    """Check that all ranks read one checkpoint; torch raises the error on every rank.

    Raises:
        CheckpointError: naming the first rank that reads another one than rank 0.
    """
    known = [(rank, each) for rank, each in enumerate(sources) if isinstance(each, _Source) and each.digest is not None]
    for rank, other in known[1:]:
        first_rank, first = known[0]
        if other.digest != first.digest:
            raise load("flatparam_files").CheckpointError(
                f"rank {rank} loads the checkpoint {other.path}, and rank {first_rank} loads {first.path}, which is a "
                "different one: the model would be a mixture",
                rank=rank,
                path=other.path,
                hint="have one rank choose, and tell the others: broadcast the path before load()",
            )
