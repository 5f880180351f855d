"""The checks of arguments that all engines share, so that they refuse the same calls with the same messages.

A call that gloo would refuse must fail on threads too, or tests on threads would prove nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Final

import attrs
import torch
from torch import Tensor

from flatparam_comm.collectives import ExchangesValues, Parts, ReduceOp
from flatparam_comm.errors import describe_call

#: The dtypes that can be reduced: gloo and NCCL both add them, with the same meaning. (bool is left out because gloo
#: and NCCL turn its SUM into an OR; fp8 and int16 because at most one of the two can add them.)
REDUCIBLE: Final[frozenset[torch.dtype]] = frozenset(
    (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.int8, torch.uint8, torch.int32, torch.int64),
    )
)
_ORDERED: Final = frozenset(dtype for dtype in REDUCIBLE if not dtype.is_complex)


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


def check_all_gather(site: Site, output: Tensor, shard: Tensor) -> None:
    """Raise ValueError unless `shard` can be gathered from every rank into `output`."""
    try:
        if _fit_apart(site.size, output, shard):
            return
    except AttributeError:
        # Something is no tensor, and is refused below.
        pass
    check_flat(site, "output", output)
    check_flat(site, "shard", shard)
    check_alike(site, ("output", output), ("shard", shard))
    check_numel(site, whole=("output", output), part=("shard", shard))
    check_overlap(site, whole=("output", output), part=("shard", shard))


def check_reduce_scatter(site: Site, output: Tensor, full: Tensor, op: ReduceOp) -> None:
    """Raise ValueError unless `full` can be reduced over the ranks and scattered into `output`."""
    try:
        if op.__class__ is ReduceOp and full.dtype in _ORDERED and _fit_apart(site.size, full, output):
            return
    except AttributeError:
        # Something is no tensor, and is refused below.
        pass
    check_flat(site, "output", output)
    check_flat(site, "full", full)
    check_alike(site, ("output", output), ("full", full))
    check_numel(site, whole=("full", full), part=("output", output))
    check_overlap(site, whole=("full", full), part=("output", output))
    check_reducible(site, full, op)


def check_reduce_scatter_parts(site: Site, output: Tensor, full: Parts) -> None:
    """Raise ValueError unless `full`, which lies in parts, can be reduced over the ranks and scattered to `output`."""
    check_flat(site, "output", output)
    found = (full.dtype, full.device.type, full.numel())
    expected = (output.dtype, "cpu", site.size * output.numel())
    if found != expected or not output.is_cpu:
        raise site.refuse(
            f"parts of {_told(*expected)} for an output of {output.numel()} elements on {output.device}",
            f"parts of {_told(*found)}",
        )
    check_reducible(site, output, ReduceOp.SUM)


def _told(dtype: torch.dtype, device: str, numel: int) -> str:
    return f"{numel} x {str(dtype).removeprefix('torch.')} on {device}"


def _fit_apart(size: int, whole: Tensor, part: Tensor) -> bool:
    """Return whether the tensors pass every check below and share no memory; a fast path for the usual case."""
    return (
        whole.dtype == part.dtype
        and whole.dtype in _ORDERED
        and whole.numel() == size * part.numel()
        and whole.dim() == 1 == part.dim()
        and whole.device == part.device
        # What `_lies_dense` asks: to call it twice takes longer than to ask.
        and whole.layout is part.layout is torch.strided
        and whole.is_contiguous()
        and part.is_contiguous()
        and not (whole.is_meta or whole.is_neg() or part.is_neg())
        and not 0 <= part.data_ptr() - whole.data_ptr() + part.nbytes < whole.nbytes + part.nbytes
    )


def _lies_dense(tensor: Tensor) -> bool:
    """Return whether the memory of a tensor of real numbers holds its values, one after the other."""
    return tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_meta and not tensor.is_neg()


def check_all_reduce(site: Site, tensor: Tensor, op: ReduceOp) -> None:
    """Raise ValueError unless `tensor` can be reduced in place."""
    try:
        if op.__class__ is ReduceOp and tensor.dtype in _ORDERED and _lies_dense(tensor):
            return
    except AttributeError:
        # It is no tensor, and is refused below.
        pass
    check_dense(site, "tensor", tensor)
    check_reducible(site, tensor, op)


def _is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _are_whole(numbers: object) -> bool:
    return isinstance(numbers, Iterable) and all(map(_is_whole, numbers))


def check_broadcast(site: Site, tensor: Tensor, root: int) -> None:
    """Raise ValueError unless `tensor` can be replaced by that of rank `root`."""
    check_dense(site, "tensor", tensor)
    if not _is_whole(root) or not 0 <= root < site.size:
        raise site.refuse(
            f"a root in [0, {site.size})", f"root={root!r}", "give the rank within this group, not the global one"
        )


def check_all_to_all(
    site: Site, output: Tensor, given: Tensor, output_numels: Sequence[int], given_numels: Sequence[int]
) -> None:
    """Raise ValueError unless `given` can be dealt out to the ranks, and `output` can take what they give."""
    check_flat(site, "output", output)
    check_flat(site, "given", given)
    check_alike(site, ("output", output), ("given", given))
    for name, tensor, numels in (("output", output, output_numels), ("given", given, given_numels)):
        if not _are_whole(numels):
            raise site.refuse(f"{name}_numels to be a sequence of whole numbers", repr(numels))
        if len(numels) != site.size or min(numels) < 0 or sum(numels) != tensor.numel():
            raise site.refuse(
                f"{name}_numels to have {site.size} numbers, none negative, that add up to {tensor.numel()}",
                f"{len(numels)} that add up to {sum(numels)}, the least {min(numels, default=None)}",
            )
    apart = (
        output.data_ptr() + output.nbytes <= given.data_ptr() or given.data_ptr() + given.nbytes <= output.data_ptr()
    )
    if output.numel() and given.numel() and not apart:
        raise site.refuse("output to be apart from given", "that they overlap", "pass given.clone()")


def check_subgroup(site: Site, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks as a tuple. Raises ValueError unless they are ranks of this group, in increasing order."""
    if not _are_whole(ranks):
        raise site.refuse("a sequence of ranks, which are whole numbers", repr(ranks))
    chosen = tuple(ranks)
    increasing = all(low < high for low, high in itertools.pairwise(chosen))
    if not chosen or not increasing or chosen[0] < 0 or chosen[-1] >= site.size:
        raise site.refuse(
            f"one or more increasing ranks in [0, {site.size})",
            f"{list(chosen)}",
            "give ranks within this group, each once, lowest first",
        )
    return chosen
