"""The rank that steps each matrix, so that all ranks have equal work: numbers only, the same plan on every rank.

A place is a rank of the data-parallel world; with `S` ranks that share the parameters, rank `s` of replica `r` is place
`r * S + s`. Every replica has the same shards, so a matrix can be stepped in any of them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Final, final

import attrs

__all__ = ["Job", "choose_owners", "lower_bound", "newton_schulz_flops"]

_TOLERANCE: Final = 105
"""The most that any place does, in percent of the lower bound, if matrices stay where they are for the most part."""


@final
@attrs.frozen
class Job:
    """A matrix to step: its cost, and how many elements of it each rank of a replica holds."""

    cost: int
    """In any unit; all jobs of a plan have the same."""
    holders: Sequence[tuple[int, int]]
    """Ranks that hold elements of it, each with their number; at least one."""


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """The floating-point operations of `steps` quintic Newton-Schulz iterations of one matrix.

    Each multiplies the matrix by its transpose, the product by itself, and the sum of both by the matrix: with the
    shorter side `m` and the longer one `n`, `2 m^2 n + 2 m^3 + 2 m^2 n`.
    """
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def lower_bound(costs: Sequence[int], places: int) -> int:
    """The least that the busiest of `places` does, however `costs` are dealt out.

    It is the least capacity of bins, as large as the largest cost and as the mean, that `places` of them may be enough
    for by two counts of the bins that are needed. For each `k`: a bin with a size above `capacity - k` has no other
    size of `k` or more, and of those up to half the capacity the rest needs bins by the sum of its sizes (bound L2 of
    S. Martello, P. Toth, "Lower bounds and reduction procedures for the bin packing problem", Discrete Applied
    Mathematics 28 (1990), section 3), and by their number, since at most `capacity // k` of them fit into one bin.
    """
    if not costs:
        return 0
    least = max(max(costs), -(-sum(costs) // places))
    sizes = sorted(Counter(costs).items())
    most = 2 * least
    while least < most:
        middle = (least + most) // 2
        if _bins(sizes, middle) > places:
            least = middle + 1
        else:
            most = middle
    return least


def _bins(sizes: Sequence[tuple[int, int]], capacity: int) -> int:
    """The bins that `sizes`, each with its count, need at least."""
    found = 0
    for k in [0, *(size for size, _ in sizes if 2 * size <= capacity)]:
        alone = sum(count for size, count in sizes if size > capacity - k)
        large = [(size, count) for size, count in sizes if capacity < 2 * size <= 2 * (capacity - k)]
        small = [(size, count) for size, count in sizes if k <= size and 2 * size <= capacity]
        opened = sum(count for _, count in large)
        area = sum(size * count for size, count in small)
        area -= sum((capacity - size) * count for size, count in large)
        more = max(0, -(-area // capacity))
        if k:
            number = sum(count for _, count in small)
            number -= sum((capacity - size) // k * count for size, count in large)
            more = max(more, -(-number // (capacity // k)))
        found = max(found, alone + opened + more)
    return found


def choose_owners(
    jobs: Sequence[Job], ranks: int, replicas: int = 1, *, at_holders: bool = False
) -> list[int]:
    """The place that steps each of `jobs`; see this module for the numbers of places.

    A matrix stays with a rank that holds elements of it, most of them if possible, as long as nobody does more than
    1.05 times what the best plan that is known asks of the busiest; then work counts more than bytes.

    Args:
        jobs: in the same order on every rank.
        ranks: the ranks that share the parameters.
        replicas: how many times the parameters are there.
        at_holders: a matrix has to stay with a rank that holds elements of it, however uneven the work is.
    """
    places = ranks * replicas
    order = sorted(range(len(jobs)), key=lambda number: (-jobs[number].cost, number))
    if at_holders:
        return _near(jobs, order, ranks, replicas, None) or []
    costs = [job.cost for job in jobs]
    bound = lower_bound(costs, places)
    plans = [_longest_first(costs, order, places)]
    if _busiest(costs, plans[0], places) * 100 > _TOLERANCE * bound:
        plans.append(_first_fit(costs, order, places, bound))
    best = min(plans, key=lambda plan: _busiest(costs, plan, places))
    limit = max(_busiest(costs, best, places), _TOLERANCE * bound // 100)
    return _near(jobs, order, ranks, replicas, limit) or best


def _busiest(costs: Sequence[int], plan: Sequence[int], places: int) -> int:
    load = [0] * places
    for cost, place in zip(costs, plan, strict=True):
        load[place] += cost
    return max(load)


def _longest_first(costs: Sequence[int], order: Sequence[int], places: int) -> list[int]:
    """Give each job, the longest first, to the place that has least to do."""
    heap = [(0, place) for place in range(places)]
    plan = [0] * len(costs)
    for number in order:
        load, place = heap[0]
        heapq.heapreplace(heap, (load + costs[number], place))
        plan[number] = place
    return plan


def _first_fit(costs: Sequence[int], order: Sequence[int], places: int, bound: int) -> list[int]:
    """Search for the least capacity with which each job, the longest first, fits into the first place with room."""
    least, most = bound, 2 * bound
    found: list[int] | None = None
    for _ in range(12):
        middle = (least + most) // 2
        plan = _fit(costs, order, places, middle)
        if plan is None:
            least = middle + 1
        else:
            found, most = plan, middle
        if least >= most:
            break
    return found or _longest_first(costs, order, places)


def _fit(costs: Sequence[int], order: Sequence[int], places: int, capacity: int) -> list[int] | None:
    room, plan = [capacity] * places, [0] * len(costs)
    place, last = 0, -1
    for number in order:
        cost = costs[number]
        # What was too full for a job of this cost still is.
        place = place if cost == last else 0
        last = cost
        while place < places and room[place] < cost:
            place += 1
        if place == places:
            return None
        room[place] -= cost
        plan[number] = place
    return plan


def _near(
    jobs: Sequence[Job], order: Sequence[int], ranks: int, replicas: int, limit: int | None
) -> list[int] | None:
    """Give each job to a holder that stays within `limit`, else to whoever has least to do; `None` if none has room.

    Without a limit only holders are asked.
    """
    load, plan = [0] * (ranks * replicas), [0] * len(jobs)
    heap = [(0, place) for place in range(ranks * replicas)] if limit is not None else []
    for number in order:
        job = jobs[number]
        place = _holder(job, load, ranks, replicas, limit)
        if place is None:
            while heap[0][0] != load[heap[0][1]]:
                heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
            place = heap[0][1]
            if limit is not None and load[place] + job.cost > limit:
                return None
        load[place] += job.cost
        plan[number] = place
    return plan


def _holder(job: Job, load: Sequence[int], ranks: int, replicas: int, limit: int | None) -> int | None:
    """The place with room that holds most of the matrix, and of those the one that has least to do."""
    best: tuple[int, int, int] | None = None
    for rank, numel in job.holders:
        for place in range(rank, ranks * replicas, ranks):
            if limit is not None and load[place] + job.cost > limit:
                continue
            # Without a limit it is the work that counts.
            key = (-numel, load[place], place) if limit is not None else (load[place], -numel, place)
            if best is None or key < best:
                best = key
    return None if best is None else best[-1]
