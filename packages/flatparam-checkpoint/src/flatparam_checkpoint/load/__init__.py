"""Loading: what this rank needs is read and verified first, and installed once all ranks have agreed."""

from flatparam_checkpoint.load.loaded import Loaded
from flatparam_checkpoint.load.session import load_checkpoint

__all__ = [
    "Loaded",
    "load_checkpoint",
]
