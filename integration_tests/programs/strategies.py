"""Hypothesis's strategies for programs and configurations; what is simpler comes first, so that failures shrink to it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

import flatparam_checkpoint  # noqa: F401  # those of checkpoints
import flatparam_files.formats.detect  # noqa: F401  # all layers, and so all thresholds
import flatparam_optim  # noqa: F401  # the threshold of matrices
import flatparam_publish  # noqa: F401  # those of publishing
from flatparam_core import Threshold, all_thresholds
from integration_tests.programs.recipes import (
    PRECISIONS,
    Configuration,
    Evaluation,
    Micro,
    Operation,
    Program,
    Step,
)
from integration_tests.programs.saving import SHARDED, THREADED, Saving
from integration_tests.programs.trees import (
    LAYERS,
    TIED_TO,
    WITHOUT_BIAS,
    Block,
    Leaf,
    Place,
    Tie,
    build,
    items_of,
    layers_of,
)

SINGLE = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@functools.cache
def _mostly(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
    """The usual value in three draws of four."""
    return st.sampled_from([usual] * (3 * len(others)) + list(others))


@functools.cache
def _seldom(often: int = 10) -> st.SearchStrategy[bool]:
    """True in one draw of so many."""
    return st.sampled_from([False] * (often - 1) + [True])


SMALL = [kind for kind in LAYERS if kind != "long"]
leaves = st.builds(Leaf, st.sampled_from(SMALL), _mostly("", "bias", "all"))


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
    if draw(_seldom()):
        tree = _with_kinds(tree, {name: WITHOUT_BIAS.get(leaf.kind, leaf.kind) for name, leaf in layers_of(tree)})
    if draw(_seldom()):
        names = [name for name, _ in layers_of(tree)]
        tree = _with_kinds(tree, dict.fromkeys(draw(st.lists(st.sampled_from(names), min_size=1, max_size=2)), "long"))
    program = Program(
        tree,
        draw(_ties(tree)),
        draw(st.lists(steps, min_size=1, max_size=3).map(tuple)),
        draw(st.sampled_from(["sgd", "adamw", "adagrad"])),
        draw(st.booleans()),
    )
    if draw(_seldom(5)):
        names = [name for name, _ in build(tree, program.ties).named_parameters()]
        flips = st.lists(st.sampled_from(names), max_size=3, unique=True).map(tuple)
        program = attrs.evolve(program, steps=tuple(attrs.evolve(step, flipped=draw(flips)) for step in program.steps))
    return _summing_exactly(program)


def _with_kinds(block: Block, kinds: Mapping[str, str], prefix: str = "") -> Block:
    """The same with these layers of other kinds."""
    places = []
    for number, place in enumerate(block.places):
        name, item = f"{prefix}{number}", place.item
        if isinstance(item, Block):
            item = _with_kinds(item, kinds, f"{name}.")
        else:
            item = attrs.evolve(item, kind=kinds.get(name, item.kind))
        places.append(attrs.evolve(place, item=item))
    return attrs.evolve(block, places=tuple(places))


def _summing_exactly(program: Program) -> Program:
    """Without norms of the order 1 of long parameters, which are too large to be exact."""
    if not has_long(program.tree):
        return program
    return attrs.evolve(
        program,
        steps=tuple(attrs.evolve(step, clip=float("inf")) if step.clip else step for step in program.steps),
    )


def has_long(tree: Block) -> bool:
    """Whether there is a parameter of more than 2^18 elements."""
    return any(leaf.kind == "long" for _, leaf in layers_of(tree))


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
    full = [""] * len(precisions) if "" in precisions else []
    checkpointed = draw(_seldom(5))
    configuration = Configuration(
        count,
        strategy,
        draw(st.sampled_from(sizes)) if strategy in HYBRID else 0,
        tuple(name for name in names if draw(st.booleans())),
        draw(st.sampled_from(["no", "yes", "inside"])),
        draw(st.sampled_from([*full, *precisions])),
        draw(st.sampled_from([False, False, True])),
        draw(st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", ""])),
        draw(st.sampled_from([0, 1, 2])),
        draw(st.booleans()),
        checkpointed=tuple(name for name in names if checkpointed and draw(st.booleans())),
        turned=draw(_mostly(False, True)),
        thresholds=draw(_thresholds(has_long(tree))),
    )
    if draw(_seldom()):  # as many units of one parameter as there can be
        alone = [name for name, leaf in layers_of(tree) if leaf.kind in ONE_PARAMETER]
        configuration = attrs.evolve(configuration, units=tuple(dict.fromkeys((*configuration.units, *alone))))
    return configuration


ONE_PARAMETER = ("embedding", "buffered", "plain", "scale", "single", "long")


@functools.cache
def _thresholds(is_long: bool) -> st.SearchStrategy[tuple[tuple[str, int], ...]]:
    """None in half of the draws; else some of any values, or all of the same kind.

    Args:
        is_long: whether there is a parameter of which steps would otherwise be cut into hundreds of thousands of pieces.
    """

    def values(each: Threshold) -> list[int]:
        small = [each.least, *(max(each.least, number) for number in (2, 5, 64))]
        if is_long and each.name == "runtime.step_numel":
            small = [2**12, 2**12 + 1]
        return [*small, each.default, each.most]

    known = all_thresholds()
    some = st.lists(st.sampled_from(known), min_size=1, max_size=5, unique_by=lambda each: each.name).flatmap(
        lambda chosen: st.tuples(*(st.tuples(st.just(each.name), st.sampled_from(values(each))) for each in chosen))
    )
    smallest = st.just(tuple((each.name, values(each)[0]) for each in known))
    largest = st.just(tuple((each.name, values(each)[-1]) for each in known))
    return st.one_of(st.just(()), st.just(()), st.just(()), some, smallest, largest)


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


@st.composite
def savings(
    draw: st.DrawFn, ways: Sequence[str] = THREADED, depth: int = 2
) -> tuple[Program, Configuration, Configuration, Saving]:
    """A program, two ways to shard it with the same precision, and a way to get from the one to the other."""
    program = draw(programs(depth))
    program = _summing_exactly(attrs.evolve(program, steps=(*program.steps, draw(steps))))
    precision = draw(_mostly("", *(name for name in PRECISIONS if name)))
    way = draw(st.sampled_from(ways))
    both = [draw(configurations(program.tree, (1, 2, 3), (*SINGLE, *HYBRID), [precision]))]
    ranks = (both[0].ranks,) if way in SHARDED else (1, 2, 3)
    both.append(draw(configurations(program.tree, ranks, (*SINGLE, *HYBRID), [precision])))
    if draw(_mostly(False, True)):
        program = attrs.evolve(program, optimizer=draw(st.sampled_from(["groups", "two"])))
        program = attrs.evolve(program, apart=draw(st.sampled_from(["place", "dtype", "bias"])))
        both = [_keeping_apart(program, each) for each in both]
        program = _within(program) if program.apart == "place" else program
    if not precision and draw(_mostly(False, True)):
        program, both = _below_plain_parent(draw, program, both)
    if not precision and draw(_mostly(False, True)):
        both = [attrs.evolve(each, ignored=_some_frozen(draw, program, each)) for each in both]
    saving = Saving(way, draw(st.integers(0, len(program.steps))), draw(_mostly(False, True)))
    if way == "local":
        both[1] = attrs.evolve(both[0], offload=both[1].offload)
    elif way in SHARDED:  # it loads where as many ranks share the shards; DCP can change that
        shared = both[0].strategy, both[0].shard_size
        both[1] = attrs.evolve(both[1], strategy=shared[0], shard_size=shared[1])
        # A plain parameter takes no sharded tensor: what is ignored was ignored.
        units = tuple(name for name in both[1].units if name not in both[0].ignored)
        both[1] = attrs.evolve(both[1], ignored=both[0].ignored, units=units)
    if way == "distributed":
        saving = attrs.evolve(saving, into_trained=False)  # there may be a state that the file does not have
    if saving.way == "streamed" and both[1].has_plain_parent:
        saving = attrs.evolve(saving, way="broadcast")  # it is the wrapper that takes an empty state dict
    return program, both[0], both[1], saving


def _keeping_apart(program: Program, configuration: Configuration) -> Configuration:
    """Have no flat parameter with parameters of both kinds: it belongs to one group of one optimizer."""
    if program.apart == "bias":
        return attrs.evolve(configuration, use_orig_params="yes")
    if program.apart == "place":
        return attrs.evolve(configuration, units=tuple(dict.fromkeys(("0", *configuration.units))))
    return configuration


def _within(program: Program) -> Program:
    """Without ties between the first place and another: the flat parameter of one would hold something of the other."""
    return attrs.evolve(program, ties=tuple((a, b) for a, b in program.ties if (a[0] == "0") == (b[0] == "0")))


def _below_plain_parent(
    draw: st.DrawFn, program: Program, configurations: Sequence[Configuration]
) -> tuple[Program, list[Configuration]]:
    """Make a unit of every top-level module of the first, the second or both, and none of the root.

    What is tied across two roots is refused, and `clip_grad_norm_` is a method of the one root. A root that the
    synchronised pass does not call keeps the gradients that it has collected, which one process does not.
    """
    ties = tuple((a, b) for a, b in program.ties if a.split(".")[0] == b.split(".")[0])
    steps = tuple(attrs.evolve(step, clip=0.0) for step in program.steps)
    if any(place.when in ("even", "odd") for place in program.tree.places):
        steps = tuple(_synchronised(step) for step in steps)
    tops = [str(number) for number in range(len(program.tree.places))]
    which = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    return attrs.evolve(program, ties=ties, steps=steps), [
        attrs.evolve(each, units=tuple(dict.fromkeys((*tops, *each.units))), has_plain_parent=True) if chosen else each
        for each, chosen in zip(configurations, which, strict=True)
    ]


def _synchronised(step: Step) -> Step:
    """The same step, in which every backward pass reduces gradients."""
    return attrs.evolve(
        step,
        operations=tuple(attrs.evolve(each, quiet="") if isinstance(each, Micro) else each for each in step.operations),
    )


def _some_frozen(draw: st.DrawFn, program: Program, configuration: Configuration) -> tuple[str, ...]:
    """Layers without anything to train; what is ignored is not synchronised."""
    tied = {name for tie in program.ties for name in tie}
    return tuple(
        name
        for name, leaf in layers_of(program.tree)
        if leaf.frozen == "all" and name not in tied and name not in configuration.units and draw(st.booleans())
    )
