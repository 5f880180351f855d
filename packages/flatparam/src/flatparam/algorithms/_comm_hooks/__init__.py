"""Communication hooks: how the gradients of several ranks become their mean."""

from flatparam.algorithms._comm_hooks import default_hooks
from flatparam.algorithms._comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

__all__ = ["LOW_PRECISION_HOOKS", "default_hooks"]

LOW_PRECISION_HOOKS = [fp16_compress_hook, bf16_compress_hook]
"""The hooks that cast gradients themselves: with one of these the wrapper does not."""
