"""The arithmetic of `tools/gpu`: sizes of models, bytes of a step, units of the host's time."""

from __future__ import annotations

import pytest
from bench.workloads import WORKLOADS, stack
from each_row import each_row
from gpu.formula import Bytes, Units, full_shard, shard_grad_op
from gpu.place import ranks_for
from gpu.sizes import BYTES_OF_TRAINING, MOST_WIDTH, SHARE, size_for
from gpu.steps import gathered_nbytes

UNIT = 2**20
"""Elements of a unit: four MiB in fp32, of which one is gathered ahead and no second."""


@each_row(("gigabytes", "ranks"), [(4, 1), (12, 1), (24, 4)])
def test_a_model_fits_into_its_share(gigabytes: int, ranks: int) -> None:
    """As many as are trained at once have room in their share of the memory, and one a step wider would not."""
    size = size_for(gigabytes * 10**9, 6, ranks)
    bound = SHARE * gigabytes * 10**9 * ranks
    assert 6 * BYTES_OF_TRAINING * size.numel <= bound
    wider = (size.width + 128) ** 2 * 12 * size.layers
    assert 6 * BYTES_OF_TRAINING * wider > bound or size.width == MOST_WIDTH


def test_an_unknown_memory_gets_the_smallest_model() -> None:
    """Where torch cannot tell how much memory there is, the model is small, and not none."""
    assert size_for(0, 6, 1).width == 128


@each_row(("devices", "ranks"), [(0, 1), (1, 1), (2, 2), (3, 2), (7, 4), (8, 8), (16, 8)])
def test_ranks_are_a_power_of_two(devices: int, ranks: int) -> None:
    """Of several devices as many are used as the largest power of two, and at most eight."""
    assert ranks_for(devices) == ranks


def test_bytes_by_hand() -> None:
    """Three units of one MiB of elements on two ranks, counted by hand in units `u` of bytes.

    At rest: shards and two moments, 3 * 3/2. Forward: one unit, and on an accelerator the next. Backward, FULL_SHARD: the
    second unit is at work with its parameters and its gradient, the first is gathered, and there is the last one's
    shard of half a unit; on an accelerator the last one's reduction is under way. SHARD_GRAD_OP: all units and autograd's gradient of the last.
    """
    u = 4 * UNIT
    units = Units([UNIT] * 3, ranks=2)
    rest = 9 * u // 2
    assert full_shard(units, on_device=False) == Bytes(rest, rest + u, rest + 7 * u // 2)
    assert full_shard(units, on_device=True) == Bytes(rest, rest + 2 * u, rest + 9 * u // 2)
    assert shard_grad_op(units, on_device=False) == Bytes(rest, rest + 3 * u, rest + 4 * u)


def test_small_units_are_gathered_ahead_together() -> None:
    """Units of one MiB: four of them are on their way while another computes, as `runtime.prefetch_nbytes` has it."""
    units = Units([UNIT // 4] * 8, ranks=1)
    found = full_shard(units, on_device=True)
    assert found.forward - found.rest == 5 * UNIT


def test_units_are_padded() -> None:
    """A unit of three elements on two ranks has eight, so that shards are of 16 bytes, and a model with parameters outside of its units is refused."""
    assert Units([3], ranks=2).full == [32]
    with pytest.raises(ValueError, match="all in units"):
        Units.of(WORKLOADS["tiny small"], 2)


def test_a_link_is_as_slow_as_a_block() -> None:
    """What a rank gets for a block in bf16 is two bytes an element of the others' seven eighths."""
    assert gathered_nbytes(stack(units=3, width=4, depth=2)) == 2 * 40 * 7 / 8
