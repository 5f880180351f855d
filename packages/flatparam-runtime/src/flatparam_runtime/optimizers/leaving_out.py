"""Steps that are left out on all ranks, since a gradient is not finite."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from torch import optim

from flatparam_comm import FlatParamError
from flatparam_runtime.agreement.nonfinite import NonfiniteGuard
from flatparam_runtime.autograd import in_backward
from flatparam_runtime.optimizers.torch_optimizers import INIT_GROUP
from flatparam_runtime.unit import holder_of_parameter

_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
#: The attribute that a gradient scaler sets while it steps an optimizer that looks at it.
_OF_SCALER: Final = "found_inf"


def step_instead(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """The arguments to step with instead, if the gradients of the last pass, or of the closure's, are not finite.

    The step is left out by stepping a twin that has no parameters: nothing changes, the gradients neither.

    Raises:
        FlatParamError: for a step inside a backward pass, since nobody knows by then whether all gradients are finite.
    """
    guards = _guards_of(optimizer)
    if not guards:
        return None
    if in_backward():
        raise FlatParamError(
            f"{type(optimizer).__name__} steps in the backward pass, before the ranks know whether all gradients are "
            "finite: step it after backward(), or pass nonfinite='ignore'"
        )
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if callable(closure):
        guarded = functools.partial(_closed, closure, optimizer, guards)
        if len(args) > 1:
            return (args[0], guarded, *args[2:]), kwargs
        return args, {**kwargs, "closure": guarded}
    if _OF_SCALER in vars(optimizer) or not _have_found(guards):
        return None
    return (_twin(optimizer), *args[1:]), kwargs


def _closed(closure: Callable[[], Any], optimizer: optim.Optimizer, guards: list[NonfiniteGuard]) -> Any:
    """Call the closure of a step, and leave the optimizer without gradients if they are not finite."""
    result = closure()
    if _have_found(guards):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    return result


def _have_found(guards: list[NonfiniteGuard]) -> bool:
    """Return whether a guard has found such a gradient; each that has counts the step."""
    found = [guard for guard in guards if guard.found]
    for guard in found:
        guard.leave_out()
    return bool(found)


def _guards_of(optimizer: optim.Optimizer) -> list[NonfiniteGuard]:
    """Return the guards of the trees whose parameters the optimizer holds."""
    held_by = (holder_of_parameter(parameter) for group in optimizer.param_groups for parameter in group["params"])
    guards = dict.fromkeys(unit.observers.guard for unit in held_by if unit is not None)
    return [guard for guard in guards if guard is not None]


def _twin(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return an optimizer of the same kind and settings, without parameters."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop(INIT_GROUP, None)
    twin.param_groups = [{**group, "params": []} for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    return twin
