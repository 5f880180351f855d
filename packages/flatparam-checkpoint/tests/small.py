"""A run so small that it can be killed hundreds of times: one process, no autograd, no units."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatparam_checkpoint import Checkpointer
from flatparam_comm import SingleCollectives
from flatparam_files import Moment

ALONE = SingleCollectives()


class SmallRun:
    """A model, an optimizer, and random numbers that a resumed run must continue."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.model = nn.Linear(5, 3)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.generator = torch.Generator().manual_seed(1)
        self.step = 0
        self.checkpointer = Checkpointer(root, self.model, self.optimizer, ranks=ALONE, **options)

    def resume(self) -> int:
        """Load the latest checkpoint, if there is one; returns the step."""
        loaded = self.checkpointer.load()
        if loaded is not None:
            self.step = loaded.step
            self.generator.set_state(loaded.rank_extra["generator"])
            assert loaded.extra == {"step": self.step}
        return self.step

    def train(self, steps: int, every: int = 5) -> None:
        """Go on to `steps`, saving every few."""
        while self.step < steps:
            for parameter in self.model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=self.generator)
            self.optimizer.step()
            self.step += 1
            if self.step % every == 0:
                self.save()

    def save(self) -> Path | None:
        """As the checkpoint of the step."""
        return self.checkpointer.save(
            self.step, extra={"step": self.step}, rank_extra={"generator": self.generator.get_state()}
        )

    def state(self) -> list[torch.Tensor]:
        """All numbers."""
        states = [values[name] for values in self.optimizer.state.values() for name in sorted(values)]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *states, self.generator.get_state())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether all numbers are equal, bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class KillAt:
    """Kills this process at the `count`-th time that `moment` comes, once it is `armed`."""

    def __init__(self, moment: Moment, count: int = 1, *, armed: bool = True) -> None:
        self.moment, self.left, self.armed = moment, count, armed

    def __call__(self, moment: Moment) -> None:
        if self.armed and moment is self.moment:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
