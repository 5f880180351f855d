"""`Publisher`: versions of a model for receivers, of which only the first is sent whole."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Final, final

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self

from flatparam_comm import telling
from flatparam_files.disk.progress import progress_bar
from flatparam_publish.catalogue import Catalogue, PublishedTensor, ReceiverNames, published_tensors
from flatparam_publish.channel import Channel, Frames, NewVersion, VersionId
from flatparam_publish.encoding import bits_of, changes, values
from flatparam_publish.gathering import PUBLISH_NBYTES
from flatparam_publish.publish_error import agree_to_publish
from flatparam_publish.slicing import Part, Slicing
from flatparam_runtime import Threshold
from flatparam_state.at_rest import bring_to_rest
from flatparam_state.model_tensors import ModelTensor
from flatparam_state.ranks import all_of

CACHED_NUMEL: Final = Threshold(
    "state.cached_numel",
    2**17,
    "A rank on the CPU looks for changes to publish in so many elements at a time; more would not stay in its cache.",
)


@final
@attrs.frozen
class Published:
    """The version that one `Publisher.publish()` sent."""

    version: int
    is_dense: bool
    """Whether all values were sent."""
    nbytes: int
    """The bytes that all ranks have sent."""
    dense_nbytes: int
    """The bytes of all values, which it would have been otherwise."""


@final
class Publisher:
    """Sends versions of a sharded model to receivers: all values first, and then only the changes.

    Nothing is gathered: each rank compares its shards, in the dtype in which they are published, with a snapshot of
    what receivers have, and sends its own changes, bit for bit. Ranks that hold copies of a shard share the work.

    Memory: this rank's shards once more, in the published dtype, on their device.
    """

    def __init__(
        self,
        model: nn.Module,
        channel: Channel,
        *,
        names: ReceiverNames | None = None,
        dtype: torch.dtype | None = None,
        bucket: int | None = None,
        only: Callable[[str], bool] | None = None,
    ) -> None:
        """Begin to publish `model`; every rank makes one, after the model is sharded.

        Args:
            channel: what carries the versions: a `Mailbox` or a `GroupChannel`.
            names: what tensors are called there; see `publish`.
            dtype: of floating-point tensors there; None keeps that of each.
            bucket: the bytes of elements that a rank looks at, or sends, at a time; by default 256 MiB
                (`state.publish_nbytes`).
            only: which tensors are published, by their name in the model, such as those of an adapter whose frozen base
                receivers have already (`Receiver(strict=False)`); None publishes all.

        Raises:
            ValueError: if names collide, no tensor is published, the dtype cannot be published, or the channel's
                slicing does not fit.
        """
        self._model = model
        self._channel = channel
        self._names = names
        self._dtype = dtype
        self._only = only
        self._bucket = PUBLISH_NBYTES.value if bucket is None else bucket
        self._number = 0
        self._last: VersionId | None = None
        self._shards: list[_OwnShard] = []
        self._catalogue = Catalogue(())
        with telling("Publisher()"):
            self._look()

    def __repr__(self) -> str:
        return f"Publisher({type(self._model).__name__}, version {self.version})"

    @property
    def version(self) -> int:
        """The number of the last version that was published; 0 before the first."""
        return self._number

    @property
    def catalogue(self) -> Catalogue:
        """The tensors that are published: names, shapes and dtypes."""
        return self._catalogue

    @torch.no_grad()
    def publish(self) -> Published:
        """Send the current model as the next version; every rank calls it, outside of passes.

        All values are sent if receivers do not have the version before: at first, and after they, or this program, were
        started again. Of a part of a tensor that has changed a lot all values are sent, if these are fewer bytes.

        Raises:
            PublishError: on every rank, if one has failed, or if ranks would publish different tensors; receivers keep
                the version before.
            FlatParamError: inside a forward or backward pass, or while full parameters are summoned.
        """
        bring_to_rest(self._model)
        # Functions of the caller run here, maybe with an error on this rank alone.
        with telling("Publisher.publish()"):
            self._look()
        ranks = all_of(self._model)
        asked = {"version": self._last, "slicing": repr(self._channel.slicing)}
        new_stream = secrets.token_hex(8)
        stream = agree_to_publish(ranks, "Publisher.publish", self._catalogue.digest, asked, new_stream)
        stream = self._last.stream if self._last else stream
        held = self._channel.held(ranks)
        knows = held is not None and held == self._last
        new = NewVersion(
            max(self._number, held.number if held else 0) + 1,
            stream,
            held if knows else None,
            self._catalogue,
            self._frames,
        )
        for shard in self._shards:
            shard.forget_changes()
        delivered = self._channel.deliver(new, ranks)
        for shard in self._shards:
            shard.remember(has_all=not knows)
        self._number, self._last = new.number, delivered.version
        return Published(new.number, not knows, delivered.nbytes, self._channel.slicing.nbytes(self._catalogue))

    def _look(self) -> None:
        """Find the tensors where they are now."""
        pairs = published_tensors(self._model, self._names, self._dtype, self._only)
        catalogue = Catalogue(tuple(published for _, published in pairs))
        is_first = all_of(self._model).is_first
        pieces = [
            (index, *piece) for index, (tensor, _) in enumerate(pairs) for piece in _pieces(tensor, index, is_first)
        ]
        if catalogue != self._catalogue or len(pieces) != len(self._shards):
            self._channel.slicing.check(catalogue)
            self._catalogue, self._last = catalogue, None
            self._shards = [_OwnShard(index) for index, *_ in pieces]
        for shard, (index, start, local) in zip(self._shards, pieces, strict=True):
            shard.look_at(pairs[index][1], start, local, self._channel.slicing)

    def _frames(self, wants_all: bool) -> Frames:
        shows = None if all_of(self._model).is_first else False
        nbytes = sum(shard.local.nbytes for shard in self._shards)
        with progress_bar("publish", nbytes, shows) as observe:
            for shard in self._shards:
                yield from shard.frames(wants_all, self._bucket)
                observe(shard.local.nbytes)


def _pieces(tensor: ModelTensor, index: int, is_first: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield the elements that this rank sends of tensor number `index`, as a view, each behind the first one's place.

    Of a part that is cut along several dimensions these are several pieces.
    """
    local = tensor.local.reshape(-1)
    if tensor.place is None:
        yield 0, local if is_first else local[:0]
        return
    replicate = tensor.place.unit.topology.replicate
    is_own = replicate is None or index % replicate.size == replicate.rank
    if tensor.is_copy or not is_own or not tensor.span:
        yield 0, local[:0]
        return
    spans = tensor.intervals(tensor.span)
    for span, piece in zip(spans, torch.split(local, [span.numel for span in spans]), strict=True):
        yield span.start, piece


@final
@attrs.define(eq=False)
class _OwnShard:
    """This rank's part of one tensor that is published."""

    index: int
    dtype: torch.dtype = torch.float32
    start: int = 0
    """The first element of the tensor that is here."""
    local: Tensor = attrs.field(factory=lambda: torch.empty(0))
    """1-D, in the model's dtype."""
    parts: tuple[Part, ...] = ()
    """The part of the tensor that each receiver has."""
    snapshot: Tensor | None = None
    """The values that receivers have, if they have any; of the published dtype."""
    _sent: list[_Change] = attrs.field(factory=list)
    """The changes that `frames` has found since the last version; receivers do not have them yet."""

    def look_at(self, published: PublishedTensor, start: int, local: Tensor, slicing: Slicing) -> None:
        """Find the elements where they are now, in `local`."""
        self.dtype = published.info.dtype
        self.start = start
        self.local = local
        self.parts = tuple(slicing.part(published, rank) for rank in range(slicing.size))

    def forget_changes(self) -> None:
        """Forget what was found for a version that was not delivered."""
        self._sent = []

    def remember(self, *, has_all: bool) -> None:
        """Take the elements as what receivers have, who got all of them, or what `frames` has found to have changed."""
        if self.snapshot is None:
            self.snapshot = torch.empty_like(self.local, dtype=self.dtype)
        if has_all:
            self.snapshot.copy_(self.local)
        bits = bits_of(self.snapshot)
        for change in self._sent:
            bits[change.start :][change.places.to(bits.device)] = change.new.to(bits.device)
        self.forget_changes()

    def frames(self, wants_all: bool, nbytes: int) -> Frames:
        """Yield the records of this rank, looking at `nbytes` at a time."""
        step = max(1, nbytes // self.dtype.itemsize)
        for start in range(0, self.local.numel(), step):
            stop = min(start + step, self.local.numel())
            if wants_all or self.snapshot is None:
                records = (self._values(part, start, stop) for part in self.parts)
            else:
                change = _Change.found(self.local, self.snapshot, start, stop)
                self._sent.append(change)
                records = (self._changes(part, change) for part in self.parts)
            for number, record in enumerate(records):
                yield from ((number, piece) for piece in record)

    def _values(self, part: Part, start: int, stop: int) -> list[Tensor]:
        """Return the record of the elements `[start, stop)`, as far as they are in `part`."""
        new = bits_of(self.local[start:stop].to(self.dtype))
        if not part.is_whole:
            new = new[part.mask(torch.arange(self.start + start, self.start + stop, device=new.device))]
        return values(self.index, part.before(self.start + start), new) if new.numel() else []

    def _changes(self, part: Part, change: _Change) -> list[Tensor]:
        """Return the shorter of the record of changes and that of values; nothing, if nothing has changed in `part`."""
        first, last = self.start + change.start, self.start + change.stop
        begin, end = part.before(first), part.before(last)
        places, old, new = change.places, change.old, change.new
        if not part.is_whole:
            inside = part.mask(places + first)
            places, old, new = part.places(places[inside] + first) - begin, old[inside], new[inside]
        if not places.numel():
            return []
        record = changes(self.index, begin, places, old, new)
        if sum(piece.numel() for piece in record[1:]) < (end - begin) * self.dtype.itemsize:
            return record
        return self._values(part, change.start, change.stop)


@final
@attrs.frozen(eq=False)
class _Change:
    """The differences between the elements `[start, stop)` of a shard and the values that receivers have of it."""

    start: int
    stop: int
    places: Tensor
    """1-D, int64, increasing, counted from `start`."""
    old: Tensor
    new: Tensor
    """The integers there."""

    @classmethod
    def found(cls, local: Tensor, snapshot: Tensor, start: int, stop: int) -> Self:
        """Compare them, on the CPU so many at a time that they stay in its cache."""
        step = CACHED_NUMEL.value if local.is_cpu else stop - start
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for at in range(start, stop, step):
            end = min(at + step, stop)
            new = bits_of(local[at:end].to(snapshot.dtype))
            old = bits_of(snapshot[at:end].to(new.device))
            places = (new != old).nonzero().view(-1)
            found.append((places + (at - start), old[places], new[places]))
        return cls(start, stop, *(torch.cat(each) for each in zip(*found, strict=True)))
