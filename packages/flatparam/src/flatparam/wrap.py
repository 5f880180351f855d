"""FSDP1's module of policies and of wrapping by hand.

A policy decides which submodules of a model become units of their own; by hand, the model says which modules are
wrapped, and the caller says how.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from torch import nn

from flatparam.addons import lazily

if TYPE_CHECKING:
    from flatparam_plan import PlannedPolicy, planned

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "PlannedPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "planned",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
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
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Collection[type[nn.Module]]
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


def _or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[WrapFunction]) -> bool:
    """Wrap what any of `policies` wraps."""
    return any([policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies])


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


def wrap_chosen(root: nn.Module, chosen: Collection[nn.Module], wrap: Callable[[nn.Module], nn.Module]) -> None:
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
        raise AssertionError(f"expected a policy and a wrapper, found {auto_wrap_policy!r} and {wrapper_cls!r}")
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


@attrs.frozen
class _Wrapping:
    """The wrapper and its arguments that `wrap` uses in one context."""

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
    arguments to the outer's; a context with a different wrapper has only its own arguments.
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
        """Leave the innermost context, if there is one."""
        if _CONTEXTS.stack:
            _CONTEXTS.stack.pop()

    def __enter__(self) -> None:
        self.enable_autowrap_context(self._arguments)

    def __exit__(self, *exception: object) -> None:
        self.disable_autowrap_context()


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make `wrap` use `wrapper_cls` and these arguments inside the context.

    An inner context with the same `wrapper_cls` adds its arguments to those of the outer context. A context with a
    different `wrapper_cls` only has its own.
    """
    with _ConfigAutoWrap(wrapper_cls=wrapper_cls, **wrapper_kwargs):
        yield


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap `module` if the call is inside `enable_wrap`, otherwise return it as it is.

    `wrap_overrides` override the arguments of `enable_wrap`; the module's own `_wrap_overrides`, a dict, override both.
    """
    wrapping = _CONTEXTS.innermost
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **with_overrides(module, {**wrapping.kwargs, **wrap_overrides}))


__getattr__ = lazily(__name__, {"flatparam_plan": ("PlannedPolicy", "planned")})
