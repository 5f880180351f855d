"""The giving of full tensors to a sink: a function, or the files at a path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TypeAlias, final

import attrs
from torch import Tensor

from flatparam_publish.files import writing
from flatparam_publish.gathering import Pair, full_tensors
from flatparam_publish.versions import Catalogue
from flatparam_runtime import Topology

__all__ = ["Giving", "Sink"]

Sink: TypeAlias = Callable[[str, Tensor], object]
"""Called with the receiver's name of each tensor, and the tensor."""


@final
@attrs.define(eq=False)
class Giving:
    """The giving of tensors to a sink, if this rank has one.

    After an error the rank goes on with its part in collectives, and the error is told at the end.
    """

    sink: Sink | str | os.PathLike[str] | None
    catalogue: Catalogue
    error: BaseException | None = None
    _stack: contextlib.ExitStack = attrs.field(factory=contextlib.ExitStack)
    _give: Sink | None = None

    def __enter__(self) -> None:
        if self.sink is None:
            return
        with self._noting():
            self._give = self._stack.enter_context(_open(self.sink, self.catalogue))

    def __exit__(self, *raised: object) -> None:
        with self._noting():
            # A path must not appear after an error.
            if self.error is not None:
                self._stack.__exit__(type(self.error), self.error, self.error.__traceback__)
            else:
                self._stack.__exit__(*raised)  # type: ignore[arg-type]  # what __exit__ was called with

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error

    def all_of(self, pairs: list[Pair], topology: Topology, nbytes: int) -> None:
        """Give each tensor."""

        def is_wanted() -> bool:
            return self._give is not None and self.error is None

        for name, tensor in full_tensors(pairs, topology, nbytes, is_wanted):
            with self._noting():
                assert self._give is not None, "it is wanted"
                self._give(name, tensor)
            del tensor


@contextlib.contextmanager
def _open(sink: Sink | str | os.PathLike[str], catalogue: Catalogue) -> Iterator[Sink]:
    if callable(sink):
        yield sink
        return
    with writing(sink, catalogue) as files:
        yield files
