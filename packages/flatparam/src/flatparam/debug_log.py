"""The things that `TORCH_DISTRIBUTED_DEBUG=INFO` logs: where the time of a rank goes, and what each unit does."""

from __future__ import annotations

import collections
import contextlib
import enum
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, final

import attrs
import torch.distributed as dist

from flatparam_comm import current_collectives
from flatparam_runtime import Event, Unit

_LOGGER = logging.getLogger(__name__)


@attrs.define
class _Times:
    """The seconds spent so far on each thing, and what is being measured."""

    results: dict[str, float] = attrs.field(factory=lambda: collections.defaultdict(float))
    profiling: set[str] = attrs.field(factory=set)


_OF_PROCESS = _Times()
_OF_THREAD = threading.local()


def _times() -> _Times:
    """Return those of this rank: of the process, or of this thread if the ranks are threads."""
    if current_collectives() is None:
        return _OF_PROCESS
    times: _Times = vars(_OF_THREAD).setdefault("times", _Times())
    return times


@attrs.frozen
class _OfRank:
    """An attribute of a class that is a different object on each rank."""

    read: Callable[[_Times], Any]

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self.read(_times())


class SimpleProfiler:
    """A stopwatch: adds up the seconds that are spent inside of `profile`, on this rank. The class is the profiler.

    `results` maps what was measured to seconds, `profiling` is the set of what is being measured. It measures what its
    callers put into its contexts, and nothing by itself.
    """

    class Type(str, enum.Enum):
        """Names for what is often measured; any other text will do too."""

        ALL = "all"
        ALLGATHER = "all_gather"
        ALLGATHER_OBJ = "all_gather_object"
        RESHARDING = "resharding"
        H2D = "H2D"
        D2H = "D2H"

    results: ClassVar[_OfRank] = _OfRank(lambda times: times.results)
    profiling: ClassVar[_OfRank] = _OfRank(lambda times: times.profiling)

    @classmethod
    def reset(cls) -> None:
        """Forget what was measured."""
        cls.results.clear()
        cls.profiling.clear()

    @classmethod
    @contextlib.contextmanager
    def profile(cls, profile_type: str) -> Iterator[None]:
        """Add the seconds inside the context to those of `profile_type`, also if it ends with an exception.

        Raises:
            AssertionError: inside of a context for the same thing, whose seconds would count twice.
        """
        if profile_type in cls.profiling:
            raise AssertionError(f"{profile_type} is being profiled already; its contexts cannot be nested")
        cls.profiling.add(profile_type)
        begin = time.monotonic()
        try:
            yield
        finally:
            cls.results[profile_type] += time.monotonic() - begin
            cls.profiling.discard(profile_type)

    @classmethod
    def dump_and_reset(cls, msg: str) -> None:
        """Log `msg` and the results, on rank 0 and with `TORCH_DISTRIBUTED_DEBUG=INFO`, and forget them."""
        if rank_here() == 0 and is_info_wanted():
            _LOGGER.info("%s %s", msg, dict(cls.results))
        cls.reset()


def is_info_wanted() -> bool:
    """Return whether `TORCH_DISTRIBUTED_DEBUG=INFO` was set."""
    if not dist.is_available():
        return False
    # The names are not in torch's `__all__`.
    return bool(dist.get_debug_level() == dist.DebugLevel.INFO)  # type: ignore[attr-defined]


def rank_here() -> int:
    """Return the rank of this process, or of this thread if the ranks are threads."""
    here = current_collectives()
    if here is not None:
        return here.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def watch_for_debugging(unit: Unit) -> None:
    """With `TORCH_DISTRIBUTED_DEBUG=INFO`, warn of data that is taken over, and log each reduction of `unit`."""
    if is_info_wanted():
        unit.observers.instruments.append(_DebugLog(weakref.ref(unit)))


@final
@attrs.frozen
class _DebugLog:
    _unit: weakref.ReferenceType[Unit]

    def on_event(self, event: Event) -> None:
        unit = self._unit()
        if event.kind == "take over" and unit is not None:
            names = ", ".join(name for handle in unit.handles for name in handle.taken_over)
            warnings.warn(
                f"unit {event.unit!r}: {names} had been given other data, which was copied to the shard; each rank has "
                "to give its own part, or all the same whole",
                stacklevel=2,
            )
        elif event.kind in ("reduce", "finish"):
            _LOGGER.info("unit %r: %s, %d bytes of gradients", event.unit, event.kind, event.nbytes)
