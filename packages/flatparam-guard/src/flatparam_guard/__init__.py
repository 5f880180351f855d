"""Failures that travel: a rank that waits for one that has failed, or does something else, knows within seconds.

A layer finds this package by an entry point of `flatparam.guard`, and calls the functions that `flatparam_comm`'s
protocol `Guard` has.
"""

from flatparam_guard.activity import end_of_call, watch_call
from flatparam_guard.process import begin, monitor_of, set_relay, tell_failure
from flatparam_guard.survivors import Survivors, survivors_of

__version__ = "0.1.0"

__all__ = ["Survivors", "begin", "end_of_call", "monitor_of", "set_relay", "survivors_of", "tell_failure", "watch_call"]
