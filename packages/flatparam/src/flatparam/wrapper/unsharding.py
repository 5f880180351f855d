"""A gather of a unit that a program has started by hand."""

from __future__ import annotations

from typing import final

import attrs

from flatparam_runtime import Unit

__all__ = ["UnshardHandle"]


@final
@attrs.frozen(eq=False)
class UnshardHandle:
    """A gather that was started by hand."""

    _unit: Unit

    @classmethod
    def begin(cls, unit: Unit) -> UnshardHandle:
        """Start to gather the full parameters of `unit`."""
        unit.begin_unshard()
        return cls(unit)

    def wait(self) -> None:
        """Have the module show its full parameters; calling it again costs nothing."""
        self._unit.finish_unshard()
