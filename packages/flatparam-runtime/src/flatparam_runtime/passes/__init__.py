"""The steps that units take in a forward and in a backward pass, in order."""

from flatparam_runtime.passes.backward import notice_failed_passes
from flatparam_runtime.passes.forward import call_unit
from flatparam_runtime.passes.hooks import attach, register_forward_method
from flatparam_runtime.passes.tree import ROOT_NAME, UnitTree, tree_of

__all__ = ["ROOT_NAME", "UnitTree", "attach", "call_unit", "notice_failed_passes", "register_forward_method", "tree_of"]
