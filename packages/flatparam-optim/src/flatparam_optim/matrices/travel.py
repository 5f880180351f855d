"""The steps of matrices that share one set of ranks: to owners, the steps there, back, and to replicas.

While a bucket is stepped, the next one is under way to its owners, and the updates of the one before come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from flatparam_comm import COMPLETED, Pending, Span, Topology, streams_of
from flatparam_optim.matrices.members import Member, StateOf, WholeStep
from flatparam_optim.matrices.routes import Routes


@final
@attrs.define(eq=False)
class _BucketUnderWay:
    """One bucket under way on one rank."""

    number: int
    pending: Pending = COMPLETED
    received: Tensor | None = None
    own: dict[int, Sequence[Tensor]] = attrs.field(factory=dict)
    """The parts of its own matrices that this rank has prepared, which do not travel."""
    updates: dict[int, Tensor] = attrs.field(factory=dict)
    """This rank's parts of updates, 1-D, by matrix."""
    whole: dict[int, Tensor] = attrs.field(factory=dict)
    """The updates of the matrices that this rank has stepped, 1-D in memory order, until they are on their way."""


@final
@attrs.define(eq=False)
class Travel:
    """One rank's end of the steps of some matrices."""

    routes: Routes
    members: Sequence[Member]
    """The matrices of `routes`."""
    topology: Topology
    rule: WholeStep
    state_of: Callable[[Any], StateOf]
    device: torch.device
    given: torch.dtype
    """The dtype in which matrices travel to their owners."""
    returned: torch.dtype
    """The dtype in which updates travel back."""
    stepped: int = 0
    """The matrices that this rank has stepped, since the object was made."""
    _to_step: Sequence[bool] = ()
    """Of each matrix, whether it is stepped this time."""
    _stacks: dict[int, Sequence[Tensor]] = attrs.field(factory=dict)
    """The prepared tensors of stacks, by the identity of the parameter, while some of its matrices are not sent."""
    _to_send: Counter[int] = attrs.field(factory=Counter)
    """How many matrices of each stack are to be sent."""

    @property
    def rank(self) -> int:
        """This rank among those that share the parameters."""
        return self.topology.shard.rank

    @property
    def replica(self) -> int:
        """The replica that this rank belongs to, as the routes count them."""
        replicate = self.topology.replicate
        return replicate.rank if replicate is not None and self.routes.replicas > 1 else 0

    @property
    def place(self) -> int:
        """The number of this rank in the routes."""
        return self.replica * self.routes.ranks + self.rank

    @torch.no_grad()
    def run(self, meanwhile: Callable[[], object], to_step: Sequence[bool]) -> None:
        """Step all matrices that have gradients, and call `meanwhile` once the first of them are under way.

        Args:
            meanwhile: is called once.
            to_step: for each matrix, whether it is stepped; a rank that holds no part of it may not know better than
                that it is.
        """
        self._to_step = to_step
        self._stacks.clear()
        self._to_send = Counter(
            id(member.parameter)
            for member, matrix in zip(self.members, self.routes.matrices, strict=True)
            if member.number is not None and self.rank in matrix.spans
        )
        stages = (self._send, self._step, self._spread, self._finish)
        under_way: list[_BucketUnderWay] = []
        for tick in range(self.routes.buckets + len(stages) - 1):
            if tick < self.routes.buckets:
                under_way.append(_BucketUnderWay(tick))
            for at, stage in enumerate(stages):
                number = tick - at
                if 0 <= number < self.routes.buckets:
                    stage(under_way[number])
            if tick == 0:
                meanwhile()
            if tick >= len(stages) - 1:
                # Its memory is free.
                under_way[tick - len(stages) + 1] = _BucketUnderWay(-1)
        if not self.routes.buckets:
            meanwhile()

    # To the owners

    def _send(self, bucket: _BucketUnderWay) -> None:
        routes, rank = self.routes, self.rank
        messages: list[list[Tensor]] = [[] for _ in range(routes.ranks)]
        for replica in range(routes.replicas):
            for owner in range(routes.ranks):
                numbers = routes.owned(replica * routes.ranks + owner, bucket.number)
                for number, span in routes.parts(numbers, rank):
                    prepared = self._prepare(number)
                    if replica != self.replica:
                        continue
                    if owner == rank:
                        bucket.own[number] = prepared
                        continue
                    nothing = [self._zeros(span.numel)] * self.rule.streams
                    messages[owner] += [self._carried(each) for each in prepared] or nothing
        if not routes.travels(self.replica, bucket.number):
            return
        mine = routes.owned(self.place, bucket.number)
        received = [
            0 if other == rank else routes.message_numel(mine, other, self.rule.streams)
            for other in range(routes.ranks)
        ]
        bucket.pending, bucket.received = self._deal(messages, received, self.given, "matrices to their owners")

    def _prepare(self, number: int) -> Sequence[Tensor]:
        """Return the tensors that travel of this rank's part of a matrix; none if it has no gradient."""
        member = self.members[number]
        gradient = member.parameter.grad
        if gradient is None:
            return ()
        key = id(member.parameter)
        prepared = self._stacks.pop(key, None)
        if prepared is None:
            state = self.state_of(member.parameter)
            prepared = self.rule.prepare(member.parameter, gradient, state, member.settings)
        if member.number is None:
            return prepared
        self._to_send[key] -= 1
        if self._to_send[key]:
            self._stacks[key] = prepared
        return [member.part_of(each) for each in prepared]

    def _carried(self, tensor: Tensor) -> Tensor:
        carried = tensor.reshape(-1).to(self.given)
        if carried.device == self.device:
            return carried
        return streams_of(self.device).to_device(carried, self.device)

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self.given, device=self.device)

    def _deal(
        self, messages: Sequence[Sequence[Tensor]], received: Sequence[int], dtype: torch.dtype, label: str
    ) -> tuple[Pending, Tensor]:
        """Begin to send each rank its message, and to receive `received` elements from each."""
        parts = [part for message in messages for part in message]
        given = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=self.device)
        output = torch.empty(sum(received), dtype=dtype, device=self.device)
        pending = self.topology.shard.all_to_all(
            output,
            given,
            output_numels=received,
            given_numels=[sum(part.numel() for part in message) for message in messages],
            label=label,
        )
        return pending, output

    # On the owner

    def _step(self, bucket: _BucketUnderWay) -> None:
        bucket.pending.wait()
        routes, mine = self.routes, self.routes.owned(self.place, bucket.number)
        arrived = self._arrived(bucket, mine)
        for number in mine:
            if self._to_step[number]:
                bucket.whole[number] = self._stepped(number, arrived[number])
            else:
                numel = routes.matrices[number].numel
                bucket.whole[number] = torch.zeros(numel, dtype=self.returned, device=self.device)
        bucket.own.clear()
        messages: list[list[Tensor]] = [[] for _ in range(routes.ranks)]
        for rank in range(routes.ranks):
            for number, span in routes.parts(mine, rank):
                part = bucket.whole[number][span.as_slice()]
                if rank == self.rank:
                    self._take(bucket, number, part)
                else:
                    messages[rank].append(part)
        bucket.pending = COMPLETED
        if routes.travels(self.replica, bucket.number):
            received = [
                0 if other == self.rank else routes.message_numel(self._owned_by(other, bucket), self.rank)
                for other in range(routes.ranks)
            ]
            bucket.pending, bucket.received = self._deal(messages, received, self.returned, "updates of matrices")
        bucket.whole.clear()

    def _owned_by(self, rank: int, bucket: _BucketUnderWay) -> Sequence[int]:
        return self.routes.owned(self.replica * self.routes.ranks + rank, bucket.number)

    def _arrived(self, bucket: _BucketUnderWay, mine: Sequence[int]) -> dict[int, list[tuple[Span, Sequence[Tensor]]]]:
        """For each own matrix its parts, each with what was prepared of it: zeros if there is no gradient."""
        found: dict[int, list[tuple[Span, Sequence[Tensor]]]] = {number: [] for number in mine}
        start = 0
        for rank in range(self.routes.ranks):
            parts = self.routes.parts(mine, rank)
            if rank == self.rank:
                for number, span in parts:
                    found[number].append((span, [self._carried(each) for each in bucket.own[number]]))
                continue
            if bucket.received is None:
                continue
            for number, span in parts:
                end = start + self.rule.streams * span.numel
                found[number].append((span, torch.split(bucket.received[start:end], span.numel)))
                start = end
        bucket.received = None
        return found

    def _stepped(self, number: int, parts: Sequence[tuple[Span, Sequence[Tensor]]]) -> Tensor:
        """Return the update of a matrix, 1-D in memory order."""
        member, matrix = self.members[number], self.routes.matrices[number]
        whole = []
        for stream in range(self.rule.streams):
            if len(parts) == 1:
                flat = parts[0][1][stream].clone()
            else:
                flat = torch.empty(matrix.numel, dtype=self.given, device=self.device)
                for span, pieces in parts:
                    flat[span.as_slice()] = pieces[stream]
            found = matrix.whole(flat)
            # A `DTensor` that is cut by columns has these first in memory; in one process it would not.
            whole.append(found if member.form is None else found.contiguous())
        self.stepped += 1
        update = self.rule.step(whole, self.state_of(member.parameter), member.settings)
        return matrix.flat(update, self.returned)

    # Back

    def _take(self, bucket: _BucketUnderWay, number: int, update: Tensor) -> None:
        """Note this rank's part of an update."""
        if self._to_step[number]:
            bucket.updates[number] = update

    def _spread(self, bucket: _BucketUnderWay) -> None:
        bucket.pending.wait()
        bucket.pending = COMPLETED
        received = bucket.received
        start = 0
        for owner in range(self.routes.ranks):
            parts = self.routes.parts(self._owned_by(owner, bucket), self.rank)
            if owner == self.rank or not parts or received is None:
                continue
            start = self._take_all(bucket, parts, received, start)
        bucket.received = None
        if self.routes.replicas > 1:
            self._give_replicas(bucket)

    def _take_all(
        self, bucket: _BucketUnderWay, parts: Sequence[tuple[int, Span]], received: Tensor, start: int
    ) -> int:
        """Note the updates in a message that begins at `start`; returns its end."""
        for number, span in parts:
            self._take(bucket, number, received[start : start + span.numel])
            start += span.numel
        return start

    def _give_replicas(self, bucket: _BucketUnderWay) -> None:
        """Begin to give the other replicas this rank's parts of the updates that come from this one."""
        replicate = self.topology.replicate
        assert replicate is not None, "there are replicas"
        numel = self.routes.replica_numel(bucket.number, self.rank)
        if not numel:
            return
        message = torch.zeros(numel, dtype=self.returned, device=self.device)
        start = 0
        parts = self.routes.parts(self.routes.in_replica(self.replica, bucket.number), self.rank)
        for number, span in parts:
            if number in bucket.updates:
                message[start : start + span.numel] = bucket.updates[number]
            start += span.numel
        bucket.received = torch.empty(numel * replicate.size, dtype=self.returned, device=self.device)
        bucket.pending = replicate.all_gather(bucket.received, message, label="updates to replicas")

    def _finish(self, bucket: _BucketUnderWay) -> None:
        bucket.pending.wait()
        bucket.pending = COMPLETED
        if bucket.received is not None:
            numel = self.routes.replica_numel(bucket.number, self.rank)
            for replica in range(self.routes.replicas):
                if replica != self.replica:
                    numbers = self.routes.in_replica(replica, bucket.number)
                    parts = self.routes.parts(numbers, self.rank)
                    self._take_all(bucket, parts, bucket.received, replica * numel)
        for number, update in self._beside_parts(bucket.updates).items():
            member, spec = self.members[number], self.routes.matrices[number].spec
            part = member.part_of(member.parameter)
            self.rule.apply(part, update.view(part.shape), spec.shape, member.settings)

    def _beside_parts(self, updates: dict[int, Tensor]) -> dict[int, Tensor]:
        """The updates on the devices of their parts: those of offloaded ones come to the host, which waits once."""
        far = [number for number in updates if self.members[number].parameter.device != self.device]
        if far:
            streams = streams_of(self.device)
            with streams.downloading() as copies:
                updates = updates | {number: streams.to_host(updates[number]) for number in far}
            if copies.end is not None:
                copies.end.synchronize()
        return updates
