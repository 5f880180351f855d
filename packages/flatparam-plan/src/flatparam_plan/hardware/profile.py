"""A hardware profile: how fast a device computes, moves memory and reaches other devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

import attrs

from flatparam_plan.errors import PlanError
from flatparam_plan.hollow import Work

__all__ = ["Profile", "Way"]

_POSITIVE: Final = attrs.validators.gt(0.0)
_FRACTION: Final = (attrs.validators.gt(0.0), attrs.validators.le(1.0))


@final
@attrs.frozen
class Way:
    """A way for bytes between two ranks."""

    bandwidth: float = attrs.field(validator=_POSITIVE)
    """Bytes per second that a rank sends, while it receives as many."""
    latency: float = attrs.field(validator=attrs.validators.ge(0))
    """Seconds of a collective of no bytes."""


@final
@attrs.frozen
class Profile:
    """A device and what connects it: `flops`, bandwidths and latencies, in FLOP, bytes and seconds."""

    name: str
    source: str
    """Where the numbers come from: "data sheet", or how they were measured."""
    device: str
    """Whose schedule the runtime has: "accelerator" or "cpu"."""
    flops: Mapping[str, float]
    """Floating-point operations per second, by dtype."""
    memory: float = attrs.field(validator=_POSITIVE)
    memory_bandwidth: float = attrs.field(validator=_POSITIVE)
    launch: float = attrs.field(validator=attrs.validators.ge(0))
    """Seconds of the host for each kernel."""
    link: Way
    """Between ranks of one host."""
    network: Way
    """Between hosts."""
    host: float = attrs.field(validator=_POSITIVE)
    """Bytes per second between the device and the memory of its host."""
    flops_efficiency: float = attrs.field(default=1.0, validator=list(_FRACTION))
    memory_efficiency: float = attrs.field(default=1.0, validator=list(_FRACTION))
    link_efficiency: float = attrs.field(default=1.0, validator=list(_FRACTION))
    """The parts of the numbers that are reached."""

    def seconds_of(self, work: Work) -> float:
        """The time of one kernel: the longer of its operations and its bytes."""
        rate = self.flops.get(work.dtype) or self.flops.get("float32")
        if rate is None:
            raise PlanError(
                f"profile {self.name!r}: expected FLOP/s of {work.dtype}, found {', '.join(self.flops)}; add it "
                "to [flops]"
            )
        operations = work.flops / (rate * self.flops_efficiency)
        return max(operations, work.nbytes / (self.memory_bandwidth * self.memory_efficiency))

    def seconds_to_send(self, nbytes: int, *, leaves_host: bool) -> float:
        """The time of a collective for which each rank sends `nbytes` bytes."""
        way = self.network if leaves_host else self.link
        return way.latency + nbytes / (way.bandwidth * self.link_efficiency)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Profile:
        """The profile that a TOML file says.

        Raises:
            PlanError: naming what is missing.
        """
        try:
            values: dict[str, Any] = {name: found[name] for name in ("name", "source", "device", "flops")}
            values |= {name: float(found[name]) for name in ("memory", "memory_bandwidth", "launch")}
            values |= {name: Way(**found[name]) for name in ("link", "network")}
            values |= {
                f"{name}_efficiency": float(part) for name, part in found.get("efficiency", {}).items()
            }
            return cls(**values, host=float(found["host"]["bandwidth"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"expected a hardware profile with name, source, device, memory, memory_bandwidth, launch, [flops], "
                f"[link], [network] and [host], found one that does not fit: {type(error).__name__}: {error}"
            ) from error
