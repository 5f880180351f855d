"""A fault on one rank of a sharded model, over gloo: every other rank is told who failed, where and why."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives, PeerError, ProcessGroupCollectives, RankError, shared_memory
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes

#: Seconds that the rank that waits has to tell, on however busy a machine.
PATIENCE = 60.0
FORWARD = "rank 1 failed first in forward pass of unit 'inner' after 2 optimizer steps with ValueError: a bug"
BACKWARD = "rank 1 failed first in backward pass after 2 optimizer steps with ValueError: a bug"
BARE = "rank 1 failed first after 2 optimizer steps with ValueError: a bug"


class Inner(nn.Module):
    """A unit with a fault in its forward or backward, in the step that `arm` begins."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fault = ""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """One linear layer, and the fault."""
        if self.fault == "forward":
            raise ValueError("a bug")
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "exit":
            sys.exit(3)
        output: torch.Tensor = self.linear(value)
        if self.fault == "backward":
            output.register_hook(_raise)  # type: ignore[no-untyped-call]  # torch does not annotate it
        return output

    def arm(self, fault: str) -> None:
        """Have the next step fail."""
        self.fault = fault
        if fault == "hook":
            self.register_forward_pre_hook(_raise)
        if fault == "state_dict":
            self.register_state_dict_post_hook(_raise)  # type: ignore[no-untyped-call]  # the same


class Outer(nn.Module):
    """Three units, one inside the outermost one that fails, and one after it that the other ranks wait for."""

    def __init__(self, faulty: Inner, collectives: Collectives) -> None:
        super().__init__()
        self.inner = FullyShardedDataParallel(faulty, collectives)
        self.last = FullyShardedDataParallel(nn.Linear(4, 4), collectives)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """One unit after the other."""
        output: torch.Tensor = self.last(self.inner(value))
        return output


class Faulty(torch.optim.SGD):
    """An optimizer whose step raises, if it is told to."""

    fault = ""

    def step(self, closure: Any = None) -> None:
        """A step, or the fault."""
        if self.fault == "step":
            _raise()
        super().step(closure)


def _raise(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("a bug")


def _train(comm: ProcessGroupCollectives, directory: str, fault: str, lives: bool, through: str) -> None:
    torch.manual_seed(0)
    faulty = Inner()
    collectives = shared_memory(comm) if through == "shared memory" else comm
    model = FullyShardedDataParallel(Outer(faulty, collectives), collectives)
    optimizer = Faulty(model.parameters(), lr=0.1)
    told = Path(directory, f"rank-{comm.rank}")
    try:
        for step in range(4):
            if step == 2 and comm.rank == 1:
                faulty.arm(fault)
                optimizer.fault = fault
            output = model(torch.ones(2, 4))
            loss = output.sum()
            if optimizer.fault == "loss":
                loss.register_hook(_raise)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            model.state_dict()
    except PeerError as error:
        told.write_text(f"{error.rank}|{error}")
        raise
    except ValueError as error:
        # The exception of the failing rank is its own, unchanged.
        told.write_text(f"{error}|{error.__cause__}")
        if not lives:
            raise
        # Issue nothing, as a notebook does whose user is reading the exception.
        while not Path(directory, "rank-0").exists():
            time.sleep(0.05)


@pytest.mark.parametrize("through", ["gloo", "shared memory"])
@pytest.mark.parametrize(
    ("fault", "lives", "cause"),
    [
        ("forward", True, FORWARD),
        ("forward", False, FORWARD),
        ("hook", True, FORWARD),
        ("backward", True, BACKWARD),
        ("backward", False, BACKWARD),
        ("loss", True, BACKWARD),
        ("loss", False, BACKWARD),
        ("step", True, "rank 1 failed first in step of Faulty after 2 optimizer steps with "),
        ("step", False, BARE),
        (
            "state_dict",
            True,
            "rank 1 failed first in state_dict(), summon_full_params() or loading, at unit ",
        ),
        ("kill", False, "rank 1 failed first with the end of its process: process "),
        ("exit", False, "rank 1 failed first "),
    ],
)
def test_the_other_ranks_are_told(tmp_path: Path, fault: str, lives: bool, cause: str, through: str) -> None:
    """Whatever fails on rank 1, the other rank raises PeerError with the rank and the cause, whether rank 1 lives on."""
    with pytest.raises(RankError):
        run_processes(2, _train, str(tmp_path), fault, lives, through, grace=PATIENCE)
    culprit, told = (tmp_path / "rank-0").read_text().split("|")
    assert culprit == "1"
    assert cause in told
    if fault == "kill":
        # What a dead process has left in the memory that its host shares.
        assert re.search(r"; its last collective was [a-z_]+ '[^']+', after 2 optimizer steps", told), told
    if fault not in ("kill", "exit"):
        assert (tmp_path / "rank-1").read_text() == "a bug|None"
