"""Calls of a module inside a unit, or of a unit's other methods, from outside of the unit's own forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import attrs
from torch import nn
from typing_extensions import Self, final

__all__ = ["InnerCall", "InnerCalls"]

U = TypeVar("U")


@final
class InnerCall(Generic[U]):
    """Stands for a method of a module, as an attribute of the module itself: the unit has its parameters meanwhile."""

    __slots__ = ("covered", "name", "own", "reference", "run", "unit")

    def __init__(self, unit: U, module: nn.Module, name: str, run: Callable[..., Any]) -> None:
        """Not in its place yet.

        Args:
            unit: the unit that `module` is, or is inside of.
            name: the method's.
            run: called with this object and the method's positional and keyword arguments.
        """
        self.unit = unit
        self.reference = weakref.ref(module)
        self.name = name
        self.run = run
        self.own: Callable[..., Any] | None = None  # what the user had put in the place of the class's method
        self.covered: Callable[..., Any] | None = (
            None  # what he has put in the place of this, most likely around it
        )

    def __reduce__(self) -> tuple[object, ...]:
        state = (self.unit, self.module, self.name, self.run, self.own, self.covered)
        return _new, (), state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.unit, module, self.name, self.run, self.own, self.covered = state
        self.reference = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return self.run(self, args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The module that is called, and so alive."""
        module = self.reference()
        assert module is not None, "its own attribute is called"
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The method itself, whose signature this has too."""
        if self.own is not None:
            return self.own
        method: Callable[..., Any] = getattr(type(self.module), self.name).__get__(self.module)
        return method

    def put(self) -> None:
        """Stand in the method's place; what somebody has put over this stays, and calls this if it wants to."""
        module = self.reference()
        if module is None:
            return
        there = module.__dict__.get(self.name)
        if there is not self and (there is None or there is not self.covered):
            self.own, self.covered = there, None
            module.__dict__[self.name] = self

    def lift(self) -> None:
        """Put back what was there, unless somebody has put something over this."""
        module = self.reference()
        if module is None:
            return
        there = module.__dict__.get(self.name)
        if there is not self:
            self.covered = there
        elif self.own is not None:
            module.__dict__[self.name] = self.own
        else:
            del module.__dict__[self.name]


def _new() -> InnerCall[Any]:
    return InnerCall.__new__(InnerCall)


@final
@attrs.define(eq=False)
class InnerCalls:
    """The `forward` of every module inside a unit: watched exactly while the unit itself is not called."""

    calls: tuple[InnerCall[Any], ...] = ()

    @classmethod
    def of(cls, calls: tuple[InnerCall[Any], ...]) -> Self:
        """Watch from now on."""
        watched = cls(calls)
        watched.put()
        return watched

    def put(self) -> None:
        """The unit is not called any more."""
        for call, place in self._places():
            if place.get(call.name) is call.own is call.covered is None:  # as nearly always, in few steps
                place[call.name] = call
            else:
                call.put()

    def lift(self) -> None:
        """The unit is called, and calls what is inside: nothing stands in between then, also for a compiler."""
        for call, place in self._places():
            if place.get(call.name) is call and call.own is None:
                del place[call.name]
            else:
                call.lift()

    def _places(self) -> list[tuple[InnerCall[Any], dict[str, Any]]]:
        modules = [call.reference() for call in self.calls]
        both = zip(self.calls, modules, strict=True)
        return [(call, module.__dict__) for call, module in both if module is not None]
