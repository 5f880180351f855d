"""The allocations that torch's CPU allocator makes, one by one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, Final, final

import attrs
import torch

_MARK: Final = "flatparam: a place"


@final
@attrs.define(eq=False)
class Allocations:
    """The sizes of allocations (positive) and frees (negative), in order, once the context has ended."""

    sizes: list[int] = attrs.field(factory=list)
    places: list[int] = attrs.field(factory=list)
    """The number of sizes before each place that was marked."""

    @property
    def peak(self) -> int:
        """The most bytes at once, of those that were allocated in the context."""
        now = most = 0
        for size in self.sizes:
            now += size
            most = max(most, now)
        return most

    def peak_between(self, first: int, second: int) -> int:
        """Return the most bytes at once between two marked places, given by their numbers."""
        start, stop = self.places[first], self.places[second]
        now = most = sum(self.sizes[:start])
        for size in self.sizes[start:stop]:
            now += size
            most = max(most, now)
        return most

    @property
    def kept(self) -> int:
        """The bytes that were allocated in the context and not freed there."""
        return sum(self.sizes)


@contextlib.contextmanager
def allocations() -> Iterator[Allocations]:
    """Record what the CPU allocator is asked for by this thread, and by backward passes that it runs.

    The numbers are those of torch's own memory profiler, which the allocator reports to.
    """
    found = Allocations()
    autograd = torch.autograd
    # torch's public profiler writes lines of its own to stderr, and takes a hundred times as long.
    config = autograd.ProfilerConfig(  # type: ignore[attr-defined]
        autograd.ProfilerState.CPU,  # type: ignore[attr-defined]
        False,
        True,
        False,
        False,
        False,
        torch._C._profiler._ExperimentalConfig(),
    )
    torch._C._autograd._enable_profiler_legacy(config)
    try:
        yield found
    finally:
        for event in _in_order(torch._C._autograd._disable_profiler_legacy()):
            if event.kind() == "memory_alloc":
                found.sizes.append(event.cpu_memory_usage())
            elif event.kind() == "push" and event.name() == _MARK:
                found.places.append(len(found.sizes))


def _in_order(events: Any) -> list[Any]:
    """Return the events of all threads as they happened; a backward pass within many others has a thread of its own."""
    threads = [each for each in events if each]
    if len(threads) == 1:
        return list(threads[0])
    every = list(itertools.chain.from_iterable(threads))
    return sorted(every, key=every[0].cpu_elapsed_us) if every else []


def mark() -> None:
    """Mark a place in the allocations that are being recorded; places are numbered from 0."""
    with torch.autograd.profiler.record_function(_MARK):
        pass
