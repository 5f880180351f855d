"""The errors that the flat parameter raises."""

from __future__ import annotations

__all__ = ["FlatParamError", "IllegalStepError", "LayoutError"]


class FlatParamError(RuntimeError):
    """The base class of the errors of the flat-parameter library; catch it to catch all of them."""


class LayoutError(FlatParamError, ValueError):
    """A layout, a span or a parameter that does not fit where it was to be placed."""


class IllegalStepError(FlatParamError):
    """A state machine was asked for a step that is not in its table."""
