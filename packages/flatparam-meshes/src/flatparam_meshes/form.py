"""A parameter that is a `DTensor`: what a unit shards of it, what modules see of that, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from typing_extensions import Self, override

from flatparam.sharding.extensions import FSDPExtensions
from flatparam_comm import Collectives, FlatParamError, ProcessGroupCollectives
from flatparam_core import Span

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KEEPS_ROWS: Final = "_flatparam_keeps_rows"
"""An attribute of a `DTensor` parameter: its shards are to be rows, as FSDP2's are, however the `DTensor` is cut."""


class SharedByUnit(Protocol):
    """The things that the forms of a unit share: `UnitMeshes` is one."""

    sums_late: bool
    """Whether the sum over copies is taken once for each reduction, and not while autograd computes."""


@final
@attrs.frozen
class HeldPart:
    """The part of a tensor that one rank holds beside data parallelism, as files have it.

    The elements of all parts are numbered part by part, and in a part in its memory order; of a tensor that is cut
    along one dimension that is its memory order.
    """

    shape: tuple[int, ...]
    """The shape of the whole."""
    stride: tuple[int, ...]
    """The strides of the whole, in elements; the part has its dimensions in the same order."""
    start: tuple[int, ...]
    """The first index of the part in each dimension."""
    part_shape: tuple[int, ...]
    """The shape of the part."""
    offset: int
    """The number of the first element of the part."""
    is_copy: bool | None
    """Whether a rank before this one holds the same; `None` if it does as of any plain parameter."""

    def intervals(self, span: Span) -> list[Span]:
        """Return where the elements `span` of this part, by number, lie in the memory order of the whole.

        Of a part that is cut along several dimensions these are several intervals: one for each index in the
        dimensions before the last of these.
        """
        order = sorted(range(len(self.shape)), key=lambda dim: -self.stride[dim])
        order = [dim for dim in order if self.shape[dim] > 1]
        cut = [place for place, dim in enumerate(order) if self.part_shape[dim] != self.shape[dim]]
        outer, inner = (order[: cut[-1]], order[cut[-1] :]) if cut else ([], order)
        first = sum(self.start[dim] * self.stride[dim] for dim in order)
        numel = math.prod(self.part_shape[dim] for dim in inner)
        found, wanted = [], span.shifted(-self.offset)
        for number in range(wanted.start // numel, -(-wanted.stop // numel)) if wanted else ():
            own, rest = wanted.overlap(Span(number * numel, (number + 1) * numel)), number
            at = first - number * numel
            for dim in reversed(outer):
                rest, index = divmod(rest, self.part_shape[dim])
                at += index * self.stride[dim]
            found.append(own.shifted(at))
        return found


@final
@attrs.define(eq=False)
class MeshForm:
    """How one `DTensor` parameter is flattened and shown: the presenter of what this rank holds of it.

    A unit shards the local part over its data-parallel ranks. A module sees a `DTensor` over the full local part, so
    that plans of tensor parallelism work as before.

    The gradient that autograd gives for the `DTensor` may be a sum still to be made, as that of a norm under sequence
    parallelism is. This rank's summand is kept, and `UnitMeshes.complete` adds up the summands, in the dtype in which
    gradients are reduced, once for each reduction. If the gradient has been added up already, one rank contributes it,
    and the others zeros. So in either case the copies of a parameter get the same bits.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """The shape of the `DTensor`."""
    stride: tuple[int, ...]
    """The strides of the `DTensor`, in elements: the dimensions that are cut over ranks have the largest."""
    keeps_rows: bool = attrs.field(default=False, kw_only=True)
    """Whether the part stays in its own memory order, so that a shard may be some of its rows; see `KEEPS_ROWS`."""
    meshes: SharedByUnit | None = None
    """The things that the forms of a unit share, once all are known."""
    to_come: DTensor | None = None
    """The parameter, if it was on the meta device: values come while it is sharded."""
    spread_over: tuple[Collectives, ...] = attrs.field(init=False)
    """The groups whose ranks hold other parts of the parameter, beside those of data parallelism."""
    copied_over: tuple[Collectives, ...] = attrs.field(init=False)
    """The groups whose ranks hold copies of what this rank has of the parameter."""
    _here: tuple[int, ...] = attrs.field(init=False)
    """This rank's place along each dimension of the mesh."""

    @_here.default
    def _find_place(self) -> tuple[int, ...]:
        found = self.mesh.get_coordinate()
        return tuple(found or ())

    @classmethod
    def of(cls, parameter: DTensor, name: str) -> Self:
        """Return the form of a parameter.

        Raises:
            FlatParamError: for a sum still to be made, or a mesh without this rank; the message names the parameter.
        """
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        if any(placement.is_partial() for placement in placements):
            raise FlatParamError(
                f"parameter {name!r} is a DTensor with {placements}: expected Shard or Replicate, since a parameter "
                "that is a sum still to be made has no value to train; call redistribute() first"
            )
        if mesh.get_coordinate() is None:
            raise FlatParamError(
                f"parameter {name!r} is a DTensor over {mesh}, which this process is not in: shard the module only on "
                "the ranks of that mesh, or leave it whole (ignored_modules, or ignored_params of fully_shard)"
            )
        keeps_rows = bool(vars(parameter).pop(KEEPS_ROWS, False))
        strides = tuple(parameter.stride()) if keeps_rows else _strides(parameter, mesh, placements)
        made = cls(mesh, placements, parameter.shape, strides, keeps_rows=keeps_rows)
        made.to_come = parameter if parameter.is_meta else None
        return made

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # A copy of a model is over the same ranks.
        return self

    # What is flattened, and what modules see

    def part(self, tensor: DTensor) -> Tensor:
        """Return the local part of `tensor`, laid out so that the dimensions that are cut over ranks come first.

        So the elements of one rank are neighbours in the memory order of the whole tensor, and its part of a shard is
        one interval of them, or a few. A part that is cut along dimension 0, or not at all, is returned as it is.
        """
        local = tensor.to_local()
        cut = () if self.keeps_rows else _cut_dimensions(self.mesh, self.placements)
        first = tuple(range(len(cut)))
        return local if cut == first else local.movedim(cut, first).contiguous().movedim(first, cut)

    def __call__(self, local: Tensor) -> DTensor:
        """Return what modules see: the `DTensor` over `local`, of any dtype; the gradient comes back to `local`."""
        shown: DTensor = _Shown.apply(local, self)  # type: ignore[no-untyped-call]  # torch's
        return shown

    def over(self, local: Tensor) -> DTensor:
        """Return the `DTensor` over `local`, outside of autograd."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def whole(self, local: Tensor) -> Tensor:
        """Return all of the `DTensor` over `local`, row-major; every rank of the mesh calls it."""
        shown, placements = self.over(local), list(self.placements)
        # In one call torch mixes up parts of different sizes, if the program has flattened the mesh.
        for dimension in reversed(range(len(placements))):
            placements[dimension] = Replicate()
            shown = shown.redistribute(placements=placements)
        return _arrived(shown.to_local()).contiguous()

    def flattened(self, shown: object) -> object:
        """Return the local part of a tensor like the one that modules see, or of all of it; anything else as it is.

        Raises:
            FlatParamError: for a `DTensor` of the same shape over a mesh that does not end in this one.
        """
        if not isinstance(shown, Tensor) or shown.shape != self.shape:
            return shown
        if not isinstance(shown, DTensor):
            if self.box is None:
                return shown
            return shown[tuple(slice(start, start + size) for start, size in zip(*self.box, strict=True))]
        if shown.device_mesh != self.mesh:
            if not self._is_end_of(shown.device_mesh):
                raise FlatParamError(
                    f"found a DTensor over {shown.device_mesh} for a parameter that is one over {self.mesh}: expected "
                    "a mesh whose last dimensions are these; give what its full_tensor() returns"
                )
            return shown
        if tuple(shown.placements) != self.placements:
            shown = shown.redistribute(placements=self.placements)
        return shown.to_local()

    def _is_end_of(self, mesh: DeviceMesh) -> bool:
        outer = mesh.ndim - self.mesh.ndim
        return outer >= 0 and all(
            _ranks(mesh, outer + dimension) == _ranks(self.mesh, dimension) for dimension in range(self.mesh.ndim)
        )

    # Where it lies

    @property
    def is_first_copy(self) -> bool:
        """Return whether this rank is the first of those that hold copies."""
        return not any(
            place for place, placement in zip(self._here, self.placements, strict=True) if placement.is_replicate()
        )

    @property
    def is_even(self) -> bool:
        """Return whether every rank holds as many elements."""
        sizes = list(self.shape)
        for dimension, placement in enumerate(self.placements):
            dim = getattr(placement, "dim", None)
            if dim is None:
                continue
            if sizes[dim] % self.mesh.size(dimension):
                return False
            sizes[dim] //= self.mesh.size(dimension)
        return True

    @property
    def is_interval(self) -> bool:
        """Return whether each rank's part is an interval of the memory order: it is cut along one dimension at most."""
        cut = {getattr(each, "dim", None) for each in self.placements if not each.is_replicate()}
        return len(cut | ({0} if self.keeps_rows and cut else set())) < 2 and None not in cut

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the first index of this rank's part in each dimension, and its shape; `None` if it is no box."""
        if any(type(each) not in (Shard, Replicate) for each in self.placements):
            return None
        shape, offsets = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        return tuple(offsets), tuple(shape)

    def held(self, name: str) -> HeldPart:
        """Return where in the `DTensor` this rank's part lies, for files.

        Raises:
            FlatParamError: if it is cut in a way in which the part of a rank is no box; it names `name`.
        """
        if self.box is None or (self.keeps_rows and not self.is_interval):
            raise FlatParamError(
                f"parameter {name!r} is a DTensor with {self.placements}: files have boxes of a tensor, whose cut "
                "dimensions are the first in memory (FSDP2's fully_shard cuts dimension 0 besides); "
                "redistribute() it to Shard or Replicate before it is sharded, or save what "
                "flatparam.checkpoint.state_dict.get_state_dict() gives with torch.distributed.checkpoint"
            )
        part_shape, start = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        if len(_cut_dimensions(self.mesh, self.placements)) > 1:
            # Each part gets as many numbers as the first one, which is the largest.
            number, largest = 0, list(self.shape)
            for place, size, placement in zip(self._here, self.mesh.shape, self.placements, strict=True):
                if isinstance(placement, Shard):
                    number = number * size + place
                    largest[placement.dim] = -(-largest[placement.dim] // size)
            offset = number * math.prod(largest)
        else:
            offset = sum(first * step for first, step in zip(start, self.stride, strict=True))
        return HeldPart(tuple(self.shape), self.stride, tuple(start), tuple(part_shape), offset, not self.is_first_copy)

    @spread_over.default
    def _find_parts(self) -> tuple[Collectives, ...]:
        return self._groups(copies=False)

    @copied_over.default
    def _find_copies(self) -> tuple[Collectives, ...]:
        return self._groups(copies=True)

    def _groups(self, *, copies: bool) -> tuple[Collectives, ...]:
        return tuple(
            ProcessGroupCollectives(self.mesh.get_group(dimension))
            for dimension, placement in enumerate(self.placements)
            if placement.is_replicate() is copies and self.mesh.size(dimension) > 1
        )

    # Its gradient

    def local_gradient(self, gradient: DTensor) -> Tensor:
        """Return what this rank collects of a gradient that autograd has computed: the shape of the local part.

        With `UnitMeshes.sums_late`, the sum over the copies of these is the gradient.
        """
        late = self.meshes is not None and self.meshes.sums_late
        target: list[Placement] = []
        is_silent = False
        for place, wanted, found in zip(self._here, self.placements, gradient.placements, strict=True):
            is_summand = late and wanted.is_replicate()
            if is_summand and found.is_partial("sum"):
                target.append(found)
                continue
            target.append(wanted)
            # One rank contributes a gradient that all of them know.
            is_silent = is_silent or (is_summand and place != 0)
        if tuple(target) != tuple(gradient.placements):
            gradient = _redistributed(gradient, target)
        local = _arrived(gradient.to_local())
        return torch.zeros_like(local) if is_silent else local


class _Shown(torch.autograd.Function):
    """From the full local part to the `DTensor` that modules see, and back for the gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, form: MeshForm) -> DTensor:
        ctx.form = form
        return form.over(local)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, None]:
        # A module may have asked for a gradient of a different kind.
        if not isinstance(gradient, DTensor):
            return gradient, None
        return ctx.form.local_gradient(gradient), None


def _redistributed(gradient: DTensor, placements: Sequence[Placement]) -> DTensor:
    """Return the gradient with these placements; what is added up on the way is added up in fp32 at least."""
    wide: Any = gradient
    if any(placement.is_partial() for placement in gradient.placements):
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    found: DTensor = wide.redistribute(placements=placements).to(gradient.dtype)
    return found


def _arrived(local: Tensor) -> Tensor:
    """Wait for what is still on its way."""
    wait: Callable[[], Tensor] | None = getattr(local, "wait", None)
    return local if wait is None else wait()


def _ranks(mesh: DeviceMesh, dimension: int) -> list[int]:
    """Return the numbers of the ranks that differ from this one in that dimension alone, and its own."""
    return torch.distributed.get_process_group_ranks(mesh.get_group(dimension))


def _cut_dimensions(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the dimensions of the tensor that are cut over several ranks, in order."""
    several = (each for size, each in zip(mesh.shape, placements, strict=True) if size > 1)
    return tuple(sorted({each.dim for each in several if isinstance(each, Shard)}))


def _strides(parameter: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return the strides of the whole tensor if the dimensions that are cut come first in memory."""
    cut = _cut_dimensions(mesh, placements)
    if cut == tuple(range(len(cut))):
        return tuple(parameter.stride())
    order = [*cut, *(dimension for dimension in range(parameter.dim()) if dimension not in cut)]
    strides, step = [0] * parameter.dim(), 1
    for dimension in reversed(order):
        strides[dimension], step = step, step * max(parameter.shape[dimension], 1)
    return tuple(strides)


def chunk_over(full: DTensor, mesh: DeviceMesh, rank: int = 0) -> DTensor:
    """Return a `DTensor` over `mesh` too. If both cut dimension 0, the data-parallel cut is the outer one, as a mesh of
    that order means it: so parts of tensors move between the ranks of `full`.

    Args:
        full: what modules see; every rank of both meshes calls it.
        mesh: of one dimension for data parallelism, the last one, and others over which there are copies.
        rank: is not looked at.

    Raises:
        FlatParamError: if the two are not slices of one mesh.
    """
    inner: Any = full.device_mesh
    try:
        both = type(inner)._concatenate([mesh, inner])  # it has no public name
    except (AssertionError, RuntimeError, TypeError) as error:
        raise FlatParamError(
            f"a parameter is a DTensor over {inner} and is sharded over {mesh}: for its sharded state both have to be "
            f"slices of one mesh with names, without a rank in common but this one ({error})"
        ) from error
    kept, outer = list(full.placements), [Replicate()] * mesh.ndim
    local, shape, stride = full.to_local().clone(), full.shape, full.stride()
    whole = DTensor.from_local(local, both, [*outer, *kept], run_check=False, shape=shape, stride=stride)
    return whole.redistribute(placements=[*outer[:-1], Shard(0), *kept])


class DTensorExtensions(FSDPExtensions):
    """An extension for `DTensor` parameters over a mesh of other ranks than those that FSDP shards over."""

    @override
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        """Return this rank's local part, and its form; raise `FlatParamError` for a sum still to be made."""
        if not isinstance(tensor, DTensor):
            return tensor, None
        form = MeshForm.of(tensor, "(of an extension)")
        return form.part(tensor), form

    @override
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        """Return the `DTensor` of which `tensor` is the local part; gradients come back to that part."""
        shown: Tensor = param_extension(tensor)
        return shown
