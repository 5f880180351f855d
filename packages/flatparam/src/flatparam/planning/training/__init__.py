"""The training program that is planned, and how it is run on its ranks."""

from flatparam.planning.errors import PlanError
from flatparam.planning.training.inputs import Inputs
from flatparam.planning.training.program import TrainingProgram
from flatparam.planning.training.ranks import Call
from flatparam.planning.training.running import Trained, Watcher, train, train_step
from flatparam.planning.training.setup import STRATEGIES, Setup

__all__ = [
    "STRATEGIES",
    "Call",
    "Inputs",
    "PlanError",
    "Setup",
    "Trained",
    "TrainingProgram",
    "Watcher",
    "train",
    "train_step",
]
