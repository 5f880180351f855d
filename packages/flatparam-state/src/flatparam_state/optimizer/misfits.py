"""Saved states whose shapes or names show that they are those of a different model, or of a different optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from flatparam_runtime import FlatParamError
from flatparam_state.forms.deferred import LazyTensor, Streamed, is_tensor_like, shape_of
from flatparam_state.forms.wanted import Wanted
from flatparam_state.optimizer.entry import AsItIs, State, is_per_rank
from flatparam_state.optimizer.first_state import keeps_otherwise, names_like_parameter, names_of_first_state
from flatparam_state.optimizer.held import Held, Holding
from flatparam_state.optimizer.quantised import spread_out

__all__ = ["check_shapes", "described", "misfit_error", "wanted_of", "check_states"]

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
            known[number, dim, dtype] = names_like_parameter(
                optimizer, settings, dim, dtype, item.parameter.device
            )
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
    return {
        fqn: Wanted.of_parameter(item.place, index)
        for fqn, index in zip(item.fqns, item.indices, strict=True)
    }


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
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    item: Held,
    wanted: Wanted,
    name: str,
    value: Any,
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


def check_states(
    optimizer: torch.optim.Optimizer, holding: Holding, saved: Mapping[str, Mapping[str, Any]]
) -> None:
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
