"""Run a program with accelerate's FSDP on the CPU, where accelerate would choose DDP: `on_cpu.py program.py ...`.

It changes what accelerate finds out about the machine, and nothing of FSDP.
"""

import runpy
import sys
from typing import Any

import torch
from accelerate import state
from accelerate.utils import DistributedType

MADE = state.AcceleratorState.__init__


def made_for_fsdp(self: Any, *args: Any, **kwargs: Any) -> None:
    """As accelerate makes its state on a machine with accelerators."""
    MADE(self, *args, **kwargs)
    for shared in (state.PartialState._shared_state, state.AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
        shared["device"] = torch.device("cpu")
    if kwargs.get("fsdp_plugin") is not None:
        self.fsdp_plugin = kwargs["fsdp_plugin"]


state.AcceleratorState.__init__ = made_for_fsdp
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
