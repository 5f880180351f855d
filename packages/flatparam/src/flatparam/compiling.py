"""What `torch.compile` wants to know of a wrapped module."""

from __future__ import annotations

from torch import nn

from flatparam.resolve import Ignored
from flatparam_core import FSDP_WRAPPED_MODULE, each_module
from flatparam_runtime import unit_of

__all__ = ["mark_for_compiler"]


def mark_for_compiler(module: nn.Module, ignored: Ignored) -> None:
    """Mark `module` and what is inside as managed by FSDP: Dynamo then guards on neither its parameters' identity
    nor their shapes. The names of the marks are those that Dynamo reads.

    It compiles no module that says that it does not use its original parameters. While a unit computes, each of its
    parameters is an autograd leaf of its own, in both settings of `use_orig_params`; so all say that they do.
    """
    for child in each_module(module, lambda child: FSDP_WRAPPED_MODULE in child._modules):
        if child not in ignored.modules and (child is module or unit_of(child) is None):
            child.__dict__["_is_fsdp_managed_module"] = True
            child.__dict__["_fsdp_use_orig_params"] = True
