"""Many equal blocks, laid out from rehearsals of few."""

from flatparam.planning.repeated.extending import rehearse_repeated
from flatparam.planning.repeated.repeats import Template, with_few_blocks

__all__ = ["Template", "rehearse_repeated", "with_few_blocks"]
