"""The error of everything that plans."""

from __future__ import annotations

from typing import final


@final
class PlanError(RuntimeError):
    """A program, or a setup, that cannot be planned; the message says why, and what to do."""
