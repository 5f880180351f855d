"""How much memory of the device a step takes: to the byte what a formula says, and no more than FSDP1's and FSDP2's."""

from __future__ import annotations

from typing import Any, Final

import attrs
import pytest

from integration_tests.simulated.memory import Measured, Sizes, formula, measured
from integration_tests.simulated.programs import Program
from integration_tests.simulated.worlds import on_simulated

pytestmark = pytest.mark.processes

ROWS: Final[dict[str, dict[str, Any]]] = {
    "FULL_SHARD": {},
    "originals": {"use_orig_params": True},
    "SHARD_GRAD_OP": {"strategy": "grad_op"},
    "NO_SHARD": {"strategy": "none"},
    "hybrid": {"strategy": "hybrid"},
    "hybrid, sharded": {"strategy": "hybrid_of_one"},
    "bfloat16": {"precision": "bfloat16"},
    "BACKWARD_POST": {"prefetch": "late"},
    "accumulation": {"micro_batches": 2, "no_sync": True},
    "offload": {"offload": True},
}
ONE_UNIT: Final = 1
"""Bytes that are gathered ahead where it is to be one unit."""
ALL: Final = 2**22
"""The default, by which the whole chain is gathered ahead."""
NOT_FSDP2: Final = ("originals", "NO_SHARD", "hybrid", "hybrid, sharded", "BACKWARD_POST")
"""What FSDP2 has no word for, or has by a different name."""
Key = tuple[str, str, int]


@pytest.fixture(scope="module")
def found() -> dict[Key, Measured]:
    """What the first rank measures, by library, row and the bytes that are gathered ahead."""
    keys = [("flatparam", name, ahead) for name in ROWS for ahead in (ONE_UNIT, ALL)]
    keys += [("fsdp1", name, ALL) for name in ROWS if name != "originals"]
    keys += [("fsdp2", name, ALL) for name in ROWS if name not in NOT_FSDP2]
    jobs = [(Program(library, chain=True, **ROWS[name]), ahead) for library, name, ahead in keys]
    return dict(zip(keys, on_simulated(2, measured, jobs)[0], strict=True))


@pytest.mark.parametrize("ahead", [ONE_UNIT, ALL], ids=["one unit ahead", "all units ahead"])
@pytest.mark.parametrize("name", ROWS)
def test_the_peak_is_the_formulas(found: dict[Key, Measured], name: str, ahead: int) -> None:
    """Parameters, gradients and momentum take in each phase exactly the formula's bytes."""
    assert found["flatparam", name, ahead].phases == formula(Program(chain=True, **ROWS[name]), ahead)


@pytest.mark.parametrize("name", [name for name in ROWS if name != "originals"])
def test_no_more_than_fsdp1(found: dict[Key, Measured], name: str) -> None:
    """A step takes at most what FSDP1's does: of live bytes, and of what the allocator reserves."""
    for ahead in (ONE_UNIT, ALL):
        ours, theirs = found["flatparam", name, ahead], found["fsdp1", name, ALL]
        assert ours.nbytes <= theirs.nbytes
        assert ours.pools_nbytes <= theirs.pools_nbytes


@pytest.mark.parametrize("name", [name for name in ROWS if name not in NOT_FSDP2])
def test_no_more_reserved_than_fsdp2(found: dict[Key, Measured], name: str) -> None:
    """The allocator reserves at most what it does for FSDP2, which gathers one unit ahead."""
    ours, theirs = found["flatparam", name, ONE_UNIT], found["fsdp2", name, ALL]
    assert ours.pools_nbytes <= theirs.pools_nbytes


@pytest.mark.parametrize("name", [name for name in ROWS if name not in (*NOT_FSDP2, "offload")])
def test_no_more_alive_than_fsdp2(found: dict[Key, Measured], name: str) -> None:
    """At most as many bytes are alive at once as of FSDP2.

    With offload there is nothing to compare: FSDP2's host gives a gradient's memory back to the stream that is still
    writing it, so that these bytes count as reserved alone.
    """
    assert found["flatparam", name, ONE_UNIT].nbytes <= found["fsdp2", name, ALL].nbytes


def test_the_formula_depends_on_each_setting() -> None:
    """No two rows that should differ have the same formula, and more gathered ahead is more in the forward pass."""
    programs = {name: Program(chain=True, **row) for name, row in ROWS.items()}
    distinct = {name: tuple(formula(program, ONE_UNIT).values()) for name, program in programs.items()}
    same = {"originals", "hybrid, sharded"}  # as FULL_SHARD: on two ranks they hold the same
    assert len(set(distinct.values())) == len(ROWS) - len(same)
    plain = programs["FULL_SHARD"]
    assert formula(plain, ONE_UNIT)["forward"] < formula(plain, ALL)["forward"]
    more = attrs.evolve(plain, ranks=4)
    assert Sizes.of(more, ONE_UNIT).rest * 2 == Sizes.of(plain, ONE_UNIT).rest
