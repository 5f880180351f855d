"""What is known to fail, and is left out of the search until it is mended: then its entry goes, and its test stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from integration_tests.programs.recipes import Configuration, Micro, Program
from integration_tests.programs.trees import Block, Place, layers_of

Predicate = Callable[[Program, Configuration], bool]


def _places(block: Block) -> Iterator[Place]:
    for place in block.places:
        yield place
        if isinstance(place.item, Block):
            yield from _places(place.item)


def _checkpoints(program: Program, kind: str) -> bool:
    return any(place.checkpoint == kind for place in _places(program.tree))


def tie_and_reload(program: Program, configuration: Configuration) -> bool:
    """A state dict with a weight that is tied across units is refused when it is loaded."""
    return bool(program.ties) and any(step.look == "reload" for step in program.steps)


def tie_and_reentrant(program: Program, configuration: Configuration) -> bool:
    """A tied weight is freed, or its gradient reduced, too early with reentrant checkpointing."""
    return bool(program.ties) and _checkpoints(program, "reentrant")


def tie_and_absence(program: Program, configuration: Configuration) -> bool:
    """A tied weight gets no gradient in a pass that does not call the unit that owns it."""
    return bool(program.ties) and any(place.when != "always" for place in _places(program.tree))


def unit_reached_again(program: Program, configuration: Configuration) -> bool:
    """A unit that is used twice before one backward pass, and has parameters without gradients, is reduced twice."""
    forwards = (op.forwards for step in program.steps for op in step.operations if isinstance(op, Micro))
    places = list(_places(program.tree))
    twice = max(forwards, default=1) > 1 or any(p.calls > 1 and isinstance(p.item, Block) for p in places)
    return twice and any(place.when != "always" or not place.used for place in places)


def frozen_and_checkpoint(program: Program, configuration: Configuration) -> bool:
    """Frozen parameters are freed before a recomputed layer needs them in the backward pass."""
    frozen = any(leaf.frozen for _, leaf in layers_of(program.tree))
    return frozen and _checkpoints(program, "non-reentrant")


KNOWN: tuple[Predicate, ...] = (
    tie_and_reload,
    tie_and_reentrant,
    tie_and_absence,
    unit_reached_again,
    frozen_and_checkpoint,
)


def is_known(program: Program, configuration: Configuration) -> bool:
    """Whether it may fail for a reason that has a test of its own."""
    return any(predicate(program, configuration) for predicate in KNOWN)
