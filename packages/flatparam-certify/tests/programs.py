"""Small cases that the tests certify engines with."""

import torch
from torch import Tensor, nn

from flatparam_certify import Case


class Model(nn.Module):
    """A norm, two linear layers and three experts, of which each row uses every one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.relu(self.up(self.norm(x))))
        return sum((torch.tanh(expert(hidden)) for expert in self.experts), torch.zeros(()))


def batch(step: int, micro_batch: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: rows as many as two ranks can share."""
    del step, micro_batch, data_rank
    return torch.randn(4, 6), torch.randn(4, 4)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean square error."""
    inputs, targets = batch
    return (model(inputs) - targets).square().mean()


build = Model
CASE = Case(Model, batch, loss)


def rows_of(batch: tuple[Tensor, Tensor], part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return the rows of one of some ranks that share a batch."""
    inputs, targets = (each.chunk(parts)[part] for each in batch)
    return inputs, targets
