"""Sizes at which the code takes a different path: named, listed in one place, and settable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, final

import attrs

_MADE: Final[dict[str, Threshold]] = {}


@final
@attrs.define(eq=False)
class Threshold:
    """A number that decides which path the code takes; results do not depend on it.

    A process has one value of it. Set it before you make what depends on it: a model, a checkpoint, a group.
    """

    name: str = attrs.field(on_setattr=attrs.setters.frozen)
    """The layer and the noun, as in `core.small_gradient_nbytes`; no two thresholds have the same."""
    value: int
    ways: str = attrs.field(on_setattr=attrs.setters.frozen)
    """A sentence that says what the code does up to the value, and above it."""
    least: int = attrs.field(default=1, kw_only=True, on_setattr=attrs.setters.frozen)
    """The smallest value with which everything works."""
    most: int = attrs.field(default=2**40, kw_only=True, on_setattr=attrs.setters.frozen)
    """The largest value; it is small if the value is memory."""
    default: int = attrs.field(init=False, on_setattr=attrs.setters.frozen)

    @default.default
    def _remember(self) -> int:
        return self.value

    def __attrs_post_init__(self) -> None:
        if self.name in _MADE:
            raise ValueError(f"there is a threshold {self.name!r} already")
        _MADE[self.name] = self

    @contextlib.contextmanager
    def set_to(self, value: int) -> Iterator[None]:
        """Use `value` inside the context.

        Raises:
            ValueError: if `value` is below `least` or above `most`.
        """
        if not self.least <= value <= self.most:
            raise ValueError(f"{self.name}: expected a number from {self.least} to {self.most}, found {value}")
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before


def all_thresholds() -> list[Threshold]:
    """Return every threshold of the layers that have been imported, sorted by name."""
    return [_MADE[name] for name in sorted(_MADE)]
