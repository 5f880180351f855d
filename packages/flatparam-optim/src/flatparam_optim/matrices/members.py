"""The parameters that an optimizer steps as wholes: which they are, their rule, and who has their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import Self

from flatparam_comm import (
    FlatParamError,
    FlatParameter,
    FlatParamHandle,
    Mark,
    ParamSpec,
    ReduceOp,
    Span,
    Topology,
    handle_of,
    owner_of,
    streams_of,
)
from flatparam_optim.matrices.routes import HeldBlock
from flatparam_runtime import holder_of


def originals_in(parameter: nn.Parameter) -> Iterator[tuple[str, nn.Parameter, tuple[int, ...]]]:
    """Yield the originals that `parameter` stands for, each with its name in its unit (else `""`) and its full shape.

    A flat parameter stands for all of its originals, any other parameter for itself.
    """
    if isinstance(parameter, FlatParameter):
        handle = handle_of(parameter)
        if handle is not None:
            for index, slot in enumerate(handle.layout.slots):
                yield slot.spec.fqn, handle.original(index), slot.spec.shape
            return
    owner = owner_of(parameter)
    if owner is None:
        yield "", parameter, tuple(parameter.shape)
    else:
        yield _spec(*owner).fqn, parameter, _shape(*owner)


def spread_form(handle: FlatParamHandle, index: int) -> Any:
    """Return the form of a `DTensor` that is cut over ranks beside those of data parallelism; `None` for any other.

    It is a `MeshForm` of the add-on flatparam-meshes.
    """
    meshes = handle.forms.meshes
    form = None if meshes is None else meshes.form(handle, index)
    return form if form is not None and form.spread_over else None


def _spec(handle: FlatParamHandle, index: int) -> ParamSpec:
    return handle.layout.slots[index].spec


def _shape(handle: FlatParamHandle, index: int) -> tuple[int, ...]:
    form = spread_form(handle, index)
    return _spec(handle, index).shape if form is None else tuple(form.shape)


@final
@attrs.frozen(eq=False)
class Member:
    """A parameter that is stepped as a whole, of which this rank may hold a part; without a handle it holds all.

    The whole of a `DTensor` is that of all ranks. Of a stack of matrices, each may be a member.
    """

    parameter: nn.Parameter
    settings: Settings
    handle: FlatParamHandle | None
    index: int = 0
    form: Any = None
    """The form of a `DTensor` of which ranks of another mesh hold other parts; see `spread_form`."""
    number: int | None = None
    """Which matrix of the stack `parameter` it is; `None` for all of the parameter."""

    @classmethod
    def of(cls, parameter: nn.Parameter, settings: Settings) -> Member:
        """Return the member that an original, or a parameter of no unit, is."""
        owner = owner_of(parameter)
        if owner is None:
            return cls(parameter, settings, None)
        return cls(parameter, settings, *owner, spread_form(*owner))

    @property
    def unit_topology(self) -> Topology | None:
        """Return the data-parallel ranks that share the parameter; `None` if this rank has it for itself."""
        unit = None if self.handle is None else holder_of(self.handle)
        return None if unit is None else unit.topology

    def topology(self) -> Topology | None:
        """Return all ranks that share the parameter, or `None`; for a `DTensor` every one of them calls it."""
        found = self.unit_topology
        if self.form is None or found is None or self.handle is None:
            return found
        whole: Topology = self.handle.forms.meshes.ranks_of_whole(self.form, found)
        return whole

    @property
    def spec(self) -> ParamSpec:
        """Return the facts about the whole that is stepped."""
        if self.handle is None:
            return ParamSpec.of("", self.parameter)
        found = _spec(self.handle, self.index)
        if self.form is not None:
            found = attrs.evolve(found, shape=tuple(self.form.shape), stride=self.form.stride)
        if self.number is not None:
            name = f"{found.fqn}[{self.number}]"
            found = attrs.evolve(found, fqn=name, shape=found.shape[1:], stride=found.stride[1:])
        return found

    def matrices(self) -> list[Member]:
        """Return the matrices of a stack, or itself: for any other, or if a matrix is no interval of its memory."""
        spec = self.spec
        if self.form is not None and not self.form.is_interval:
            return [self]
        if len(spec.shape) < 3 or spec.shape[0] < 2 or spec.stride[0] * spec.shape[0] != spec.numel:
            return [self]
        return [attrs.evolve(self, number=number) for number in range(spec.shape[0])]

    @property
    def held(self) -> Span:
        """Return the elements of the parameter that this rank holds, in the memory order of the whole.

        If this rank's part is a block, they are counted in the order of the block.
        """
        assert self.handle is not None, "ranks share it"
        span = self.handle.layout.fragment(self.index, self.handle.rank).in_param
        if self.form is None or not self.form.is_interval:
            return span
        return span.shifted(self.form.held(self.spec.fqn).offset)

    @property
    def block(self) -> HeldBlock | None:
        """Return what this rank and those that shard with it hold of a `DTensor`, if it is no interval of the whole."""
        if self.handle is None or self.form is None or self.form.is_interval:
            return None
        offsets, shape = self.form.box
        return HeldBlock(offsets, shape, _spec(self.handle, self.index).stride)

    def within(self, held: Span) -> Span:
        """Return what of this member is in an interval of the parameter, counted from the member's first element."""
        if self.number is None:
            return held
        numel = self.spec.numel
        start = self.number * numel
        return held.overlap(Span(start, start + numel)).relative_to(start)

    def spans(self, held: Sequence[Span | None]) -> dict[int, Span]:
        """Return for each rank that has elements of this member, which ones.

        Args:
            held: what each rank of one replica has of a `DTensor`, in the order of the whole; not read for any other.
        """
        assert self.handle is not None, "ranks share it"
        layout = self.handle.layout
        if self.form is None:
            found = {rank: layout.fragment(self.index, rank).in_param for rank in layout.ranks_of(self.index)}
        else:
            found = {rank: span for rank, span in enumerate(held) if span}
        within = {rank: self.within(span) for rank, span in found.items()}
        return {rank: span for rank, span in within.items() if span}

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return what of this member is in `tensor`, which is shaped like this rank's part of the parameter; a view."""
        if self.number is None:
            return tensor
        held, start = self.held, self.number * self.spec.numel
        span = held.overlap(Span(start, start + self.spec.numel))
        return tensor.view(-1)[span.relative_to(held.start).as_slice()]


def follow_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give originals of listed flat parameters the gradients that these have now.

    Somebody may have set a flat parameter's gradient to None, or replaced it, and the originals do not know.
    """
    for parameter in parameters:
        owner = owner_of(parameter)
        if parameter.grad is None or owner is None or not owner[0].exposure.lists_shard:
            continue
        handle, index = owner
        flat = handle.flat_param.grad
        if flat is None:
            parameter.grad = None
            continue
        gradient = flat[handle.layout.fragment(index, handle.rank).in_shard.as_slice()]
        if gradient.data_ptr() != parameter.grad.data_ptr():
            if parameter.grad_dtype != gradient.dtype:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient.view(parameter.shape)


def drop_flat_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Free the gradient of each listed flat parameter whose originals are among `parameters` and have none any more."""
    handles = {owner[0]: None for owner in map(owner_of, parameters) if owner is not None}
    for handle in handles:
        if handle.exposure.lists_shard and not any(
            original.grad is not None for original in handle.exposure.originals().values()
        ):
            handle.flat_param.grad = None


# The seam to a rule that steps whole matrices


Settings: TypeAlias = "Mapping[str, Any]"
"""The hyper-parameters of a parameter group."""
StateOf: TypeAlias = "MutableMapping[str, Any]"
"""The optimizer's state of one parameter, by name."""


class WholeStep(Protocol):
    """A rule that steps parameters as wholes, in three parts: on each rank's part, on the whole, on each part again."""

    @property
    def streams(self) -> int:
        """How many tensors travel to the owner for each parameter."""

    @property
    def keeps_state(self) -> bool:
        """Whether `step` keeps state with the owner, which then is a rank that holds elements of the parameter."""

    @property
    def part_states(self) -> frozenset[str]:
        """The names of the states that `prepare` makes on each rank that holds a part; others are the owner's alone."""

    def dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes in which tensors travel to the owner and back, of a parameter of `dtype`."""

    def cost(self, shape: Sequence[int], settings: Settings) -> int:
        """Return the cost of `step` for a parameter of `shape`, in a unit of the rule's own."""

    def prepare(self, part: Tensor, gradient: Tensor, state: StateOf, settings: Settings) -> Sequence[Tensor]:
        """The tensors that have to travel: `streams` of them, shaped like `part`, this rank's part of the parameter.

        `state` is that of the part; what is shaped like the part belongs there.
        """

    def step(self, whole: Sequence[Tensor], state: StateOf, settings: Settings) -> Tensor:
        """Return the update of the whole parameter, on its owner.

        A rule that keeps no state may be called with zeros for a parameter without a gradient; its update is dropped.

        Args:
            whole: what `prepare` returned, in the parameter's shape and strides; may be changed.
            state: the same that `prepare` gets on this rank.
            settings: the hyper-parameters.
        """

    def apply(self, part: Tensor, update: Tensor, shape: Sequence[int], settings: Settings) -> None:
        """Change this rank's part of the parameter by its part of the update, of the same shape.

        Args:
            part: to be changed.
            update: in the dtype in which it has travelled.
            shape: that of the whole parameter.
            settings: the hyper-parameters.
        """


@runtime_checkable
class StepsEachMatrix(Protocol):
    """A rule that steps each matrix of a stack by itself, and keeps no state: they may have different owners."""

    @property
    def steps_each_matrix(self) -> bool:
        """Return whether it does."""


# Which ranks have a gradient of each matrix: compared in every step, without a host that waits for its device


@final
@attrs.define(eq=False)
class Presence:
    """The presence of the gradients of some matrices in one step, as the ranks have told each other.

    After a backward pass all ranks that hold a part of a matrix have its gradient, or none has, and each knows it by
    its own part. Only a user can make ranks differ. On the CPU the comparison is there before anything is stepped. The
    host of an accelerator would have to wait for it, so it looks at it in the next step.
    """

    _members: Sequence[Member]
    _rank: int
    _device: torch.device
    _runs_ahead: bool
    """Whether the host would have to wait for the comparison."""
    _own: bytes
    """Two flags for each matrix: this rank holds a part of it with a gradient, and one without."""
    _told: Tensor | None
    """The flags of all ranks together, on the host; `None` if nobody compares."""
    _landed: Mark | None
    """The point at which the copy to the host ends, if it is not made yet."""

    @classmethod
    def begin(cls, members: Sequence[Member], topology: Topology, device: torch.device) -> Self:
        """Tell the other ranks which gradients this one has; every rank calls it.

        Args:
            device: the device that the groups reach.
        """
        own = b"".join(map(_flags, members))
        streams = streams_of(device)
        if streams.is_capturing:
            # The host cannot look at what a graph does; the next step that is not captured compares.
            return cls(members, topology.rank, device, True, own, None, None)
        # No step waits for the comparison.
        with streams.aside() as copies:
            flags = streams.to_device(torch.frombuffer(bytearray(own), dtype=torch.uint8), device)
            for group in topology.groups:
                group.all_reduce(flags, op=ReduceOp.MAX, label="gradients of matrices").wait()
            told = streams.to_host(flags)
        return cls(members, topology.rank, device, streams.runs_ahead, own, told, copies.end)

    @property
    def is_late(self) -> bool:
        """Whether the host looks at the comparison in the next step."""
        return self._runs_ahead and self._told is not None

    @property
    def may_look(self) -> bool:
        """Whether the host may ask the device now: not while a graph is captured."""
        return not streams_of(self._device).is_capturing

    def to_step(self) -> list[bool]:
        """For each matrix, whether it is stepped, as far as this rank knows.

        A rank that holds no part of a matrix, and whose host does not know, takes it that the others have a gradient.
        """
        flags = self._own if self._runs_ahead or self._told is None else bytes(self._told.tolist())
        return [bool(has) or not lacks for has, lacks in zip(flags[::2], flags[1::2], strict=True)]

    def look(self) -> None:
        """Note it if the comparison has come, so that nothing has to wait for it later."""
        if self._landed is not None and self._landed.is_reached():
            self._landed = None

    def check(self) -> None:
        """Check that the ranks have the same gradients; wait for the comparison if it has not come yet.

        Raises:
            FlatParamError: on every rank, if only some ranks that hold a part of a matrix have its gradient.
        """
        if self._told is None:
            return  # Nobody has compared.
        self.look()
        if self._landed is not None:
            self._landed.synchronize()
        told = bytes(self._told.tolist())
        for number, member in enumerate(self._members):
            if told[2 * number] and told[2 * number + 1]:
                raise FlatParamError(self._refusal(number, member))

    def _refusal(self, number: int, member: Member) -> str:
        has, lacks = self._own[2 * number], self._own[2 * number + 1]
        found = "a gradient on this rank" if has else "no gradient on this rank" if lacks else "none on this rank"
        outcome = (
            "so nothing was stepped"
            if not self._runs_ahead
            else "so the step before this one was wrong: load the state before it"
        )
        return (
            f"rank {self._rank}: parameter {member.spec.fqn!r}, of shape {member.spec.shape}, has {found}, and only "
            f"some of the ranks that hold a part of it have its gradient, {outcome}; give or drop the gradient of a "
            "parameter on all ranks"
        )


def _flags(member: Member) -> bytes:
    if not member.parameter.numel():
        return bytes((0, 0))
    has = member.parameter.grad is not None
    return bytes((has, not has))
