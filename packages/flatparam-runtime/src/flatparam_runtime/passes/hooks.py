"""The hooks of a unit's module: which hooks there are, and who calls whom.

===================  ==============================  ======================  ==========================
hook                 on                              handler                 phase of the unit
===================  ==============================  ======================  ==========================
forward pre-hook     the unit's module               `before_forward`        IDLE -> FORWARD
forward hook         the unit's module (always)      `after_forward`         FORWARD -> IDLE
(no hook)            `forward` of modules inside it  `_call_inside`          the same, if called from outside
node pre-hook        outputs that need a gradient    `_before_backward`      IDLE -> BACKWARD
post-accumulate      some leaves                     `_gradient_arrived`     BACKWARD -> REDUCING or IDLE,
tensor hook          inputs that need a gradient     `_input_arrived`        with the last of these two
node pre-hook        gradients with a graph          `_before_second_...`    IDLE -> BACKWARD
final callback       the autograd run                `BackwardPass.finish`   REDUCING -> IDLE
===================  ==============================  ======================  ==========================

This file registers the first two, when a unit is made, and `unit/inner_call.py` replaces a method by `_call_inside`
while its unit is not called. `forward.py` registers the others, call by call, but two: `unit/module.py` registers a
leaf's hook once it has to, and `backward.py` queues the final callback when a pass begins. Outside of both folders,
`optimizers/stepping.py` registers one hook for the process, on every optimizer's step, if `notice_optimizers` is
called.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from flatparam_comm import FlatParamError
from flatparam_runtime.autograd import in_backward
from flatparam_runtime.passes.forward import after_forward, before_forward
from flatparam_runtime.unit import InnerCall, InnerCalls, Phase, Unit, call_as_forward, unit_of

__all__ = ["attach", "register_forward_method"]


def attach(unit: Unit, below: Iterable[nn.Module]) -> InnerCalls:
    """Have `unit` follow the forward and backward passes of its module, and of the modules `below` in no other unit.

    A call of a module below counts only if it comes from outside of the unit's own forward.

    Returns:
        The calls of the modules below, which the unit looks after.
    """
    module = unit.module
    module.register_forward_pre_hook(functools.partial(before_forward, unit), prepend=True, with_kwargs=True)
    module.register_forward_hook(functools.partial(after_forward, unit), always_call=True)
    return InnerCalls.of(
        tuple(InnerCall(unit, child, "forward", _call_inside) for child in below if not _is_shell(child))
    )


def _is_shell(module: nn.Module) -> bool:
    """Whether `module` only wraps one unit, so that a call of `module` is a call of that unit."""
    while unit_of(module) is None:
        if module._parameters or module._buffers or not module._modules:
            return False
        children = list(module.children())
        if len(children) != 1:
            return False
        (module,) = children
    return True


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have the method `name` of `module` run with the full parameters of the module's unit in place, like `forward`.

    Args:
        module: a unit, or a module inside one.

    Raises:
        FlatParamError: if `module` is neither, or has no such method.
    """
    forward = module.__dict__.get("forward")
    unit = forward.unit if isinstance(forward, InnerCall) else unit_of(module)
    if unit is None or not callable(getattr(module, name, None)):
        raise FlatParamError(
            f"{type(module).__name__}.{name}: expected a method of a sharded module, or of a module inside one"
        )
    InnerCall(unit, module, name, _call_inside).put()


def _call_inside(call: InnerCall[Unit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    unit = call.unit
    if torch.compiler.is_compiling() or unit.calls or unit.phase is Phase.BACKWARD:
        return call.__wrapped__(*args, **kwargs)
    # A recomputation may be of modules in other units. A method that the user registered always gets the parameters.
    if call.name == "forward" and in_backward() and not _uses_parameters(unit, call.module):
        return call.__wrapped__(*args, **kwargs)
    before, after = functools.partial(before_forward, unit), functools.partial(after_forward, unit)
    return call_as_forward(call.module, call.__wrapped__, before, after, args, kwargs)


def _uses_parameters(unit: Unit, module: nn.Module) -> bool:
    """Whether `module`, or a module inside it, has parameters of `unit` or of the units that `unit` borrows from."""
    handles = (handle for each in (unit, *unit.links.lenders) for handle in each.handles)
    users = {info.module for handle in handles for infos in handle.param_infos for info in infos}
    return not users.isdisjoint(module.modules())
