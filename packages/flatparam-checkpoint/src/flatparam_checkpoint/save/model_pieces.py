"""The pieces of a sharded model that this rank saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flatparam_checkpoint.averages_of import UPDATES, tensors_of
from flatparam_checkpoint.extra_states import extra_state_modules
from flatparam_files import TensorInfo, join_path
from flatparam_files.checkpoint import Contribution, OwnedPiece, TensorRecord, row_major_on_demand
from flatparam_runtime import Span
from flatparam_state import Place
from flatparam_state.model_tensors import ModelTensor, model_tensors

if TYPE_CHECKING:
    from flatparam_state import ShardedEMA

__all__ = ["add_averages", "add_model", "record_of", "share_of"]


def share_of(span: Span, place: Place) -> Span:
    """Return the part of `span` that this rank writes: of equal copies, each replica writes as much."""
    replicate = place.unit.topology.replicate
    if replicate is None:
        return span
    begin, end = (
        span.start + span.numel * index // replicate.size for index in (replicate.rank, replicate.rank + 1)
    )
    return Span(begin, end)


def record_of(tensor: ModelTensor, dtype: torch.dtype | None = None) -> TensorRecord:
    """Return the record of `tensor` in the manifest, or of something of a different dtype that is shaped like it."""
    return TensorRecord(TensorInfo(tensor.shape, dtype or tensor.dtype), stride=tensor.stride)


def add_model(model: nn.Module, rank: int, contribution: Contribution) -> None:
    """Add what `rank` saves of `model`: its part of what is sharded; rank 0 also what is whole, and extra states."""
    _add_tensors(model, ("model",), rank, contribution)
    if rank == 0:
        for name, module in extra_state_modules(model):
            contribution.add_values(("model", name), module.get_extra_state())


def add_averages(averages: ShardedEMA, at: tuple[str, ...], rank: int, contribution: Contribution) -> None:
    """Add what `rank` saves of `averages`, under the keys `at`: of each as much as of the tensor that it is of."""
    averages.in_place(lambda: _add_tensors(averages.model, tensors_of(at), rank, contribution))
    if rank == 0:
        contribution.add_values((*at, UPDATES), averages.updates)


def _add_tensors(model: nn.Module, at: tuple[str, ...], rank: int, contribution: Contribution) -> None:
    for tensor in model_tensors(model):
        path = join_path((*at, tensor.name))
        if tensor.place is not None:
            share = share_of(tensor.span, tensor.place)
            part = tensor.local[share.relative_to(tensor.span.start).as_slice()]
            contribution.pieces.append(OwnedPiece(path, record_of(tensor), share, _give(part)))
        elif rank == 0:
            chunks = row_major_on_demand(tensor.local)
            contribution.pieces.append(OwnedPiece(path, record_of(tensor), tensor.span, chunks))
        for alias in tensor.names[1:]:
            contribution.aliases[join_path((*at, alias))] = path


def _give(part: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (part,)
