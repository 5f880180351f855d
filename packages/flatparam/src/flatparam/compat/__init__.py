"""Torch's own FSDP beside ours: its enums and configurations are recognised, and attributes of its modules changed.

Torch's FSDP is not imported to recognise an object: that is done by the name of its class and those of its members or
fields.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import threading
from collections.abc import Iterable
from types import CellType
from typing import Any, Final, TypeVar, final

import attrs

__all__ = [
    *("INSTALLED", "LOCK", "LikeTorchs", "Patch", "apply", "as_config", "as_enum", "inner_of", "restore"),
    "torchs_own",
]

E = TypeVar("E", bound=enum.Enum)
C = TypeVar("C")


class LikeTorchs(enum.Enum):
    """An enum of FSDP1's, whose members equal those of torch's enum of the same name.

    So a program may compare a member that it stored before `flatparam.install()` with one that it took after.
    """

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        kind = type(other)
        if kind is not type(self) and isinstance(other, enum.Enum) and kind.__module__.startswith("torch."):
            return kind.__name__ == type(self).__name__ and other.name == self.name
        return NotImplemented

    # As that of torch's member.
    __hash__ = enum.Enum.__hash__


def as_enum(kind: type[E], value: Any, argument: str) -> E:
    """`value` as a member of `kind`; a member of torch's enum of the same name is translated.

    Raises:
        TypeError: naming the argument, for anything else.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, enum.Enum) and type(value).__name__ == kind.__name__ and value.name in kind.__members__:
        return kind[value.name]
    raise TypeError(f"{argument}: expected a {kind.__name__}, found {value!r}")


def as_config(kind: type[C], value: Any, argument: str) -> C:
    """`value` as an instance of `kind` (a dataclass); torch's dataclass of the same name is translated.

    Raises:
        TypeError: naming the argument, for anything else.
    """
    if isinstance(value, kind):
        return value
    for candidate in (kind, *_subclasses(kind)):
        if type(value).__name__ == candidate.__name__ and dataclasses.is_dataclass(value):
            # Each candidate is a dataclass.
            fields = {field.name for field in dataclasses.fields(candidate)}  # type: ignore[arg-type]
            return candidate(**{name: item for name, item in vars(value).items() if name in fields})
    raise TypeError(f"{argument}: expected a {kind.__name__}, found {value!r}")


def _subclasses(kind: type[C]) -> list[type[C]]:
    return [kind for child in kind.__subclasses__() for kind in (child, *_subclasses(child))]


# Attributes that are given other values, and get those back that they had


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


def inner_of(outer: Any) -> CellType:
    """Return the cell of the function of torch's inside of `outer`: programs hold the outer one.

    Raises:
        RuntimeError: if this torch's function is made in another way.
    """
    for cell in outer.__closure__ or ():
        if cell.cell_contents is outer.__wrapped__:
            return cell  # type: ignore[no-any-return]
    raise RuntimeError(
        f"{outer.__module__}.{outer.__qualname__} of this torch is not the function that flatparam knows"
    )


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
