"""Attributes that are given other values, and get those back that they had."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterable
from typing import Any, Final, final

import attrs

_ABSENT: Final = object()
"""Stands for the value of an attribute that is not there."""
LOCK: Final = threading.RLock()
"""Is held while `INSTALLED` changes."""


@final
@attrs.frozen(eq=False)
class Patch:
    """An attribute of a module or of a class, the value that it is to have, and the one that it had."""

    holder: Any
    name: str
    value: Any
    before: Any = attrs.field(init=False)

    @before.default
    def _as_it_is(self) -> Any:
        # What a class inherits is not its own, and is not to become that.
        return vars(self.holder).get(self.name, _ABSENT)

    @property
    def of(self) -> str:
        """The full name of the module or class."""
        holder = self.holder
        return f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder.__name__

    @property
    def is_in_place(self) -> bool:
        """Whether the attribute has the value of the patch, which nobody has changed since."""
        return vars(self.holder).get(self.name, _ABSENT) is self.value

    def put(self) -> None:
        """Give the attribute its new value."""
        self._set(self.value)

    def take_back(self) -> None:
        """Give the attribute the value that it had, unless somebody has given it another since."""
        if self.is_in_place:
            self._set(self.before)

    def _set(self, value: Any) -> None:
        if isinstance(self.holder, type):
            if value is _ABSENT:
                delattr(self.holder, self.name)
            else:
                setattr(self.holder, self.name, value)
            return
        # Some modules do things of their own when an attribute is set.
        namespace = vars(self.holder)
        if value is _ABSENT:
            namespace.pop(self.name, None)
        else:
            namespace[self.name] = value


INSTALLED: Final[list[Patch]] = []
"""The patches of `flatparam.install()` that are in place; empty if nothing is installed."""


def torchs_own(module: str, name: str) -> Any:
    """Return the object that `name` in torch's `module` is without the patches of `flatparam.install()`."""
    holder = importlib.import_module(module)
    with LOCK:
        for patch in INSTALLED:
            if patch.holder is holder and patch.name == name:
                return patch.before
    return getattr(holder, name)


def apply(patches: Iterable[Patch]) -> list[Patch]:
    """Put all `patches`, or none of them if one of them cannot be put; returns them."""
    done: list[Patch] = []
    try:
        for patch in patches:
            patch.put()
            done.append(patch)
    except BaseException:
        restore(done)
        raise
    return done


def restore(patches: Iterable[Patch]) -> None:
    """Take all `patches` back, the last one first."""
    for patch in reversed(list(patches)):
        patch.take_back()
