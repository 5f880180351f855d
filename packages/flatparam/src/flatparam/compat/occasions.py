"""When a model is wrapped: what `install` has to do then, since other libraries may have been imported meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

__all__ = ["WHEN_WRAPPED"]

WHEN_WRAPPED: Final[list[Callable[[], None]]] = []
"""Each is called when a wrapper is made."""
