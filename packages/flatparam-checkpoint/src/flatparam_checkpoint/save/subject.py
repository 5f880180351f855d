"""The subject of a save: what a program hands over, of which each rank saves its part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_checkpoint.keys import UPDATES, extra_state_modules, tensors_of, warn_of_own_entries
from flatparam_checkpoint.save.contribution import Contribution, OwnedPiece
from flatparam_files import CheckpointError, TensorInfo, join_path
from flatparam_files.checkpoint.manifest import OF_RANKS, RankValue, TensorRecord
from flatparam_files.checkpoint.values import encode, inline, reference
from flatparam_runtime import COUNTERS, Span, Threshold
from flatparam_state.at_rest import bring_to_rest
from flatparam_state.model_tensors import ModelTensor, model_tensors
from flatparam_state.optimizer import Held, Holding, Inventory, spread_out, with_names
from flatparam_state.places import Place, places_in

if TYPE_CHECKING:
    from flatparam_state import ShardedEMA


def share_of(tensor: ModelTensor, place: Place) -> Span:
    """Return the part of `tensor.span` that this rank writes: of equal copies, each replica writes as much."""
    span, replicate = tensor.span, place.unit.topology.replicate
    if tensor.is_copy:
        return Span(span.start, span.start)
    if replicate is None:
        return span
    begin, end = (span.start + span.numel * index // replicate.size for index in (replicate.rank, replicate.rank + 1))
    return Span(begin, end)


def record_of(tensor: ModelTensor, dtype: torch.dtype | None = None) -> TensorRecord:
    """Return the record of `tensor` in the manifest, or of something of a different dtype that is shaped like it."""
    return TensorRecord(TensorInfo(tensor.shape, dtype or tensor.dtype), stride=tensor.stride)


def _pieces(path: str, tensor: ModelTensor, dtype: torch.dtype, elements: Tensor, place: Place) -> Iterator[OwnedPiece]:
    """Yield this rank's pieces of `elements`, which are shaped like what it has of `tensor`."""
    share, record = share_of(tensor, place), record_of(tensor, dtype)
    part = elements[share.relative_to(tensor.span.start).as_slice()]
    spans = tensor.intervals(share) if share else [share]
    for span, piece in zip(spans, torch.split(part, [span.numel for span in spans]), strict=True):
        yield OwnedPiece(path, record, span, piece)


def add_model(model: nn.Module, rank: int, contribution: Contribution) -> None:
    """Add what `rank` saves of `model`: its part of what is sharded; rank 0 also what is whole, and extra states."""
    _add_tensors(model, ("model",), rank, contribution)
    warn_of_own_entries(model, tells=rank == 0)
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
            contribution.pieces += _pieces(path, tensor, tensor.dtype, tensor.local, tensor.place)
        elif rank == 0:
            contribution.pieces.append(OwnedPiece(path, record_of(tensor), tensor.span, tensor.local))
        for alias in tensor.names[1:]:
            contribution.aliases[join_path((*at, alias))] = path


# The pieces of an optimizer's state


INLINE_NBYTES: Final = Threshold(
    "state.inline_nbytes",
    1024,
    "A tensor that belongs to a parameter as a whole is in the manifest up to here; a larger one in the rank's file.",
    least=0,
)


def add_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, at: tuple[str, ...], rank: int, contribution: Contribution
) -> Inventory:
    """Add what `rank` saves of `optimizer`, under the keys `at`; returns what to compare with the other ranks.

    Raises:
        FlatParamError: if a parameter is not the model's, or a state is something that cannot be saved.
    """
    tensors = {name: tensor for tensor in model_tensors(model) for name in tensor.names}
    adding = _Adding((*at, "state"), rank, contribution, tensors)
    holding = Holding.of(model, optimizer)
    states = {item: spread_out(optimizer.state.get(item.parameter, {})) for item in holding.items}
    for item, state in states.items():
        adding.add(item, state)
    if rank == 0:
        groups = [with_names(group, found) for group, found in holding.groups]
        contribution.add_values((*at, "param_groups"), groups)
        # What it keeps under a name that is no parameter's, as torch allows; of a tensor that it dropped, nothing.
        for key, value in optimizer.state.items():
            if not isinstance(key, Tensor):
                _add_other(key, value, (*at, "state"), tensors, contribution)
    return Inventory.of(list(places_in(model)), holding.by_group, states)


def _add_other(
    key: Any, value: Any, at: tuple[str, ...], tensors: Mapping[str, ModelTensor], contribution: Contribution
) -> None:
    if not isinstance(key, str) or key in tensors:
        raise CheckpointError(
            f"the optimizer's state has an entry {key!r}, expected parameters, or names that no parameter has",
            hint="keep it under a name of its own",
        )
    contribution.add_values((*at, key), value)


@final
@attrs.frozen(eq=False)
class _Adding:
    """The states of one optimizer on their way into a contribution."""

    _at: tuple[str, ...]
    _rank: int
    _contribution: Contribution
    _tensors: Mapping[str, ModelTensor]

    def add(self, item: Held, state: Mapping[Any, Any]) -> None:
        if (item.place is None and self._rank != 0) or item.is_elsewhere or not item.fqns:
            return
        for name, value in state.items():
            if not isinstance(name, str):
                raise CheckpointError(f"a state of {item.fqns[0]!r} is called {name!r}", fqn=item.fqns[0])
            replicate = None if item.place is None else item.place.unit.topology.replicate
            if item.is_cut(name, value) and (value.dim() > 0 or name not in COUNTERS):
                self._add_shaped(item, name, value.detach())
            elif item.is_kept_once(name) or (
                (replicate is None or replicate.rank == 0) and not self._tensors[item.fqns[0]].is_copy
            ):
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
            path = join_path((*self._at, fqn, name))
            self._contribution.pieces += _pieces(path, self._tensors[fqn], value.dtype, mine, item.place)

    def _piece(self, path: str, record: TensorRecord, span: Span, value: Tensor) -> None:
        self._contribution.pieces.append(OwnedPiece(path, record, span, value))

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


# The whole of it


Inventories: TypeAlias = Mapping[tuple[str, ...], Inventory]
"""The inventory of each optimizer of a rank, by the keys under which its state is in a checkpoint."""


@final
@attrs.frozen(eq=False)
class Subject:
    """The model, the optimizers and the averages that a program saves, and the rank that saves its part of them."""

    model: torch.nn.Module | None
    optimizers: Mapping[tuple[str, ...], torch.optim.Optimizer]
    rank: int
    averages: Mapping[tuple[str, ...], ShardedEMA] = attrs.field(factory=dict)

    @property
    def described(self) -> dict[str, object]:
        """The things that every rank has to hand over alike, as the arguments of `Checkpointer` are called."""
        return {
            "model": None if self.model is None else type(self.model).__name__,
            "optimizer": sorted("/".join(at) for at in self.optimizers),
            "averages": sorted("/".join(at) for at in self.averages),
        }

    def contribute(self, contribution: Contribution, extra: Any, rank_extra: Any) -> Inventories:
        """Add all that this rank saves; returns what each of its optimizers holds."""
        inventories: dict[tuple[str, ...], Inventory] = {}
        if self.model is not None:
            bring_to_rest(self.model)
            add_model(self.model, self.rank, contribution)
            for at, optimizer in self.optimizers.items():
                inventories[at] = add_optimizer(self.model, optimizer, at, self.rank, contribution)
            for at, averages in self.averages.items():
                add_averages(averages, at, self.rank, contribution)
        if self.rank == 0:
            contribution.add_values(("extra",), extra)
        if rank_extra is not None:
            contribution.add_values(("rank_extra", str(self.rank)), rank_extra)
        return inventories
