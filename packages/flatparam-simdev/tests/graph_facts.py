"""What programs see of graphs. Each function runs on one rank and returns what test_capture.py looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from flatparam_simdev.worlds import World

from .device_facts import error_of

Facts = dict[str, Any]


def of_one(world: World) -> Facts:
    """What one rank sees, by the names of the functions below."""
    functions = (replays, numbers_of_the_host, refused, streams, memory)
    return {function.__name__: function(world.device) for function in functions}


def replays(device: torch.device) -> Facts:
    """A buffer that becomes its double and one, captured and replayed twice."""
    from flatparam_simdev import device as simulated

    numbers, graph = torch.ones(2, device=device), simulated.Graph()
    with simulated.capture(graph):
        numbers.copy_(numbers * 2 + 1)
    found = {"captured": numbers.tolist()}
    for name in ("first", "second"):
        graph.replay()
        found[name] = numbers.tolist()
    return found


def numbers_of_the_host(device: torch.device) -> list[float]:
    """What is added is a number of the host that changes after the capture."""
    from flatparam_simdev import device as simulated

    numbers, graph, added = torch.ones(2, device=device), simulated.Graph(), torch.tensor(2.0)
    with simulated.capture(graph):
        numbers.add_(added)
    added.fill_(100.0)
    graph.replay()
    found: list[float] = numbers.tolist()
    return found


REFUSED: Final[dict[str, Callable[[Tensor], Any]]] = {
    "item": lambda numbers: numbers.sum().item(),
    "a copy to the host": lambda numbers: numbers.cpu(),
    "a copy from ordinary memory": lambda numbers: numbers.copy_(torch.zeros(2)),
    "a copy from pinned memory that waits": lambda numbers: numbers.copy_(torch.zeros(2).pin_memory()),
    "synchronising the device": lambda numbers: torch.accelerator.synchronize(),
    "synchronising a stream": lambda numbers: torch.accelerator.current_stream().synchronize(),
    "synchronising an event": lambda numbers: torch.accelerator.current_stream().record_event().synchronize(),
    "asking an event": lambda numbers: torch.accelerator.current_stream().record_event().query(),
    "asking a stream": lambda numbers: torch.accelerator.current_stream().query(),
    "a shape that depends on values": lambda numbers: numbers.nonzero(),
}


def refused(device: torch.device) -> dict[str, tuple[str, list[float]]]:
    """Of each, what is raised in a capture that has changed a buffer, and what is in the buffer then."""
    from flatparam_simdev import device as simulated

    found = {}
    for name, call in REFUSED.items():
        numbers = torch.ones(2, device=device)

        def work(numbers: Tensor = numbers, call: Callable[[Tensor], Any] = call) -> None:
            with simulated.capture(simulated.Graph()):
                numbers.mul_(5)
                call(numbers)

        found[name] = (error_of(work), numbers.tolist())
    return found


def streams(device: torch.device) -> Facts:
    """Work on another stream, forked and joined as it should be, and otherwise."""
    from flatparam_simdev import device as simulated

    side = torch.Stream(device=device)
    numbers, graph = torch.ones(2, device=device), simulated.Graph()
    before = side.record_event()

    def captured(fork: bool = True, join: bool = True, wait: bool = False, into: Any = None) -> None:
        with simulated.capture(into or simulated.Graph()):
            current = torch.accelerator.current_stream()
            if wait:
                current.wait_event(before)
            if fork:
                side.wait_stream(current)
            with side:
                numbers.mul_(4)
            if join:
                current.wait_stream(side)

    captured(into=graph)
    graph.replay()
    return {
        "forked and joined": numbers.tolist(),
        "not forked": error_of(lambda: captured(fork=False)),
        "not joined": error_of(lambda: captured(join=False)),
        "waiting for what was before": error_of(lambda: captured(wait=True)),
    }


def memory(device: torch.device) -> Facts:
    """What is allocated by a capture; what a replay says whose input is gone; and what is left after the graph."""
    from flatparam_simdev import device as simulated

    module: Any = torch.get_device_module(device)
    output, graph = torch.ones(1000, device=device), simulated.Graph()
    start = module.memory_allocated()
    given = torch.ones(1000, device=device)
    size = module.memory_allocated() - start
    with simulated.capture(graph):
        output.copy_(given * 2)
    grown = module.memory_allocated() - start - size
    del given
    error = error_of(graph.replay)
    graph.reset()
    return {"grown": grown, "error": error, "left": module.memory_allocated() - start}
