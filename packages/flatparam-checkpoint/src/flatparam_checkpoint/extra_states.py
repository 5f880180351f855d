"""The extra states of a model's modules, which are saved and loaded with its tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from flatparam_files.checkpoint import EXTRA_STATE
from flatparam_runtime import clean_fqn

__all__ = ["extra_state_modules"]


def extra_state_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of `model` that have an extra state, with its names in the state dict."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = clean_fqn(path)
            yield f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE, module
