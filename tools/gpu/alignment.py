"""What a product costs whose weight does not begin where the kernels like it, as a view into a flat buffer may."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from .facts import Facts
from .measurement import Measurement
from .place import Place, Plan, in_processes

OFFSETS: Final = (0, 8, 4, 2, 1)
"""In elements."""


def measure(place: Place) -> dict[str, dict[str, Any]]:
    """A row for each dtype and offset: milliseconds of both products; the first also as often as the aligned."""
    width, rows = 64 if place.plan.tiny else 4096, {}
    for dtype in (torch.bfloat16, torch.float32):
        flat = torch.randn(width * width + max(OFFSETS), device=place.device).to(dtype)
        x = torch.randn(width, width, device=place.device).to(dtype)
        aligned = None
        for offset in OFFSETS:
            weight = flat[offset : offset + width * width].view(width, width)
            row = {"linear": _ms(place, F.linear, x, weight), "matmul": _ms(place, torch.matmul, x, weight)}
            aligned = aligned or row["linear"]
            name = f"{str(dtype)[6:]}, {offset * flat.itemsize} bytes"
            rows[name] = {**row, "ratio": row["linear"] / aligned}
    return rows


def _ms(place: Place, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> float:
    for _ in range(3):
        product(x, weight)
    place.synchronise()
    begin = time.perf_counter()
    for _ in range(20):
        product(x, weight)
    place.synchronise()
    return 1e3 * (time.perf_counter() - begin) / 20


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    columns = {"linear": "ms, x @ w.T", "matmul": "ms, x @ w", "ratio": "x aligned"}
    return {"columns": columns, "rows": in_processes(plan, limit, measure)[0]}


MEASUREMENTS: Final = (
    Measurement(
        "alignment",
        "Products of two square matrices whose weight begins so many bytes into a buffer.",
        10,
        40,
        _run,
    ),
)
