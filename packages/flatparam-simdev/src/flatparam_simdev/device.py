"""Register the simulated device with torch, under the name "simulated", and its process groups.

To import this module is to register the device, which is final for the process; so it is for programs, for the
processes of a world (`flatparam_simdev.worlds`) and for a run of pytest with `flatparam_simdev.plugin`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from flatparam_simdev import log
from flatparam_simdev.groups import Group
from flatparam_simdev.native import ACCELERATOR, NAME

__all__ = ["DEVICE", "Graph", "behaving", "capture", "mark", "on_wait_of_host", "phase", "start_log", "stop_log"]

# What is seen of the device


def start_log() -> None:
    """Write down from now on what happens, from an empty log."""
    ACCELERATOR.start_log()


def stop_log() -> list[log.Record]:
    """Write down no more; return what was."""
    ACCELERATOR.stop_log()
    return log.from_tuples(ACCELERATOR.records())


_phase = "the beginning"


def mark(name: str) -> None:
    """Begin a phase of the program, to which belongs what follows in the log."""
    global _phase
    _phase = name
    ACCELERATOR.mark(name)


def phase() -> str:
    """Return the phase that was marked last."""
    return _phase


def on_wait_of_host(call: Callable[[str], None] | None) -> None:
    """Have this called with what the host is about to wait for, while there is a log; `None` ends it."""
    ACCELERATOR.on_wait_of_host(call)


@contextmanager
def behaving(how: str, value: bool) -> Iterator[None]:
    """Have the device behave otherwise inside; accelerator.cpp says how it can.

    With "data_changes_device", `.data =` can take a tensor from the CPU to the device, as torch allows it for CUDA.
    """
    previous = ACCELERATOR.behave(how, value)
    try:
        yield
    finally:
        ACCELERATOR.behave(how, previous)


# The device's module, torch.simulated


@contextmanager
def _on_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    previous = ACCELERATOR.set_current_stream(stream.stream_id)
    try:
        yield
    finally:
        ACCELERATOR.set_current_stream(previous)


def _stream(device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
    return torch.Stream(device=NAME, priority=priority)


def _event(enable_timing: bool = False, **_: Any) -> torch.Event:
    return torch.Event(device=NAME, enable_timing=enable_timing)


def _default_stream(device: Any = None) -> torch.Stream:
    kind = torch.accelerator.current_stream().device_type
    return torch.Stream(stream_id=0, device_index=0, device_type=kind)


class Graph:
    """A graph holds what was queued during a capture; see `capture`."""

    def __init__(self) -> None:
        """Make an empty one."""
        self._number = 0

    def replay(self) -> None:
        """Queue it again on the current stream, in the same memory."""
        ACCELERATOR.replay(self._number)

    def reset(self) -> None:
        """Let go of its memory."""
        number, self._number = self._number, 0
        if number:
            ACCELERATOR.free_graph(number)

    def __del__(self) -> None:
        self.reset()


@contextmanager
def capture(graph: Graph) -> Iterator[None]:
    """Keep what is queued inside in `graph`, an empty one, instead of doing it, as `torch.cuda.graph` does.

    capture.h says what is refused inside.
    """
    torch.accelerator.synchronize()
    with torch.Stream(device=NAME) as stream:
        graph._number = ACCELERATOR.begin_capture(stream.stream_id)
        try:
            yield
        except BaseException:
            ACCELERATOR.drop_capture()
            raise
        ACCELERATOR.end_capture()


def _device_module() -> types.ModuleType:
    """Return what torch looks for in the module of a device. There is one device; its random numbers are the CPU's."""
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device=lambda device: _on_stream(None),
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        is_bf16_supported=lambda: True,
        manual_seed=torch.manual_seed,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        Stream=_stream,
        Event=_event,
        stream=_on_stream,
        current_stream=lambda device=None: torch.accelerator.current_stream(),
        default_stream=_default_stream,
        set_stream=lambda stream: ACCELERATOR.set_current_stream(stream.stream_id),
        synchronize=lambda device=None: torch.accelerator.synchronize(),
        memory_allocated=lambda device=None: ACCELERATOR.memory()[0],
        max_memory_allocated=lambda device=None: ACCELERATOR.memory()[1],
        reset_peak_memory_stats=lambda device=None: ACCELERATOR.reset_peak(),
        is_current_stream_capturing=ACCELERATOR.is_capturing,
        Graph=Graph,
        graph=capture,
        empty_cache=lambda: None,
    )
    return module


def _watched(name: str) -> Callable[..., Any]:
    """Return a method of tensors that reads memory without an operator, and says so in the log."""
    original = getattr(torch.Tensor, name)

    @functools.wraps(original)
    def reads(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        ACCELERATOR.host_reads(self, f"Tensor.{name}")
        return original(self, *args, **kwargs)

    return reads


def _register() -> None:
    utils: Any = torch.utils
    utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module())  # type: ignore[no-untyped-call]  # torch's own
    utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, Group, devices=[NAME])
    for name in ("tolist", "numpy", "__array__"):
        setattr(torch.Tensor, name, _watched(name))


_register()

DEVICE: Final = torch.device(NAME, 0)
