"""Wrapping by hand: the model says which modules are wrapped, and the caller says how."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import attrs
from torch import nn

from flatparam.policies.choosing import with_overrides

__all__ = ["enable_wrap", "wrap"]


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
