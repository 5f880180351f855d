"""A small model like Mixtral: each rank of expert parallelism has other experts, and tokens travel to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from integration_tests.meshes.llama import VOCABULARY, WIDTH, RMSNorm

EXPERTS = 4


class Copied(torch.autograd.Function):
    """Tokens of which each rank of a group computes a part: what all ranks have found is the gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _summed(gradient, ctx.group), None


class Summed(torch.autograd.Function):
    """The sum of what the ranks of a group have computed of the same tokens."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return _summed(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def _summed(part: Tensor, group: Any) -> Tensor:
    summed = part.contiguous().clone()
    dist.all_reduce(summed, group=group)
    return summed


class Experts(nn.Module):
    """Some of the experts, beginning with number `first`; each is an MLP, and gets the tokens that chose it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.shared: Any = None
        """The group whose ranks have each a part of every expert here."""
        self.up = nn.Parameter(torch.empty(count, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.empty(count, 2 * WIDTH, WIDTH))

    def reset_parameters(self, first: int) -> None:
        for number in range(self.up.shape[0]):
            generator = torch.Generator().manual_seed(100 + first + number)
            with torch.no_grad():
                self.up[number].copy_(torch.randn(WIDTH, 2 * WIDTH, generator=generator) / 4)
                self.down[number].copy_(torch.randn(2 * WIDTH, WIDTH, generator=generator) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Return what expert `chosen[i]` of these makes of `tokens[i]`; no token at all is fine."""
        # Modules may see DTensors.
        up, down = (w.to_local() if hasattr(w, "to_local") else w for w in (self.up, self.down))
        if self.shared is not None:
            tokens = Copied.apply(tokens, self.shared)
        found = torch.zeros_like(tokens)
        for number in range(up.shape[0]):
            mine = (chosen == number).unsqueeze(-1)
            found = found + torch.where(mine, F.silu(tokens @ up[number]) @ down[number], 0.0)
        return found if self.shared is None else Summed.apply(found, self.shared)


class MoE(nn.Module):
    """Each token goes to its best expert, which may be on another rank of `group`; None: all are here."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.experts = Experts(EXPERTS // self.ranks)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        if self.ranks == 1:
            found = self.experts(tokens, expert)
        else:
            found = self._elsewhere(tokens, expert)
        return (found * weight.unsqueeze(-1)).view_as(x)

    def _elsewhere(self, tokens: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort(stable=True)
        here = EXPERTS // self.ranks
        send = torch.bincount(expert // here, minlength=self.ranks)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        numbers = torch.empty(int(receive.sum()), dtype=torch.int64)
        sizes = receive.tolist(), send.tolist()
        dist.all_to_all_single(numbers, expert[order] % here, *sizes, group=self.group)
        arrived = all_to_all_single_autograd(tokens[order], *sizes, self.group)
        returned = all_to_all_single_autograd(self.experts(arrived, numbers), *reversed(sizes), self.group)
        return torch.empty_like(returned).index_copy(0, order, returned)


class Mixtral(nn.Module):
    """Embedding, one block of experts behind a norm, head."""

    def __init__(self, group: Any = None, *, idle: bool = False) -> None:
        """Make a model; with `idle`, every token chooses the first expert at first, so that most ranks get none."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm, self.moe, self.output = RMSNorm(), MoE(group), nn.Linear(WIDTH, VOCABULARY, bias=False)
        rank = 0 if group is None else dist.get_rank(group)
        self.moe.experts.reset_parameters(rank * EXPERTS // self.moe.ranks)
        if idle:
            nn.init.zeros_(self.moe.router.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.output(x + self.moe(self.norm(x)))
