"""A hardware profile: how fast a device computes, moves memory and reaches other devices; and those with names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import attrs

from flatparam_plan.hollow.kernels import Work
from flatparam_plan.plan_error import PlanError

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
        """Return the time of one kernel: the longer of its operations and its bytes."""
        rate = self.flops.get(work.dtype) or self.flops.get("float32")
        if rate is None:
            raise PlanError(
                f"profile {self.name!r}: expected FLOP/s of {work.dtype}, found {', '.join(self.flops)}; add it "
                "to [flops]"
            )
        operations = work.flops / (rate * self.flops_efficiency)
        return max(operations, work.nbytes / (self.memory_bandwidth * self.memory_efficiency))

    def seconds_to_send(self, nbytes: int, *, leaves_host: bool) -> float:
        """Return the time of a collective for which each rank sends `nbytes` bytes."""
        way = self.network if leaves_host else self.link
        return way.latency + nbytes / (way.bandwidth * self.link_efficiency)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Profile:
        """Return the profile that a TOML file says.

        Raises:
            PlanError: naming what is missing.
        """
        try:
            values: dict[str, Any] = {name: found[name] for name in ("name", "source", "device", "flops")}
            values |= {name: float(found[name]) for name in ("memory", "memory_bandwidth", "launch")}
            values |= {name: Way(**found[name]) for name in ("link", "network")}
            values |= {f"{name}_efficiency": float(part) for name, part in found.get("efficiency", {}).items()}
            return cls(**values, host=float(found["host"]["bandwidth"]))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"expected a hardware profile with name, source, device, memory, memory_bandwidth, launch, [flops], "
                f"[link], [network] and [host], found one that does not fit: {type(error).__name__}: {error}"
            ) from error


# Hardware profiles by name: those that ship with the package, and files


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


AnyProfile: TypeAlias = "str | Path | Profile"
"""A hardware profile, the name of one, or the path of its TOML file."""

_SHIPPED: Final = Path(__file__).parent / "profiles"


def profile_named(name: AnyProfile) -> Profile:
    """Return the profile of this name that ships with the package, or the one in a TOML file.

    Raises:
        PlanError: if there is none, or it does not fit.
    """
    if isinstance(name, Profile):
        return name
    path = _SHIPPED / f"{name}.toml" if str(name).isalnum() else Path(name)
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in _SHIPPED.glob("*.toml")))
        raise PlanError(
            f"expected a hardware profile ({names}), this-machine, this-machine:gloo, or a TOML file, found "
            f"{str(name)!r}"
        )
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(
            f"expected a hardware profile as a TOML file, found {str(path)!r}, which is not TOML: {error}"
        ) from error
    return Profile.of(found)


def transport_here(profile: object) -> str | None:
    """Return the transport that the name of a profile asks to measure here, if it does.

    That is "shared_memory" of "this-machine", and "gloo" of "this-machine:gloo".
    """
    name, _, transport = profile.partition(":") if isinstance(profile, str) else ("", "", "")
    known = transport in ("", "gloo", "shared_memory")
    return (transport or "shared_memory") if name == "this-machine" and known else None


def device_of(profile: AnyProfile) -> str:
    """Whose schedule the runtime has under a profile: "cpu" or "accelerator"."""
    return "cpu" if transport_here(profile) else profile_named(profile).device
