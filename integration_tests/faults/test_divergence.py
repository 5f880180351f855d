"""One rank of a sharded model does something that the others do not: an error on every rank, soon, and no dead process."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel, StateDictType
from flatparam_comm import (
    CommError,
    ProcessGroupCollectives,
    RankError,
    shared_memory,
)
from flatparam_comm.testing import PATIENCE, run_processes
from flatparam_runtime import DivergenceError

pytestmark = pytest.mark.processes

WIDTHS = (8, 64, 16, 32)


class Skipping(nn.Sequential):
    """Blocks of different sizes, which a rank may call in another order, or leave out."""

    order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The mean square of each block's output, on a part of the first input, in this order."""
        total = value.new_zeros(())
        for number in self.order:
            output = self[number](value[:, : WIDTHS[number]].to(next(self[number].parameters()).dtype))
            total = total + output.float().square().mean()
        return total


class Program:
    """A model of several units, and a step that can be done in other ways."""

    def __init__(self, collectives: Any, use_orig_params: bool) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"process_group": collectives, "use_orig_params": use_orig_params}
        blocks = [FullyShardedDataParallel(nn.Linear(width, width), **options) for width in WIDTHS]
        self.inner = Skipping(*blocks)
        self.model = FullyShardedDataParallel(self.inner, **options)

    def step(self, *, backward: bool = True, synchronised: bool = True) -> None:
        """One step of training."""
        with nullcontext() if synchronised else self.model.no_sync():
            loss = self.model(torch.ones(2, max(WIDTHS)))
            if backward:
                loss.backward()
        self.model.zero_grad()

    def diverge(self, how: str) -> None:
        """Do something that the other rank does not."""
        if how == "a unit is left out":
            self.inner.order = (0, 2, 3)
        elif how == "another order":
            self.inner.order = (0, 2, 1, 3)
        elif how == "cast":
            self.inner[1].to(torch.bfloat16)
        elif how == "backward is left out":
            self.step(backward=False)
        elif how == "no_sync":
            self.step(synchronised=False)
        elif how == "a state dict":
            with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):
                self.model.state_dict()
        elif how == "a step more":
            self.step()
        elif how == "an evaluation":
            with torch.no_grad():
                self.model(torch.ones(2, max(WIDTHS)))
        elif how == "frozen":
            for parameter in list(self.inner)[1].parameters():
                parameter.requires_grad_(False)
        elif how == "interrupted":
            try:
                loss = self.model(torch.ones(2, max(WIDTHS)))
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                del loss
        else:
            raise AssertionError(how)


def _train(
    comm: ProcessGroupCollectives, directory: str, how: str, through: str, use_orig_params: bool
) -> None:
    collectives = shared_memory(comm) if through == "shared memory" else comm
    program = Program(collectives, use_orig_params)
    for _ in range(3):
        program.step()
    parted = time.monotonic()
    try:
        if comm.rank == 1:
            program.diverge(how)
        for _ in range(6):
            program.step()
        collectives.barrier()
    except (CommError, DivergenceError) as error:
        took = time.monotonic() - parted
        Path(directory, f"rank-{comm.rank}").write_text(f"{type(error).__name__}|{took}|{error}")
        raise


DIVERGENCES = [
    "a unit is left out",
    "another order",
    "cast",
    "backward is left out",
    "no_sync",
    "a state dict",
    "a step more",
    "an evaluation",
    "frozen",
    "interrupted",
]


@pytest.mark.parametrize(
    "use_orig_params",
    [pytest.param(False, id="flat"), pytest.param(True, id="originals", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("through", ["gloo", "shared memory"])
@pytest.mark.parametrize("how", DIVERGENCES)
def test_every_rank_is_told(tmp_path: Path, how: str, through: str, use_orig_params: bool) -> None:
    """No rank waits for the timeout or is ended by gloo; each raises an error about what the ranks do differently."""
    with pytest.raises(RankError) as raised:
        run_processes(2, _train, str(tmp_path), how, through, use_orig_params)
    assert type(raised.value) is RankError, raised.value
    told = [(tmp_path / f"rank-{rank}").read_text().split("|") for rank in range(2)]
    for kind, took, text in told:
        assert kind in ("MismatchError", "DivergenceError", "PeerError"), text
        # The bound is two seconds on a quiet machine; without the guards it is the process group's timeout.
        assert float(took) < PATIENCE, text
    assert {"MismatchError", "DivergenceError"} & {kind for kind, _, _ in told}, told
