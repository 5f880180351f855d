"""A program run as one rank of a world in which no other exists, and what was seen."""

from flatparam_plan.rehearsal.rehearsal import Entry, Rehearsal, UnitFacts
from flatparam_plan.rehearsal.rehearsing import rehearse

__all__ = ["Entry", "Rehearsal", "UnitFacts", "rehearse"]
