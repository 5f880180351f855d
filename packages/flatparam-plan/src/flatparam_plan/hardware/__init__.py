"""How fast a device computes, moves memory and reaches others."""

from flatparam_plan.hardware.profile import AnyProfile, Profile, Way, device_of, profile_named, transport_here
from flatparam_plan.hardware.samples import ROUGH, timed_here
from flatparam_plan.hardware.stretches import Stretches, Timings

__all__ = [
    "ROUGH",
    "AnyProfile",
    "Profile",
    "Stretches",
    "Timings",
    "Way",
    "device_of",
    "profile_named",
    "timed_here",
    "transport_here",
]
