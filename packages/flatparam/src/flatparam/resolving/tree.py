"""The modules that become units, with the settings of each: resolved for the whole tree before one is wrapped."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Mapping
from typing import Any, final

import attrs
import torch
from torch import nn

from flatparam.api import MixedPrecision
from flatparam.compat import as_config
from flatparam.policies.choosing import chosen_by
from flatparam.resolving.arguments import Arguments
from flatparam.resolving.settings import Inherited, Resolved, resolve
from flatparam_core import clean_fqn, owner_of
from flatparam_runtime import unit_of

__all__ = ["ResolvedTree", "resolve_tree"]


@final
@attrs.frozen(eq=False)
class ResolvedTree:
    """The settings of a module, and of those inside that a policy chose."""

    root: Resolved
    inside: Mapping[nn.Module, Resolved] = attrs.field(factory=dict)


def resolve_tree(
    wrapper: type[nn.Module], module: nn.Module, arguments: Arguments, offered: Resolved | None = None
) -> ResolvedTree:
    """Return the settings of `module`, and of what the policy chooses inside it; nothing is changed.

    What is wrapped already stays as it is, and nothing inside it is wrapped again.

    Args:
        wrapper: the class that wraps.
        offered: the settings that the wrapper around this one resolved for it, if it did; a subclass may have changed
            the arguments since.

    Raises:
        ValueError, TypeError: naming the argument.
    """
    if offered is not None and arguments.are(offered.asked):
        return ResolvedTree(offered)
    root = resolve(module, arguments, None if offered is None else offered.inherited)
    if offered is None:
        _warn_of_shared_memory(module)
    if arguments.auto_wrap_policy is None:
        return ResolvedTree(root)
    wrapped = {
        child for child in module.modules() if isinstance(child, wrapper) or unit_of(child) is not None
    }
    inside = {child for outer in wrapped for child in outer.modules()}
    left_out = root.ignored.modules | inside
    passed_on = _passed_on(root)
    kwargs = passed_on.by_name()
    targets = chosen_by(
        arguments.auto_wrap_policy,
        module,
        ignored_modules=left_out,
        ignored_parameters=root.ignored.parameters,
        kwargs=kwargs,
    )
    targets = {child: chosen for child, chosen in targets.items() if child not in inside}
    in_full_precision = _in_full_precision(module, root, left_out)
    for child in in_full_precision:
        targets[child] = {**targets.get(child, kwargs), "mixed_precision": None}
    _check_names(targets)
    return ResolvedTree(
        root,
        {
            child: resolve(
                child,
                Arguments(**chosen),
                Inherited(
                    root.ignored,
                    root.environment,
                    passed_on,
                    root.is_left_out or child in in_full_precision,
                    root.rules,
                ),
            )
            for child, chosen in targets.items()
        },
    )


def _warn_of_shared_memory(module: nn.Module) -> None:
    """Warn of parameters that lie in the same memory, but are different objects: they are tied only until now."""
    spans = []
    for name, parameter in module.named_parameters():
        is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
        if not is_plain or parameter.is_meta or not parameter.numel() or owner_of(parameter) is not None:
            continue
        reach = sum(
            (size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
        start = parameter.data_ptr()
        spans.append((str(parameter.device), start, start + (reach + 1) * parameter.itemsize, name))
    spans.sort()
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            warnings.warn(
                f"the parameters {clean_fqn(name)!r} and {clean_fqn(other)!r} are different objects in one memory, and "
                "are not tied any more once they are sharded; assign one parameter to both modules to tie them, or "
                "give each memory of its own",
                stacklevel=4,
            )


def _check_names(targets: Mapping[nn.Module, Mapping[str, Any]]) -> None:
    known = attrs.fields_dict(Arguments)
    for module, chosen in targets.items():
        for name in chosen:
            if name not in known:
                raise TypeError(
                    f"auto_wrap_policy: expected arguments of FullyShardedDataParallel for a {type(module).__name__}, "
                    f"found {name!r}; they are {', '.join(known)}"
                )


def _passed_on(root: Resolved) -> Arguments:
    """Return the arguments of a wrapper for the modules inside, which share its groups and what is ignored."""
    return attrs.evolve(
        root.asked,
        process_group=root.plan.topology,
        device_mesh=None,
        auto_wrap_policy=None,
        sharding_strategy=root.strategy,
        ignored_states=root.ignored.parameters,
        ignored_modules=None,
        broadcast_buffers=False,
    )


def _in_full_precision(module: nn.Module, root: Resolved, left_out: Collection[nn.Module]) -> list[nn.Module]:
    """The modules inside of the classes that the mixed precision leaves out, as BatchNorm; a warning names them."""
    asked: Any = root.asked.mixed_precision
    if asked is None:
        return []
    classes = tuple(as_config(MixedPrecision, asked, "mixed_precision")._module_classes_to_ignore)
    found = [child for child in module.modules() if isinstance(child, classes) and child not in left_out]
    if found:
        names = sorted({type(child).__name__ for child in found})
        warnings.warn(
            f"mixed_precision leaves {', '.join(names)} out: they become units of their own that compute in fp32",
            stacklevel=4,
        )
    return [child for child in found if child is not module]
