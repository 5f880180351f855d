"""Collectives between the ranks of one host through memory that all of them have mapped, for tensors of the CPU.

A layer finds this package by the entry point `shared_memory` of `flatparam.transports`.
"""

from flatparam_onehost.engine import SharedMemoryCollectives, connected, is_shared, shared_memory

__version__ = "0.1.0"

__all__ = ["SharedMemoryCollectives", "connected", "is_shared", "shared_memory"]
