"""The errors of the wrapper."""

from __future__ import annotations

from flatparam_core import FlatParamError

__all__ = ["NotYetSupportedError"]


class NotYetSupportedError(FlatParamError, ValueError):
    """An argument of FSDP1's that this version does not honour; it is refused rather than ignored."""

    def __init__(self, what: str, instead: str) -> None:
        """Say what was asked for, and what to do instead."""
        super().__init__(f"{what} is not supported by this version of flatparam: {instead}")
        self.what = what
        self.instead = instead
