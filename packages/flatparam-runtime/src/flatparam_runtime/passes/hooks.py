"""The hooks of a unit's module: which hooks there are, and who calls whom.

===================  ==============================  ======================  ==========================
hook                 on                              handler                 phase of the unit
===================  ==============================  ======================  ==========================
(no hook)            the unit's module, by wrappers  `call_unit`             IDLE -> FORWARD -> IDLE
forward pre-hook     the unit's module, in place     `before_forward`        IDLE -> FORWARD
forward hook         the same (always)               `after_forward`         FORWARD -> IDLE
forward hook         the unit's module               `cast_output`           (none)
(no hook)            its call and its `forward`      `_call_directly`        the same, if called past the wrapper
(no hook)            `forward` of modules inside it  `_call_inside`          the same, if called from outside
node pre-hook        outputs that need a gradient    `_before_backward`      IDLE -> BACKWARD
post-accumulate      some leaves                     `_gradient_arrived`     BACKWARD -> REDUCING or IDLE,
tensor hook          inputs that need a gradient     `_input_arrived`        with the last of these two
node pre-hook        gradients with a graph          the same, with `again`  IDLE -> BACKWARD
final callback       the autograd run                `BackwardPass.finish`   REDUCING -> IDLE
===================  ==============================  ======================  ==========================

This file registers those of the module, when a unit is made, and `unit/calls.py` replaces a method by
`_call_inside` or `_call_directly` while its unit is not called. `forward.py` registers the others, call by call, but
two: `unit/module.py` registers a leaf's hook once it has to, and `backward.py` queues the final callback when a pass
begins. A forward call that reads a parameter of a sharded unit (`self.head.weight`) reaches `lending._read`.

Those for the whole process are installed when a wrapper is made (`notice_optimizers`, `notice_failed_passes`). The
state layer has one before each optimizer's step, if a model is offloaded or shows averages (`flatparam_state.at_rest`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

from flatparam_comm import FlatParamError
from flatparam_runtime.autograd import CALL, in_backward, stays_last, untraced
from flatparam_runtime.passes.forward import after_forward, before_forward, call_between, cast_output
from flatparam_runtime.unit import InnerCall, InnerCalls, Phase, Unit, unit_of


def attach(unit: Unit, below: Iterable[nn.Module]) -> InnerCalls:
    """Have `unit` follow the forward and backward passes of its module, and of the modules `below` in no other unit.

    A call of a module below counts only if it comes from outside of the unit's own forward.

    Returns:
        The calls that do not come from there, which the unit looks after.
    """
    module, casting = unit.module, unit.plan.casting
    if casting.restores_outputs or casting.output_dtype is not None:
        module.register_forward_hook(functools.partial(cast_output, unit))
    own: list[InnerCall[Unit]] = []
    if unit.held.by_hooks:
        before, after = functools.partial(_before, unit), functools.partial(after_forward, unit)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)
    else:
        own = [InnerCall(unit, module, name, _call_directly) for name in (CALL, "forward")]
    inside = (InnerCall(unit, child, "forward", _call_inside) for child in below if not _is_shell(child))
    return InnerCalls.of((*own, *inside))


@untraced
@stays_last(after_forward)
def _before(unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return before_forward(unit, module, args, kwargs)


def _is_shell(module: nn.Module) -> bool:
    """Return whether `module` only wraps one unit, so that a call of `module` is a call of that unit."""
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


@functools.partial(untraced, with_callees=False)
def _call_inside(call: InnerCall[Unit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    unit = call.unit
    if unit.calls or unit.phase is Phase.BACKWARD:
        return call.__wrapped__(*args, **kwargs)
    # A recomputation may be of modules in other units. A method that the user registered always gets the parameters.
    if call.name == "forward" and in_backward() and not _uses_parameters(unit, call.module):
        return call.__wrapped__(*args, **kwargs)
    return call_between(call.module, unit, call.__wrapped__, args, kwargs)


@functools.partial(untraced, with_callees=False)
def _call_directly(call: InnerCall[Unit], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    unit = call.unit
    if unit.calls:
        return call.__wrapped__(*args, **kwargs)
    return call_between(call.module, unit, call.__wrapped__, args, kwargs)


def _uses_parameters(unit: Unit, module: nn.Module) -> bool:
    """Whether `module`, or a module inside it, has parameters of `unit` or of the units that `unit` borrows from."""
    handles = (handle for each in (unit, *unit.links.lenders) for handle in each.handles)
    users = {info.module for handle in handles for infos in handle.param_infos for info in infos}
    return not users.isdisjoint(module.modules())
