"""Whether a whole step can be captured as a graph, and replays to what an eager step computes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from bench.contenders import Contender
from bench.training import Training
from bench.workloads import Workload
from torch import Tensor

from .contenders import with_plain
from .facts import Facts
from .measurement import Measurement, not_on_cpu
from .place import Place, Plan, allocator_of, in_processes, told
from .sizes import EXACT, TINY

BEFORE: Final = 3
REPLAYS: Final = 2
LIMIT_OF_EACH: Final = 30.0
"""Seconds for one contender."""


class Graph(Protocol):
    """What is captured, on the stream that is current."""

    def capture_begin(self) -> None:
        """What is called from here on is not done, but written down."""

    def capture_end(self) -> None:
        """The end of it."""

    def replay(self) -> None:
        """Do it."""


def measure(place: Place, name: str) -> dict[str, Any]:
    """Whether the contender's step was captured, or why not; and the losses of replays beside those of eager steps."""
    contender = with_plain(place.group.size)[name]
    workload = (TINY if place.plan.tiny else EXACT).workload
    try:
        eager = _made(place, contender, workload)
        expected = [eager.step() for _ in range(BEFORE + REPLAYS)][BEFORE:]
        training = _made(place, contender, workload)
    except Exception as error:
        return {"error": told(error)}
    try:
        replayed = _replayed(place, training)
    except Exception as error:  # the reason is what is asked for
        return {"captured": False, "reason": told(error)}
    return {"captured": True, "replayed": replayed, "eager": expected, "equal": replayed == expected}


def _made(place: Place, contender: Contender, workload: Workload) -> Training:
    training = contender.build(place.setting(workload))
    parameters = list(training.model.parameters())
    # It counts its steps on the device, so that a replay counts too.
    training.optimizer = torch.optim.AdamW(parameters, lr=1e-3, capturable=True)
    return training


def _replayed(place: Place, training: Training) -> list[float]:
    """The losses of the steps that the graph replays, after some that are eager."""
    stream = torch.Stream(place.device)
    stream.wait_stream(torch.accelerator.current_stream(place.device))
    with stream:
        for _ in range(BEFORE):
            training.step()
        place.synchronise()
        place.group.barrier()
        graph, loss = _captured(place, training)
        found = []
        for _ in range(REPLAYS):
            graph.replay()
            found.append(loss.item())
    return found


def _captured(place: Place, training: Training) -> tuple[Graph, Tensor]:
    graph = _new_graph()()
    gc.collect()  # nothing of before is to be freed meanwhile
    allocator_of(place.device).empty_cache()
    graph.capture_begin()
    try:
        loss = training.forward()
        training.backward(loss)
        training.update()
    finally:
        graph.capture_end()
    return graph, loss


def _new_graph() -> Callable[[], Graph]:
    """torch's class for graphs: that of all accelerators from torch 2.13 on, that of CUDA before."""
    made: Callable[[], Graph] = getattr(torch.accelerator, "Graph", torch.cuda.CUDAGraph)
    return made


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    """Each in processes of its own: one that fails leaves the device in a state that others should not begin with."""
    rows: dict[str, dict[str, Any]] = {}
    until = time.monotonic() + limit * plan.patience
    for name in with_plain(plan.ranks):
        left = (until - time.monotonic()) / plan.patience
        try:
            (rows[name], *_) = in_processes(plan, min(LIMIT_OF_EACH, max(left, 1.0)), measure, name)
        except Exception as error:
            rows[name] = {"error": told(error)}
    columns = {"captured": "captured", "equal": "replays as eager steps", "reason": "because"}
    return {"workload": (TINY if plan.tiny else EXACT).workload.what, "columns": columns, "rows": rows}


MEASUREMENTS: Final = (
    Measurement(
        "capture",
        "Whether a whole step (forward, backward, AdamW) is captured as a graph, and whether two replays have the "
        "losses of the eager steps in their place, bit for bit; or what was raised.",
        45,
        110,
        _run,
        not_on_cpu,
    ),
)
