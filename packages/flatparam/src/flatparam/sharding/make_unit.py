"""Make a module a unit, as the arguments of the wrapper were resolved, or find that it is one already."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import nn

from flatparam import debug_log
from flatparam.addons import load, tell_clients
from flatparam.resolving.parameters import Ignored
from flatparam.resolving.settings import Resolved, ResolvedTree
from flatparam.sharding import extensions, placement
from flatparam.spread import route_torchs_functions
from flatparam.wrap import wrap_chosen
from flatparam.wrapper.refusing import refuse_parts_in_states
from flatparam_core import FSDP_WRAPPED_MODULE, FlatParamError, FlatParameter, owner_of
from flatparam_runtime import Unit, notice_failed_passes, notice_optimizers, shard_module, unit_of, warn_caller

_MUCH: Final = 2
"""The length of a flat parameter, as a multiple of its parameters', above which its layout gets a warning."""


def shard_tree(module: nn.Module, tree: ResolvedTree, wrap: Callable[[nn.Module, Resolved], nn.Module]) -> Unit:
    """Return the unit of `module`, after those inside have been wrapped as they were resolved, from the inside out.

    Args:
        wrap: makes the wrapper of a module inside.

    Raises:
        FlatParamError: if a module was wrapped before, and has got parameters since that no unit holds.
    """
    refuse_repacked(module, tree.root.ignored)
    wrap_chosen(module, tree.inside, lambda child: wrap(child, tree.inside[child]))
    return _unit_for(module, tree.root)


def _unit_for(module: nn.Module, resolved: Resolved) -> Unit:
    """Return the unit of `module`, which is made one, unless it was wrapped before."""
    unit = unit_of(module)
    if unit is None:
        return shard_resolved(module, resolved, by_hooks=False)
    _notice()
    _check_holds_all(module, unit, resolved)
    _warn_of_other_plan(unit, resolved)
    return unit


def _notice() -> None:
    notice_optimizers()
    notice_failed_passes()


def shard_resolved(module: nn.Module, resolved: Resolved, *, by_hooks: bool) -> Unit:
    """Make `module`, which is no unit yet, one as its settings were resolved.

    Args:
        by_hooks: the module is called as it is; otherwise a wrapper calls it.
    """
    refuse_repacked(module, resolved.ignored)
    _notice()
    modules = placement.own_modules(module, resolved.ignored)
    tensors = list(placement.own_tensors(modules, resolved.ignored))
    if extensions.needs_extensions(tensors):
        resolved = extensions.flatten_extended(module, resolved)
        tensors = list(placement.own_tensors(modules, resolved.ignored))
    is_deferred = placement.is_deferred(tensors, resolved)
    initialise = placement.initialiser(module, resolved) if is_deferred else None
    if resolved.device is not None:
        placement.move(tensors, resolved.device)
    if resolved.asked.sync_module_states and initialise is None:
        placement.broadcast_from_first(resolved.plan.topology, tensors)
    unit = shard_module(
        module,
        resolved.plan,
        ignored_modules=resolved.ignored.modules,
        ignored_parameters=resolved.ignored.parameters,
        device=resolved.device,
        initialise=initialise,
        rule_of=resolved.rules,
        shares=() if resolved.rules is None else resolved.rules.shares,
        by_hooks=by_hooks,
    )
    route_torchs_functions(unit)
    refuse_parts_in_states(unit)
    keep_packing(modules, resolved.ignored)
    tell_clients("unit_made")
    _warn_of_padding(unit)
    debug_log.watch_for_debugging(unit)
    if resolved.environment.trace_folder is not None:
        load("flatparam_plan.recorder").record(unit, resolved.environment.trace_folder)
    mark_for_compiler(modules)
    return unit


def _warn_of_padding(unit: Unit) -> None:
    """Say that the rules of a layout make a flat parameter much longer than its parameters."""
    for handle in unit.handles:
        layout, numel = handle.layout, sum(slot.spec.numel for slot in handle.layout.slots)
        if not layout.is_plain and layout.numel > _MUCH * numel:
            times = layout.numel / max(numel, 1)
            warn_caller(
                f"unit {unit.name!r}: with the rules of its layout, the flat parameter of {layout.fqns[0]!r}, ... "
                f"takes {times:.1f} times the memory of its parameters on {layout.world_size} ranks; "
                "make units of more parameters, shard over fewer ranks (HYBRID_SHARD), or keep less together: "
                "docs/layouts.md says what rules cost"
            )


def _check_holds_all(module: nn.Module, unit: Unit, resolved: Resolved) -> None:
    tensors = placement.own_tensors(placement.own_modules(module, resolved.ignored), resolved.ignored)
    for tensor in tensors:
        if isinstance(tensor, nn.Parameter) and not isinstance(tensor, FlatParameter) and owner_of(tensor) is None:
            name = next(name for name, parameter in module.named_parameters() if parameter is tensor)
            raise FlatParamError(
                f"rank {unit.topology.rank}: {type(module).__name__} was wrapped before it got the "
                f"parameter {name!r}, which no unit holds; wrap its module, and then the module around both"
            )


def _warn_of_other_plan(unit: Unit, resolved: Resolved) -> None:
    """Say that arguments which differ from those of the first wrapping change nothing."""
    before, asked = unit.plan, resolved.plan
    differing = [
        name
        for name, mine, other in (
            ("sharding_strategy", before.free_after_forward, asked.free_after_forward),
            ("process_group", before.topology, asked.topology),
            ("mixed_precision", (before.precision, before.casting), (asked.precision, asked.casting)),
            ("cpu_offload", before.storage_device, asked.storage_device),
            ("use_orig_params", before.use_orig_params, asked.use_orig_params),
        )
        if mine != other
    ]
    if differing:
        warn_caller(
            f"unit {unit.name!r} was wrapped before, and its parameters stay as they were sharded then: "
            f"{', '.join(differing)} of this wrapping {'have' if len(differing) > 1 else 'has'} no effect on them"
        )


# Layers of bitsandbytes that give their weight other bytes when they evaluate on a CPU are told not to. On a CPU with
# AVX512-BF16 a `Linear4bit` repacks its weight the first time that it evaluates, for a faster product, and rounds the
# scales. Nothing undoes that exactly, and the layer trains no more. A rank holds only a part of the weight, so it could
# not repack it; without that the layer evaluates as it trains.

_MAY_REPACK: Final = "support_avx512bf16_for_cpu"
_IS_REPACKED: Final = "packing_format_for_cpu"


def keep_packing(modules: Iterable[nn.Module], ignored: Ignored) -> None:
    """Have those of `modules` whose weight is to be sharded keep its bytes when they evaluate."""
    for module in modules:
        if vars(module).get(_MAY_REPACK) and module._parameters.get("weight") not in ignored:
            setattr(module, _MAY_REPACK, False)


def refuse_repacked(module: nn.Module, ignored: Ignored) -> None:
    """Refuse a model of which a layer has evaluated before, so that its weight is repacked.

    Raises:
        FlatParamError: naming the parameter.
    """
    for path, child in module.named_modules():
        # TorchScript's parameters are in no dict; they are refused, or ignored, later.
        if isinstance(child, torch.jit.ScriptModule):
            continue
        weight = child._parameters.get("weight")
        if weight is None or weight in ignored:
            continue
        if getattr(getattr(weight, "quant_state", None), _IS_REPACKED, False):
            name = f"{path}.weight" if path else "weight"
            raise FlatParamError(
                f"parameter {name!r} was repacked when its {type(child).__name__} evaluated on this CPU (AVX512-BF16), "
                "which rounds its scales and is not undone, and the layer trains no more: expected the bytes as they "
                f"were quantised; shard the model before it evaluates, or set {_MAY_REPACK} = False of its layers first"
            )


def mark_for_compiler(modules: Iterable[nn.Module]) -> None:
    """Mark the modules of a unit as managed by FSDP: Dynamo then guards on neither their parameters' identity nor
    their shapes. The names of the marks are those that Dynamo reads.

    It compiles no module that says that it does not use its original parameters. While a unit computes, each of its
    parameters is an autograd leaf of its own, in both settings of `use_orig_params`; so all say that they do.
    """
    for module in modules:
        # A wrapper has no parameters of its own.
        if FSDP_WRAPPED_MODULE not in module._modules:
            module.__dict__["_is_fsdp_managed_module"] = True
            module.__dict__["_fsdp_use_orig_params"] = True
