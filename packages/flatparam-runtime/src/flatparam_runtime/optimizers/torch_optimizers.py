"""The seam to the optimizers of torch: each name that reaches into them, or that is left on them, is here.

* The classes of `torch.optim` collect the tensors of a parameter group in `_init_group`. If it is gone, they step each
  parameter by itself.
* torch's `_apply_optimizer_in_backward` lists what it attaches to a parameter in `_in_backward_optimizers`. If the list
  is gone, nothing steps in the backward pass.
* A parameter has what `register_post_accumulate_grad_hook` was given in `_post_accumulate_grad_hooks`. If that is gone,
  these hooks are not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn, optim

from flatparam_comm import FlatParamError, FlatParameter, FlatParamHandle, memory_view, owner_of
from flatparam_runtime.unit import held_in, holder_of

INIT_GROUP: Final = "_init_group"
"""The method of an optimizer that collects the tensors of a group."""
IN_BACKWARD: Final = "_in_backward_optimizers"
"""The attribute of a parameter that lists the optimizers that step it in the backward pass."""

HOOKS: Final = "_post_accumulate_grad_hooks"
"""The attribute of a parameter that has the hooks to call once its gradient is there; `None` if there are none."""

KEEPS_OWN_PART: Final = "_flatparam_keeps_own_part"
"""Our mark on an optimizer whose state has been cut as its parameters were."""


def steps_of(kinds: Iterable[type[optim.Optimizer]]) -> dict[type[optim.Optimizer], Callable[[Any], Any]]:
    """Return the `step` of each of `kinds` that has an `_init_group`, without the hooks that torch wraps around it."""
    # The name is spelled out for tools/matrix, which reads the sources for the names of torch.
    return {kind: inspect.unwrap(kind.step) for kind in kinds if hasattr(kind, "_init_group")}


STEPS: Final[Mapping[type[optim.Optimizer], Callable[[Any], Any]]] = steps_of(
    (
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    )
)
"""The optimizers that treat each element alone, and can therefore step segments."""

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
    state: Mapping[str, Any], names: frozenset[str] | None, parameter: Tensor, handle: FlatParamHandle, index: int
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


def have_listed(optimizer: optim.Optimizer, parameters: list[Tensor]) -> None:
    """Put what units list in the places of full parameters, which their modules show until a backward pass is over."""
    for at, found in enumerate(parameters):
        handle, index = held_in(found) or (None, None)
        if handle is None or index is None or all(found is not leaf for leaf in handle.leaves[index : index + 1]):
            continue
        unit = holder_of(handle)
        # A context of `summon_full_params` writes back what is stepped inside.
        if unit is None or unit.showing.pins:
            continue
        if handle.exposure.lists_shard:
            # It gets no gradient, and the flat parameter does.
            if any(each is handle.flat_param for group in optimizer.param_groups for each in group["params"]):
                continue
            raise FlatParamError(
                f"{handle.told(index)} is in the optimizer {type(optimizer).__name__}, which was made between a "
                "forward and a backward pass: make it of the sharded model's parameters()"
            )
        parameters[at] = listed = handle.exposure.listed()[index]
        if found in optimizer.state:
            optimizer.state[listed] = optimizer.state.pop(found)
