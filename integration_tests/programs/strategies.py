"""Hypothesis's strategies for programs and configurations; what is simpler comes first, so that failures shrink to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from integration_tests.programs.recipes import (
    PRECISIONS,
    Configuration,
    Evaluation,
    Micro,
    Operation,
    Program,
    Step,
)
from integration_tests.programs.trees import LAYERS, TIED_TO, Block, Leaf, Place, Tie, items_of, layers_of

SINGLE = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def _mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """The usual value in three draws of four."""
    return st.sampled_from([usual] * (3 * len(others)) + list(others))


leaves = st.builds(Leaf, st.sampled_from(list(LAYERS)), _mostly("", "bias", "all"))


def blocks(depth: int) -> st.SearchStrategy[Block]:
    """Blocks in blocks, so many below each other."""
    inside: st.SearchStrategy[Leaf | Block] = leaves
    if depth > 1:
        inside = st.one_of(leaves, blocks(depth - 1), blocks(depth - 1))
    places = st.builds(
        Place,
        inside,
        when=_mostly("always", "even", "odd", "never"),
        calls=_mostly(1, 2),
        used=_mostly(True, False),
        checkpoint=_mostly("", "non-reentrant", "reentrant"),
    )
    return st.builds(Block, st.lists(places, min_size=1, max_size=4).map(tuple), st.booleans())


micros = st.builds(
    Micro,
    quiet=st.sampled_from(["", "", "both", "forward", "backward"]),
    forwards=_mostly(1, 2),
    again=_mostly(False, True),
    evaluates=_mostly(False, True),
)
operations = st.one_of(micros, micros, st.builds(Evaluation, st.booleans()))


def _ending_reduced(chosen: Sequence[Operation], last: Micro) -> tuple[Operation, ...]:
    return (*chosen, last)


steps = st.builds(
    Step,
    st.builds(_ending_reduced, st.lists(operations, max_size=3), micros.filter(lambda m: m.is_reduced)),
    clip=st.sampled_from([0.0, 0.0, 1.0, float("inf")]),
    set_to_none=st.sampled_from([True, True, False]),
    look=_mostly("", "summon", "save", "reload"),
)


@st.composite
def programs(draw: st.DrawFn, depth: int) -> Program:
    """Whole programs, with so many blocks below each other."""
    tree = draw(blocks(depth))
    return Program(
        tree,
        draw(_ties(tree)),
        draw(st.lists(steps, min_size=1, max_size=3).map(tuple)),
        draw(st.sampled_from(["sgd", "adamw"])),
        draw(st.booleans()),
    )


def _ties(tree: Block) -> st.SearchStrategy[tuple[Tie, ...]]:
    names: dict[str, list[str]] = {}
    for name, leaf in layers_of(tree):
        if leaf.kind in TIED_TO:
            names.setdefault(TIED_TO[leaf.kind], []).append(name)
    pairs = [
        (first, second)
        for alike in names.values()
        for place, first in enumerate(alike)
        for second in alike[place + 1 :]
    ]
    if not pairs:
        return st.just(())
    return st.lists(st.sampled_from(pairs), max_size=2, unique_by=lambda pair: pair[1]).map(tuple)


@st.composite
def configurations(
    draw: st.DrawFn,
    tree: Block,
    ranks: Sequence[int],
    kinds: Sequence[str],
    precisions: Sequence[str] = ("",),
) -> Configuration:
    """Ways to shard a tree."""
    count = draw(st.sampled_from(ranks))
    strategy = draw(st.sampled_from(kinds))
    sizes = [size for size in range(1, count + 1) if count % size == 0]
    names = [name for name, _ in items_of(tree)]
    return Configuration(
        count,
        strategy,
        draw(st.sampled_from(sizes)) if strategy in HYBRID else 0,
        tuple(name for name in names if draw(st.booleans())),
        draw(st.sampled_from(["no", "yes", "inside"])),
        draw(st.sampled_from(precisions)),
        draw(st.sampled_from([False, False, True])),
        draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", ""])),
        draw(st.sampled_from([0, 1, 2])),
        draw(st.booleans()),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    ranks: Sequence[int] = (2, 3, 4),
    kinds: Sequence[str] = (*SINGLE, *HYBRID),
    precisions: Sequence[str] = tuple(PRECISIONS),
    depth: int = 3,
) -> tuple[Program, Configuration]:
    """A program and a way to shard it."""
    program = draw(programs(depth))
    return program, draw(configurations(program.tree, ranks, kinds, precisions))
