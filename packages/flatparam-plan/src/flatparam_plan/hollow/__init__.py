"""Memory that is counted and never touched, and what runs in it."""

from flatparam_plan.hollow.arena import Log
from flatparam_plan.hollow.blank import Blank, hollow_copy
from flatparam_plan.hollow.compiler import without_compiler
from flatparam_plan.hollow.hollow_memory import HollowMemory
from flatparam_plan.hollow.kernels import Work

__all__ = ["Blank", "HollowMemory", "Log", "Work", "hollow_copy", "without_compiler"]
