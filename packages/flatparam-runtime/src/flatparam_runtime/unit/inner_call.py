"""A call of a module inside a unit, or of a unit's other methods, from outside of the unit's own forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

from torch import nn

from flatparam_runtime.autograd import CALL

U = TypeVar("U")


def _of_method(name: str) -> property:
    return property(lambda call: getattr(call.__wrapped__, name))


@final
class InnerCall(Generic[U]):
    """A stand-in for a method, as an attribute of the module: while it runs, the unit has its full parameters."""

    __slots__ = ("covered", "name", "own", "reference", "run", "unit")

    def __init__(self, unit: U, module: nn.Module, name: str, run: Callable[..., Any]) -> None:
        """A stand-in that `put` puts in its place.

        Args:
            unit: the unit that `module` is, or is inside of.
            name: the name of the method, or `CALL`.
            run: called with this object and the method's positional and keyword arguments.
        """
        self.unit = unit
        self.reference = weakref.ref(module)
        self.name = name
        self.run = run
        # The user's replacement for the class's method.
        self.own: Callable[..., Any] | None = None
        # The user's replacement for this object, which most likely calls it.
        self.covered: Callable[..., Any] | None = None

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
        """The method itself, whose signature this object has too."""
        if self.own is not None:
            return self.own
        name = "_call_impl" if self.name == CALL else self.name
        method: Callable[..., Any] = getattr(type(self.module), name).__get__(self.module)
        return method

    # What programs ask a method for that make a new one of its function. A `__getattr__` would make all else here slow.
    __closure__, __code__, __defaults__ = map(_of_method, ("__closure__", "__code__", "__defaults__"))
    __func__, __globals__, __kwdefaults__ = map(_of_method, ("__func__", "__globals__", "__kwdefaults__"))
    __name__, __self__ = map(_of_method, ("__name__", "__self__"))

    def put(self) -> None:
        """Replace the method; a function that the user has put over this object stays, and may call this object."""
        module = self.reference()
        if module is None:
            return
        there = module.__dict__.get(self.name)
        if there is not self and (there is None or there is not self.covered):
            self.own, self.covered = there, None
            module.__dict__[self.name] = self

    def lift(self) -> None:
        """Restore the method, unless the user has put a function over this object."""
        module = self.reference()
        if module is None:
            return
        there = module.__dict__.get(self.name)
        if there is not self:
            # What `compile()` has put there does not call this object.
            self.covered = None if self.name == CALL else there
        elif self.own is not None:
            module.__dict__[self.name] = self.own
        else:
            del module.__dict__[self.name]


def _new() -> InnerCall[Any]:
    return InnerCall.__new__(InnerCall)
