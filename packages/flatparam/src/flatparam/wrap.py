"""Which submodules become units of their own: policies, and the functions that apply them."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

WrapFunction = Callable[..., bool]
"""An FSDP1 policy function: `(module, recurse, nonwrapped_numel) -> bool`."""


class _Policy(abc.ABC):
    """Decides for a whole module tree at once which modules are wrapped, and with which arguments."""

    @abc.abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: Collection[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """The modules to wrap, each with the wrapper's arguments (a copy of `root_kwargs`, perhaps changed)."""


class ModuleWrapPolicy(_Policy):
    """Wrap every instance of the given classes. Also callable as an FSDP1 policy function."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        """Take the classes whose instances are wrapped, subclasses included."""
        self._module_classes = tuple(set(module_classes))

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: Collection[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        return {
            module: dict(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, self._module_classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Whether to look further in (always), or to wrap `module`."""
        return recurse or isinstance(module, self._module_classes)

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({sorted(kind.__name__ for kind in self._module_classes)})"


class CustomPolicy(_Policy):
    """Ask a function for each module: `True` wraps it, `False` does not, a dict wraps it with other arguments."""

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
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    f"the function of a CustomPolicy returns a bool or a dict of arguments, found {answer!r} "
                    f"for {type(module).__name__}"
                )
            if answer:
                targets[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return targets


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Wrap every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Wrap the modules for which `lambda_fn` is true."""
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Collection[type[nn.Module]],
) -> bool:
    """Wrap the instances of `transformer_layer_cls`."""
    return recurse or isinstance(module, tuple(transformer_layer_cls))


_module_wrap_policy = transformer_auto_wrap_policy


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
        force_leaf_modules: never looked into; by default the function's attribute `FORCE_LEAF_MODULES`.
        exclude_wrap_modules: never wrapped; by default the function's attribute `EXCLUDE_WRAP_MODULES`.
    """
    attributes = vars(size_based_auto_wrap_policy)
    leaves = attributes["FORCE_LEAF_MODULES"] if force_leaf_modules is None else force_leaf_modules
    excluded = attributes["EXCLUDE_WRAP_MODULES"] if exclude_wrap_modules is None else exclude_wrap_modules
    large = nonwrapped_numel >= min_num_params
    return large and not isinstance(module, tuple(leaves if recurse else excluded))


vars(size_based_auto_wrap_policy).update(
    FORCE_LEAF_MODULES={nn.MultiheadAttention}, EXCLUDE_WRAP_MODULES={nn.ModuleList, nn.ModuleDict}
)


def chosen_by(
    policy: _Policy | WrapFunction,
    root: nn.Module,
    *,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    kwargs: dict[str, Any],
) -> dict[nn.Module, dict[str, Any]]:
    """The submodules of `root` that `policy` chooses, each with the wrapper's arguments; `root` itself is not one.

    Raises:
        ValueError: for a policy that is neither a policy object nor callable.
    """
    run = getattr(policy, "_run_policy", None)
    if run is not None:
        targets: dict[nn.Module, dict[str, Any]] = run(root, ignored_modules, kwargs)
    elif callable(policy):
        targets = {
            module: _with_own(module, kwargs)
            for module in _chosen(root, policy, ignored_modules, ignored_parameters)
        }
    else:
        raise ValueError(f"auto_wrap_policy: expected a policy object or a function, found {policy!r}")
    targets.pop(root, None)
    return targets


def wrap_chosen(
    root: nn.Module, targets: dict[nn.Module, dict[str, Any]], wrapper: Callable[..., nn.Module]
) -> None:
    """Replace the chosen submodules of `root` by `wrapper(submodule, **kwargs)`, innermost first.

    A module that is reached by several paths is wrapped once and replaced on all of them.
    """
    _replace(root, targets, wrapper, {})


def _with_own(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with what the module itself asks for in `_wrap_overrides`."""
    return {**kwargs, **getattr(module, "_wrap_overrides", {})}


def _replace(
    module: nn.Module,
    targets: dict[nn.Module, dict[str, Any]],
    wrapper: Callable[..., nn.Module],
    done: dict[nn.Module, nn.Module],
) -> None:
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if child not in done:
            done[child] = child
            _replace(child, targets, wrapper, done)
            if child in targets:
                done[child] = wrapper(child, **targets[child])
                done[done[child]] = done[child]
        if done[child] is not child:
            setattr(module, name, done[child])


def _chosen(
    root: nn.Module,
    policy: WrapFunction,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
) -> list[nn.Module]:
    """The modules that a policy function chooses: it is asked on the way down, and with what is left on the way up."""
    ignored = {id(parameter) for parameter in ignored_parameters}
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        numel = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(visit(child) for child in module.children() if child not in ignored_modules)
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            chosen.append(module)
            return numel
        return wrapped

    visit(root)
    return chosen


_CONTEXT = threading.local()


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Have `wrap` use `wrapper_cls` and these arguments inside the context; an inner context adds to the outer's."""
    before: tuple[Callable[..., nn.Module], dict[str, Any]] | None = getattr(_CONTEXT, "wrapping", None)
    _CONTEXT.wrapping = (wrapper_cls, {**(before[1] if before else {}), **wrapper_kwargs})
    try:
        yield
    finally:
        _CONTEXT.wrapping = before


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap `module` inside `enable_wrap`, with some arguments changed; outside return it as it is.

    The module's own `_wrap_overrides`, a dict, win over both.
    """
    wrapping: tuple[Callable[..., nn.Module], dict[str, Any]] | None = getattr(_CONTEXT, "wrapping", None)
    if wrapping is None:
        return module
    wrapper, kwargs = wrapping
    return wrapper(module, **_with_own(module, {**kwargs, **wrap_overrides}))
