"""How fast a device computes, moves memory and reaches others."""

from flatparam.planning.hardware.named import AnyProfile, device_of, profile_named, transport_here
from flatparam.planning.hardware.profile import Profile, Way
from flatparam.planning.hardware.running import timed_here
from flatparam.planning.hardware.sample import ROUGH
from flatparam.planning.hardware.stretches import Stretches, Timings

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
