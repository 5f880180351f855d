"""Ask a policy which submodules it chooses, and put wrappers in their places."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from flatparam.policies.policy import WrapFunction, _Policy

__all__ = ["chosen_by", "with_overrides", "wrap_chosen"]


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
        TypeError: if the policy is neither a policy object nor callable.
    """
    run = getattr(policy, "_run_policy", None)
    if run is not None:
        targets: dict[nn.Module, dict[str, Any]] = run(root, ignored_modules, kwargs)
    elif callable(policy) and not isinstance(policy, type):
        targets = {
            module: with_overrides(module, kwargs)
            for module in _chosen(root, policy, ignored_modules, ignored_parameters, ask_for_root=False)[0]
        }
    else:
        raise TypeError(f"auto_wrap_policy: expected a policy object or a function, found {policy!r}")
    targets.pop(root, None)
    return targets


def wrap_chosen(
    root: nn.Module, chosen: Collection[nn.Module], wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """Replace the chosen submodules of `root` by what `wrap` makes of them, innermost first.

    A module that is reached by several paths is wrapped once and replaced on all of them.
    """
    _replace(root, chosen, wrap, {})


def with_overrides(module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` with what the module itself asks for in `_wrap_overrides`."""
    return {**kwargs, **getattr(module, "_wrap_overrides", {})}


def _replace(
    module: nn.Module,
    chosen: Collection[nn.Module],
    wrap: Callable[[nn.Module], nn.Module],
    done: dict[nn.Module, nn.Module],
) -> None:
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if child not in done:
            done[child] = child
            _replace(child, chosen, wrap, done)
            if child in chosen:
                done[child] = wrap(child)
                done[done[child]] = done[child]
        if done[child] is not child:
            setattr(module, name, done[child])


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: WrapFunction,
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: Collection[nn.Module],
    ignored_params: Collection[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap what a policy function chooses in `module`, and `module` itself unless `only_wrap_children`.

    Returns the module, or the wrapper around it, and how many elements are wrapped.

    Raises:
        AssertionError: if a module inside is an instance of `wrapper_cls` already, or there is no policy or wrapper.
    """
    if None in (auto_wrap_policy, wrapper_cls):
        raise AssertionError(
            f"expected a policy and a wrapper, found {auto_wrap_policy!r} and {wrapper_cls!r}"
        )
    wrapper_type = wrapper_cls if isinstance(wrapper_cls, type) else ()
    for name, child in module.named_modules():
        if isinstance(child, wrapper_type) and child not in ignored_modules:
            raise AssertionError(f"{name or 'the module'!r} is wrapped already, by {type(child).__name__}")
    chosen, numel = _chosen(
        module, auto_wrap_policy, ignored_modules, ignored_params, ask_for_root=not only_wrap_children
    )

    def wrap(child: nn.Module) -> nn.Module:
        return wrapper_cls(child, **with_overrides(child, kwargs))

    wrap_chosen(module, set(chosen), wrap)
    return wrap(module) if module in chosen else module, numel


def _chosen(
    root: nn.Module,
    policy: WrapFunction,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    *,
    ask_for_root: bool,
) -> tuple[list[nn.Module], int]:
    """Return the modules that a policy function chooses, and how many elements they have.

    It is asked on the way down, and with what is left on the way up; about `root` only with `ask_for_root`.
    """
    ignored = {id(parameter) for parameter in ignored_parameters}
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        numel = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = sum(visit(child) for child in module.children() if child not in ignored_modules)
        asked = ask_for_root or module is not root
        if asked and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            chosen.append(module)
            return numel
        return wrapped

    numel = visit(root)
    return chosen, numel
