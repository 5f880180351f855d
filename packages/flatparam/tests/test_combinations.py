"""Everything at once: strategies, offloading, exposures, frozen and ignored parts, and what programs do between steps."""

from typing import Any

import pytest
import torch
from torch import nn

from flatparam import BackwardPrefetch, CPUOffload, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives

from .models import Block
from .worlds import assert_same_state, node_groups, on_ranks, total

PER_NODE = 2
POLICIES: dict[str, Any] = {
    "whole": None,
    "blocks": ModuleWrapPolicy({Block}),
    "pieces": ModuleWrapPolicy({nn.LayerNorm, nn.Sequential}),  # attention is the root's
}
IN_ROOT = {"whole": "", "blocks": "nothing", "pieces": "attention"}
"""Which part of a name the parameters of the root have."""


class Stack(nn.Module):
    """Blocks of which one is frozen and one left out of sharding, around a branch that not every step takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.frozen, self.branch, self.left, self.last = (Block() for _ in range(5))
        self.frozen.requires_grad_(False)
        self.left.requires_grad_(False)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = self.left(self.frozen(self.first(x)))
        return self.last(self.branch(x) if branch else x).square().mean()


def batch(step: int, part: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def between(model: FSDP, step: int) -> None:
    """What programs do between two steps; nothing of it may change what comes next."""
    if step == 0:
        with torch.no_grad():
            model.eval()(batch(9, 0, 0), branch=True)
        model.train()
    elif step == 1:
        model.load_state_dict(model.state_dict())
    elif step == 2:
        with FSDP.summon_full_params(model, with_grads=True):
            assert all(parameter.dim() for parameter in model.parameters())


@pytest.mark.pairs("strategy", "policy")
@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")
@pytest.mark.parametrize(("policy", "offload"), [("whole", False), ("blocks", True), ("pieces", False)])
@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda strategy: strategy.name)
def test_training(strategy: ShardingStrategy, policy: str, offload: bool, use_orig_params: bool) -> None:
    """Four accumulated steps of SGD with momentum have the bits of local gradients, added up node by node.

    The fourth step does not take the branch: its parameters have no gradient in any rank then.
    """
    hybrid = "HYBRID" in strategy.name

    def rank(world: Collectives) -> Any:
        module = Stack()
        model = FSDP(
            module,
            node_groups(world, PER_NODE) if hybrid else None,
            strategy,
            CPUOffload(offload),
            POLICIES[policy],
            BackwardPrefetch.BACKWARD_POST if offload else BackwardPrefetch.BACKWARD_PRE,
            forward_prefetch=not offload,
            use_orig_params=use_orig_params,
            ignored_modules=[module.left],
        )
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            with model.no_sync():
                model(batch(step, 0, world.rank), branch=step < 3).backward()
            model(batch(step, 1, world.rank), branch=step < 3).backward()
            optimizer.step()
            between(model, step)
        return model.state_dict()

    ranks = 4 if hybrid else 2
    expected = local(ranks, PER_NODE, zeros_in="nothing" if use_orig_params else IN_ROOT[policy])
    for state in on_ranks(ranks, rank):
        assert_same_state(state, expected)


def local(ranks: int, per_node: int, *, zeros_in: str) -> dict[str, Any]:
    """The unwrapped model on gradients that are summed over each node, then over the nodes, and divided.

    Args:
        zeros_in: part of the names of those parameters that share a flat parameter with used ones: where they are not
            used, they have a gradient of zeros.
    """
    model = Stack()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    trained = list(named.values())
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    for step in range(4):
        nodes = []
        for first in range(0, ranks, per_node):
            of_node = [gradients(model, trained, step, rank) for rank in range(first, first + per_node)]
            nodes.append([total(values) for values in zip(*of_node, strict=True)])
        for (name, parameter), values in zip(named.items(), zip(*nodes, strict=True), strict=True):
            found = total(values)
            if found is None and zeros_in in name:
                found = torch.zeros_like(parameter)
            parameter.grad = None if found is None else found / ranks
        optimizer.step()
    return model.state_dict()


def gradients(model: nn.Module, trained: list[nn.Parameter], step: int, rank: int) -> list[Any]:
    model.zero_grad()
    for part in range(2):
        model(batch(step, part, rank), branch=step < 3).backward()
    return [parameter.grad for parameter in trained]
