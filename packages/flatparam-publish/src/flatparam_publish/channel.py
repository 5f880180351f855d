"""The seam between a publisher and its receivers: versions, and what carries them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, final, runtime_checkable

import attrs
from torch import Tensor

from flatparam_publish.catalogue import Catalogue
from flatparam_publish.slicing import Slicing
from flatparam_runtime import Topology


@final
@attrs.frozen
class VersionId:
    """Identifies a version: its publisher, its number, and a digest of all bytes that have led to it."""

    stream: str
    number: int
    identity: str


@final
@attrs.frozen
class Packet:
    """The bytes of one version that one rank sends to one receiver."""

    nbytes: int
    sha256: str
    file: str = ""


Frames: TypeAlias = Iterator[tuple[int, Tensor]]
"""The bytes of a rank's packets in pieces: the part that a piece is for, and the piece: 1-D, uint8, on any device."""


@final
@attrs.frozen(eq=False)
class NewVersion:
    """A version that a channel is to deliver."""

    number: int
    stream: str
    before: VersionId | None
    """The version that receivers have, if only changes to it are sent."""
    catalogue: Catalogue
    frames: Callable[[bool], Frames]
    """This rank's packets; the argument says whether all values are wanted."""

    def id_with(self, packets: Sequence[Sequence[Packet]]) -> VersionId:
        """Return the name of the version that these packets make: of each sending rank, those for each receiver.

        Its identity is the sha256 of that of the version before and of those of all packets.
        """
        digests = [[packet.sha256 for packet in of_rank] for of_rank in packets]
        said = json.dumps([self.before.identity if self.before else "", self.number, digests])
        return VersionId(self.stream, self.number, hashlib.sha256(said.encode()).hexdigest())


@final
@attrs.frozen
class Delivery:
    """A version that was delivered."""

    version: VersionId
    nbytes: int
    """The bytes of the packets of all ranks."""


@runtime_checkable
class Channel(Protocol):
    """Carries versions to receivers. Every rank of a model has a channel, and all ranks call it together."""

    @property
    def slicing(self) -> Slicing:
        """The receivers' parts of tensors."""

    def held(self, topology: Topology) -> VersionId | None:
        """The version that every receiver has, or will find; None if there is none. All ranks get the same answer."""

    def deliver(self, new: NewVersion, topology: Topology) -> Delivery:
        """Deliver a version. When it returns, receivers have it, or will find it; if it raises, they do not.

        Raises:
            PublishError: on every rank, if one has failed.
        """


@final
@attrs.frozen(eq=False)
class Update:
    """A step of a receiver from one version to the next; all its bytes have arrived and match their digests."""

    version: VersionId
    before: VersionId | None
    """The version that it changes; None if it has all values."""
    catalogue: Catalogue
    """The receiver's own part."""
    packets: tuple[Tensor, ...]
    """1-D bytes."""


class UpdateSource(Protocol):
    """The source from which a receiver gets versions."""

    def fetch(self, held: VersionId | None, part: int | None, check: Callable[[Catalogue], object]) -> list[Update]:
        """Return the steps from `held` to the newest version, in order; empty if there is none that is newer.

        Args:
            held: the version that the receiver has.
            part: which part of tensors it has; None if nobody has said.
            check: raises if the receiver cannot take such tensors.
        """
