"""The simulated device does what a device does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import device_facts
from .ranks import on_simulated

pytestmark = pytest.mark.processes

NUMBERS = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
POISON = -26711958.0
POISONED = [[POISON] * 3] * 2


@pytest.fixture(scope="module")
def one() -> Any:
    """What a rank of its own finds."""
    return on_simulated(1, device_facts.of_one)[0]


@pytest.fixture(scope="module")
def two() -> Any:
    """What each of two ranks finds."""
    return on_simulated(2, device_facts.of_two)


def skip_without_synchronize() -> None:
    """Skip the test with a torch that does not tell the simulated device of `torch.accelerator.synchronize()`."""
    if torch.__version__ < "2.12":
        pytest.skip("torch 2.11 does not ask this device to wait for everything")


@pytest.mark.parametrize("wait", ["stream", "event", "device", "query", "item"])
def test_copies_to_the_host_land_late(one: Any, wait: str) -> None:
    """What is copied to pinned memory is there when the host has waited for it; before, there is poison."""
    if wait == "device":
        skip_without_synchronize()
    assert one["copies_to_the_host"][wait] == (POISONED, NUMBERS)


@pytest.mark.parametrize("wait", ["event before the copy", "another stream"])
def test_a_wait_for_something_else_does_not_count(one: Any, wait: str) -> None:
    """Waiting for what does not come after the copy leaves the poison where it is."""
    assert one["copies_to_the_host"][wait] == (POISONED, POISONED)


def test_late_copies_keep_to_their_elements(one: Any) -> None:
    """A late copy into a strided view poisons and fills only the elements of the view."""
    row = [POISON, 0.0] * 3
    assert one["copies_to_the_host"]["strided"] == (
        [row, row],
        [[0.0, 0.0, 1.0, 0.0, 2.0, 0.0], [3.0, 0.0, 4.0, 0.0, 5.0, 0.0]],
    )


def test_copies_to_ordinary_memory_wait(one: Any) -> None:
    """A copy to memory that is not pinned makes the host wait, whatever it was asked."""
    assert one["copies_to_the_host"]["ordinary memory"] == NUMBERS


def test_copies_to_the_device_read_late(one: Any) -> None:
    """What the host writes before a copy from pinned memory is over is what the device gets."""
    facts = one["copies_to_the_device"]
    assert facts["at once"] == [2.0] * 3
    assert facts["after waiting"] == [1.0] * 3


def test_a_stream_that_does_not_wait_finds_poison(one: Any) -> None:
    """A stream that reads what another is still to copy to the device finds what was in memory before."""
    assert one["copies_to_the_device"]["read by a stream that does not wait"] == [POISON] * 3
    assert one["copies_to_the_device"]["there and back"] == [1.0] * 3


def test_lists_of_copies_land_late(one: Any) -> None:
    """Copies that are asked for as a list land late, too."""
    skip_without_synchronize()
    facts = one["copies_of_lists"]
    assert facts["before"] == [[POISON] * 2, [POISON] * 3]
    assert facts["after"] == [[1.0] * 2, [1.0] * 3]


def test_the_host_is_seen_reading(one: Any) -> None:
    """The checker sees each way in which Python can read pinned memory."""
    found = one["reads_by_the_host"]
    assert [any(f"way {number}," in finding for finding in found) for number in range(6)] == [True] * 6


def test_streams_are_each_threads_own(one: Any) -> None:
    """A stream is current inside its context, in that thread alone; events on it tell the time."""
    facts = one["streams"]
    assert facts.pop("elapsed") >= 0
    assert all(facts.values())


def test_backward_runs_on_the_stream_of_forward(one: Any) -> None:
    """Autograd runs a backward pass in a thread of its own, on the streams of the forward pass."""
    facts = one["autograd"]
    assert facts["streams"] == {facts["side"]}
    assert facts["own thread"]


def test_memory_is_counted(one: Any) -> None:
    """Memory that a storage gives back is free, using it is an error, and new memory is never zero."""
    facts = one["memory"]
    assert facts["sizes"] == [4000, 0, 4000, 0]
    assert facts["peak"] >= 4000
    assert "use after free" in facts["error"]
    assert facts["fresh"] == [POISON] * 2


def test_mixed_precision_of_torch_works(one: Any) -> None:
    """torch's autocast and its scaler of gradients know the device."""
    assert one["amp"] == {"dtype": torch.bfloat16, "scaled": [8.0] * 3, "after": [2.0] * 3}


def test_groups_refuse_tensors_of_the_cpu(two: Any) -> None:
    """A collective on a tensor of the CPU is an error, as it is NCCL's."""
    for facts in two:
        assert facts["cpu tensor"] == "No backend type associated with device type cpu"


def test_collectives_compute(two: Any) -> None:
    """Each collective gives what it should, on each rank."""
    for rank, facts in enumerate(two):
        assert facts["SUM"] == [12.0, 14.0]
        assert facts["AVG"] == [6.0, 7.0]
        assert facts["PREMUL_SUM"] == [6.0, 7.0]
        # What torch's NCCL makes of it.
        assert facts["PREMUL_SUM in bfloat16"] == [0.0, 0.0]
        assert facts["MAX"] == [11.0, 12.0]
        assert facts["MIN"] == [1.0, 2.0]
        assert facts["PRODUCT"] == [11.0, 24.0]
        assert facts["reduce_scatter"] == [[6.0], [7.0]][rank]
        assert facts["all_gather_into_tensor"] == [1.0, 2.0, 11.0, 12.0]
        assert facts["all_gather"] == [[1.0, 2.0], [11.0, 12.0]]
        assert facts["coalesced"] == [[1.0, 11.0], [2.0, 12.0]]
        assert facts["broadcast"] == [11.0]


def test_waiting_orders_streams(two: Any) -> None:
    """What was gathered may be read by a stream that has waited for it, and by no other."""
    for facts in two:
        waiting, hasty = facts["waiting"]
        assert waiting == []
        assert len(hasty) == 1
        assert "all_gather" in hasty[0]


def test_operators_on_lists_count_versions(one: Any) -> None:
    """Autograd notices a change in place by an operator on a list, as it does on CUDA."""
    assert one["versions"] == (1, 1)


def test_conjugate_and_negative_views_are_copied(one: Any) -> None:
    """What is copied of such a view are its values."""
    assert one["views_of_complex_numbers"] == [[1.0 - 2.0j], [1.0 - 2.0j], [-2.0], [-2.0]]


def test_storages_are_copied(one: Any) -> None:
    """As `copy.deepcopy` and `torch.save` do it."""
    assert one["copies_of_storages"] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 2
