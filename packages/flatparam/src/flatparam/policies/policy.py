"""Policies: each decides which submodules of a model become units of their own."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable
from typing import Any, ClassVar

from torch import nn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "WrapFunction",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
]

WrapFunction = Callable[..., bool]
"""An FSDP1 policy function: `(module, recurse, nonwrapped_numel) -> bool`."""


class _Policy(abc.ABC):
    """Decides for a whole module tree at once which modules are wrapped, and with which arguments.

    Torch's policies are instances too, as is whatever has its method.
    """

    _plans: ClassVar[bool] = False
    """Whether it plans how the model will be trained, to decide."""

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        if cls is _Policy and any("_run_policy" in vars(base) for base in other.__mro__):
            return True
        return NotImplemented  # type: ignore[no-any-return]  # as the data model says

    @abc.abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: Collection[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to wrap, each with the wrapper's arguments (a copy of `root_kwargs`, perhaps changed)."""


class ModuleWrapPolicy(_Policy):
    """A policy that wraps every instance of the given classes. It can also be called as an FSDP1 policy function."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        """Take the classes whose instances are wrapped, subclasses included."""
        given: Any = module_classes
        are_some = isinstance(given, Iterable) and not isinstance(given, (str, type))
        classes = tuple(set(given)) if are_some else ()
        if not are_some or not all(isinstance(each, type) for each in classes):
            raise TypeError(
                f"ModuleWrapPolicy: expected the classes of the modules to wrap, as in {{nn.Linear}}, found {given!r}"
            )
        self._module_classes = classes

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: Collection[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, self._module_classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Return whether to look further in (always), or to wrap `module`."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({sorted(kind.__name__ for kind in self._module_classes)})"


class CustomPolicy(_Policy):
    """A policy that asks a function for each module: `True` wraps it, `False` does not, a dict also changes arguments.

    It can also be called as an FSDP1 policy function, if the function returns no arguments.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        """Take the function to ask."""
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: Collection[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        targets: dict[nn.Module, dict[str, Any]] = {}
        for module in root_module.modules():
            if module in ignored_modules:
                continue
            answer = self._answer(module)
            if answer:
                targets[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return targets

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Return whether to look further in (always), or to wrap `module`.

        Raises:
            ValueError: if the function gives arguments, which a policy function cannot pass on.
        """
        if recurse:
            return True
        answer = self._answer(module)
        if answer and isinstance(answer, dict):
            raise ValueError(
                f"a CustomPolicy that is called cannot pass {sorted(answer)} on for {type(module).__name__}; give it "
                "to the wrapper as auto_wrap_policy"
            )
        return bool(answer)

    def _answer(self, module: nn.Module) -> bool | dict[str, Any]:
        answer = self._lambda_fn(module)
        if not isinstance(answer, (bool, dict)):
            raise ValueError(
                f"the function of a CustomPolicy returns a bool or a dict of arguments, found {answer!r} "
                f"for {type(module).__name__}"
            )
        return answer


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which `lambda_fn` returns true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap the instances of `transformer_layer_cls`."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: Collection[type[nn.Module]]
) -> bool:
    """Wrap the instances of `module_classes`."""
    return transformer_auto_wrap_policy(module, recurse, nonwrapped_numel, module_classes)


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Iterable[type[nn.Module]], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    """Wrap the instances of `module_classes`; the classes come before `recurse`."""
    return recurse or isinstance(module, tuple(module_classes))


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[WrapFunction]
) -> bool:
    """Wrap what any of `policies` wraps."""
    return any(
        [policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies]
    )


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Collection[type[nn.Module]] | None = None,
    exclude_wrap_modules: Collection[type[nn.Module]] | None = None,
) -> bool:
    """Wrap a module as soon as it has `min_num_params` elements that no unit below it holds.

    Args:
        force_leaf_modules: classes whose instances are never entered; by default the function's attribute
            `FORCE_LEAF_MODULES`.
        exclude_wrap_modules: classes whose instances are never wrapped; by default the function's attribute
            `EXCLUDE_WRAP_MODULES`.
    """
    attributes = vars(size_based_auto_wrap_policy)
    leaves = attributes["FORCE_LEAF_MODULES"] if force_leaf_modules is None else force_leaf_modules
    excluded = attributes["EXCLUDE_WRAP_MODULES"] if exclude_wrap_modules is None else exclude_wrap_modules
    large = nonwrapped_numel >= min_num_params
    return large and not isinstance(module, tuple(leaves if recurse else excluded))


vars(size_based_auto_wrap_policy).update(
    FORCE_LEAF_MODULES={nn.MultiheadAttention}, EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict}
)
