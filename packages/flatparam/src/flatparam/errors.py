"""The errors of the wrapper."""

from __future__ import annotations

from flatparam_core import FlatParamError

__all__ = ["NotYetSupportedError"]


class NotYetSupportedError(FlatParamError, ValueError):
    """An argument of FSDP1's that this version does not honour; it is refused rather than ignored."""

    def __init__(self, argument: str, found: object, instead: str) -> None:
        """Say which argument had which value, and what to do instead."""
        super().__init__(f"{argument}={found!r} is not supported by this version of flatparam: {instead}")
