"""Bytes on this rank: moved, at rest, at peak.

Bytes moved are read from the library's ledger, bytes at rest are counted on the tensors themselves, and the peak is
from the allocator's own events, so that none of the three takes the sharding's word for what it does.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from flatparam_comm import ByteLedger, Collectives, ProcessGroupCollectives, RecordingCollectives


class Meter:
    """Counts what this rank moves and holds.

    ``process_group`` is what the wrapper shards over: everything that is sent over it for the model is entered in
    the meter's ledger. It is None for a plain module, which sends nothing.
    """

    def __init__(self, device: torch.device, *, sharded: bool) -> None:
        """Meter a model on ``device``; if ``sharded``, over the default process group, which must exist."""
        self.process_group: Collectives | None = None
        self._device = device
        self._ledger = ByteLedger()
        self._timeline: MemoryTimeline | None = None
        if sharded:
            self.process_group = RecordingCollectives(ProcessGroupCollectives(), self._ledger)

    def bytes_moved_since_last(self) -> int:
        """Bytes this rank had to send for the model since this was last asked, by bandwidth-optimal algorithms."""
        moved = self._ledger.sent_nbytes
        self._ledger.reset()
        return moved

    def bytes_at_rest(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Bytes of parameters, gradients and optimizer state on this rank, each storage counted once."""
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        state = [value for slot in optimizer.state.values() for value in slot.values() if isinstance(value, Tensor)]
        storages = {
            storage.data_ptr(): storage.nbytes()
            for storage in (tensor.untyped_storage() for tensor in (*parameters, *gradients, *state))
        }
        return sum(storages.values())

    @contextmanager
    def watching_memory(self, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Record what is allocated and freed inside, on top of what ``model`` and ``optimizer`` hold already."""
        self._timeline = MemoryTimeline(self._device, held=self.bytes_at_rest(model, optimizer))
        with self._timeline.recording():
            yield

    @property
    def timeline(self) -> MemoryTimeline | None:
        """What `watching_memory` recorded last."""
        return self._timeline

    def peak_bytes(self) -> int:
        """The most bytes of tensors at one time in the watched step, activations included; 0 if none was watched."""
        return self._timeline.peak if self._timeline is not None else 0

    @staticmethod
    def process_peak_bytes() -> int:
        """The most memory this process has had resident, with Python, torch's libraries and the text."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


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
