"""The buffers of a sharded module: their dtype, and the same values on every rank."""

from __future__ import annotations

from typing import Any

import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_comm import Collectives, SingleCollectives
from flatparam_comm.testing import rectangle
from flatparam_runtime import summon_full_params

from .models import WIDTH, batch
from .worlds import run, sharded

HALF = torch.bfloat16


class Buffered(nn.Module):
    """A layer, buffers in it and beside it, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layer.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.layer(x) + self.layer.shift) * self.scale
        return out


def some(name: str, buffer: Tensor) -> torch.dtype | None:
    assert isinstance(buffer, Tensor)
    return HALF if name == "scale" else None


@each_row(
    ("policy", "cast"),
    [(HALF, {"scale", "layer.shift"}), (some, {"scale"}), (None, set())],
    ids=["all", "some", "none"],
)
def test_buffers(policy: Any, cast: set[str]) -> None:
    """Floating-point buffers have the dtype of the policy in training, and their own dtype in evaluation."""
    module = sharded(Buffered, SingleCollectives(), buffer_dtype=policy, full_precision_in_eval=True)
    for training in (True, False, True):
        module.train(training)(batch())
        found = {name for name, buffer in module.named_buffers() if buffer.dtype == HALF}
        assert found == (cast if training else set())
        assert module.count.dtype == torch.int64


def test_buffers_in_summoned_parameters() -> None:
    """Inside ``summon_full_params`` a module computes with its buffers in their own dtype, too."""
    module = sharded(Buffered, SingleCollectives(), buffer_dtype=HALF)
    module(batch())
    assert module.scale.dtype == HALF
    with summon_full_params(module), torch.no_grad():
        module(batch())
        assert module.scale.dtype == torch.float32


@each_row("broadcast", [True, False])
@each_row("shards", [1, 2, 4])
def test_broadcast(broadcast: bool, shards: int) -> None:
    """If the plan says so, each training forward begins with rank 0's buffers, and an evaluation with the rank's own."""

    def steps(world: Collectives) -> list[tuple[float, int]]:
        where = rectangle(world, shards)
        module = sharded(Buffered, where, units=["layer"], broadcast_buffers=broadcast)
        found = []
        for training in (True, False, True):
            module.scale.fill_(world.rank + 1.0)
            module.count.fill_(world.rank)
            module.train(training)(batch())
            found.append((float(module.scale), int(module.count)))
        return found

    for rank, found in enumerate(run(4, steps)):
        own = (rank + 1.0, rank)
        given = (1.0, 0) if broadcast else own
        assert found == [given, own, given]
