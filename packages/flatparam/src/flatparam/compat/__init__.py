"""Recognise torch's own FSDP enums and configuration objects if a caller passes them.

Torch's FSDP is not imported for that: an object is recognised by its class's name and the names of its members or
fields.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, TypeVar

__all__ = ["LikeTorchs", "as_config", "as_enum"]


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
