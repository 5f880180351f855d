"""A forward call of a unit: gather, show, watch what autograd will compute, and free.

Read it from the top: a wrapper calls its module by `call_unit`, between `before_forward` and `after_forward`; a unit in
place has these two as hooks. The functions at the end run in the backward pass, and report to it what arrives.
"""

from __future__ import annotations

import collections
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from flatparam_comm import FlatParamError, FlatParamHandle, Threshold, tell_failure
from flatparam_runtime.autograd import (
    NO_RUN,
    apart_from_checkpoints,
    autocast_is_on,
    current_run,
    dispatch_modes,
    in_range,
    is_profiled,
    node_beneath,
    profiled,
    untraced,
)
from flatparam_runtime.optimizers import check_in_backward_optimizers
from flatparam_runtime.passes.freeing import Juncture, free
from flatparam_runtime.passes.lending import lend_what_is_read, take_back_unused
from flatparam_runtime.passes.record import ForwardPass, next_forward
from flatparam_runtime.passes.tensors import map_tensors, tensors_in
from flatparam_runtime.passes.tree import UnitTree, tree_and_backward, tree_of
from flatparam_runtime.unit import (
    ForwardCall,
    LeafWatch,
    Phase,
    Unit,
    calls_module,
    holder_of_parameter,
    leaf_watches,
    running_calls,
)

PREFETCH_NBYTES: Final = Threshold(
    "runtime.prefetch_nbytes",
    2**22,
    "On an accelerator one unit is gathered ahead, and more if all of them have at most so many bytes together.",
)


@functools.partial(untraced, with_callees=False)
def call_unit(unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `function` with the full parameters of `unit` in place: around all hooks of the unit's module, too.

    Args:
        function: the unit's module, or what stands around it now, such as a wrapper that checkpoints activations.
    """
    if unit.held.by_hooks:
        return in_range("forward", functools.partial(function, **kwargs), *args)
    module = unit.held.reference()
    if module is None:
        module = unit.module  # It raises.
    if is_profiled():
        return in_range("forward", call_between, module, unit, function, args, kwargs)
    return call_between(module, unit, function, args, kwargs)


@calls_module
@functools.partial(untraced, with_callees=False)
def call_between(
    module: nn.Module, unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `function`, which is or calls `module`, as torch calls `forward` between a pre-hook and a hook.

    The hook is called with the output `None` if the call raises, whatever it raises.
    """
    try:
        args, kwargs = before_forward(unit, module, args, kwargs)
        output = function(*args, **kwargs)
    except BaseException:
        try:
            after_forward(unit, module, args, None)
        # As with torch's hooks: the first error is the one to propagate.
        except Exception as error:
            warnings.warn(f"this error follows from the one in the forward pass: {error}", stacklevel=2)
        raise
    changed = after_forward(unit, module, args, output)
    return output if changed is None else changed


@untraced
@profiled("_pre_forward")
def before_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Have the full parameters in place for a call of `module`, and return the inputs as it takes them."""
    call = apart_from_checkpoints(_enter, unit, module) if dispatch_modes() else _enter(unit, module)
    moved: tuple[tuple[Any, ...], dict[str, Any]] = _prepared(unit, call, (args, kwargs))
    if torch.is_grad_enabled() and not call.is_recomputation:
        _watch_inputs(unit, call, moved)
    return moved


def _enter(unit: Unit, module: nn.Module) -> ForwardCall:
    tree, call = _have_full_parameters(unit, module)
    for each in (unit, *unit.links.lenders):
        _watch_unit(tree, each)
    return call


def _watch_unit(tree: UnitTree, unit: Unit) -> None:
    stream = (tree.forward or tree.latest_forward).stream
    for number, handle in enumerate(unit.handles):
        watch: LeafWatch | None = handle.forms.current.watch
        if watch is None:
            _watch_leaves(unit, number, handle, stream)
        elif watch.stream != stream:
            watch.follow(stream)


def _have_full_parameters(unit: Unit, module: nn.Module) -> tuple[UnitTree, ForwardCall]:
    tree, backward = tree_and_backward(unit)
    call = ForwardCall(sys.exc_info()[1], module, current_run() != NO_RUN)
    if unit.phase is Phase.BACKWARD and backward is not None:
        call.is_recomputation = True
        unit.begin_call(call)
        return tree, call
    if unit.held.calls and _was_interrupted(unit, module):
        _refuse_another_thread(tree)
        # No hook was called when the pass was interrupted.
        tree.recover()
    if tree.forward is None and not call.in_backward:
        tree.begin_forward()
        call.is_top = True
        if not tree.lends:
            lend_what_is_read(tree, _watch_unit)
    call.full_precision = unit.computes_in_full_precision
    unit.shed(full_precision=call.full_precision)
    if unit.phase is not Phase.FORWARD:
        if unit.phase is Phase.REDUCING and backward is not None:
            backward.reductions.settle_until(unit)
        unit.move(Phase.FORWARD)
    unit.begin_call(call)
    for reader in list(unit.links.borrowers):
        for theirs in reader.calls:
            if unit in theirs.lent:
                take_back_unused(reader, theirs, unit)
    unit.begin_unshard(full_precision=call.full_precision)
    if tree.forward is not None and not call.in_backward:
        _prefetch(tree, tree.forward, unit)
    unit.finish_unshard()
    call.stamp = 0 if unit.gather is None else unit.gather.stamp
    return tree, call


def _was_interrupted(unit: Unit, module: nn.Module) -> bool:
    """Whether some call that the unit has recorded is not on the stack any more; a call of `module` begins now."""
    known = collections.Counter(call.module for call in unit.calls)
    known[module] += 1
    return any(running_calls(called) < count for called, count in known.items())


def _refuse_another_thread(tree: UnitTree) -> None:
    for unit in tree.units:
        if any(call.runs_elsewhere for call in unit.calls):
            raise FlatParamError(
                f"rank {unit.topology.rank}: unit {unit.name!r} is in the forward pass of another thread; the "
                "units of a model run one pass at a time: call it in one thread, or with a lock around the whole pass"
            )


@profiled("_pre_forward_prefetch")
def _prefetch(tree: UnitTree, current: ForwardPass, unit: Unit) -> None:
    current.begin(unit)
    depth = unit.plan.prefetch.forward
    ahead: Iterable[Unit] = ()
    if unit.links.forward_prefetch is not None:
        ahead = unit.links.forward_prefetch
    elif tree.streams.runs_ahead and depth != 0:
        ahead = _as_many_as_fit(tree.to_come(unit), depth or 1)
    elif depth and tree.last_forward is not None:
        ahead = next_forward(tree.last_forward.began, current.began, depth)
    for other in ahead:
        if other.phase is Phase.IDLE:
            other.begin_unshard(full_precision=other.computes_in_full_precision)


def _as_many_as_fit(units: Iterable[Unit], least: int) -> Iterator[Unit]:
    """Yield the first `least` of `units`, and more of them as long as all together are small."""
    waiting = 0
    for count, unit in enumerate(units):
        waiting += unit.unsharded_nbytes
        if count >= least and waiting > PREFETCH_NBYTES.value:
            return
        yield unit


@profiled("_to_kwargs")
def _prepared(unit: Unit, call: ForwardCall, inputs: Any) -> Any:
    """Return the inputs on the device of the tree's parameters and in the dtype that the unit computes in."""
    holding = next((each for each in (unit, *tree_of(unit).units) if each.handles), None) if call.is_top else None
    if holding is not None:
        # Without waiting, the host would compute with inputs that have not landed.
        device, waits = holding.device, holding.device.type == "cpu"
        inputs = map_tensors(lambda tensor: tensor.to(device, non_blocking=not waits), inputs)
    casting = unit.plan.casting
    call.restored = casting.output_dtype
    if (
        casting.dtype is None
        or call.full_precision
        or not casting.applies(is_top=call.is_top, manages=bool(unit.handles))
    ):
        return inputs
    if casting.restores_outputs:
        floating = (tensor.dtype for tensor in tensors_in(inputs) if tensor.is_floating_point())
        call.restored = casting.output_dtype or next(floating, None)
    return _cast(inputs, casting.dtype)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


@untraced
@profiled("_post_forward")
def after_forward(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Watch the outputs for the backward pass, and free the full parameters if the unit's plan says so."""
    # The tree has recovered from an exception inside, which now propagates.
    if not unit.held.calls:
        return None
    # The call of this thread was refused.
    if output is None and unit.held.calls[-1].runs_elsewhere:
        return None
    call = unit.held.end_call()
    if autocast_is_on():
        # Until its region ends, autocast keeps a cast of each leaf: of a whole model, and of weights before a step.
        torch.clear_autocast_cache()
    failed = _is_of_exception(call, output)
    # A recomputation stops early with an exception of torch's own.
    if failed and not call.is_recomputation and not call.in_backward:
        tell_failure(sys.exc_info()[1], f"forward pass of unit {unit.name!r}")
    call.failed, call.recorded = failed, torch.is_grad_enabled() and not call.is_recomputation and not failed
    if call.restored is not None and not failed:
        output = _cast(output, call.restored)
    call.watched = call.recorded and _watch_outputs(unit, call, output)
    if call.recorded and not call.watched:
        _hook_every_leaf(unit)
    edited = None
    for handle in unit.handles if call.recorded else ():
        if handle.forms.current.is_edited:
            edited = _edited(unit)
    tree = tree_of(unit)
    if dispatch_modes():
        apart_from_checkpoints(_leave, tree, unit, call)
    else:
        _leave(tree, unit, call)
    if edited is not None:
        tell_failure(edited, f"forward pass of unit {unit.name!r}")
        raise edited
    return output if call.restored is not None and not failed else None


def cast_output(unit: Unit, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Cast the outputs of a module whose unit casts them, before the hooks that are registered on it later."""
    call = unit.calls[-1] if unit.calls else None
    if call is None or call.module is not module or call.restored is None:
        return None
    dtype, call.restored = call.restored, None
    return _cast(output, dtype)


def _is_of_exception(call: ForwardCall, output: Any) -> bool:
    """Return whether an always-called forward hook was called because the module raised."""
    return output is None and sys.exc_info()[1] is not call.outer_error


def _edited(unit: Unit) -> FlatParamError | None:
    """Return the error for parameters that the call has changed in place; None if they are written back."""
    if unit.showing.pins:
        return None
    edited = [handle.name for handle in unit.handles if handle.form.is_edited]
    return FlatParamError(
        f"unit {unit.name!r}, rank {unit.topology.rank}: some of its full parameters {', '.join(edited)} were "
        "changed in place in its forward pass, as nn.Embedding(max_norm=...) does, and the change would be lost, since "
        "the shards do not see it; change values between passes, inside summon_full_params()"
    )


def _leave(tree: UnitTree, unit: Unit, call: ForwardCall) -> None:
    """Free the unit's full parameters if its plan says so; `call` is over."""
    # Between calls a module's own `zero_grad()` has to find the flat parameters.
    if call.is_top or call.in_backward:
        for each in tree.units if call.is_top else (unit, *unit.links.lenders):
            each.list_flat_parameters(not each.calls)
    if call.is_recomputation:
        return
    if call.failed and call.is_top:
        tree.recover()
        return
    if not unit.held.calls:
        is_next = _is_first_of_backward(tree, unit)
        unit.move(Phase.IDLE)
        around = tree.forward
        is_computed = around is not None and not around.recorded and not tree.graphs
        for lender in unit.links.lenders:
            free(lender, Juncture.READER_ENDED, call, around, is_computed=is_computed)
        free(unit, Juncture.CALL_ENDED, call, around, is_next, is_computed=is_computed)
    for lender in call.lent:
        unit.give_back(lender)
    if tree.forward is not None and not call.in_backward:
        tree.forward.ended.append(unit)
    if call.is_top:
        for each in tree.units:
            if each.gather is not None:
                free(each, Juncture.FORWARD_ENDED)
        if call.recorded:
            tree.graphs.add(call)
        tree.end_forward()


def _is_first_of_backward(tree: UnitTree, unit: Unit) -> bool:
    """Return whether `unit`, whose call was outside of any backward pass, is expected to be the first in backward.

    It is if all but the outermost unit have ended, and this pass is like the one before.
    """
    if not unit.plan.keeps_last or tree.forward is None:
        return False
    # Only the number of units counts: ranks that diverge must still issue the same collectives, so that all detect it.
    still_open = 2  # this call, and the outermost one around it
    return len(tree.forward.ended) == tree.forward.calls_before - still_open


def _watch_inputs(unit: Unit, call: ForwardCall, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    args, kwargs = inputs
    # The shortcut for most calls.
    is_one = not kwargs and len(args) == 1 and type(args[0]) is Tensor
    for tensor in args if is_one else tensors_in(inputs):
        if tensor.requires_grad:
            token = object()
            node = tensor.grad_fn or apart_from_checkpoints(get_gradient_edge, tensor).node
            call.inputs[token] = (node, tensor.device)
            # The hook holds only the token: the node owns its hooks, so a hook that holds the node is never freed.
            hook = functools.partial(_input_arrived, weakref.ref(unit), weakref.ref(call), token)
            registered = tensor.register_hook(hook)
            # A leaf outlives this graph; the call does not.
            if tensor.grad_fn is None:
                weakref.finalize(call, registered.remove)


def _watch_outputs(unit: Unit, call: ForwardCall, output: Any) -> bool:
    found: dict[Node, None] = {}
    opaque: list[object] = []
    made = {node for node, _ in call.inputs.values()}
    for tensor in (output,) if type(output) is Tensor else tensors_in(output, opaque):
        node = tensor.grad_fn
        # The module passed a parameter on, or a part of its memory: whoever called computes with it.
        if node is None or tensor._is_view():
            holder = _holder_of_memory(unit, call, tensor)
            if holder is not None:
                call.returned.add(holder)
            if holder is unit:
                opaque.append(tensor)
        if node is None:
            continue
        found.setdefault(node)
        # If the view is changed in place outside, the gradient comes by the tensor that it is a view of.
        beneath = None if tensor._base is None else node_beneath(tensor, made)
        if beneath is not None:
            found.setdefault(beneath)
    # An input that is passed on, as a cache of earlier layers' keys, gets its gradient when this unit is long complete.
    for node in [node for node in found if node not in made] or found:
        # A node's hooks run after those of its output tensors. So if this output is also the input of a different
        # unit, that unit is complete, and its memory is free, before this unit gathers ahead.
        node.register_prehook(functools.partial(_before_backward, unit, call))
    return bool(found) and not opaque


def _holder_of_memory(unit: Unit, call: ForwardCall, tensor: Tensor) -> Unit | None:
    """The unit in whose full parameters `tensor` lies, of the one that is called and of those that lend to it."""
    lenders: Iterable[Unit] = call.lent
    for each in (unit, *lenders):
        for handle in each.handles:
            if handle.buffer.has(tensor):
                return each
    return holder_of_parameter(tensor) if tensor.requires_grad and tensor.grad_fn is None else None


def _watch_leaves(unit: Unit, number: int, handle: FlatParamHandle, stream: int) -> None:
    check_in_backward_optimizers(handle, is_guarded=unit.observers.guard is not None)
    arrived = functools.partial(functools.partial, _gradient_arrived, weakref.ref(unit), number)
    watch = LeafWatch.over(handle, arrived, stream)
    handle.form.note_nodes(watch.nodes)
    handle.form.watch = watch


def _hook_every_leaf(unit: Unit) -> None:
    """Hook all leaves, since no output announces the unit's backward pass."""
    for each in (unit, *unit.links.lenders):
        for _, _, watch in leaf_watches(each.handles):
            watch.hook(watch.unhooked)


@untraced
def _before_backward(unit: Unit, call: ForwardCall, gradients: tuple[Tensor, ...], *, again: bool = False) -> None:
    tree = tree_of(unit)
    (tree.living_backward() or tree.begin_backward()).enter(unit, call, again=again)


@untraced
def _gradient_arrived(reference: weakref.ReferenceType[Unit], number: int, index: int, leaf: Tensor) -> None:
    unit = reference()
    if unit is None:
        return
    tree = tree_of(unit)
    current = tree.living_backward() or tree.begin_backward()
    call = current.call_of(unit)
    if call is not None and leaf.grad is not None:
        _watch_gradient(unit, call, leaf.grad)
    current.gradient_arrived(unit, number, index)


def _input_arrived(
    reference: weakref.ReferenceType[Unit],
    call_reference: weakref.ReferenceType[ForwardCall],
    token: object,
    gradient: Tensor | None,
) -> None:
    unit, call = reference(), call_reference()
    if unit is None:
        return
    current = tree_of(unit).living_backward()
    if current is not None:
        if call is not None and gradient is not None and gradient.grad_fn is not None:
            _watch_gradient(unit, call, gradient)
        current.input_arrived(unit, token)


def _watch_gradient(unit: Unit, call: ForwardCall, gradient: Tensor | None) -> None:
    """Watch the gradient if it has a graph of its own (`create_graph`), which reads the unit's parameters again.

    It is `None` if only other outputs of the node that made the tensor have one: other parts that `chunk` made, say.
    """
    if gradient is not None and gradient.grad_fn is not None:
        gradient.grad_fn.register_prehook(functools.partial(_before_backward, unit, call, again=True))
