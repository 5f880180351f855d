"""A last checkpoint after a rank has failed: every process lives, and none issues a collective any more."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives, CommError, ProcessGroupCollectives, RankError, shared_memory
from flatparam_comm.testing import run_processes
from flatparam_state import Checkpointer, ShardedEMA, open_checkpoint

pytestmark = pytest.mark.processes

PATIENCE = 60.0
#: The step that fails; as many are complete.
FAILS = 3


class Block(nn.Module):
    """A unit whose forward raises if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.is_faulty = False

    def forward(self, value: Tensor) -> Tensor:
        """A linear layer, or the fault."""
        if self.is_faulty:
            raise ValueError("a bug")
        output: Tensor = self.linear(value)
        return output


class Faulty(torch.optim.AdamW):
    """An optimizer whose step raises when it has begun, if it is told to."""

    is_faulty = False

    def step(self, closure: Any = None) -> None:
        """A step, or the fault."""
        if self.is_faulty:
            raise ValueError("a bug")
        super().step(closure)


def blocks() -> nn.Sequential:
    """The model that both a sharded and a plain run begin with."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def batch(rank: int, step: int) -> Tensor:
    """The inputs of a rank in a step."""
    return torch.full((3, 8), 1.0 + rank + step)


def _train(comm: ProcessGroupCollectives, directory: str, fault: str, through: str, original: bool) -> str:
    collectives: Collectives = shared_memory(comm) if through == "shared memory" else comm
    plain = blocks()
    for index, block in enumerate(plain):
        plain[index] = FullyShardedDataParallel(block, collectives, use_orig_params=original, forward_prefetch=True)
    model = FullyShardedDataParallel(plain, collectives, use_orig_params=original, forward_prefetch=True)
    optimizer: Any = Faulty(model.parameters(), lr=0.1)
    if fault == "before a compiled step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step = torch.compile(optimizer.step, backend="eager")
    # One rank trains something else beside it.
    has_other = comm.rank == 0 and fault != "before a step by hand"
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1) if has_other else None
    averages = ShardedEMA(model, 0.9) if fault == "before the average" else None
    checkpointer = Checkpointer(Path(directory, "run"), model, optimizer, averages=averages, ranks=collectives)
    step = 0
    try:
        for step in range(FAILS + 3):
            if step == FAILS and comm.rank == 1:
                if fault == "forward":
                    plain[1].module.is_faulty = True
                if fault == "step":
                    optimizer.is_faulty = True
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            loss = model(batch(comm.rank, step)).square().mean()
            if fault in ("between", "uncaught") and step == FAILS and comm.rank == 1:
                raise ValueError("a bug")
            loss.backward()
            if fault.startswith("before") and fault != "before the average" and step == FAILS and comm.rank == 1:
                raise ValueError("a bug")
            if fault == "before a step by hand":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(0.1)
            else:
                optimizer.step()
            optimizer.zero_grad()
            if other is not None:
                other.step()
            if fault == "before the average" and step == FAILS and comm.rank == 1:
                raise ValueError("a bug")
            if averages is not None:
                averages.update()
    except (ValueError, CommError) as error:
        if fault == "uncaught" and comm.rank == 1:
            raise
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            began = time.monotonic()
            saved = checkpointer.save_last(step, extra={"error": str(error)}, seconds=PATIENCE)
        told = str(caught[0].message) if caught else f"{saved}"
        Path(directory, f"rank-{comm.rank}").write_text(f"{time.monotonic() - began:.0f}|{told}")
        return told
    raise AssertionError("the fault has not come")


def in_one_process() -> dict[str, Tensor]:
    """The parameters after the complete steps, on the mean of the ranks' losses."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(FAILS):
        for rank in range(2):
            (model(batch(rank, step)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("through", "original"), [("gloo", False), ("shared memory", True)])
@pytest.mark.parametrize("fault", ["forward", "between"])
def test_what_all_ranks_have_completed_is_saved(tmp_path: Path, fault: str, through: str, original: bool) -> None:
    """An exception of one rank, whose process lives, costs no step: what is saved equals one process's, to the bit."""
    told = run_processes(2, _train, str(tmp_path), fault, through, original, grace=PATIENCE)
    path = tmp_path / "run" / f"step-{FAILS:08}"
    assert told == [str(path)] * 2
    with open_checkpoint(path) as checkpoint:
        for name, expected in in_one_process().items():
            assert torch.equal(checkpoint.load(f"model/{name}"), expected), name
        assert checkpoint.values["extra"]["error"].startswith("rank 0: ")


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("step", "rank 1: its exception came out of an optimizer's step"),
        ("before the step", "rank 0 has done 4 optimizer steps, and rank 1 3: their parts of the model are"),
        ("before a compiled step", "rank 0 has done 4 optimizer steps, and rank 1 3: their parts of the model are"),
        ("before a step by hand", "rank 0: its parameters have changed, and no optimizer has stepped"),
        ("before the average", "rank 0 has updated its averages [4] times, and rank 1 [3] times: their parts of"),
    ],
)
def test_parts_of_different_moments_are_not_saved(tmp_path: Path, fault: str, reason: str) -> None:
    """If a rank has stepped or averaged further, or in part, every rank is warned that nothing was saved; it was not."""
    told = run_processes(2, _train, str(tmp_path), fault, "gloo", True, grace=PATIENCE)
    assert all(each.startswith(f"no last checkpoint was saved: {reason}") for each in told), told
    assert not [*(tmp_path / "run").glob("step-*")]


@pytest.mark.parametrize(("fault", "through"), [("kill", "shared memory"), ("uncaught", "gloo")])
def test_a_rank_that_cannot_come_is_not_waited_for(tmp_path: Path, fault: str, through: str) -> None:
    """If the process of a rank has ended, the other one is warned at once, with the rank and how it ended."""
    with pytest.raises(RankError):
        run_processes(2, _train, str(tmp_path), fault, through, False, grace=PATIENCE)
    seconds, told = (tmp_path / "rank-0").read_text().split("|")
    assert "rank 1 cannot come: it has failed" in told
    # Without the news of its end, the whole patience would pass.
    assert float(seconds) < PATIENCE / 2
    assert not [*(tmp_path / "run").glob("step-*")]
