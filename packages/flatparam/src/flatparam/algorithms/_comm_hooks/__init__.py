"""Communication hooks: how the gradients of several ranks become their mean."""

from typing import Final

from flatparam.algorithms._comm_hooks import default_hooks
from flatparam.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

__all__ = ["LOW_PRECISION_HOOKS", "default_hooks"]

LOW_PRECISION_HOOKS: Final = (fp16_compress_hook, bf16_compress_hook)
"""The hooks that cast gradients themselves. Gradients reach every hook in the reduction dtype."""
