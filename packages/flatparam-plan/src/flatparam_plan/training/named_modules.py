"""The modules of a model by their names or those of their classes, and how they are wrapped."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from torch import nn

from flatparam.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from flatparam_plan.plan_error import PlanError

__all__ = ["Wrapping", "policy_for", "classes_named", "recompute", "without_cache"]

Wrapping: TypeAlias = Any
"""Names of classes, a least number of elements, a policy of `flatparam.wrap`, or `None` for one unit."""


def policy_for(wrap: Wrapping, model: nn.Module) -> Any:
    """Return the policy that chooses the units of `model`.

    Raises:
        PlanError: if it cannot be planned, or if the model has no module of a class that is named.
    """
    if getattr(wrap, "_plans", False):
        raise PlanError("wrap: planned() plans by itself while a model is wrapped; plan by --fit instead")
    if isinstance(wrap, str):
        wrap = (wrap,)
    if isinstance(wrap, int):
        return functools.partial(size_based_auto_wrap_policy, min_num_params=wrap)
    if isinstance(wrap, Sequence):
        if all(isinstance(each, type) for each in wrap):
            return ModuleWrapPolicy(wrap)
        return CustomPolicy(_among(classes_named(model, wrap)))
    return wrap


def _among(classes: tuple[type[nn.Module], ...]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


# The modules of a model, by their names or those of their classes


def classes_named(model: nn.Module, names: Iterable[str]) -> tuple[type[nn.Module], ...]:
    """Return the classes of the modules in `model` that have these names; several classes may have one.

    Raises:
        PlanError: if the model has no module of such a class.
    """
    kinds = Counter(type(module) for module in model.modules())
    wanted = list(names)
    missing = [name for name in wanted if name not in {kind.__name__ for kind in kinds}]
    if missing:
        repeated = {kind.__name__ for kind, count in kinds.items() if count > 1}
        raise PlanError(
            f"the model has no module of class {missing[0]!r}; classes that it has several of: "
            f"{', '.join(sorted(repeated)) or 'none'}"
        )
    return tuple(kind for kind in kinds if kind.__name__ in wanted)


def _modules_named(model: nn.Module, names: Iterable[str]) -> set[nn.Module]:
    """Return the modules in `model` that have these names, as `blocks.3`, or are of a class with such a name.

    Raises:
        PlanError: if the model has no such module.
    """
    modules = dict(model.named_modules())
    named = [name for name in names if name in modules]
    for name in names:
        if "." in name and name not in modules:
            raise PlanError(
                f"the model has no module named {name!r}; give a name of named_modules(), or a class"
            )
    classes = classes_named(model, [name for name in names if name not in modules])
    return {modules[name] for name in named} | {
        each for each in modules.values() if isinstance(each, classes)
    }


def recompute(model: nn.Module, names: Iterable[str]) -> None:
    """Have the activations of the modules with these names recomputed in the backward pass; the model itself stays."""
    # A private module of torch, as the guide about activation checkpointing uses it. Its function that wraps all
    # chosen modules of a model imports torch's FSDP for that, which takes longer than many a plan.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    chosen = _modules_named(model, names)
    if model in chosen:
        raise PlanError(
            f"checkpointing: expected modules inside the model, found the whole model, {type(model).__name__}; name "
            "its blocks"
        )
    wrapped = {module: checkpoint_wrapper(module) for module in chosen}
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if child in wrapped:
                setattr(parent, name, wrapped[child])


def without_cache(model: nn.Module) -> bool:
    """Have a model of transformers keep no keys and values for later tokens, as one trains it.

    The configurations are copied, since a caller may share them with other models.

    Returns:
        Whether it would have kept them.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", False) is True:
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)].use_cache = False
            # Not by the module's own `__setattr__`, which may check what it is given.
            vars(module)["config"] = copies[id(config)]
    return bool(copies)
