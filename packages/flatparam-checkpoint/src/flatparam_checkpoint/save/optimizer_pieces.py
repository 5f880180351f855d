"""The pieces of an optimizer's state that this rank saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatparam_checkpoint.save.model_pieces import record_of, share_of
from flatparam_files import CheckpointError, TensorInfo, join_path
from flatparam_files.checkpoint import (
    OF_RANKS,
    Contribution,
    OwnedPiece,
    RankValue,
    TensorRecord,
    encode,
    inline,
    reference,
    row_major_chunks,
)
from flatparam_runtime import COUNTERS, Span, Threshold
from flatparam_state import places_in
from flatparam_state.model_tensors import ModelTensor, model_tensors
from flatparam_state.optimizer import Held, Inventory, held_by, held_parameters, spread_out

__all__ = ["add_optimizer", "optimizers_by_name"]

INLINE_NBYTES: Final = Threshold(
    "state.inline_nbytes",
    1024,
    "A tensor that belongs to a parameter as a whole is in the manifest up to here; a larger one in the rank's file.",
    least=0,
)


def optimizers_by_name(
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
) -> dict[tuple[str, ...], torch.optim.Optimizer]:
    """Return the optimizers, by the keys under which their state is in a checkpoint."""
    if optimizer is None:
        return {}
    if not isinstance(optimizer, Mapping):
        return {("optimizer",): optimizer}
    for name in optimizer:
        if name in ("", "state", "param_groups"):
            raise CheckpointError(
                f"{name!r} cannot be the name of an optimizer", hint="give it a different one"
            )
    return {("optimizer", name): each for name, each in optimizer.items()}


def add_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    at: tuple[str, ...],
    rank: int,
    contribution: Contribution,
) -> Inventory:
    """Add what `rank` saves of `optimizer`, under the keys `at`; returns what to compare with the other ranks.

    Raises:
        FlatParamError: if a parameter is not the model's, or a state is something that cannot be saved.
    """
    tensors = {name: tensor for tensor in model_tensors(model) for name in tensor.names}
    adding = _Adding(at, rank, contribution, tensors)
    groups: list[dict[str, Any]] = []
    by_group: list[Sequence[Held]] = []
    states: dict[Held, Mapping[Any, Any]] = {}
    for group, found in held_by(optimizer, held_parameters(model, optimizer)):
        fqns = [fqn for item in found for fqn in item.fqns]
        groups.append({**group, **{key: fqns for key in ("params", "param_names") if key in group}})
        for item in found:
            states[item] = spread_out(optimizer.state.get(item.parameter, {}))
            adding.add(item, states[item])
        by_group.append(found)
    if rank == 0:
        contribution.add_values((*at, "param_groups"), groups)
    return Inventory.of(list(places_in(model)), by_group, states)


class _Adding:
    """The states of one optimizer on their way into a contribution."""

    def __init__(
        self,
        at: tuple[str, ...],
        rank: int,
        contribution: Contribution,
        tensors: Mapping[str, ModelTensor],
    ) -> None:
        self._at = (*at, "state")
        self._rank = rank
        self._contribution = contribution
        self._tensors = tensors

    def add(self, item: Held, state: Mapping[Any, Any]) -> None:
        if (item.place is None and self._rank != 0) or item.is_elsewhere:
            return
        for name, value in state.items():
            if not isinstance(name, str):
                raise CheckpointError(f"a state of {item.fqns[0]!r} is called {name!r}", fqn=item.fqns[0])
            if _is_shaped_like(value, item, name):
                self._add_shaped(item, name, value.detach())
            elif item.place is None or _is_first_replica(item) or item.is_kept_once(name):
                self._add_rank_value(item, name, value)

    def _add_shaped(self, item: Held, name: str, value: Tensor) -> None:
        if item.place is None:
            tensor = self._tensors[item.fqns[0]]
            path = join_path((*self._at, item.fqns[0], name))
            self._piece(path, record_of(tensor, value.dtype), tensor.span, value)
            return
        handle = item.place.handle
        flat = value.reshape(-1)
        for fqn, index in zip(item.fqns, item.indices, strict=True):
            fragment = handle.layout.fragment(index, handle.rank)
            mine = flat[fragment.in_shard.as_slice()] if item.is_flat else flat
            share = share_of(fragment.in_param, item.place)
            part = mine[share.relative_to(fragment.in_param.start).as_slice()]
            record = record_of(self._tensors[fqn], value.dtype)
            self._piece(join_path((*self._at, fqn, name)), record, share, part)

    def _piece(self, path: str, record: TensorRecord, span: Span, value: Tensor) -> None:
        def chunks() -> Iterator[Tensor]:
            return row_major_chunks(value)

        self._contribution.pieces.append(OwnedPiece(path, record, span, chunks))

    def _add_rank_value(self, item: Held, name: str, value: Any) -> None:
        """Add a state that belongs to the parameter as a whole."""
        tree = self._encoded(item.fqns[0], name, value)
        for fqn in item.fqns:
            span = self._tensors[fqn].span
            path = join_path((*self._at, fqn, name))
            self._contribution.rank_values[path] = RankValue(self._rank, span, tree)

    def _encoded(self, fqn: str, name: str, value: Any) -> Any:
        path = join_path((OF_RANKS, str(self._rank), *self._at, fqn, name))
        if type(value) is Tensor and value.nbytes > INLINE_NBYTES.value:
            record = TensorRecord(TensorInfo(value.shape, value.dtype), whole=True)
            self._piece(path, record, Span(0, value.numel()), value.detach())
            return reference(path)
        tensors: dict[str, Tensor] = {}
        tree = encode(value, (*self._at, fqn, name), tensors)
        if isinstance(value, Tensor) and tensors:
            return inline(value.detach())
        if tensors:
            raise CheckpointError(
                f"{join_path((*self._at, fqn, name))!r} is a {type(value).__name__} with tensors in it",
                fqn=fqn,
                hint="an optimizer's state is a tensor or a plain value",
            )
        return tree


def _is_shaped_like(value: Any, item: Held, name: str) -> bool:
    return item.is_cut(name, value) and (value.dim() > 0 or name not in COUNTERS)


def _is_first_replica(item: Held) -> bool:
    replicate = None if item.place is None else item.place.unit.topology.replicate
    return replicate is None or replicate.rank == 0
