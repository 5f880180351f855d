"""The states that an optimizer is given to load: what each entry is, and what of it does not fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch import nn

from flatparam_runtime import COUNTERS, FlatParamError
from flatparam_state.forms.chunker import Chunker, is_dtensor
from flatparam_state.forms.deferred import (
    LazyTensor,
    LazyValue,
    Streamed,
    as_tensor,
    dtype_of,
    from_first,
    is_tensor_like,
    shape_of,
)
from flatparam_state.forms.state_form import Wanted
from flatparam_state.forms.tiling import is_sharded_tensor
from flatparam_state.optimizer.entry import AsItIs, PerRank, State, copy_value, is_equal, is_per_rank, spread_out
from flatparam_state.optimizer.first_state import keeps_otherwise, names_like_parameter, names_of_first_state
from flatparam_state.optimizer.held import Held, Holding
from flatparam_state.places import places_in
from flatparam_state.ranks import told_by_first


@attrs.frozen(eq=False)
class SavedStates:
    """The saved states of parameters, and which of them are shaped like their parameters."""

    saved: State
    chunker: Chunker
    shaped: frozenset[str]
    """The names of the states that are shaped like their parameters."""

    @classmethod
    def of(cls, holding: Holding, saved: State, chunker: Chunker) -> SavedStates:
        """Look at every state of every parameter that the optimizer holds.

        A 0-d state of a 0-d parameter does not say which it is; what the name is elsewhere does.
        """
        fits: dict[str, int] = {}
        unlike: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        unclear: set[str] = set()
        for item in holding.items:
            for fqn, wanted in wanted_of(item).items():
                for name, value in saved.get(fqn, {}).items():
                    if isinstance(value, AsItIs) or (item.part_states is not None and name not in item.part_states):
                        unlike[name] = unlike.get(name, 0) + 1
                    elif wanted.misfit(value) is not None:
                        unlike[name] = unlike.get(name, 0) + (isinstance(value, torch.Tensor))
                    elif wanted.spec.shape == ():
                        unclear.add(name)
                    else:
                        fits[name] = fits.get(name, 0) + 1
        likely = {name for name, count in fits.items() if count >= unlike.get(name, 0)}
        return cls(saved, chunker, frozenset(likely | {name for name in unclear if name not in unlike}))

    def value(self, item: Held, name: str) -> Any:
        """Return the state `name` of one parameter of this rank's optimizer, as the optimizer holds it."""
        entries = {fqn: concrete(self.saved[fqn][name]) for fqn in item.fqns if name in self.saved.get(fqn, {})}
        own = {fqn: _of_this_rank(item, fqn, name, value) for fqn, value in entries.items()}
        if (
            item.place is not None
            and (name in self.shaped or any(_is_cut(value) for value in entries.values()))
            and not any(isinstance(value, AsItIs) or is_per_rank(value) for value in entries.values())
            and any(value is not None for value in own.values())
        ):
            return _sharded(item, name, own, self.chunker)
        own = {fqn: _read(value) for fqn, value in own.items()}
        first_fqn, first = next(iter(own.items()))
        for fqn, value in own.items():
            if not is_equal(value, first):
                raise FlatParamError(
                    f"optimizer state {name!r} is {described(first)} for {first_fqn!r} and {described(value)} for "
                    f"{fqn!r}, which lie in one flat parameter and can have only one; shard with "
                    "use_orig_params=True, or make them units of their own"
                )
        return copy_value(first, None)


def has_cut_values(state_dict: Any) -> bool:
    """Return whether some state is cut over ranks, which then have to communicate; the same on every rank."""
    return any(map(_is_cut, _values(state_dict)))


def _values(state_dict: Any) -> Iterator[Any]:
    """Yield the values of all states; nothing of what has another form, which is refused later."""
    state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    entries = state.values() if isinstance(state, Mapping) else ()
    yield from (value for each in entries if isinstance(each, Mapping) for value in each.values())


def _is_cut(value: Any) -> bool:
    """Return whether ranks hold parts of it, so that it can only be shaped like the parameter."""
    return is_sharded_tensor(value) or is_dtensor(value)


def concrete(value: Any) -> Any:
    """Return the tensor, if `value` stands for one."""
    is_stand_in = is_tensor_like(value) and not isinstance(value, torch.Tensor)
    return as_tensor(value) if is_stand_in else value


def _of_this_rank(item: Held, fqn: str, name: str, value: Any) -> Any:
    """Return the value itself, or of one for each rank the one that was saved for what this rank holds."""
    if isinstance(value, Streamed) and item.place is None:
        return value.arrive()
    if isinstance(value, AsItIs) or (isinstance(value, LazyValue) and item.place is None):
        return _read(value)
    if not is_per_rank(value):
        return value
    span = wanted_of(item)[fqn].span if item.place is not None else None
    values = PerRank.from_entry(value).values
    for part, each in values:
        if part == span:
            return _read(each)
    # Of nothing there is nothing.
    if span is not None and not span:
        other = _read(values[0][1])
        return other[:0] if isinstance(other, torch.Tensor) and other.dim() else other
    saved = ", ".join(f"[{part.start}, {part.stop})" for part, _ in values)
    raise FlatParamError(
        f"optimizer state {name!r} of {fqn!r} belongs to the parts of the parameter that the ranks held when it was "
        f"saved, elements {saved}; this rank holds {'all' if span is None else f'[{span.start}, {span.stop})'}: load "
        "it with as many ranks and the same wrapping as it was saved with, or leave this state out"
    )


def _read(value: Any) -> Any:
    value = value.value if isinstance(value, AsItIs) else value
    if isinstance(value, Streamed):
        # It belongs to the parameter as a whole; every rank reads it here.
        return value.arrive()
    return value.whole() if isinstance(value, LazyValue) else value


def _sharded(item: Held, name: str, entries: Mapping[str, Any], chunker: Chunker) -> torch.Tensor:
    assert item.place is not None, "called for sharded parameters only"
    layout, rank = item.place.handle.layout, item.place.handle.rank
    found = {fqn: value for fqn, value in entries.items() if value is not None}
    wanted = wanted_of(item)
    for fqn, value in found.items():
        other = wanted[fqn].misfit(value)
        if other is not None:
            is_plain = isinstance(value, (int, float, str))
            raise misfit_error(name, fqn, wanted[fqn], described(value) if is_plain else other)
    if not item.is_flat:
        (fqn,) = item.fqns
        part = wanted[fqn].part(found[fqn], chunker)
        is_own = isinstance(found[fqn], LazyValue)
        return part.to(item.parameter.device, copy=not is_own).view(item.parameter.shape)
    dtype = functools.reduce(torch.promote_types, map(dtype_of, found.values()))
    shard = torch.zeros(item.place.handle.flat_param.numel(), dtype=dtype, device=item.parameter.device)
    for fqn, index in zip(item.fqns, item.indices, strict=True):
        if fqn in found:
            target = shard[layout.fragment(index, rank).in_shard.as_slice()]
            target.copy_(wanted[fqn].part(found[fqn], chunker))
    return shard


# Those that only the first rank has: described to all ranks, and sent tensor by tensor when they are needed


def arrived(value: Any) -> Any:
    """Return a value that is no parameter's state, on every rank."""
    if isinstance(value, Mapping):
        return {key: arrived(each) for key, each in value.items()}
    return value.arrive() if isinstance(value, Streamed) else value


def streamed(model: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first rank's state, on every rank, with stand-ins for its tensors."""
    place = next(iter(places_in(model)), None)
    if place is None:
        return state_dict
    ranks, device = told_by_first(model, _values(state_dict)), place.handle.device

    def mapped(state: Any, tensor: Callable[[str, str, Any], Any]) -> Any:
        if not isinstance(state, Mapping) or "state" not in state:
            return state
        entries = {
            fqn: {name: tensor(fqn, name, value) for name, value in values.items()}
            if isinstance(values, Mapping)
            else values
            for fqn, values in state["state"].items()
        }
        return {**state, "state": entries}

    def described(fqn: str, name: str, value: Any) -> Any:
        if is_tensor_like(value) and shape_of(value):
            return Streamed(shape_of(value), as_tensor(value).dtype)
        return concrete(value)

    def arriving(fqn: str, name: str, value: Any) -> Any:
        if not isinstance(value, Streamed):
            return value
        here = state_dict["state"][fqn][name] if ranks.is_first else None
        return attrs.evolve(value, ranks=ranks, device=device, tensor=here)

    skeleton = mapped(state_dict, described) if ranks.is_first else None
    return mapped(from_first(ranks, skeleton, label="optimizer state"), arriving)  # type: ignore[no-any-return]


_LIKE_PARAMETER: Final = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg"}
)
"""The names that nearly every optimizer gives to states which are shaped like their parameter."""
_MOST_CHARACTERS: Final = 200
"""How much of a value a message shows."""


def check_shapes(optimizer: torch.optim.Optimizer, holding: Holding, saved: State) -> None:
    """Refuse tensors that would be shaped like their parameter, and have a different shape.

    What an optimizer of torch keeps in the shape of the parameter is known from its first state. A different optimizer
    may keep what it likes under any name, such as factors or blocks: of the names that are usual it is asked what it
    makes itself, and nothing is said of others.

    Raises:
        FlatParamError: naming the state, the parameter and both shapes.
    """
    known: dict[tuple[int, int, torch.dtype], frozenset[str]] = {}
    for number, settings, item, fqn, wanted in _parameters(holding):
        dim, dtype = len(wanted.spec.shape), wanted.spec.dtype
        if (number, dim, dtype) not in known:
            known[number, dim, dtype] = names_like_parameter(optimizer, settings, dim, dtype, item.parameter.device)
        for name, value in _tensors(item, saved.get(fqn, {})):
            found = wanted.misfit(value)
            if found is not None and (
                shape_of(value) == wanted.spec.shape
                or name in known[number, dim, dtype]
                or _is_usual(optimizer, settings, item, wanted, name, value)
            ):
                raise misfit_error(name, fqn, wanted, found)


def _parameters(holding: Holding) -> Iterator[tuple[int, Mapping[str, Any], Held, str, Wanted]]:
    """Each sharded parameter: the number and the settings of its group, what holds it, its name, what is wanted."""
    for number, (settings, items) in enumerate(holding.groups):
        for item in items:
            for fqn, wanted in wanted_of(item).items():
                yield number, settings, item, fqn, wanted


def wanted_of(item: Held) -> dict[str, Wanted]:
    """This rank's part, in its optimizer, of each parameter that `item` stands for; empty if it is not sharded."""
    if item.place is None:
        return {}
    return {fqn: Wanted.of_parameter(item.place, index) for fqn, index in zip(item.fqns, item.indices, strict=True)}


def misfit_error(name: str, fqn: str, wanted: Wanted, found: str) -> FlatParamError:
    """The error for the state `name` of the parameter `fqn`, which is `found` and not the tensor that is `wanted`."""
    return FlatParamError(
        f"optimizer state {name!r} of {fqn!r}: expected a tensor of shape {wanted.spec.shape}, found {found}; "
        "the state was saved from a different model: load the state that was saved with this one, or "
        "leave out the state of this parameter"
    )


def described(value: Any) -> str:
    """Return a value in a message: of a tensor with elements what it is, of anything else as much as fits in a line."""
    if isinstance(value, torch.Tensor) and value.dim():
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _tensors(item: Held, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The saved states of one parameter that are tensors, and that belong to no rank and to no whole parameter."""
    for name, value in values.items():
        if isinstance(value, AsItIs) or is_per_rank(value) or item.is_kept_once(name):
            continue
        if isinstance(value, (LazyTensor, Streamed)) or is_tensor_like(value):
            yield name, value


def _is_usual(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], item: Held, wanted: Wanted, name: str, value: Any
) -> bool:
    """Whether the state has a usual name, is no single number, and the optimizer does not make it in its own shape."""
    if name not in _LIKE_PARAMETER or torch.Size(shape_of(value)).numel() == 1:
        return False
    if item.part_states is not None:
        # It has said itself which states are shaped like the parameter.
        return True
    spec = wanted.spec
    return not keeps_otherwise(optimizer, settings, spec.shape, spec.dtype, name, item.parameter.device)


# Those of a different optimizer


def check_states(optimizer: torch.optim.Optimizer, holding: Holding, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse saved states that the optimizer cannot go on with, such as those of AdamW for SGD with momentum.

    An optimizer of torch needs the states that its first step makes, and may be given more. Of any other nothing is
    known before its first step; then it may lack states that come later, or have them, but not both. A parameter that
    was saved without states is one that was never stepped.

    Raises:
        FlatParamError: naming the parameter, the states that were found and those that were expected.
    """
    known: dict[tuple[int, int, torch.dtype], frozenset[str]] = {}
    for number, (settings, items) in enumerate(holding.groups):
        for item in items:
            kind = number, item.parameter.dim(), item.parameter.dtype
            if kind not in known:
                known[kind] = names_of_first_state(optimizer, settings, item.parameter)
            needed = known[kind]
            held = frozenset(spread_out(optimizer.state.get(item.parameter) or {}))
            for fqn in item.fqns:
                found = frozenset(name for name, value in saved.get(fqn, {}).items() if value is not None)
                if found and (needed - found or (not needed and held - found and found - held)):
                    raise FlatParamError(
                        f"optimizer state of {fqn!r}: expected {_listed(needed or held)}, which "
                        f"{type(optimizer).__name__} has, found {_listed(found)}: it is the state of a different "
                        "optimizer, or of different settings; make the optimizer that was saved, or load "
                        "with other_states=True"
                    )


def _listed(names: frozenset[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
