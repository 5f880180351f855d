"""How fast a device computes, moves memory and reaches others."""

from flatparam_plan.hardware.named import AnyProfile, device_of, profile_named, transport_here
from flatparam_plan.hardware.profile import Profile, Way
from flatparam_plan.hardware.running import timed_here
from flatparam_plan.hardware.sample import ROUGH
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
