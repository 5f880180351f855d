"""What all measurements have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from .facts import Facts
from .place import Plan


def anywhere(plan: Plan, facts: Facts) -> str:
    """Nothing speaks against it."""
    return ""


def not_on_cpu(plan: Plan, facts: Facts) -> str:
    """It is about an accelerator."""
    return "not on this device: the CPU does everything when it is called" if plan.on_cpu else ""


@frozen
class Measurement:
    """One thing that is measured, in processes of its own.

    Attributes:
        name: "steps, fp32"; the first word is that of its module, and what `--only` takes.
        what: what its table shows, in whole sentences.
        seconds: what it takes on a large GPU, about.
        limit: when it is stopped, in seconds.
        run: what it finds, as JSON, within so many seconds; it starts the processes.
        why_not: why it cannot be measured here, or nothing.
        decides: whether the run fails unless its entry says `same`.
    """

    name: str
    what: str
    seconds: float
    limit: float
    run: Callable[[Plan, Facts, float], dict[str, Any]]
    why_not: Callable[[Plan, Facts], str] = anywhere
    decides: bool = False

    @property
    def module(self) -> str:
        """What `--only` takes."""
        return self.name.split(",")[0]
