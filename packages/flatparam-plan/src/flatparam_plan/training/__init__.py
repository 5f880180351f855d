"""The training program that is planned, and how it is run on its ranks."""

from flatparam_plan.training.lone_rank import Call
from flatparam_plan.training.program import Inputs, Trained, TrainingProgram, Watcher, train, train_step
from flatparam_plan.training.setup import STRATEGIES, Setup

__all__ = ["STRATEGIES", "Call", "Inputs", "Setup", "Trained", "TrainingProgram", "Watcher", "train", "train_step"]
