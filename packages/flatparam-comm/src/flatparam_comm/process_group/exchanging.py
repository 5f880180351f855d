"""The exchange of picklable values by two gathers of bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def exchange_bytes(
    mine: bytes,
    size: int,
    gather: Callable[[Tensor, Tensor], None],
    device: torch.device,
) -> list[bytes]:
    """Return the bytes of each of `size` ranks, in rank order.

    `gather(output, shard)` fills `output` with every rank's `shard`; both are on `device`. Unlike torch's own function
    for objects, this one needs no numpy.
    """
    own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    sizes = torch.empty(size, dtype=torch.int64, device=device)
    gather(sizes, torch.tensor([own.numel()], dtype=torch.int64, device=device))
    numels = sizes.tolist()
    longest = max(numels)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    gathered = torch.empty(size * longest, dtype=torch.uint8, device=device)
    gather(gathered, padded)
    rows = zip(gathered.view(size, longest), numels, strict=True)
    return [bytes(row[:numel].tolist()) for row, numel in rows]
