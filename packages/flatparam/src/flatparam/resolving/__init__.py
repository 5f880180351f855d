"""From the arguments of a wrapper to the plans of its units; nothing in here changes a module."""

from flatparam.resolving.arguments import Arguments, DeviceMesh, Ignorable, Policy, ProcessGroup, Ranks
from flatparam.resolving.devices import resolve_device
from flatparam.resolving.environment import TRACE_FOLDER, Environment
from flatparam.resolving.ignored import Ignored, resolve_ignored
from flatparam.resolving.rules import resolve_rules
from flatparam.resolving.settings import Resolved, backward_prefetch_of, resolve_prefetch
from flatparam.resolving.tree import ResolvedTree, resolve_tree

__all__ = [
    "Arguments",
    "DeviceMesh",
    "Environment",
    "Ignorable",
    "Ignored",
    "Policy",
    "ProcessGroup",
    "Ranks",
    "Resolved",
    "ResolvedTree",
    "TRACE_FOLDER",
    "backward_prefetch_of",
    "resolve_device",
    "resolve_ignored",
    "resolve_prefetch",
    "resolve_rules",
    "resolve_tree",
]
