"""Many equal blocks, laid out from rehearsals of few."""

from flatparam_plan.repeated.extension import rehearse_repeated
from flatparam_plan.repeated.repeats import Template, with_few_blocks

__all__ = ["Template", "rehearse_repeated", "with_few_blocks"]
