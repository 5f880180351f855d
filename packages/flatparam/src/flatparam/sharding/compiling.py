"""The marks of a wrapped module that `torch.compile` reads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from flatparam_core import FSDP_WRAPPED_MODULE

__all__ = ["mark_for_compiler"]


def mark_for_compiler(modules: Iterable[nn.Module]) -> None:
    """Mark the modules of a unit as managed by FSDP: Dynamo then guards on neither their parameters' identity nor
    their shapes. The names of the marks are those that Dynamo reads.

    It compiles no module that says that it does not use its original parameters. While a unit computes, each of its
    parameters is an autograd leaf of its own, in both settings of `use_orig_params`; so all say that they do.
    """
    for module in modules:
        # A wrapper has no parameters of its own.
        if FSDP_WRAPPED_MODULE not in module._modules:
            module.__dict__["_is_fsdp_managed_module"] = True
            module.__dict__["_fsdp_use_orig_params"] = True
