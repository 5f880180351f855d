"""The state that an optimizer has of parameters that were sharded afterwards: each rank keeps its own part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn, optim

from flatparam_comm import FlatParameter, FlatParamHandle, memory_view, owner_of
from flatparam_runtime.optimizers.torch_optimizers import KEEPS_OWN_PART

_PART_STATES_OF: Final = "part_states_of"
"""The method of an optimizer that knows of shards: `(settings of a group) -> names of states`, or `None` for all."""

COUNTERS: Final = frozenset({"step", "eta", "mu", "mu_product"})
"""The 0-d states of torch's optimizers that belong to no element, also if the parameter has no dimension."""


def part_states_of(optimizer: optim.Optimizer, settings: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the names of the states that are cut like their parameter if they have its shape; `None` stands for all.

    Other states belong to a parameter as a whole.

    Args:
        optimizer: says it itself, by a method of this name without the first argument, if it steps whole parameters.
        settings: a parameter group of it.
    """
    tell = getattr(optimizer, _PART_STATES_OF, None)
    return tell(settings) if callable(tell) else None


def keep_own_part(optimizer: optim.Optimizer) -> None:
    """Cut the state that `optimizer` had before its parameters were sharded, as these were cut, and mark it.

    Adagrad makes state when it is made, and others have some if they have stepped before the model was wrapped.
    """
    has_shards = False
    for group in optimizer.param_groups:
        names = part_states_of(optimizer, group)
        for parameter in group["params"]:
            has_shards = has_shards or isinstance(parameter, FlatParameter)
            owner = owner_of(parameter) if isinstance(parameter, nn.Parameter) else None
            if owner is None:
                continue
            has_shards = True
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                state.update(_own_parts(state, names, parameter, *owner))
    if has_shards:
        setattr(optimizer, KEEPS_OWN_PART, True)


def _own_parts(
    state: Mapping[str, Any],
    names: frozenset[str] | None,
    parameter: Tensor,
    handle: FlatParamHandle,
    index: int,
) -> dict[str, Tensor]:
    spec = handle.layout.slots[index].spec
    if parameter.shape == spec.shape:
        return {}
    span = handle.layout.fragment(index, handle.rank).in_param
    return {
        name: memory_view(value, spec)[span.as_slice()].clone().view(parameter.shape)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.shape == spec.shape
        and ((value.dim() > 0 or name not in COUNTERS) if names is None else name in names)
    }
