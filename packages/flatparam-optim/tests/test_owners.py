"""The owners of matrices: equal work for every rank, the same plan everywhere, and few bytes; numbers only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatparam_optim.matrices.matrix_owners import Job, choose_owners, lower_bound, newton_schulz_flops

Shapes = Sequence[Sequence[tuple[int, int]]]

LLAMA_70B: Shapes = 80 * [[(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), *2 * [(28672, 8192)], (8192, 28672)]]
"""The matrices of a model like Llama 70B, by block."""
_ATTENTION = [(1536, 7168), (12288, 1536), (576, 7168), (16384, 512), (7168, 8192)]
KIMI_K2: Shapes = [
    [*_ATTENTION, (18432, 7168), (18432, 7168), (7168, 18432)],
    *60 * [[*_ATTENTION, (384, 7168), *385 * [(2048, 7168), (2048, 7168), (7168, 2048)]]],
]
"""Those of a model like Kimi K2: 384 experts and a shared one in each block but the first."""
WORLD_SIZES = (
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    30,
    64,
    85,
    97,
    125,
    128,
    145,
    151,
    200,
    256,
    300,
    384,
    500,
    512,
    768,
    1000,
    1024,
)
"""Some from 67 to 151 are those at which the sum of all work is far below what the best plan asks of somebody."""


def jobs_of(units: Shapes, ranks: int) -> list[Job]:
    """The jobs of units whose parameters lie end to end in shards of equal length."""
    found = []
    for shapes in units:
        ends = list(itertools.accumulate(rows * columns for rows, columns in shapes))
        shard = -(-ends[-1] // ranks)
        for (rows, columns), end in zip(shapes, ends, strict=True):
            start = end - rows * columns
            holders = [
                (rank, min(end, (rank + 1) * shard) - max(start, rank * shard))
                for rank in range(start // shard, (end - 1) // shard + 1)
            ]
            found.append(Job(newton_schulz_flops(rows, columns, 5), holders))
    return found


def busiest(jobs: Sequence[Job], owners: Sequence[int], places: int) -> int:
    load = [0] * places
    for job, owner in zip(jobs, owners, strict=True):
        load[owner] += job.cost
    return max(load)


@pytest.mark.parametrize(
    ("units", "ranks"),
    [
        *(pytest.param(LLAMA_70B, ranks, id=f"Llama 70B on {ranks}") for ranks in WORLD_SIZES),
        *(pytest.param(KIMI_K2, ranks, id=f"Kimi K2 on {ranks}") for ranks in (8, 256)),
        *(pytest.param(KIMI_K2, ranks, id=f"Kimi K2 on {ranks}", marks=pytest.mark.long) for ranks in (2, 100, 1024)),
    ],
)
def test_work_is_balanced(units: Shapes, ranks: int) -> None:
    """Nobody does more than 1.05 times the lower bound; if the largest matrix sets the bound, nobody does more than it."""
    jobs = jobs_of(units, ranks)
    costs = [job.cost for job in jobs]
    bound, found = lower_bound(costs, ranks), busiest(jobs, choose_owners(jobs, ranks), ranks)
    assert found * 100 <= bound * 105


@pytest.mark.long
@pytest.mark.parametrize(("units", "step"), [(LLAMA_70B, 1), (KIMI_K2, 31)], ids=["Llama 70B", "Kimi K2"])
def test_work_is_balanced_at_any_world_size(units: Shapes, step: int) -> None:
    """The same for all sizes to 1,024, or for every 31st."""
    for ranks in range(1, 1025, step):
        jobs = jobs_of(units, ranks)
        bound = lower_bound([job.cost for job in jobs], ranks)
        found = busiest(jobs, choose_owners(jobs, ranks), ranks)
        assert found * 100 <= bound * 105, (ranks, found / bound)


@pytest.mark.parametrize(("ranks", "replicas"), [(8, 2), (8, 16), (3, 5), (64, 16), (1, 8)])
def test_replicas_share_the_work(ranks: int, replicas: int) -> None:
    """With copies of the shards, all places together have as little to do as a world of as many ranks."""
    jobs = jobs_of(LLAMA_70B, ranks)
    places = ranks * replicas
    bound = lower_bound([job.cost for job in jobs], places)
    assert busiest(jobs, choose_owners(jobs, ranks, replicas), places) * 100 <= bound * 105


def test_whole_matrices_stay_where_they_are() -> None:
    """A matrix that one rank has is stepped there, as far as the work allows it."""
    jobs = [Job(10, [(rank % 4, 100)]) for rank in range(40)]
    assert choose_owners(jobs, 4) == [rank % 4 for rank in range(40)]
    kept = [Job(10, [(0, 100)], places=(0, 2)) for _ in range(4)]
    free = [Job(10, [(0, 50), (1, 50)]) for _ in range(4)]
    assert choose_owners([*free, *kept], 2, 2) == [1, 3, 1, 3, 0, 2, 0, 2]
    uneven = [Job(10, [(0, 100)]) for _ in range(40)]
    assert busiest(uneven, choose_owners(uneven, 4), 4) == 100


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Job], int, int]:
    ranks, replicas = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    holder = st.tuples(st.integers(0, ranks - 1), st.integers(1, 9))
    job = st.builds(Job, st.integers(1, 50), st.lists(holder, min_size=1, max_size=3, unique_by=lambda pair: pair[0]))
    return draw(st.lists(job, max_size=12)), ranks, replicas


@given(plans())
@settings(max_examples=150, deadline=None)
def test_every_matrix_has_one_owner(case: tuple[list[Job], int, int]) -> None:
    """Each job has one place in the world; the plan is the same each time, and not far from the bound."""
    jobs, ranks, replicas = case
    owners = choose_owners(jobs, ranks, replicas)
    assert len(owners) == len(jobs)
    assert all(0 <= owner < ranks * replicas for owner in owners)
    assert owners == choose_owners(jobs, ranks, replicas)
    costs, places = [job.cost for job in jobs], ranks * replicas
    if jobs:
        bound = lower_bound(costs, places)
        # The rule of the longest first is at most a third worse than the best.
        assert bound <= busiest(jobs, owners, places) <= bound * 4 / 3 + max(costs)


@given(plans())
@settings(max_examples=100, deadline=None)
def test_owners_can_be_confined_to_holders(case: tuple[list[Job], int, int]) -> None:
    """If a matrix has to stay with a rank that holds some of it, it does."""
    jobs, ranks, replicas = case
    confined = [
        attrs.evolve(job, places=[rank + ranks * replica for rank, _ in job.holders for replica in range(replicas)])
        for job in jobs
    ]
    for job, owner in zip(confined, choose_owners(confined, ranks, replicas), strict=True):
        assert owner in job.places


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_the_bound_is_one(costs: list[int], places: int) -> None:
    """No way of dealing out the costs asks less of the busiest place than the lower bound says."""
    best = min(
        max(sum(c for c, at in zip(costs, dealt, strict=True) if at == place) for place in range(places))
        for dealt in itertools.product(range(places), repeat=len(costs))
    )
    assert lower_bound(costs, places) <= best
