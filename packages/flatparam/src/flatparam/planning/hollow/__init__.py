"""Memory that is counted and never touched, and what runs in it."""

from flatparam.planning.hollow.compiler import without_compiler
from flatparam.planning.hollow.kernels import Work
from flatparam.planning.hollow.log import Log
from flatparam.planning.hollow.memory import HollowMemory
from flatparam.planning.hollow.models import Blank, hollow_copy

__all__ = ["Blank", "HollowMemory", "Log", "Work", "hollow_copy", "without_compiler"]
