"""The hooks, which decide when things happen.

===================  ==============================  ======================  ==========================
hook                 on                              handler                 phase of the unit
===================  ==============================  ======================  ==========================
forward pre-hook     the unit's module               `_before_forward`       IDLE -> FORWARD
forward hook         the unit's module (always)      `_after_forward`        FORWARD -> IDLE
(no hook)            `forward` of modules inside it  `_call_inside`          the same, if called from outside
node pre-hook        outputs that need a gradient    `_before_backward`      IDLE -> BACKWARD
post-accumulate      some leaves (`leaves.py`)       `_gradient_arrived`     BACKWARD -> REDUCING or IDLE,
tensor hook          inputs that need a gradient     `_input_arrived`        with the last of these two
node pre-hook        gradients with a graph          `_before_second_...`    IDLE -> BACKWARD
final callback       the autograd run                `BackwardPass.finish`   REDUCING -> IDLE
===================  ==============================  ======================  ==========================

This module registers all of them but two: `leaves.py` registers a leaf's hook once it has to, and `backward.py` queues
the final callback when a pass begins. Outside of `passes`, `optimizers/stepping.py` registers one hook for the
process, on every optimizer's step, if `notice_optimizers` is called; `inner_calls.py` replaces a method by
`_call_inside` while its unit is not called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from flatparam_comm import FlatParamError, FlatParamHandle
from flatparam_runtime.autograd import in_backward, profiled, untraced
from flatparam_runtime.optimizers.fused_optimizer import check_in_backward_optimizers
from flatparam_runtime.passes.forward import enter_forward, is_of_exception, leave_forward
from flatparam_runtime.passes.leaves import LeafWatch, watch_of, watches
from flatparam_runtime.passes.tensors import map_tensors, tensors_in
from flatparam_runtime.passes.tree import tree_of
from flatparam_runtime.unit.calls import ForwardCall, call_as_forward
from flatparam_runtime.unit.inner_calls import InnerCall, InnerCalls
from flatparam_runtime.unit.phases import Phase
from flatparam_runtime.unit.registry import unit_of
from flatparam_runtime.unit.unit import Unit

__all__ = ["attach", "register_forward_method"]


def attach(unit: Unit, below: Iterable[nn.Module]) -> InnerCalls:
    """Have `unit` follow the forward and backward passes of its module, and of the modules `below` in no other unit.

    A call of a module below counts only if it comes from outside of the unit's own forward.

    Returns:
        The calls of the modules below, which the unit looks after.
    """
    module = unit.module
    module.register_forward_pre_hook(functools.partial(_before_forward, unit), prepend=True, with_kwargs=True)
    module.register_forward_hook(functools.partial(_after_forward, unit), always_call=True)
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
    before, after = functools.partial(_before_forward, unit), functools.partial(_after_forward, unit)
    return call_as_forward(call.module, call.__wrapped__, before, after, args, kwargs)


def _uses_parameters(unit: Unit, module: nn.Module) -> bool:
    """Whether `module`, or a module inside it, has parameters of `unit` or of the units that `unit` borrows from."""
    handles = (handle for each in (unit, *unit.lenders) for handle in each.handles)
    users = {info.module for handle in handles for infos in handle.param_infos for info in infos}
    return not users.isdisjoint(module.modules())


@untraced
@profiled("_pre_forward")
def _before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tree = tree_of(unit)
    call = enter_forward(tree, unit, module)
    for each in (unit, *unit.lenders):
        for number, handle in enumerate(each.handles):
            watch = watch_of(handle)
            if watch is None:
                _watch_leaves(each, number, handle, tree.stream)
            elif tree.has_changed_stream:
                watch.follow(tree.stream)
    moved: tuple[tuple[Any, ...], dict[str, Any]] = _prepared(unit, call, (args, kwargs))
    if torch.is_grad_enabled() and not call.is_recomputation:
        _watch_inputs(unit, call, moved)
    return moved


@profiled("_to_kwargs")
def _prepared(unit: Unit, call: ForwardCall, inputs: Any) -> Any:
    """The inputs on the device of the unit's parameters and in the dtype that it computes in."""
    if call.is_top and unit.handles:
        # Without waiting, the host would compute with inputs that have not landed.
        waits = unit.device.type == "cpu"
        inputs = map_tensors(lambda tensor: tensor.to(unit.device, non_blocking=not waits), inputs)
    casting = unit.plan.casting
    if (
        casting.dtype is None
        or call.full_precision
        or not casting.applies(is_top=call.is_top, manages=bool(unit.handles))
    ):
        return inputs
    if casting.restores_outputs:
        floating = (tensor.dtype for tensor in tensors_in(inputs) if tensor.is_floating_point())
        call.restored = next(floating, None)
    return _cast(inputs, casting.dtype)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


@untraced
@profiled("_post_forward")
def _after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # The tree has recovered from an exception inside, which now propagates.
    if not unit.calls:
        return None
    call = unit.held.end_call()
    failed = is_of_exception(call, output)
    recorded = torch.is_grad_enabled() and not call.is_recomputation and not failed
    if call.restored is not None and not failed:
        output = _cast(output, call.restored)
    watched = recorded and _watch_outputs(unit, call, output)
    if recorded and not watched:
        _hook_every_leaf(unit)
    leave_forward(tree_of(unit), unit, call, failed=failed, recorded=recorded, watched=watched)
    return output if call.restored is not None and not failed else None


def _watch_inputs(unit: Unit, call: ForwardCall, inputs: Any) -> None:
    for tensor in tensors_in(inputs):
        if tensor.requires_grad:
            token = object()
            call.inputs[token] = tensor.grad_fn or get_gradient_edge(tensor).node
            # The hook holds only the token: the node owns its hooks, so a hook that holds the node is never freed.
            hook = functools.partial(_input_arrived, weakref.ref(unit), weakref.ref(call), token)
            registered = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            # A leaf outlives this graph; the call does not.
            if tensor.grad_fn is None:
                weakref.finalize(call, registered.remove)


def _watch_outputs(unit: Unit, call: ForwardCall, output: Any) -> bool:
    watched = set()
    opaque: list[object] = []
    for tensor in tensors_in(output, opaque):
        if not tensor.requires_grad:
            continue
        # The module passed a leaf on: no unit waits for it, but it may be a parameter.
        if tensor.grad_fn is None:
            opaque.extend(leaf for handle in unit.handles for leaf in handle.leaves if leaf is tensor)
            continue
        if tensor.grad_fn not in watched:
            # A node's hooks run after those of its output tensors. So if this output is also the input of a different
            # unit, that unit is complete, and its memory is free, before this unit gathers ahead.
            tensor.grad_fn.register_prehook(functools.partial(_before_backward, unit, call))
        watched.add(tensor.grad_fn)
    return bool(watched) and not opaque


def _watch_leaves(unit: Unit, number: int, handle: FlatParamHandle, stream: int) -> None:
    check_in_backward_optimizers(handle)
    arrived = functools.partial(functools.partial, _gradient_arrived, weakref.ref(unit), number)
    LeafWatch.begin(handle, arrived, stream)


def _hook_every_leaf(unit: Unit) -> None:
    """Hook all leaves, since no output announces the unit's backward pass."""
    for each in (unit, *unit.lenders):
        for _, _, watch in watches(each.handles):
            watch.hook(watch.unhooked)


def _before_backward(unit: Unit, call: ForwardCall, gradients: tuple[Tensor, ...]) -> None:
    tree_of(unit).begin_backward().enter(unit, call)


def _before_second_backward(unit: Unit, call: ForwardCall, gradients: tuple[Tensor, ...]) -> None:
    tree_of(unit).begin_backward().enter(unit, call, again=True)


def _gradient_arrived(reference: weakref.ReferenceType[Unit], number: int, index: int, leaf: Tensor) -> None:
    unit = reference()
    if unit is None:
        return
    current = tree_of(unit).begin_backward()
    call = current.calls.get(unit)
    if call is not None and leaf.grad is not None:
        _watch_gradient(unit, call, leaf.grad)
    current.gradient_arrived(unit, number, index)


def _input_arrived(
    reference: weakref.ReferenceType[Unit],
    call_reference: weakref.ReferenceType[ForwardCall],
    token: object,
    gradient: Tensor,
) -> None:
    unit, call = reference(), call_reference()
    current = None if unit is None else tree_of(unit).backward
    if unit is not None and current is not None:
        if call is not None:
            _watch_gradient(unit, call, gradient)
        current.input_arrived(unit, token)


def _watch_gradient(unit: Unit, call: ForwardCall, gradient: Tensor) -> None:
    """Watch the gradient if it has a graph of its own (`create_graph`), which reads the unit's parameters again."""
    if gradient.grad_fn is not None:
        gradient.grad_fn.register_prehook(functools.partial(_before_second_backward, unit, call))
