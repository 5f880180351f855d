"""The budget of a pickle: what its objects may take, and how often they may be looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from flatparam_files.disk import allowed_nbytes, is_short_integer

__all__ = ["Budget"]

_TIMES: Final = 32
"""The most bytes of objects for each byte of a large pickle; those of torch take up to twenty."""
_SMALL_VISITS: Final = 100_000
_VISITS_A_BYTE: Final = 16


@final
class Budget:
    """The rest of the memory, and of the visits to values, that a pickle of `nbytes` may cost.

    A value that is used in several places counts in each: whoever walks through a tree comes there again and again,
    and a pickle of 600 bytes can be a tree of a million leaves.
    """

    __slots__ = ("_allowed", "_left", "_visits")

    def __init__(self, nbytes: int) -> None:
        """All of it is left."""
        self._allowed = self._left = allowed_nbytes(nbytes, _TIMES)
        self._visits = _SMALL_VISITS + _VISITS_A_BYTE * nbytes

    def take(self, nbytes: int) -> None:
        """Take memory of the budget.

        Raises:
            ValueError: if there is not so much left.
        """
        self._left -= nbytes
        if self._left < 0:
            raise ValueError(f"its objects would take more than {self._allowed:,} bytes of memory")

    def take_literal(self, value: Any) -> None:
        """Take the memory of a number, a text or bytes.

        Raises:
            ValueError: if there is not so much left, or the number is too long to be printed.
        """
        if isinstance(value, int) and not is_short_integer(value):
            raise ValueError(f"it has an integer of {value.bit_length():,} bits")
        self.take(64 + (len(value) if isinstance(value, (str, bytes, bytearray)) else 0))

    def visit(self, root: Any) -> None:
        """Take a visit to every value below `root` of the budget, and the memory of a copy of each text.

        Raises:
            ValueError: if there are not so many left, or a container holds itself.
        """
        # The containers on the way to where the walk is, and what is left of each.
        path: list[tuple[int, Iterator[Any]]] = [(0, iter((root,)))]
        inside: set[int] = set()
        while path:
            for value in path[-1][1]:
                self._visits -= 1
                if self._visits < 0:
                    raise ValueError(
                        "it has far more values than bytes, because it has the same ones again and again"
                    )
                below = _below(value)
                if below is not None:
                    if id(value) in inside:
                        raise ValueError("a container holds itself")
                    inside.add(id(value))
                    path.append((id(value), below))
                    break
                if isinstance(value, (str, bytes)):
                    self.take(len(value))
            else:
                inside.discard(path.pop()[0])


def _below(value: Any) -> Iterator[Any] | None:
    """The values that a container holds; None if it is none."""
    if isinstance(value, Mapping):
        return (each for item in value.items() for each in item)
    if isinstance(value, (list, tuple, set, frozenset)):
        return iter(value)
    arguments = getattr(value, "arguments", None)
    return iter((arguments, value.state)) if isinstance(arguments, tuple) else None
