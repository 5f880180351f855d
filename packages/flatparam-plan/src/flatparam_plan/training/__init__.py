"""The training program that is planned, and how it is run on its ranks."""

from flatparam_plan.errors import PlanError
from flatparam_plan.training.inputs import Inputs
from flatparam_plan.training.program import TrainingProgram
from flatparam_plan.training.ranks import Call
from flatparam_plan.training.running import Trained, Watcher, train, train_step
from flatparam_plan.training.setup import STRATEGIES, Setup

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
