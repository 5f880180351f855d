"""Which submodules become units of their own: policies, and the functions that apply them."""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import attrs
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
    """Ask a function for each module: `True` wraps it, `False` does not, a dict wraps it with other arguments.

    Also callable as an FSDP1 policy function, where the function gives no arguments.
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
        """Whether to look further in (always), or to wrap `module`.

        Raises:
            ValueError: where the function gives arguments, which a policy function cannot pass on.
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
        TypeError: for a policy that is neither a policy object nor callable.
    """
    run = getattr(policy, "_run_policy", None)
    if run is not None:
        targets: dict[nn.Module, dict[str, Any]] = run(root, ignored_modules, kwargs)
    elif callable(policy):
        targets = {
            module: _with_own(module, kwargs)
            for module in _chosen(root, policy, ignored_modules, ignored_parameters, ask_for_root=False)[0]
        }
    else:
        raise TypeError(f"auto_wrap_policy: expected a policy object or a function, found {policy!r}")
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
        AssertionError: where a module inside is an instance of `wrapper_cls` already, or there is no policy or wrapper.
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
    wrap_chosen(module, {child: _with_own(child, kwargs) for child in chosen}, wrapper_cls)
    if module in chosen:
        module = wrapper_cls(module, **_with_own(module, kwargs))
    return module, numel


def _chosen(
    root: nn.Module,
    policy: WrapFunction,
    ignored_modules: Collection[nn.Module],
    ignored_parameters: Collection[nn.Parameter],
    *,
    ask_for_root: bool,
) -> tuple[list[nn.Module], int]:
    """The modules that a policy function chooses, and how many elements they have.

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


# Wrapping by hand


@attrs.frozen
class _Wrapping:
    """What `wrap` does in one context."""

    wrapper_cls: Callable[..., nn.Module]
    kwargs: dict[str, Any]


class _Contexts(threading.local):
    """The contexts that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Wrapping] = []

    @property
    def innermost(self) -> _Wrapping | None:
        return self.stack[-1] if self.stack else None


_CONTEXTS = _Contexts()


@attrs.frozen
class _OfInnermost:
    """An attribute, of a class and of its instances, that tells something of the innermost context."""

    read: Callable[[_Wrapping | None], Any]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self.read(_CONTEXTS.innermost)


class _ConfigAutoWrap:
    """The context that `enable_wrap` makes, as an object; the class tells what counts in this thread now.

    Its keyword arguments are `wrapper_cls` and the wrapper's own. An inner context with the same wrapper adds its
    arguments to the outer's; one with another wrapper has its own alone.
    """

    in_autowrap_context = _OfInnermost(lambda wrapping: wrapping is not None)
    wrapper_cls = _OfInnermost(lambda wrapping: None if wrapping is None else wrapping.wrapper_cls)
    kwargs = _OfInnermost(lambda wrapping: {} if wrapping is None else wrapping.kwargs)

    def __init__(self, **kwargs: Any) -> None:
        self._arguments = kwargs

    @staticmethod
    def enable_autowrap_context(kwargs: dict[str, Any]) -> None:
        """Enter a context; `disable_autowrap_context` leaves it.

        Raises:
            AssertionError: without a `wrapper_cls`.
        """
        if "wrapper_cls" not in kwargs:
            raise AssertionError(f"expected wrapper_cls among the arguments, found {sorted(kwargs)}")
        outer = _CONTEXTS.innermost
        inherited = outer.kwargs if outer and outer.wrapper_cls is kwargs["wrapper_cls"] else {}
        merged = {**inherited, **kwargs}
        _CONTEXTS.stack.append(_Wrapping(merged.pop("wrapper_cls"), merged))

    @staticmethod
    def disable_autowrap_context() -> None:
        """Leave the innermost context; nothing outside of any."""
        if _CONTEXTS.stack:
            _CONTEXTS.stack.pop()

    def __enter__(self) -> None:
        self.enable_autowrap_context(self._arguments)

    def __exit__(self, *exception: object) -> None:
        self.disable_autowrap_context()


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Have `wrap` use `wrapper_cls` and these arguments inside the context.

    An inner context with the same `wrapper_cls` adds to the outer's arguments; one with another has its own alone.
    """
    with _ConfigAutoWrap(wrapper_cls=wrapper_cls, **wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap `module` inside `enable_wrap`, with some arguments changed; outside return it as it is.

    The module's own `_wrap_overrides`, a dict, win over both.
    """
    wrapping = _CONTEXTS.innermost
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **_with_own(module, {**wrapping.kwargs, **wrap_overrides}))
