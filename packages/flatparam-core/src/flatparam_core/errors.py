"""The errors that the flat parameter raises."""

from __future__ import annotations

__all__ = ["FlatParamError", "IllegalStepError", "LayoutError"]


class FlatParamError(RuntimeError):
    """Anything that the flat-parameter library refuses; catch it to catch all of them."""


class LayoutError(FlatParamError, ValueError):
    """A layout, a span or a parameter that does not fit where it was asked to lie."""


class IllegalStepError(FlatParamError):
    """A state machine was asked for a step that is not in its table."""
