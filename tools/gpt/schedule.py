"""The learning rate at each step."""

from __future__ import annotations

import math


def learning_rate(step: int, *, steps: int, warmup: int, peak: float) -> float:
    """The rate of ``step`` (1 is the first): linear from 0 to ``peak`` over ``warmup`` steps, then a cosine down to
    a tenth of it at ``steps``.
    """
    if step <= warmup:
        return peak * step / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
