"""The checker, on logs written by hand."""

from __future__ import annotations

from collections.abc import Callable

from each_row import each_row

from flatparam_simdev.log import Kind
from flatparam_simdev.races import find_races

from .writing import Writer


def rules(writer: Writer) -> list[str]:
    return [finding.rule for finding in find_races(writer.records)]


def test_one_stream_is_in_order() -> None:
    """What one stream does happens in its order."""
    log = Writer()
    block = log.allocate()
    log.kernel(0, "fill", writes=[block])
    log.kernel(0, "add", reads=[block])
    assert rules(log) == []


def test_two_streams_race() -> None:
    """A stream that reads what another writes, without waiting, is a finding that names both."""
    log = Writer()
    block = log.allocate()
    log.mark("forward")
    log.kernel(0, "fill", writes=[block])
    log.kernel(1, "add", reads=[block])
    [finding] = find_races(log.records)
    assert str(finding) == (
        "race over device memory: add (reads, stream 1, forward, record 3) does not wait for "
        "fill (writes, stream 0, forward, record 2)"
    )


def test_two_readers_do_not_race() -> None:
    """Two streams may read the same memory."""
    log = Writer()
    block = log.allocate()
    log.kernel(0, "sum", reads=[block])
    log.kernel(1, "add", reads=[block])
    assert rules(log) == []


def test_other_bytes_do_not_race() -> None:
    """Two streams may write different bytes of one block."""
    log = Writer()
    block = log.allocate()
    log.use(Kind.KERNEL, 0, "fill", writes=[block], extent=(0, 50))
    log.use(Kind.KERNEL, 1, "fill", writes=[block], extent=(50, 100))
    assert rules(log) == []
    log.use(Kind.KERNEL, 2, "fill", writes=[block], extent=(49, 50))
    assert rules(log) == ["race"]


def test_an_event_orders() -> None:
    """A stream that waits for an event comes after what was before it, and not after what was behind it."""
    log = Writer()
    first, second = log.allocate(), log.allocate()
    log.kernel(0, "fill", writes=[first])
    event = log.record(0)
    log.kernel(0, "fill", writes=[second])
    log.wait(1, event)
    log.kernel(1, "add", reads=[first])
    assert rules(log) == []
    log.kernel(1, "add", reads=[second])
    assert rules(log) == ["race"]


def test_order_is_handed_on() -> None:
    """A stream that waits for a stream that has waited for a third comes after the third."""
    log = Writer()
    block = log.allocate()
    log.kernel(0, "fill", writes=[block])
    log.order(0, 1)
    log.order(1, 2)
    log.kernel(2, "add", reads=[block])
    assert rules(log) == []


def test_a_write_after_a_read_races() -> None:
    """A stream may not write what another may still read."""
    log = Writer()
    block = log.allocate()
    log.kernel(1, "sum", reads=[block])
    log.kernel(0, "fill", writes=[block])
    assert rules(log) == ["race"]


@each_row(
    "synchronise",
    [
        lambda log: log.synchronise(0),
        lambda log: log.synchronise_event(log.record(0)),
        lambda log: log.synchronise_device(),
        lambda log: log.query(log.record(0)),
    ],
    ids=["a stream", "an event", "the device", "by asking"],
)
def test_the_host_waits(synchronise: Callable[[Writer], None]) -> None:
    """The host may read what was copied to it once it has waited, or knows otherwise that it is over."""
    log = Writer()
    block = log.allocate(pinned=True)
    log.use(Kind.TO_HOST, 0, "copy to the host", writes=[block])
    synchronise(log)
    log.host("tolist", reads=[block])
    assert rules(log) == []


def test_the_host_does_not_wait() -> None:
    """The host that reads a copy which may not have landed is a finding; so is one that overwrites what is copied."""
    log = Writer()
    block, other = log.allocate(pinned=True), log.allocate(pinned=True)
    log.use(Kind.TO_HOST, 0, "copy to the host", writes=[block])
    log.host("tolist", reads=[block])
    log.use(Kind.TO_DEVICE, 0, "copy to the device", reads=[other])
    log.host("fill", writes=[other])
    assert rules(log) == ["race", "race"]


def test_the_device_is_after_the_host() -> None:
    """What the host does before it queues something has happened when that runs."""
    log = Writer()
    block = log.allocate(pinned=True)
    log.host("fill", writes=[block])
    log.use(Kind.TO_DEVICE, 1, "copy to the device", reads=[block])
    assert rules(log) == []


def test_the_host_hands_order_on() -> None:
    """After the host has waited for one stream, what it queues on another comes after the first."""
    log = Writer()
    block = log.allocate()
    log.kernel(0, "fill", writes=[block])
    log.synchronise(0)
    log.kernel(1, "add", reads=[block])
    assert rules(log) == []


def test_freed_memory_is_not_used() -> None:
    """Memory that is used after it was freed is a finding."""
    log = Writer()
    block = log.allocate()
    log.free(block)
    log.kernel(0, "add", reads=[block])
    assert rules(log) == ["used after it was freed"]


def test_memory_is_reused_on_its_own_stream() -> None:
    """Memory of a stream's pool that this stream alone has used may be given out again to it."""
    log = Writer()
    block = log.allocate()
    log.kernel(0, "fill", writes=[block])
    log.free(block)
    again = log.allocate()
    log.kernel(0, "fill", writes=[again])
    assert rules(log) == []


def test_memory_is_reused_too_early() -> None:
    """Memory that another stream still reads when it is freed may be given out again: a finding."""
    log = Writer()
    block = log.allocate()
    log.kernel(1, "all_gather", reads=[block])
    log.free(block)
    again = log.allocate()
    log.kernel(0, "fill", writes=[again])
    [finding] = find_races(log.records)
    assert finding.rule == "reused too early"
    assert "fill (writes, stream 0" in str(finding)
    assert "all_gather (reads, stream 1" in str(finding)


def test_memory_is_reused_in_time() -> None:
    """It is none where the pool's stream has waited for the other before the memory is used again."""
    log = Writer()
    block = log.allocate()
    log.kernel(1, "all_gather", reads=[block])
    log.free(block)
    again = log.allocate()
    log.order(1, 0)
    log.kernel(0, "fill", writes=[again])
    assert rules(log) == []


def test_memory_is_reused_by_another_stream() -> None:
    """Memory from a stream's pool that another stream uses first must wait for the stream of the pool."""
    log = Writer()
    block = log.allocate()
    log.kernel(0, "fill", writes=[block])
    log.free(block)
    again = log.allocate()
    log.kernel(1, "fill", writes=[again])
    assert rules(log) == ["reused too early"]


def test_recorded_streams_are_waited_for() -> None:
    """The allocator waits for the streams that it was told of before it gives memory out again."""
    log = Writer()
    block = log.allocate()
    log.kernel(1, "all_gather", reads=[block])
    log.record_stream(block, 1)
    log.free(block)
    again = log.allocate()
    log.kernel(0, "fill", writes=[again])
    assert rules(log) == []


def test_pools_are_apart() -> None:
    """Memory of one stream's pool is not given out by another's."""
    log = Writer()
    block = log.allocate()
    log.kernel(1, "all_gather", reads=[block])
    log.free(block)
    other = log.allocate(pool=2)
    log.kernel(2, "fill", writes=[other])
    assert rules(log) == []


def test_pinned_memory_is_not_reused_early() -> None:
    """The allocator of pinned memory waits for copies from it by itself."""
    log = Writer()
    block = log.allocate(pinned=True)
    log.use(Kind.TO_DEVICE, 1, "copy to the device", reads=[block])
    log.free(block, pinned=True)
    again = log.allocate(pinned=True)
    log.host("fill", writes=[again])
    assert rules(log) == []


def test_a_finding_is_told_once() -> None:
    """The same two operators in the same phase are one finding, which counts."""
    log = Writer()
    for _ in range(3):
        block = log.allocate()
        log.kernel(0, "fill", writes=[block])
        log.kernel(1, "add", reads=[block])
    [finding] = find_races(log.records)
    assert finding.times == 3
    assert str(finding).endswith(", 3 times")
