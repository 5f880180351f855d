"""A model of a norm and two linear layers, over two ranks of tensor parallelism."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flatparam

WIDTH = 4


class Net(nn.Module):
    """Under sequence parallelism each rank has half of the sequence, dimension 1, at the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH)),
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.norm(x)) * self.scale


def mesh_of(*shape: int) -> Any:
    """Return a mesh of (data, tensor)."""
    logging.disable(logging.WARNING)  # torch warns that it could do with fewer collectives
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))


def parallel(mesh: Any) -> Net:
    """Return the model of seed 0 over `mesh`; `scale` stays a plain parameter."""
    torch.manual_seed(0)
    net = Net()
    plan = {
        "norm": SequenceParallel(),
        "body": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "body.0": ColwiseParallel(),
        "body.2": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh["tensor"], plan)
    return net


def inputs(rank: int) -> Tensor:
    """The batch of a data-parallel rank: two sequences of four."""
    return torch.arange(32.0).view(2, 4, WIDTH).add(rank).sin()


def wrapped(mesh: Any, **arguments: Any) -> Any:
    """Return the model in one unit, by the wrapper."""
    arguments = {"device_id": torch.device("cpu"), "use_orig_params": True, **arguments}
    return flatparam.FullyShardedDataParallel(parallel(mesh), device_mesh=mesh["data"], **arguments)
