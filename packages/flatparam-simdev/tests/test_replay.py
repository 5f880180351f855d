"""The replay, on logs written by hand; each thing costs ten, a call of the host nothing or one."""

from __future__ import annotations

from xml.etree import ElementTree

from flatparam_simdev.log import Kind
from flatparam_simdev.replay import Communication, Costs, draw, from_table, replay

from .writing import NBYTES, Writer

TEN = from_table({}, otherwise=10.0)


def gather(log: Writer, *, stream: int = 1) -> None:
    log.use(Kind.COLLECTIVE, stream, "all_gather")


def test_streams_run_at_the_same_time() -> None:
    """What runs on another stream meanwhile is hidden; the step is as long as its longest lane."""
    log = Writer()
    log.mark("step 0 forward")
    gather(log)
    log.kernel(0, "aten::mm")
    step = replay(log.records, TEN).step("step 0")
    assert step.length == 10
    assert step.communication == {"step 0 forward": Communication(10, 10)}


def test_waiting_takes_time() -> None:
    """A kernel that waits for communication begins after it, and hides none of it."""
    log = Writer()
    log.mark("step 0 forward")
    gather(log)
    log.order(1, 0)
    log.kernel(0, "aten::mm")
    step = replay(log.records, TEN).step("step 0")
    assert step.length == 20
    assert step.communication_in("forward") == Communication(10, 0)


def test_a_prefetch_is_hidden() -> None:
    """The second gather runs while the first unit computes; the lower bound is reached."""
    log = Writer()
    log.mark("step 0 forward")
    gather(log)
    first = log.record(1)
    gather(log)
    second = log.record(1)
    log.wait(0, first)
    log.kernel(0, "aten::mm")
    log.wait(0, second)
    log.kernel(0, "aten::mm")
    step = replay(log.records, TEN).step("step 0")
    assert step.communication_in("forward") == Communication(20, 10)
    assert (step.length, step.lower_bound, step.computing) == (30, 30, 20)


def test_a_step_begins_where_the_last_one_ends() -> None:
    """The length of a step is what it adds."""
    log = Writer()
    for number in range(2):
        log.mark(f"step {number} forward")
        log.kernel(0, "aten::mm")
    assert replay(log.records, TEN).step("step 1").length == 10


def test_the_host_waits() -> None:
    """After the host has waited for a stream, nothing begins before that; each wait is counted in its phase."""
    log = Writer()
    log.mark("step 0 forward")
    log.kernel(0, "aten::mm")
    log.synchronise(0)
    log.kernel(1, "aten::mm")
    step = replay(log.records, TEN).step("step 0")
    assert step.length == 20
    assert step.waits_of_host == {"step 0 forward": 1}


def test_the_host_takes_time() -> None:
    """Kernels that are shorter than a call of the host wait for it."""
    log = Writer()
    log.mark("step 0 forward")
    for _ in range(3):
        log.kernel(0, "aten::mm")
    schedule = replay(log.records, from_table({"aten::mm": 1.0}, 0.0), host_call=5.0)
    assert [task.begin for task in schedule.tasks] == [5, 10, 15]
    assert schedule.step("step 0").kernels == {"step 0 forward": 3}


def test_memory_peaks() -> None:
    """The peak is of what is allocated at once; a stream that was recorded keeps memory until it is done."""
    log = Writer()
    log.mark("step 0 forward")
    for stream in (None, 1):
        block = log.allocate()
        log.kernel(1, "aten::mm", reads=[block])
        if stream is not None:
            log.record_stream(block, stream)
        log.free(block)
    log.allocate(pool=2)
    step = replay(log.records, TEN).step("step 0")
    assert (step.peak_nbytes, step.peak_of_pools_nbytes) == (2 * NBYTES, 2 * NBYTES)


def test_costs_go_by_kind() -> None:
    """Matrix products, other kernels, communication and small messages each have a cost."""
    log = Writer()
    log.kernel(0, "aten::addmm.out")
    log.kernel(0, "aten::add.out")
    gather(log)
    log.use(Kind.TO_HOST, 0, "copy to the host")
    costs = Costs(product=7, kernel=2, communication=9, message=1, message_nbytes=NBYTES - 1)
    assert [costs(record) for record in log.records] == [7, 2, 9, 9]
    assert Costs(message_nbytes=NBYTES)(log.records[-1]) == 1.0


def test_a_picture_is_svg() -> None:
    """A picture has a lane for each stream, a box for each thing, and says what it is when one points at it."""
    log = Writer()
    log.mark("step 0 forward")
    gather(log)
    log.order(1, 0)
    log.kernel(0, "aten::mm")
    log.synchronise(0)
    picture = ElementTree.fromstring(draw(replay(log.records, TEN), "step 0", "a < b"))
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in picture.iter(f"{name}text")]
    assert {"a < b", "stream 0: computing", "stream 1: all_gather", "the host waits"} <= set(texts)
    told = [element.text for element in picture.iter(f"{name}title")]
    assert told == [
        "all_gather, step 0 forward: 0 to 10",
        "aten::mm, step 0 forward: 10 to 20",
        "synchronize: 0 to 20",
    ]
