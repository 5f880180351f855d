"""The receiver of published weights: it needs no ranks, and no sharded model."""

from flatparam_state.receiving.receiver import Receiver

__all__ = ["Receiver"]
