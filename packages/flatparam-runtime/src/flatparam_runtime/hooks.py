"""The only file that registers hooks: when things happen.

===================  ==============================  ======================  ==========================
hook                 on                              handler                 phase of the unit
===================  ==============================  ======================  ==========================
forward pre-hook     the unit's module               `_before_forward`       IDLE -> FORWARD
forward hook         the unit's module (always)      `_after_forward`        FORWARD -> IDLE
node pre-hook        outputs that need a gradient    `_before_backward`      IDLE -> BACKWARD
post-accumulate      each leaf, once for ever        `_gradient_arrived`     BACKWARD -> REDUCING or IDLE,
tensor hook          inputs that need a gradient     `_input_arrived`        with the last of these two
final callback       the autograd run                `BackwardPass.finish`   REDUCING -> IDLE
===================  ==============================  ======================  ==========================
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from flatparam_runtime.calls import ForwardCall
from flatparam_runtime.forward import enter_forward, leave_forward, result_of_exception
from flatparam_runtime.traverse import map_tensors, tensors_in
from flatparam_runtime.tree import tree_of
from flatparam_runtime.unit import Unit

__all__ = ["attach"]


def attach(unit: Unit) -> None:
    """Have `unit` follow its module's forward and backward passes."""
    module = unit.module
    module.register_forward_pre_hook(functools.partial(_before_forward, unit), prepend=True, with_kwargs=True)
    module.register_forward_hook(functools.partial(_after_forward, unit), always_call=True)


def _before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = enter_forward(tree_of(unit), unit)
    if not unit.watches_leaves:
        _watch_leaves(unit)
    moved = _on_device(unit, (args, kwargs)) if call.is_top else (args, kwargs)
    if torch.is_grad_enabled() and not call.is_recomputation:
        _watch_inputs(unit, call, moved)
    return moved


def _on_device(unit: Unit, inputs: Any) -> Any:
    """The outermost unit's inputs, where its parameters are."""
    if not unit.handles:
        return inputs
    device = unit.handles[0].flat_param.device
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), inputs)


def _after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if not unit.calls:
        return  # recovered from an exception further in, which is now on its way out
    call = unit.calls.pop()
    failed = result_of_exception(call, output)
    recorded = torch.is_grad_enabled() and not call.is_recomputation and not failed
    watched = recorded and _watch_outputs(unit, call, output)
    leave_forward(tree_of(unit), unit, call, failed=failed, recorded=recorded, watched=watched)


def _watch_inputs(unit: Unit, call: ForwardCall, inputs: Any) -> None:
    for tensor in tensors_in(inputs):
        if tensor.requires_grad:
            token = object()
            call.inputs[token] = get_gradient_edge(tensor).node
            # The hook holds only the token: the node owns its hooks, so a hook that held the node would never be freed.
            hook = functools.partial(_input_arrived, weakref.ref(unit), token)
            registered = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
            if tensor.grad_fn is None:  # a leaf outlives this graph; the call does not
                weakref.finalize(call, registered.remove)


def _watch_outputs(unit: Unit, call: ForwardCall, output: Any) -> bool:
    watched = set()
    opaque: list[object] = []
    for tensor in tensors_in(output, opaque):
        if not tensor.requires_grad:
            continue
        if (
            tensor.grad_fn is None
        ):  # a leaf that the module passed on: nobody waits for it, but it may be a parameter
            opaque.extend(leaf for handle in unit.handles for leaf in handle.leaves if leaf is tensor)
            continue
        if tensor.grad_fn not in watched:
            # A node's hooks run after those of its output tensors. So where this output is also another unit's
            # input, that unit is complete, and its memory free, before this one gathers ahead.
            tensor.grad_fn.register_prehook(functools.partial(_before_backward, unit, call))
        watched.add(tensor.grad_fn)
    return bool(watched) and not opaque


def _watch_leaves(unit: Unit) -> None:
    reference = weakref.ref(unit)
    for number, handle in enumerate(unit.handles):
        for index, leaf in enumerate(handle.leaves):
            if not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            wanted = leaf.requires_grad
            leaf.requires_grad_(True)  # a frozen one may be trained later, and takes a hook only so
            hook = functools.partial(_gradient_arrived, reference, number, index)
            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            leaf.requires_grad_(wanted)
    unit.watches_leaves = True


def _before_backward(unit: Unit, call: ForwardCall, gradients: tuple[Tensor, ...]) -> None:
    tree_of(unit).begin_backward().enter(unit, call)


def _gradient_arrived(reference: weakref.ReferenceType[Unit], number: int, index: int, leaf: Tensor) -> None:
    unit = reference()
    if unit is not None:
        tree_of(unit).begin_backward().gradient_arrived(unit, number, index)


def _input_arrived(reference: weakref.ReferenceType[Unit], token: object, gradient: Tensor) -> None:
    unit = reference()
    current = None if unit is None else tree_of(unit).backward
    if unit is not None and current is not None:
        current.input_arrived(unit, token)
