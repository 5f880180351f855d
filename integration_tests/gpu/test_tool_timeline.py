"""What `tools/gpu` reads from a profile, of traces that are written by hand. Times are in microseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.timeline import STEP, Hidden, events_of, intersection, timeline, union

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def on_device(name: str, begin: float, end: float, *, stream: int = 7, **more: Any) -> dict[str, Any]:
    """A kernel, or what `cat` says."""
    arguments = {"stream": stream, "correlation": more.pop("correlation", None)}
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "args": arguments}
    return {**event, "ts": begin, "dur": end - begin, **more}


def on_host(
    name: str, begin: float, end: float, *, category: str, thread: int = 1, **args: Any
) -> dict[str, Any]:
    """A call, or a range."""
    event = {"ph": "X", "cat": category, "name": name, "pid": 99, "tid": thread, "args": args}
    return {**event, "ts": begin, "dur": end - begin}


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    """The events in a step of 1000 microseconds."""
    step = on_host(STEP, 0, 1000, category="user_annotation")
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, step, *events]}


def test_a_collective_is_hidden_where_something_is_computed() -> None:
    """A gather of 100 of which 60 run beside a product is hidden by 60; computing is the union of the kernels."""
    found = timeline(
        trace(
            on_device("gemm", 40, 100),
            on_device("gemm", 90, 130),
            on_device(GATHER, 0, 100, stream=20),
        )
    )
    assert found.communication == Hidden(total=100, hidden=60)
    assert found.computing == 90
    assert found.length == 130
    assert found.to_device == found.to_host == Hidden(0, 0)


def test_two_collectives_at_once_are_counted_once() -> None:
    """What is measured is when there is any communication, so that no more can be hidden than there is."""
    found = timeline(
        trace(
            on_device("gemm", 0, 100),
            on_device(GATHER, 10, 50, stream=20),
            on_device("ncclDevKernel_ReduceScatter", 30, 120, stream=21),
        )
    )
    assert found.communication == Hidden(total=110, hidden=90)


def test_copies_by_their_direction() -> None:
    """Copies from and to the host are told by their names, and copies on the device are neither, and compute nothing."""
    copy = {"cat": "gpu_memcpy", "stream": 13}
    found = timeline(
        trace(
            on_device("gemm", 0, 50),
            on_device("Memcpy HtoD (Pinned -> Device)", 20, 70, **copy),
            on_device("Memcpy DtoH (Device -> Pinned)", 45, 60, **copy),
            on_device("Memcpy DtoD (Device -> Device)", 50, 60, cat="gpu_memcpy"),
        )
    )
    assert (found.to_device, found.to_host) == (Hidden(50, 30), Hidden(15, 5))
    assert (found.computing, found.communication) == (50, Hidden(0, 0))


@pytest.mark.parametrize(("inside", "expected"), [(True, Hidden(10, 10)), (False, Hidden(0, 0))])
def test_a_collective_of_one_rank_is_a_copy(inside: bool, expected: Hidden) -> None:
    """A copy that the host launches inside a call of c10d, on the same thread, is communication; any other is not."""
    found = timeline(
        trace(
            on_host("c10d::_allgather_base_", 100, 120, category="cpu_op"),
            on_host("c10d::_allgather_base_", 0, 1000, category="cpu_op", thread=2),
            on_host("cudaMemcpyAsync", 110 if inside else 125, 130, category="cuda_runtime", correlation=5),
            on_device("Memcpy DtoD (Device -> Device)", 200, 210, stream=20, cat="gpu_memcpy", correlation=5),
            on_device("gemm", 150, 300),
        )
    )
    assert found.communication == expected


def test_kernels_of_other_streams_hide_nothing() -> None:
    """What lays out the gathered bytes on a stream of its own is no computing that a collective could hide behind."""
    found = timeline(
        trace(
            on_device("gemm", 100, 200),
            on_device("copy_in_kernel", 0, 30, stream=21),
            on_device(GATHER, 10, 30, stream=20),
        )
    )
    assert found.communication == Hidden(total=20, hidden=0)


def test_waits_of_the_host() -> None:
    """What counts is a call that synchronises, in the step: not the one after it, and no other call."""
    found = timeline(
        trace(
            on_device("gemm", 0, 10),
            on_host("cudaEventSynchronize", 5, 9, category="cuda_runtime"),
            on_host("cudaEventSynchronize", 15, 16, category="cuda_runtime", thread=2),
            on_host("cudaStreamSynchronize", 20, 21, category="cuda_runtime"),
            on_host("cudaLaunchKernel", 30, 31, category="cuda_runtime"),
            on_host("cudaDeviceSynchronize", 1000, 1010, category="cuda_runtime"),
        )
    )
    assert found.waits_of_host == {"cudaEventSynchronize": 2, "cudaStreamSynchronize": 1}


def test_a_profile_without_the_device_is_refused() -> None:
    """Where torch cannot profile the device, nothing is made up; nor without the step's range."""
    with pytest.raises(LookupError, match="events of the device"):
        timeline(trace(on_host("aten::mm", 0, 10, category="cpu_op")))
    with pytest.raises(LookupError, match=STEP):
        timeline({"traceEvents": [on_device("gemm", 0, 10)]})


def test_a_trace_of_torch(tmp_path: Path) -> None:
    """In what torch's profiler exports, the step is a range, and an operator on this thread lies in it."""
    with torch.profiler.profile() as profile, torch.profiler.record_function(STEP):
        torch.ones(2, 2) @ torch.ones(2, 2)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = events_of(json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")))
    (step,) = (event for event in events if event.name == STEP and event.category == "user_annotation")
    (product,) = (event for event in events if event.name == "aten::matmul")
    assert step.begin <= product.begin < product.end <= step.end
    assert step.lane == product.lane
    assert not product.is_on_device


def test_intervals() -> None:
    """`union` joins what overlaps or touches and drops what is empty; `intersection` is what both have."""
    assert union([(5, 6), (0, 2), (2, 3), (1, 2), (9, 9)]) == [(0, 3), (5, 6)]
    assert intersection([(0, 3), (5, 9)], [(2, 6), (8, 12)]) == [(2, 3), (5, 6), (8, 9)]
    assert intersection([(0, 3)], [(3, 4)]) == intersection([], [(0, 1)]) == []
