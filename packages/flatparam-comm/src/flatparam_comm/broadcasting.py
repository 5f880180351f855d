"""The broadcast of one rank's tensors to all ranks, in buckets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from flatparam_comm.collectives import Collectives
from flatparam_comm.errors import MismatchError
from flatparam_core import Threshold

BUCKET_NBYTES: Final = Threshold(
    "comm.broadcast_bucket_nbytes",
    250 * 2**20,
    "Tensors that one rank broadcasts travel together up to this size; a larger tensor travels alone, without a copy.",
)
#: Each tensor begins at a multiple of this many bytes in its bucket, so that it can be viewed in any dtype.
_ALIGNMENT = 16


@attrs.define(eq=False)
class _Bucket:
    """Tensors of one device that travel together, and the byte of the buffer at which each begins."""

    tensors: list[Tensor] = attrs.field(factory=list)
    starts: list[int] = attrs.field(factory=list)
    nbytes: int = 0

    def fits(self, tensor: Tensor, bucket_nbytes: int) -> bool:
        return not self.tensors or _aligned(self.nbytes) + _nbytes(tensor) <= bucket_nbytes

    def add(self, tensor: Tensor) -> None:
        start = _aligned(self.nbytes)
        self.tensors.append(tensor)
        self.starts.append(start)
        self.nbytes = start + _nbytes(tensor)


def broadcast_tensors(
    collectives: Collectives,
    tensors: Sequence[Tensor],
    *,
    root: int = 0,
    bucket_nbytes: int | None = None,
    label: str = "broadcast_tensors",
) -> None:
    """Overwrite `tensors` by those of rank `root`; block (on CUDA: order the current stream) until they are there.

    The tensors may have any dtypes, shapes, strides and devices; all but the strides must be the same on every rank, in
    the same order (checked before anything is sent; `MismatchError` on every rank if not). Tensors travel as bytes, in
    buckets of up to `bucket_nbytes`, one bucket at a time, so the extra memory is one bucket. A tensor that fills a
    bucket alone travels without one (and without extra memory if it is contiguous). Raises ValueError for a
    `bucket_nbytes` below 1.
    """
    if bucket_nbytes is None:
        bucket_nbytes = BUCKET_NBYTES.value
    if bucket_nbytes < 1:
        raise ValueError(f"broadcast_tensors: expected bucket_nbytes >= 1, found {bucket_nbytes}")
    plain = [tensor.detach() for tensor in tensors]
    _compare(collectives, plain, label)
    for bucket in _buckets([tensor for tensor in plain if tensor.numel()], bucket_nbytes):
        tensor = bucket.tensors[0]
        if len(bucket.tensors) == 1 and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            # The tensor travels as bytes, like a bucket: on another rank its strides may require a bucket.
            collectives.broadcast(tensor.view(-1).view(torch.uint8), root=root, label=label).wait()
        else:
            _broadcast_bucket(collectives, bucket, root, label)


def _broadcast_bucket(collectives: Collectives, bucket: _Bucket, root: int, label: str) -> None:
    """Pack the bucket on the root, send it, and unpack it on the other ranks."""
    buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=bucket.tensors[0].device)
    is_root = collectives.rank == root
    views = [
        buffer[start : start + _nbytes(tensor)].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(bucket.tensors, bucket.starts, strict=True)
    ]
    with torch.no_grad():
        if is_root:
            for tensor, view in zip(bucket.tensors, views, strict=True):
                view.copy_(tensor)
        collectives.broadcast(buffer, root=root, label=label).wait()
        if not is_root:
            for tensor, view in zip(bucket.tensors, views, strict=True):
                tensor.copy_(view)


def _buckets(tensors: Sequence[Tensor], bucket_nbytes: int) -> Iterator[_Bucket]:
    """Yield the tensors in order, in buckets of one device each; only one larger tensor may exceed `bucket_nbytes`."""
    filling: dict[torch.device, _Bucket] = {}
    for tensor in tensors:
        bucket = filling.setdefault(tensor.device, _Bucket())
        if not bucket.fits(tensor, bucket_nbytes):
            yield bucket
            bucket = filling[tensor.device] = _Bucket()
        bucket.add(tensor)
    yield from (bucket for bucket in filling.values() if bucket.tensors)


def _compare(collectives: Collectives, tensors: Sequence[Tensor], label: str) -> None:
    """Raise MismatchError on every rank unless all ranks have tensors of the same dtypes and shapes.

    If the ranks agree, only a digest is exchanged.
    """
    mine = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.device.type) for tensor in tensors]
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(collectives.exchange(digest, label=label))) == 1:
        return
    everyone = collectives.exchange(mine, label=label)
    longest = max(len(each) for each in everyone)
    for index in range(longest):
        found = [each[index] if index < len(each) else "none" for each in everyone]
        if any(each != found[0] for each in found):
            told = "; ".join(f"rank {rank} has {each}" for rank, each in enumerate(found))
            raise MismatchError(
                collectives.rank,
                "broadcast_tensors",
                label,
                f"expected the same dtypes and shapes on every rank, found at tensor number {index}: {told}; "
                "build the same model on every rank",
            )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
