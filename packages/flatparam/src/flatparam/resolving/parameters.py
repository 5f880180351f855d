"""A module's parameters: which are left whole, the device that the others go to, and the rule by which each is cut."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any, final

import attrs
import torch
from torch import nn

from flatparam.layout import as_policy
from flatparam_core import (
    ELEMENT,
    FSDP_WRAPPED_MODULE,
    BoundParameter,
    FlatParameter,
    LayoutRule,
    clean_fqn,
    each_module,
    owner_of,
)
from flatparam_runtime import unit_of, warn_caller


@final
@attrs.frozen(eq=False)
class Ignored:
    """The modules, with all below them, and the parameters that are left whole."""

    modules: frozenset[nn.Module] = frozenset()
    parameter_ids: frozenset[int] = frozenset()
    parameters: tuple[nn.Parameter, ...] = ()

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self.parameter_ids


def resolve_ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Resolve the two arguments, of which at most one may be given; units below an ignored module stay units.

    Raises:
        TypeError: for something that is no collection.
        ValueError: for both arguments, for something in one that is no module or parameter, for a mix of them, or for a
            module that is wrapped.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states exclude each other: pass one of them")
    name = "ignored_modules" if ignored_states is None else "ignored_states"
    items = list(_iterable(name, ignored_modules if ignored_states is None else ignored_states))
    if items and all(isinstance(item, nn.Parameter) for item in items) and name == "ignored_states":
        return _ignored((), items)
    if any(isinstance(item, nn.Parameter) for item in items) and any(isinstance(i, nn.Module) for i in items):
        raise ValueError("ignored_states: expected all modules or all parameters, found both")
    for item in items:
        if not isinstance(item, nn.Module):
            raise ValueError(f"{name}: expected an iterable of modules, found {type(item).__name__} in it")
        if FSDP_WRAPPED_MODULE in item._modules or unit_of(item) is not None:
            raise ValueError(f"{name} should not include wrapped modules, and this {type(item).__name__} is one")
        if item is module:
            warn_caller(f"{name} holds the module that is wrapped: none of it is sharded")
    return _ignored(items, ())


def _iterable(name: str, value: Any) -> Iterable[Any]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise TypeError(f"{name}: expected an iterable, found {type(value).__name__}")
    return value


def _ignored(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> Ignored:
    below = frozenset(
        child for module in modules for child in each_module(module, lambda child: unit_of(child) is not None)
    )
    every = (*parameters, *(p for module in below for p in module.parameters(recurse=False)))
    return Ignored(below, frozenset(map(id, every)), tuple(every))


def resolve_device(device_id: Any, module: nn.Module, ignored: Ignored, *, offload: bool) -> torch.device | None:
    """Return the device that full parameters are to live on; `None` leaves them where they are.

    Without `device_id`, parameters on the CPU and on one accelerator go to the accelerator; those on the meta device,
    and those whose shards are to be kept in CPU memory, to the current accelerator if there is one.

    Raises:
        TypeError: if `device_id` is nothing that names a device.
        ValueError: if parameters are on different accelerators.
    """
    asked = None if device_id is None else _device(device_id)
    found = {
        parameter.device
        for child in each_module(module)
        for parameter in child._parameters.values()
        if parameter is not None and parameter not in ignored and not getattr(parameter, "_fsdp_flattened", False)
    }
    accelerators = sorted({device for device in found if device.type not in ("cpu", "meta")}, key=str)
    others = [device for device in accelerators if asked is None or device != asked]
    if others and (asked is not None or len(others) > 1):
        wanted = "one device" if asked is None else f"device_id={asked}"
        raise ValueError(
            f"device_id: expected parameters on {wanted} or on the CPU, found some on {', '.join(map(str, others))}; "
            "move the module to one device, or pass that device"
        )
    if asked is not None:
        return asked
    if accelerators and len(found) > 1:
        return accelerators[0]
    if offload or torch.device("meta") in found:
        here = next((device for device in found if device.type != "meta"), torch.device("cpu"))
        if here.type == "cpu" and torch.accelerator.is_available():
            here = _device(torch.accelerator.current_device_index())
        return here
    return None


def _device(device_id: Any) -> torch.device:
    if not isinstance(device_id, (int, str, torch.device)):
        raise TypeError(f"device_id: expected an int, a string or a torch.device, found {device_id!r}")
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(device_id)
    if device.type == "cpu":
        # The index of a CPU means nothing.
        return torch.device("cpu")
    if device.type != "meta" and not torch.get_device_module(device).is_available():
        raise ValueError(f"device_id: expected a device of this machine, found {device}, which torch cannot use here")
    if device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
        warn_caller(f"device_id={device_id!r} has no index: using the current device, {device}")
    return device


@final
@attrs.frozen(eq=False)
class ResolvedRules:
    """The rule of every parameter of a model, by the attribute that holds it: the object may be replaced by another."""

    _by_module: MutableMapping[nn.Module, dict[str, LayoutRule]]
    shares: tuple[float, ...] = ()
    """For each rank of the shard group the weight of its part; empty gives all the same."""

    def __call__(self, bound: BoundParameter) -> LayoutRule:
        """Return the rule of a parameter; of a shared one, that which keeps most together."""
        known = (self._by_module.get(info.module, {}).get(info.param_name, ELEMENT) for info in bound.infos)
        spec = bound.spec
        return max(known, key=lambda rule: (rule.grain(spec.shape, spec.stride), rule.block_numel))


def resolve_rules(module: nn.Module, layout: Any, *, is_whole_model: bool = False) -> ResolvedRules | None:
    """The rules that `layout` gives the parameters below `module` that no unit holds yet; `None` without a layout.

    Args:
        is_whole_model: `layout` is for this module alone; a pattern that fits none of its names gets a warning.

    Raises:
        TypeError: for anything that is no layout, or gives no rule; the message names the parameter.
    """
    if layout is None:
        return None
    policy = as_policy(layout)
    found: MutableMapping[nn.Module, dict[str, LayoutRule]] = weakref.WeakKeyDictionary()
    names: list[str] = []
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is None or isinstance(parameter, FlatParameter) or owner_of(parameter) is not None:
                # A pattern may be for this one.
                is_whole_model = is_whole_model and parameter is None
                continue
            fqn = clean_fqn(f"{path}.{name}" if path else name)
            found.setdefault(child, {})[name] = policy.rule(fqn, parameter, child)
            names.append(fqn)
    for pattern in policy.patterns if is_whole_model else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            shown = f"{', '.join(map(repr, names[:3]))}{', ...' if len(names) > 3 else ''}" or "none"
            warn_caller(f"layout: {pattern!r} fits no parameter, so its rule does nothing; the names are {shown}")
    return ResolvedRules(found, policy.shares)
