"""Sequences that ranks share: attention over all parts, and gradients of one process, whatever the parts' lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import fully_shard
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, ProcessGroupCollectives
from flatparam_comm.testing import run_processes
from flatparam_runtime import summon_full_params
from integration_tests.meshes.llama import Gathered

pytestmark = pytest.mark.processes

WIDTH, TOKENS, DATA = 8, 11, 2


class Attention(nn.Module):
    """Attention whose keys and values come from all ranks that share the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shared: tuple[Any, Sequence[int]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).chunk(3, dim=-1)
        if self.shared is not None:
            key, value = (Gathered.apply(each, *self.shared) for each in (key, value))
        return x + self.out(torch.softmax(query @ key.transpose(1, 2), dim=-1) @ value)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention(), nn.Linear(WIDTH, 3))


def batch(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, TOKENS, WIDTH, generator=generator), torch.randint(0, 3, (1, TOKENS), generator=generator)


def summed(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), target.flatten(), reduction="sum")


def shared(ranks: Collectives, sizes: Sequence[int], door: str) -> float:
    """Return the largest error of a gradient after one step on this rank's part of a sequence."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (DATA, len(sizes)), mesh_dim_names=("dp", "cp"))
    data, part = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
    model: Any = build()
    for module in model[:2]:
        module.shared = mesh["cp"].get_group(), sizes
    # The ranks that share a sequence hold shards like all others: one group of all of them.
    everyone = ProcessGroupCollectives(dist.group.WORLD)
    if door == "wrapper":
        model = FSDP(model, everyone, auto_wrap_policy=ModuleWrapPolicy({Attention}), use_orig_params=True)
    else:
        for module in (*model[:2], model):
            fully_shard(module, mesh=everyone)
    # The sum over parts of a sequence is no mean: it is divided by the number of sequences alone. As in FSDP2, a module
    # of `fully_shard` is asked for itself.
    for module in (model,) if door == "wrapper" else (*model[:2], model):
        module.set_gradient_divide_factor(float(DATA))
    x, target = (each.split([*sizes], dim=1)[part] for each in batch(data))
    (summed(model, x, target) / TOKENS).backward()
    alone = build()
    for rank in range(DATA):
        (summed(alone, *batch(rank)) / TOKENS / DATA).backward()
    with summon_full_params(model, with_grads=True):
        named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
        errors = [float((named[name].grad - each.grad).abs().max()) for name, each in alone.named_parameters()]
    return max(errors)


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("sizes", [[11], [6, 5], [9, 2]], ids=str)
def test_gradients_are_those_of_one_process(sizes: list[int], door: str) -> None:
    """Over two sequences, each on one rank or on two, in parts of any length: every gradient."""
    for error in run_processes(DATA * len(sizes), shared, sizes, door):
        assert error < 2e-7
