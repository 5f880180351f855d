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

_TOLERANCE: Final = 105
"""The most that any place does, in percent of the lower bound, if matrices stay where they are for the most part."""
_MANY: Final = 16
"""If more of a size fit into one bin, bins can be filled so well that the sum of all sizes is the better bound."""
_HEAVY: Final = 8
"""The sizes of which any two are looked at: those that are most of the work."""


@final
@attrs.frozen
class Job:
    """A matrix to step: its cost, and how many elements of it each rank of a replica holds."""

    cost: int
    """In any unit; all jobs of a plan have the same."""
    holders: Sequence[tuple[int, int]]
    """Ranks that hold elements of it, each with their number; at least one."""
    places: Sequence[int] = ()
    """The places that may step it; empty stands for all."""


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Return the floating-point operations of `steps` quintic Newton-Schulz iterations of one matrix.

    Each multiplies the matrix by its transpose, the product by itself, and the sum of both by the matrix: with the
    shorter side `m` and the longer one `n`, `2 m^2 n + 2 m^3 + 2 m^2 n`.
    """
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def lower_bound(costs: Sequence[int], places: int) -> int:
    """Return the least that the busiest of `places` does, however `costs` are dealt out.

    It is the least capacity of bins, as large as the largest cost and as the mean, that `places` of them may be enough
    for by three counts. For each `k`: a bin with a size above `capacity - k` has no other size of `k` or more, and of
    those up to half the capacity the rest needs bins by the sum of its sizes (bound L2 of S. Martello, P. Toth, "Lower
    bounds and reduction procedures for the bin packing problem", Discrete Applied Mathematics 28 (1990), section 3),
    and by their number, since at most `capacity // k` of them fit into one bin. For any two of the sizes that are
    most of the work: see `_room_beside`.
    """
    if not costs:
        return 0
    least = max(max(costs), -(-sum(costs) // places))
    sizes = sorted(Counter(costs).items())
    heavy = sorted(sorted(sizes, key=lambda each: (-each[0] * each[1], each))[:_HEAVY])
    most = 2 * least
    while least < most:
        middle = (least + most) // 2
        if _bins(sizes, middle) > places or not _pairs_fit(heavy, middle, places):
            least = middle + 1
        else:
            most = middle
    return least


def _pairs_fit(sizes: Sequence[tuple[int, int]], capacity: int, places: int) -> bool:
    """Whether `places` bins may be enough for the sizes, each with its count, if all but any two are left out."""
    for at, (small, smalls) in enumerate(sizes):
        for large, larges in sizes[at + 1 :]:
            if capacity // large <= _MANY and _room_beside(large, larges, small, capacity, places) < smalls:
                return False
    return True


def _room_beside(large: int, larges: int, small: int, capacity: int, places: int) -> int:
    """Return how many of size `small` fit, at most, into `places` bins that `larges` of size `large` are dealt out to.

    A bin with `n` large ones has room for `(capacity - n large) // small`. The bins have `larges / places` large ones
    on the average, so that their average room lies below the upper hull of these points.
    """
    most = capacity // large
    if larges > most * places:
        return -1
    room = [(capacity - count * large) // small for count in range(most + 1)]
    low, more = divmod(larges, places)
    best = 0 if more else room[low] * places
    for left in range(low + 1):
        for right in range(max(left + 1, -(-larges // places)), most + 1):
            chord = room[left] * (right * places - larges) + room[right] * (larges - left * places)
            best = max(best, chord // (right - left))
    return best


def _bins(sizes: Sequence[tuple[int, int]], capacity: int) -> int:
    """Return the bins that `sizes`, each with its count, need at least."""
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


def choose_owners(jobs: Sequence[Job], ranks: int, replicas: int = 1) -> list[int]:
    """Return the place that steps each of `jobs`; see this module for the numbers of places.

    A matrix stays with a rank that holds elements of it, most of them if possible, as long as nobody does more than
    1.05 times what the best plan that is known asks of the busiest; then work counts more than bytes.

    Args:
        jobs: in the same order on every rank.
        ranks: the ranks that share the parameters.
        replicas: how many times the parameters are there.
    """
    places = ranks * replicas
    order = sorted(range(len(jobs)), key=lambda number: (-jobs[number].cost, number))
    owners = [0] * len(jobs)
    load = [0] * places
    rest = []
    for number in order:
        if jobs[number].places:
            # The work is what there is to choose by, however uneven it is.
            held = dict(jobs[number].holders)
            owners[number] = min((load[place], -held.get(place % ranks, 0), place) for place in jobs[number].places)[-1]
            load[owners[number]] += jobs[number].cost
        else:
            rest.append(number)
    if rest:
        bound = max(lower_bound([job.cost for job in jobs], places), max(load))
        for number, place in _dealt_out(jobs, rest, load, ranks, bound).items():
            owners[number] = place
    return owners


def _dealt_out(
    jobs: Sequence[Job], order: Sequence[int], load: Sequence[int], ranks: int, bound: int
) -> dict[int, int]:
    """Return the places of the jobs in `order`, the costliest first, beside what each place has to do already."""
    best, busiest = _longest_first(jobs, order, load)
    if busiest * 100 > _TOLERANCE * bound:
        best, busiest = min((best, busiest), _first_fit(jobs, order, load, bound, busiest), key=lambda found: found[1])
    near = _near(jobs, order, load, ranks, max(busiest, _TOLERANCE * bound // 100))
    return best if near is None else near


def _longest_first(jobs: Sequence[Job], order: Sequence[int], load: Sequence[int]) -> tuple[dict[int, int], int]:
    """Give each job to the place that has least to do; returns the places, and what the busiest has to do."""
    heap = [(done, place) for place, done in enumerate(load)]
    heapq.heapify(heap)
    plan = {}
    for number in order:
        done, place = heap[0]
        heapq.heapreplace(heap, (done + jobs[number].cost, place))
        plan[number] = place
    return plan, max(done for done, _ in heap)


def _first_fit(
    jobs: Sequence[Job], order: Sequence[int], load: Sequence[int], least: int, most: int
) -> tuple[dict[int, int], int]:
    """Search for the least capacity with which each job fits into the first place with room; see `_longest_first`."""
    found: dict[int, int] = {}
    capacity = 2 * most
    for _ in range(12):
        middle = (least + most) // 2
        plan = _fit(jobs, order, load, middle)
        if plan is None:
            least = middle + 1
        else:
            found, capacity, most = plan, middle, middle
        if least >= most:
            break
    return found, capacity


def _fit(jobs: Sequence[Job], order: Sequence[int], load: Sequence[int], capacity: int) -> dict[int, int] | None:
    room, plan = [capacity - done for done in load], {}
    place, last = 0, -1
    for number in order:
        cost = jobs[number].cost
        # What was too full for a job of this cost still is.
        place = place if cost == last else 0
        last = cost
        while place < len(room) and room[place] < cost:
            place += 1
        if place == len(room):
            return None
        room[place] -= cost
        plan[number] = place
    return plan


def _near(
    jobs: Sequence[Job], order: Sequence[int], load: Sequence[int], ranks: int, limit: int
) -> dict[int, int] | None:
    """Give each job to the holder of most of it that stays within `limit`, else to whoever has least to do.

    `None` if nobody has room.
    """
    done, plan = list(load), {}
    heap = [(each, place) for place, each in enumerate(done)]
    heapq.heapify(heap)
    for number in order:
        job = jobs[number]
        near = [
            (-numel, done[place], place)
            for rank, numel in job.holders
            for place in range(rank, len(done), ranks)
            if done[place] + job.cost <= limit
        ]
        if near:
            place = min(near)[-1]
        else:
            while heap[0][0] != done[heap[0][1]]:
                heapq.heapreplace(heap, (done[heap[0][1]], heap[0][1]))
            place = heap[0][1]
            if done[place] + job.cost > limit:
                return None
        done[place] += job.cost
        plan[number] = place
    return plan
