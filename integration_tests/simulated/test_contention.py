"""The copies that feed collectives come between the waves of a product, and not after it."""

from __future__ import annotations

from typing import Any, Final

import pytest

from flatparam_simdev.contention import contended
from flatparam_simdev.log import Kind
from flatparam_simdev.replay import Costs, replay
from integration_tests.simulated.overlap import STEP
from integration_tests.simulated.programs import Outcome, Program, run
from integration_tests.simulated.worlds import World, on_simulated

ROWS: Final[dict[str, dict[str, Any]]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"strategy": "grad_op"},
    "hybrid": {"strategy": "hybrid_of_one"},
    "originals": {"use_orig_params": True},
    "fully_shard": {"library": "fully_shard"},
}
COSTS: Final = Costs(communication=190.0)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Of each row: what a rank has to tell of training in bfloat16, whose gathers need a cast."""
    common = {"precision": "bfloat16", "scenario": "one_unit_ahead", "blocks": 6}
    told = on_simulated(2, run, [Program(**common, **row) for row in ROWS.values()])[0]
    return dict(zip(ROWS, told, strict=True))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("row", ROWS)
def test_casts_do_not_wait_for_products(outcomes: dict[str, Outcome], row: str) -> None:
    """Where kernels share the device, a step is as long as where they do not, within 1 %; without priorities by 3 % longer.

    A unit computes for 200, and a gather takes 190: it has to begin soon after the unit does.
    """
    log = outcomes[row].log
    equal = [record for record in log if record.kind is not Kind.PRIORITY]
    alone = replay(log, COSTS).step(STEP).length
    shared, without = (contended(each, COSTS, wave=5.0, latency=0.1).step(STEP).length for each in (log, equal))
    assert shared <= 1.01 * alone
    assert without >= 1.03 * alone


def copied(world: World, has_priorities: bool) -> tuple[list[float], list[int]]:
    """What is copied to the device and back, and the priorities of the streams."""
    import torch

    from flatparam_comm.transfer.streams import Streams
    from flatparam_simdev import device

    with device.behaving("has_priorities", has_priorities):
        device.start_log()
        streams = Streams(world.device)
        with streams.uploading() as up:
            there = streams.to_device(torch.tensor([1.0, 2.0]), world.device)
        assert up.end is not None
        up.end.wait()
        with streams.downloading() as down:
            back = streams.to_host(there)
        assert down.end is not None
        down.end.synchronize()
        records = device.stop_log()
    return back.tolist(), [record.extra for record in records if record.kind is Kind.PRIORITY]


@pytest.mark.processes
@pytest.mark.parametrize("has_priorities", [True, False])
def test_devices_without_priorities_work(has_priorities: bool) -> None:
    """Both streams for copies have the high priority; where the device refuses it, they are ordinary ones."""
    ((values, priorities),) = on_simulated(1, copied, has_priorities)
    assert values == [1.0, 2.0]
    assert priorities == ([-1, -1] if has_priorities else [])
