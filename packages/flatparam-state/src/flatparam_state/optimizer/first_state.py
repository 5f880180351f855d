"""The state that an optimizer's first step will make, before there was one: a place for what is loaded."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, Final, final

import torch
from torch import nn

from flatparam_state.optimizer.held import Held, Holding, innermost

#: The method of an optimizer that says what the state of one parameter is before its first step: `(parameter,
#: settings of its group) -> state`, or `None` for what any optimizer would be asked.
_FIRST_STATE_OF: Final = "first_state_of"


@final
class FirstState(dict[str, Any]):
    """A parameter's entry in a state dict if it was never stepped: the state that its first step starts from.

    Programs load a checkpoint into the tensors of such a state dict. A parameter without a state in the checkpoint was
    never stepped: its entry may be cleared, and the parameter then starts without any state again.
    """


def first_states(
    optimizer: torch.optim.Optimizer, holding: Holding, known: Collection[Held] = ()
) -> dict[Held, dict[str, Any]]:
    """The state that `optimizer` will make for each parameter that requires a gradient, before its first step of it.

    The optimizer makes it itself, on a twin that shares nothing which changes: the optimizer's state and settings, the
    parameters and their gradients remain as they are, and nothing counts a step. An optimizer of torch is asked for its
    initial state. Any other steps copies of the parameters, one at a time, with zeros for the gradient, the learning
    rate and the weight decay; its count of steps is set back.

    Args:
        known: parameters that have a state already, and are left out.

    Raises:
        Exception: whatever the optimizer raises.
    """
    inner = innermost(optimizer)
    found: dict[Held, dict[str, Any]] = {}
    for settings, items in holding.groups:
        for item in items:
            if item.parameter.requires_grad and not item.is_elsewhere and item not in known:
                values = _told(inner, settings, item.parameter) or _initial(inner, settings, item.parameter)
                values = values or _after_zeros(inner, settings, item.parameter)
                if values:
                    found[item] = values
    return found


def names_of_first_state(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: torch.Tensor
) -> frozenset[str]:
    """The names of the states that an optimizer of torch will make for `parameter`; none for any other optimizer."""
    values = _of_torch(
        optimizer, settings, torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
    )
    return frozenset(name for name, value in values.items() if value is not None)


def names_like_parameter(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], dim: int, dtype: torch.dtype, device: torch.device
) -> frozenset[str]:
    """Return the states of a parameter of `dim` dimensions that an optimizer of torch makes in the parameter's shape.

    None are known of any other optimizer, nor of a 0-d parameter, which a single number looks like.
    """
    if not dim:
        return frozenset()
    # The sizes differ, so that no factor looks like the parameter.
    small = torch.zeros(tuple(range(2, 2 + dim)), dtype=dtype, device=device)
    return frozenset(
        name
        for name, value in _of_torch(optimizer, settings, small).items()
        if isinstance(value, torch.Tensor) and value.shape == small.shape
    )


def keeps_otherwise(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    name: str,
    device: torch.device,
) -> bool:
    """Whether an optimizer that is not one of torch's makes the state `name` of a parameter in a shape of its own.

    It steps a whole parameter of zeros, so that every rank finds the same.
    """
    inner = innermost(optimizer)
    if _is_of_torch(inner):
        return False
    try:
        value = _after_zeros(inner, settings, torch.zeros(shape, dtype=dtype, device=device)).get(name)
    except Exception:
        # Nothing says that it does.
        return False
    return isinstance(value, torch.Tensor) and tuple(value.shape) != shape


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _of_torch(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], small: torch.Tensor) -> dict[str, Any]:
    """The states that an optimizer of torch will make for a parameter like `small`; empty for any other optimizer."""
    inner = innermost(optimizer)
    if not _is_of_torch(inner):
        return {}
    try:
        return _initial(inner, settings, small) or _after_zeros(inner, settings, small)
    except Exception:
        # Some settings suit only the parameters that they are for.
        return {}


def _told(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state that the optimizer itself names, if it steps more than the part that it is given; else empty."""
    tell = getattr(optimizer, _FIRST_STATE_OF, None)
    return (tell(parameter, settings) or {}) if callable(tell) else {}


def _initial(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """The state that an optimizer of torch starts from; empty if it starts from nothing, or is not one of torch's."""
    kind: Any = type(optimizer)
    if not (kind.__module__.startswith("torch.optim.") and hasattr(kind, "_init_group")):
        return {}
    stand_in = nn.Parameter(parameter.detach())
    stand_in.grad = torch.zeros_like(stand_in)
    twin = _twin(optimizer, settings, stand_in)
    # After the group come the lists that a step has the tensors in.
    _, _, *lists = inspect.signature(kind._init_group).parameters
    try:
        with torch.no_grad():
            kind._init_group(twin, twin.param_groups[0], *([] for _ in lists))
    # With torch 2.11, the constructor of Adagrad makes the state.
    except KeyError:
        arguments = inspect.signature(kind).parameters.keys() - {"params"}
        twin = kind([stand_in], **{name: settings[name] for name in arguments & settings.keys()})
    return dict(twin.state.get(stand_in, {}))


def _after_zeros(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """Return the state that a step with zeros leaves, with the count of steps set back."""
    stand_in = nn.Parameter(parameter.detach().clone())
    stand_in.grad = torch.zeros_like(stand_in)
    twin: Any = _twin(optimizer, settings, stand_in)
    for name in {"lr", "weight_decay"} & twin.param_groups[0].keys():
        twin.param_groups[0][name] *= 0
    step = type(twin).step
    # Around the step of a class torch puts hooks that the whole process has; nobody is to notice this step.
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)
    values = dict(twin.state.get(stand_in, {}))
    if "step" in values:
        values["step"] *= 0
    return values


def _twin(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: nn.Parameter
) -> torch.optim.Optimizer:
    """An optimizer with the settings of one group, that holds only `parameter` and has neither state nor hooks."""
    kind = type(optimizer)
    twin = object.__new__(kind)
    # What an instance has in place of its class's methods belongs to the instance: a scheduler counts its steps there.
    own = {name: value for name, value in vars(optimizer).items() if not (callable(value) and hasattr(kind, name))}
    for name in [name for name in own if name.endswith(("_pre_hooks", "_post_hooks"))]:
        own[name] = type(own[name])()
    group = {name: value for name, value in settings.items() if name not in ("params", "param_names")}
    vars(twin).update(own)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**copy.deepcopy(group), "params": [parameter]}]
    return twin
