"""FSDP1's module of debugging: its names."""

from flatparam.observing.module_tree import (
    sharded_module_tree as _get_sharded_module_tree_with_module_name_to_fqns,
)
from flatparam.observing.stopwatch import SimpleProfiler

__all__ = ["SimpleProfiler", "_get_sharded_module_tree_with_module_name_to_fqns"]
