"""Work in the background: a thread, and the save that goes on in one."""

from flatparam_checkpoint.save.background.saving import BackgroundSave
from flatparam_checkpoint.save.background.thread import Background

__all__ = ["Background", "BackgroundSave"]
