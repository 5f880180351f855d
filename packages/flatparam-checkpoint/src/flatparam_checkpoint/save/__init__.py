"""Saving by ranks: what each contributes, and how all agree that it is a checkpoint."""

from flatparam_checkpoint.save.after_failure import save_after_failure
from flatparam_checkpoint.save.optimizer_pieces import optimizers_by_name
from flatparam_checkpoint.save.session import Saver
from flatparam_checkpoint.save.subject import Subject

__all__ = [
    "Saver",
    "Subject",
    "optimizers_by_name",
    "save_after_failure",
]
