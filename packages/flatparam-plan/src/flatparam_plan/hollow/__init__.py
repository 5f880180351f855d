"""Memory that is counted and never touched, and what runs in it."""

from flatparam_plan.hollow.compiler import without_compiler
from flatparam_plan.hollow.kernels import Work
from flatparam_plan.hollow.log import Log
from flatparam_plan.hollow.memory import HollowMemory
from flatparam_plan.hollow.models import Blank, hollow_copy

__all__ = ["Blank", "HollowMemory", "Log", "Work", "hollow_copy", "without_compiler"]
