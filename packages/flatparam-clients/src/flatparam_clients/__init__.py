"""Run programs that were written for FSDP1 on flatparam: torch's names, FSDP1's private ones, and other libraries.

The names are imported on first use, so that the command line can answer without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatparam.addons import lazily

if TYPE_CHECKING:
    from flatparam_clients.averaging import (
        LOW_PRECISION_HOOKS,
        DefaultState,
        LowPrecisionState,
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        reduce_scatter_hook,
    )
    from flatparam_clients.installing import Installation, install, uninstall

__version__ = "0.1.0"

__all__ = [
    "DefaultState",
    "Installation",
    "LOW_PRECISION_HOOKS",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "install",
    "reduce_scatter_hook",
    "uninstall",
]

_HOMES = {
    "flatparam_clients.averaging": (
        "DefaultState",
        "LOW_PRECISION_HOOKS",
        "LowPrecisionState",
        "allreduce_hook",
        "bf16_compress_hook",
        "fp16_compress_hook",
        "reduce_scatter_hook",
    ),
    "flatparam_clients.installing": ("Installation", "install", "uninstall"),
}
"""The modules that have the names which this package exports."""
__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
