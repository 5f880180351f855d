"""FSDP1's module of communication hooks: its names, which the add-on flatparam-clients has."""

from typing import TYPE_CHECKING

from flatparam.addons import lazily

if TYPE_CHECKING:
    from flatparam_clients import (
        DefaultState,
        LowPrecisionState,
        allreduce_hook,
        bf16_compress_hook,
        fp16_compress_hook,
        reduce_scatter_hook,
    )

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]

__getattr__ = lazily(__name__, {"flatparam_clients": __all__})
