"""Versions over a group of ranks that has trainers and receivers in it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor

from flatparam_files.disk.system import bytes_of, bytes_view
from flatparam_publish.catalogue import Catalogue
from flatparam_publish.channel import Delivery, NewVersion, Packet, Update, VersionId
from flatparam_publish.gathering import PUBLISH_NBYTES
from flatparam_publish.publish_error import PublishError, all_or_error
from flatparam_publish.slicing import Slicing
from flatparam_runtime import Collectives, Topology, resolve_topology
from flatparam_state.ranks import differing

_LABEL: Final = "publish"


@final
class GroupChannel:
    """Carries versions from the trainers in a group to the receivers in it. Each trainer sends its own packets.

    Every member makes one with the same arguments, and keeps it. When the trainers call `Publisher.publish()`, the
    receivers call `Receiver.receive()`, which returns when all of them have the version. If one of them has failed,
    everybody raises the same error, and nobody has it. A receiver holds a version's packets until they are whole.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | Collectives,
        receivers: Sequence[int],
        *,
        slicing: Slicing | None = None,
        device: torch.device | str = "cpu",
        bucket: int | None = None,
    ) -> None:
        """Connect the members of `group`; every one of them calls it.

        Args:
            group: a process group of torch, or `Collectives`.
            receivers: the ranks in the group that receive; all others are the ranks of the model.
            slicing: what parts of tensors they have: receiver number i has part i modulo `slicing.size`.
            device: that the backend of the group moves bytes on, such as "cuda" for NCCL.
            bucket: the bytes that are under way from one trainer at a time; by default 256 MiB
                (`state.publish_nbytes`).

        Raises:
            ValueError: if there is no receiver, no trainer, or not every part has a receiver; if members differ.
        """
        self._group: Collectives = group if isinstance(group, Collectives) else resolve_topology(group).shard
        self._slicing = slicing or Slicing()
        self._device = torch.device(device)
        self._bucket = PUBLISH_NBYTES.value if bucket is None else bucket
        ranks = set(range(self._group.size))
        if not receivers or not set(receivers) < ranks or len(set(receivers)) != len(receivers):
            raise ValueError(
                f"GroupChannel: expected some ranks of a group of {self._group.size} as receivers, each once and not "
                f"all of them, found {list(receivers)}"
            )
        if len(receivers) % self._slicing.size:
            raise ValueError(
                f"GroupChannel: expected a multiple of {self._slicing.size} receivers, one for each part, found "
                f"{len(receivers)}"
            )
        asked = {"receivers": [*receivers], "parts": self._slicing.size}
        found = differing(self._group.exchange(asked, label="make a GroupChannel"))
        if found is not None:
            raise ValueError(f"GroupChannel: rank {found.rank}: {found.words}; pass the same on every rank")
        self._receivers = tuple(receivers)
        self._senders = tuple(sorted(ranks - set(receivers)))
        self._routes = {
            (sender, part): self._route(sender, self._receivers[part :: self._slicing.size])
            for sender in self._senders
            for part in range(self._slicing.size)
        }

    def __repr__(self) -> str:
        return f"GroupChannel({len(self._senders)} trainers, receivers {list(self._receivers)})"

    def _route(self, sender: int, receivers: Sequence[int]) -> _Route | None:
        ranks = sorted((sender, *receivers))
        group = self._group.subgroup(ranks)
        return None if group is None else _Route(group, ranks.index(sender))

    @property
    def slicing(self) -> Slicing:
        """The parts of tensors that receivers have."""
        return self._slicing

    # The publisher's side

    def held(self, topology: Topology) -> VersionId | None:
        """Return the version that all receivers have; None if they differ."""
        if self._group.rank in self._receivers:
            raise PublishError(f"rank {self._group.rank} of the group is a receiver, and cannot publish")
        found = self._exchange(None)
        versions = {found[rank] for rank in self._receivers}
        return versions.pop() if len(versions) == 1 else None

    def deliver(self, new: NewVersion, topology: Topology) -> Delivery:
        """Send the packets of this rank, a bucket at a time."""
        sending = _Sending(new, self._slicing, self._bucket)
        packets = self._rounds(sending.bucket, _ignore)
        # The receivers compare digests now.
        self._exchange(None)
        nbytes = sum(packet.nbytes for of_rank in packets for packet in of_rank)
        return Delivery(new.id_with(packets), nbytes)

    # The receiver's side

    def fetch(self, held: VersionId | None, part: int | None, check: Callable[[Catalogue], object]) -> list[Update]:
        """Wait for the next version; `part` is given by the rank in the group."""
        if self._group.rank not in self._receivers:
            raise PublishError(f"rank {self._group.rank} of the group is a trainer, and cannot receive")
        part = self._receivers.index(self._group.rank) % self._slicing.size
        self._exchange(held)
        receiving = _Receiving()
        packets = self._rounds(lambda: _Round(), receiving.take)
        error: BaseException | None = None
        updates: list[Update] = []
        try:
            updates = [receiving.update(packets, self._slicing, part, held)]
            check(updates[0].catalogue)
        except BaseException as caught:
            error = caught
        self._exchange(None, error)
        return updates

    # Both

    def _exchange(self, fact: Any, error: BaseException | None = None) -> list[Any]:
        return all_or_error(lambda said: self._group.exchange(said, label=_LABEL), fact, error)

    def _rounds(
        self, next_bucket: Callable[[], _Round], take: Callable[[_Announced, dict[int, Tensor]], object]
    ) -> list[list[Packet]]:
        """Move buckets until every trainer has sent all; returns the packets of each trainer."""
        own = self._group.rank
        packets: dict[int, list[Packet]] = {}
        pending: list[Any] = []
        while True:
            bucket = _Round()
            error: BaseException | None = None
            try:
                bucket = next_bucket()
            except BaseException as caught:
                error = caught
            for each in pending:
                each.wait()
            told: list[_Announced] = self._exchange(bucket.told, error)
            moved: dict[int, Tensor] = {}
            pending = []
            for (sender, part), route in self._routes.items():
                nbytes = told[sender].nbytes[part] if told[sender].nbytes else 0
                if route is None or not nbytes:
                    continue
                data = bucket.data[part] if sender == own else torch.empty(nbytes, dtype=torch.uint8)
                data = data.to(self._device)
                pending.append(route.group.broadcast(data, root=route.root, label=_LABEL))
                moved[sender] = data
            if own in self._receivers:
                for each in pending:
                    each.wait()
            take(told[self._senders[0]], moved)
            packets.update({rank: told[rank].packets for rank in self._senders if told[rank].packets})
            if len(packets) == len(self._senders):
                for each in pending:
                    each.wait()
                return [packets[rank] for rank in self._senders]


def _ignore(told: _Announced, moved: dict[int, Tensor]) -> None:
    """Take nothing."""


@final
@attrs.frozen(eq=False)
class _Route:
    """One trainer, and the receivers of one part."""

    group: Collectives
    root: int


@final
@attrs.frozen
class _Announced:
    """The description of a trainer's bucket, which everybody gets."""

    nbytes: tuple[int, ...] = ()
    """For each part; empty if there is no bucket."""
    packets: list[Packet] = attrs.field(factory=list)
    """For each part, with the last bucket."""
    header: tuple[str, int, VersionId | None, bytes, tuple[int | None, ...]] | None = None
    """Stream, number, version before, catalogue and which dimensions are cut, with the first bucket."""


@final
@attrs.frozen(eq=False)
class _Round:
    """The bytes that a trainer sends in one round."""

    told: _Announced = attrs.field(factory=_Announced)
    data: tuple[Tensor, ...] = ()


@final
class _Sending:
    """The packets of one trainer, cut into buckets."""

    def __init__(self, new: NewVersion, slicing: Slicing, nbytes: int) -> None:
        self._new, self._slicing, self._nbytes = new, slicing, nbytes
        self._frames = new.frames(new.before is None)
        self._digests = [hashlib.sha256() for _ in range(slicing.size)]
        self._sent = [0] * slicing.size
        self._rest: tuple[int, Tensor] | None = None
        self._is_begun = self._is_over = False

    def bucket(self) -> _Round:
        """Return the next bucket; empty ones follow the last."""
        if self._is_over:
            return _Round()
        pieces: list[list[Tensor]] = [[] for _ in self._digests]
        room = self._nbytes
        while room > 0:
            following = self._rest or next(self._frames, None)
            self._rest = None
            if following is None:
                self._is_over = True
                break
            part, piece = following
            if piece.numel() > room:
                self._rest = part, piece[room:]
                piece = piece[:room]
            pieces[part].append(piece)
            room -= piece.numel()
        data = tuple(torch.cat([each.cpu() for each in of_part]) if of_part else _NOTHING for of_part in pieces)
        for part, of_part in enumerate(data):
            self._digests[part].update(bytes_of(bytes_view(of_part)))
            self._sent[part] += of_part.numel()
        new, header = self._new, None
        if not self._is_begun:
            cuts = self._slicing.cuts(new.catalogue)
            header = (new.stream, new.number, new.before, new.catalogue.encode(), cuts)
            self._is_begun = True
        packets = [Packet(nbytes, digest.hexdigest()) for nbytes, digest in zip(self._sent, self._digests, strict=True)]
        told = _Announced(tuple(each.numel() for each in data), packets if self._is_over else [], header)
        return _Round(told, data)


_NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


@final
class _Receiving:
    """The packets that come to one receiver."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Tensor]] = {}
        self._header: Any = None

    def take(self, told: _Announced, moved: dict[int, Tensor]) -> None:
        """Keep what came in a round; `told` is what the first trainer said."""
        self._header = self._header or told.header
        for sender, data in moved.items():
            self._pieces.setdefault(sender, []).append(data.cpu())

    def update(
        self, packets: Sequence[Sequence[Packet]], slicing: Slicing, part: int, held: VersionId | None
    ) -> Update:
        """Return the version, if all bytes are as they were sent; a PublishError if they are not."""
        stream, number, before, catalogue, cuts = self._header
        whole = Catalogue.decode(catalogue)
        slicing.check_cuts(whole, cuts)
        data = {sender: torch.cat(pieces) for sender, pieces in self._pieces.items()}
        self._pieces.clear()
        found = sorted(hashlib.sha256(bytes_of(each)).hexdigest() for each in data.values())
        expected = sorted(of_rank[part].sha256 for of_rank in packets if of_rank[part].nbytes)
        if found != expected:
            raise PublishError(f"the bytes of version {number} are not those that were sent; publish again")
        if before is not None and before != held:
            raise PublishError(f"version {number} has the changes since {before}, but this receiver has {held}")
        new = NewVersion(number, stream, before, whole, lambda wants_all: iter(()))
        return Update(new.id_with(packets), before, slicing.catalogue(whole, part), tuple(data.values()))
