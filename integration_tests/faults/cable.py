"""A virtual cable between two network namespaces, which can be slow or lose packets; the kernel needs no netem for it."""

from __future__ import annotations

import collections
import contextlib
import fcntl
import os
import random
import select
import struct
import threading
import time
from typing import Final, final

import attrs

__all__ = ["Cable"]

#: `TUNSETIFF`, `IFF_TUN | IFF_NO_PI`: packets of IP without a header of their own; see linux/if_tun.h.
_SET_INTERFACE: Final = 0x400454CA
_PACKETS: Final = 0x0001 | 0x1000
_LONGEST_PACKET: Final = 65536
#: How long the thread sleeps at most, in seconds.
_SLEEP: Final = 0.2


@final
@attrs.define(eq=False)
class Cable:
    """Two network interfaces of this namespace, each of which hands its packets to the other one.

    An interface can be moved into another namespace (`ip link set NAME netns PID`); the cable goes on.
    """

    names: tuple[str, str]
    delay: float = 0.0
    """Seconds from one end to the other."""
    loss: float = 0.0
    """The fraction of the packets that never arrives."""
    _ends: list[int] = attrs.field(factory=list)
    _under_way: collections.deque[tuple[float, int, bytes]] = attrs.field(factory=collections.deque)

    def lay(self) -> None:
        """Make the interfaces and begin to carry; raises OSError if the system does not permit it."""
        for name in self.names:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
            self._ends.append(end)
            fcntl.ioctl(end, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _PACKETS))
            os.set_blocking(end, False)
        threading.Thread(target=self._carry, name="cable", daemon=True).start()

    def _carry(self) -> None:
        chance = random.Random(0)
        while True:
            pause = _SLEEP
            if self._under_way:
                pause = max(0.0, self._under_way[0][0] - time.monotonic())
            for end in select.select(self._ends, [], [], pause)[0]:
                # An interface that is down cannot be read.
                with contextlib.suppress(OSError):
                    packet = os.read(end, _LONGEST_PACKET)
                    if chance.random() >= self.loss:
                        to = self._ends[1 - self._ends.index(end)]
                        self._under_way.append((time.monotonic() + self.delay, to, packet))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, to, packet = self._under_way.popleft()
                with contextlib.suppress(OSError):
                    os.write(to, packet)
