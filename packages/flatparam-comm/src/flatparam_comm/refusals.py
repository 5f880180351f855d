"""The checks of single tensors, with the errors that say what was expected, what was found, and what to do."""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from flatparam_comm.collectives import ExchangesValues, ReduceOp
from flatparam_comm.errors import describe_call

#: The dtypes that can be reduced: gloo and NCCL both add them, with the same meaning. (bool is left out because gloo
#: and NCCL turn its SUM into an OR; fp8 and int16 because at most one of the two can add them.)
REDUCIBLE: Final[frozenset[torch.dtype]] = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.complex64,
        torch.complex128,
    }
)


@attrs.frozen
class Site:
    """The place of a check, for its message: the rank, the size of the group, the collective, the caller's label."""

    rank: int
    size: int
    op: str
    label: str

    def refuse(self, expected: str, found: str, advice: str = "") -> ValueError:
        """Return the error to raise here; it says what was expected, what was found and what to do."""
        where = f"rank {self.rank} of {self.size}: {describe_call(self.op, self.label)}"
        return ValueError(f"{where}: expected {expected}, found {found}" + (f"; {advice}" if advice else ""))


def site_of(collectives: ExchangesValues, op: str, label: str) -> Site:
    """Return the place of a call of `collectives`."""
    return Site(rank=collectives.rank, size=collectives.size, op=op, label=label)


def check_tensor(site: Site, name: str, value: object) -> None:
    """Raise ValueError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        raise site.refuse(f"{name} to be a tensor", f"a {type(value).__name__}", "pass a torch.Tensor")


def check_dense(site: Site, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is one whose memory holds its values, one after the other."""
    check_tensor(site, name, tensor)
    if tensor.is_meta:
        raise site.refuse(f"{name} to hold bytes", "a meta tensor", "materialise it first")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        found = f"strides {tuple(tensor.stride())}" if tensor.layout == torch.strided else f"layout {tensor.layout}"
        raise site.refuse(f"{name} to be contiguous", found, f"pass {name}.contiguous() and copy back")
    if tensor.is_conj() or tensor.is_neg():
        # The bytes in memory are not the values that the caller sees.
        raise site.refuse(f"{name} without a lazy conjugate or negation", "one", "call resolve_conj() / resolve_neg()")


def check_flat(site: Site, name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is dense, and 1-D."""
    check_tensor(site, name, tensor)
    if tensor.dim() != 1:
        raise site.refuse(f"{name} to be 1-D", f"shape {tuple(tensor.shape)}", f"pass {name}.view(-1)")
    check_dense(site, name, tensor)


def check_alike(site: Site, one: tuple[str, Tensor], other: tuple[str, Tensor]) -> None:
    """Raise ValueError unless two tensors have one dtype and are on one device."""
    (name, tensor), (other_name, other_tensor) = one, other
    if tensor.dtype != other_tensor.dtype:
        raise site.refuse(
            f"{name} and {other_name} of one dtype", f"{tensor.dtype} and {other_tensor.dtype}", "cast one of them"
        )
    if tensor.device != other_tensor.device:
        raise site.refuse(
            f"{name} and {other_name} on one device", f"{tensor.device} and {other_tensor.device}", "move one of them"
        )


def check_numel(site: Site, *, whole: tuple[str, Tensor], part: tuple[str, Tensor]) -> None:
    """Raise ValueError unless `whole` has as many elements as all ranks' `part` together."""
    (whole_name, whole_tensor), (part_name, part_tensor) = whole, part
    expected = site.size * part_tensor.numel()
    if whole_tensor.numel() != expected:
        raise site.refuse(
            f"{whole_name}.numel() == {site.size} ranks * {part_name}.numel() == {expected}",
            f"{whole_tensor.numel()} ({part_name}.numel() is {part_tensor.numel()})",
            "pad to a multiple of the group's size",
        )


def check_overlap(site: Site, *, whole: tuple[str, Tensor], part: tuple[str, Tensor]) -> None:
    """Raise ValueError if two tensors overlap, unless engines can work in place: the part is the rank's own slice."""
    (whole_name, whole_tensor), (part_name, part_tensor) = whole, part
    nbytes = part_tensor.numel() * part_tensor.element_size()
    start, part_start = whole_tensor.data_ptr(), part_tensor.data_ptr()
    apart = part_start + nbytes <= start or start + site.size * nbytes <= part_start
    if nbytes == 0 or apart or part_start == start + site.rank * nbytes:
        return
    raise site.refuse(
        f"{part_name} to be apart from {whole_name}, or exactly its slice number {site.rank}",
        f"an overlap that begins at byte {part_start - start} of {whole_name} (the slice is at {site.rank * nbytes})",
        f"pass {part_name}.clone()",
    )


def check_reducible(site: Site, tensor: Tensor, op: ReduceOp) -> None:
    """Raise ValueError unless every engine can reduce `tensor` by `op`."""
    if not isinstance(op, ReduceOp):
        known = ", ".join(f"ReduceOp.{each.name}" for each in ReduceOp)
        raise site.refuse(f"op to be one of {known}", repr(op), "take it from flatparam_comm")
    if tensor.dtype not in REDUCIBLE:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in REDUCIBLE))
        raise site.refuse(f"a dtype that can be reduced ({names})", str(tensor.dtype), "cast to one of them first")
    if tensor.dtype.is_complex and op is not ReduceOp.SUM:
        raise site.refuse("ReduceOp.SUM for complex numbers", str(op), "complex numbers have no order")
