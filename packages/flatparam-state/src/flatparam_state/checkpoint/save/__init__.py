"""Saving: what each rank contributes and writes, and the commit that makes a checkpoint of it."""

from flatparam_state.checkpoint.save.after_failure import save_after_failure
from flatparam_state.checkpoint.save.commit import Committer
from flatparam_state.checkpoint.save.contribution import Ticket
from flatparam_state.checkpoint.save.optimizer_pieces import optimizers_by_name
from flatparam_state.checkpoint.save.rank_file import RankFileWriter, header_metadata
from flatparam_state.checkpoint.save.report import RankReport
from flatparam_state.checkpoint.save.session import Saver
from flatparam_state.checkpoint.save.subject import Subject

__all__ = [
    "Committer",
    "RankFileWriter",
    "RankReport",
    "Saver",
    "Subject",
    "Ticket",
    "header_metadata",
    "optimizers_by_name",
    "save_after_failure",
]
