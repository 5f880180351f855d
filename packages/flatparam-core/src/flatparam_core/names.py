"""Names of modules and parameters: those that the library gives, and those that the user knows."""

from __future__ import annotations

from typing import Final

FLAT_PARAM: Final = "_flat_param"
"""The name under which a module registers its flat parameter; a second one gets `_1` behind it, and so on."""
PRESENTER: Final = "_flatparam_presenter"
"""The attribute of an original parameter that holds a differentiable function `(full parameter) -> tensor`. The module
shows the result instead of the full parameter, so that parameters can be of a tensor class that cannot be flattened."""
FSDP_WRAPPED_MODULE: Final = "_fsdp_wrapped_module"
"""The attribute under which a sharding wrapper holds its module; FSDP1's name."""

_BETWEEN: Final = frozenset({FSDP_WRAPPED_MODULE, "_checkpoint_wrapped_module", "_orig_mod"})


def clean_fqn(name: str) -> str:
    """`name` without the parts that sharding, activation checkpointing and `torch.compile` wrappers add."""
    parts = name.split(".")
    return name if _BETWEEN.isdisjoint(parts) else ".".join(part for part in parts if part not in _BETWEEN)
