"""How much memory of the device parameters and gradients take: what a log says, and what a formula says.

The model is a chain of matrices without biases, whose activations are of four rows. So whatever has at least so many bytes
as `LEAST_NBYTES` is of parameters or gradients, whole or a shard; activations and messages are smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import attrs

from flatparam_simdev.log import Kind, Record
from flatparam_simdev.replay import Costs, replay
from integration_tests.simulated.models import WIDTHS
from integration_tests.simulated.programs import Program, run
from integration_tests.simulated.worlds import World

LEAST_NBYTES: Final = 4096


def held(log: Iterable[Record], least: int = LEAST_NBYTES) -> Iterator[tuple[str, int]]:
    """After each allocation and each release of the device's memory: the phase, and the bytes of what is large."""
    phase, total = "the beginning", 0
    sizes: dict[int, int] = {}
    for record in log:
        if record.kind is Kind.MARK:
            phase = record.name
        elif record.kind in (Kind.ALLOCATE, Kind.FREE) and record.name == "device":
            if record.kind is Kind.ALLOCATE and record.extra >= least:
                sizes[record.subject] = record.extra
                total += record.extra
            elif record.kind is Kind.FREE:
                total -= sizes.pop(record.subject, 0)
        else:
            continue
        yield phase, total


def peaks(log: Iterable[Record], step: str) -> dict[str, int]:
    """The most bytes of each phase of a step, by the word after its name; what was there when it began counts too."""
    found: dict[str, int] = {}
    before, was = "", 0
    for phase, total in held(log):
        if phase.startswith(f"{step} "):
            word = phase.removeprefix(step).split()[0]
            most = max(total, was) if phase != before else total
            found[word] = max(found.get(word, 0), most)
        before, was = phase, total
    return found


@attrs.frozen
class Sizes:
    """What the formula is made of, in bytes; the root is unit 0, and the others are in the order of the forward pass.

    Attributes:
        full: of each unit's parameters, in the dtype that it computes in.
        gradient: of its flat buffer of gradients.
        reduced: of the shard of their mean.
        rest: of what is there all the time: shards, and the optimizer's momentum.
        ahead: how many bytes of units are gathered ahead; always one unit.
    """

    full: list[int]
    gradient: list[int]
    reduced: list[int]
    rest: int
    ahead: int

    @classmethod
    def of(cls, program: Program, ahead: int) -> Sizes:
        """Those of the chain in a program, by hand."""
        first, *inner, last = (a * b for a, b in itertools.pairwise(WIDTHS))
        numels = [first + last, *inner]
        sharing = 1 if _is_whole(program) else program.ranks
        compute = 2 if program.precision else 4
        reduced = [4 * numel // sharing for numel in numels]
        rest = 0 if program.offload else 2 * sum(reduced)
        return cls([compute * n for n in numels], [4 * n for n in numels], reduced, rest, ahead)

    def window(self, unit: int) -> int:
        """A unit and those that are gathered ahead of it."""
        total, waiting = self.full[unit] if unit else 0, 0
        for count, nbytes in enumerate(self.full[unit + 1 :]):
            waiting += nbytes
            if count and waiting > self.ahead:
                break
            total += nbytes
        return total


def formula(program: Program, ahead: int) -> dict[str, int]:
    """The most bytes of each phase of a step."""
    sizes = Sizes.of(program, ahead)
    F, G, R = sizes.full, sizes.gradient, sizes.reduced
    keeps = program.strategy in ("grad_op", "none")
    collected = sum(G) if program.no_sync else 0
    windows = [sum(F[1:])] if keeps else [sizes.window(unit) for unit in range(len(F))]
    gathered = max(itertools.chain(_of_root(program, sizes), *(_of_unit(program, sizes, k) for k in range(1, len(F)))))
    return {
        "forward": sizes.rest + collected + F[0] + max(windows),
        "backward": sizes.rest + max(F[0] + gathered, *_at_the_end(program, sizes)),
        "optimizer": sizes.rest + (0 if program.offload else sum(R)),
    }


def _of_unit(program: Program, sizes: Sizes, k: int) -> Iterator[int]:
    """What there is beside the root's parameters while unit `k` computes its gradients, collects and reduces them."""
    F, G, R = sizes.full, sizes.gradient, sizes.reduced
    keeps = program.strategy in ("grad_op", "none")
    before = 0 if k == 1 else F[k - 1]
    others = sum(F[1:k]) if keeps else 0 if program.prefetch == "late" else before
    flying = 0 if _is_whole(program) else sum(G[k + 1 : k + 2])
    given = sum(R[k + 1 : k + 3] if program.offload else R[k + 1 :])
    waiting = sum(G[1 : k + 1]) if program.no_sync else 0
    made = F[k]  # by autograd, in the dtype of computation; there is but one parameter
    # Kept where autograd left it, until the first comes.
    of_root = G[0] if program.no_sync else _ends(program)[1]
    yield of_root + F[k] + others + made + flying + waiting + given
    yield of_root + others + made + (waiting or G[k]) + given
    yield of_root + (others or before) + (waiting or G[k]) + (0 if _is_whole(program) else R[k]) + given


def _of_root(program: Program, sizes: Sizes) -> Iterator[int]:
    """The same where the last matrix has its gradient, and where the first has."""
    F, G, R = sizes.full, sizes.gradient, sizes.reduced
    first, last = _ends(program)
    gathered = sum(F[1:]) if program.strategy in ("grad_op", "none") else F[-1]
    given = sum(R[1:3] if program.offload else R[1:])
    flying = 0 if _is_whole(program) else G[1]
    yield gathered + last + (sum(G) if program.no_sync else 0)
    yield first + (0 if program.no_sync else last + flying) + given


def _at_the_end(program: Program, sizes: Sizes) -> Iterator[int]:
    """What there is when the root's parameters are freed, while its gradients are collected and reduced."""
    G, R = sizes.gradient, sizes.reduced
    first, last = _ends(program)
    given = sum(R[1:3] if program.offload else R[1:])
    yield first + (0 if program.no_sync else last) + G[0] + given
    yield G[0] + (0 if _is_whole(program) else R[0]) + given


def _ends(program: Program) -> tuple[int, int]:
    """The bytes of the gradients of the first and of the last matrix, both of which the root has."""
    compute = 2 if program.precision else 4
    return compute * WIDTHS[0] * WIDTHS[1], compute * WIDTHS[-2] * WIDTHS[-1]


def _is_whole(program: Program) -> bool:
    """Whether each rank has all of a parameter: the flat gradient is what is summed, and then the gradient."""
    return program.strategy in ("none", "hybrid")


@attrs.frozen
class Measured:
    """What a log says of the third step.

    Attributes:
        phases: the most bytes of parameters and gradients, by phase.
        nbytes: the most bytes of anything at once, in a replay, with what waits for a recorded stream.
        pools_nbytes: what the caching allocator has to reserve: the sum of the most bytes of each stream's pool.
    """

    phases: dict[str, int]
    nbytes: int
    pools_nbytes: int


def measured(world: World, jobs: Sequence[tuple[Program, int]]) -> list[Measured]:
    """Run each program with so many bytes gathered ahead; what a rank of a world does."""
    return [_measured(world, *job) for job in jobs]


def _measured(world: World, program: Program, ahead: int) -> Measured:
    from flatparam_runtime.passes.forward import PREFETCH_NBYTES

    with PREFETCH_NBYTES.set_to(ahead):
        (outcome,) = run(world, [program])
    step = replay(outcome.log, Costs()).step("step 2")
    return Measured(peaks(outcome.log, "step 2"), step.peak_nbytes, step.peak_of_pools_nbytes)
