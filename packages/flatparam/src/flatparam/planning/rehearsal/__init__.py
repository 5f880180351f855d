"""A program run as one rank of a world in which no other exists, and what was seen."""

from flatparam.planning.rehearsal.rehearsal import Entry, Rehearsal, UnitFacts
from flatparam.planning.rehearsal.rehearsing import rehearse

__all__ = ["Entry", "Rehearsal", "UnitFacts", "rehearse"]
