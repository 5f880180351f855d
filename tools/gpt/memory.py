"""Tensor memory over the course of one step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


class MemoryTimeline:
    """Allocated bytes over time while it records, starting from the ``held`` bytes that were there before."""

    def __init__(self, device: torch.device, held: int) -> None:
        """Record on ``device``'s type; ``held`` bytes are there already."""
        self.held = held
        self.milliseconds: list[float] = [0.0]
        self.nbytes: list[int] = [held]
        self._device_type = device.type

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        return max(self.nbytes)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record every allocation and release, by whatever means, of what runs inside."""
        with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        recorded = profiler.profiler.kineto_results.events() if profiler.profiler is not None else []
        self._read([
            (event.start_ns(), event.nbytes())
            for event in recorded
            if event.name() == "[memory]" and event.device_type().name.lower() == self._device_type
        ])  # fmt: skip

    def _read(self, changes: list[tuple[int, int]]) -> None:
        if not changes:
            return
        changes.sort(key=lambda change: change[0])
        start = changes[0][0]
        self.milliseconds = [(time - start) / 1e6 for time, _ in changes]
        self.nbytes = list(accumulate((change for _, change in changes), initial=self.held))[1:]


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Drop what is written to file descriptor 2, but for exceptions, which come out after it is back.

    torch 2.13's profiler announces its start and stop there, and remarks on blocks that are older than the recording.
    """
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
