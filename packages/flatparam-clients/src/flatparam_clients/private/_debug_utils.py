"""FSDP1's module of debugging: its names."""

from flatparam.debug_log import SimpleProfiler
from flatparam_clients.tracing import sharded_module_tree as _get_sharded_module_tree_with_module_name_to_fqns

__all__ = ["SimpleProfiler", "_get_sharded_module_tree_with_module_name_to_fqns"]
