"""torch's own loader of an optimizer's state makes chunks for every rank in the world, whatever the strategy is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

from flatparam import FullyShardedDataParallel, ShardingStrategy, StateDictType
from flatparam_comm import Collectives, FlatParamError
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes


def made(strategy: ShardingStrategy, originals: bool) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """A model whose last bias has one row for one rank of the world alone, and its optimizer."""
    torch.manual_seed(0)
    mesh = None
    if strategy is ShardingStrategy.HYBRID_SHARD:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    net = nn.Sequential(nn.Linear(8, 15), nn.Tanh(), nn.Linear(15, 2), nn.Linear(2, 1, bias=False))
    model = FullyShardedDataParallel(net, use_orig_params=originals, sharding_strategy=strategy, device_mesh=mesh)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, seed: int) -> float:
    """The loss of one step on this rank's own batch."""
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * seed + rank))
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def losses(ranks: Collectives, folder: Path, strategy: ShardingStrategy, originals: bool) -> Any:
    """Those after the checkpoint, without a stop and with one."""
    warnings.simplefilter("ignore")
    model, optimizer = made(strategy, originals)
    trained(model, optimizer, ranks.rank, 0)
    of_optimizer = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optim": of_optimizer}, checkpoint_id=folder)
    expected = [trained(model, optimizer, ranks.rank, seed) for seed in (1, 2)]
    model, optimizer = made(strategy, originals)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    loaded = load_sharded_optimizer_state_dict(state["model"], "optim", dcp.FileSystemReader(folder))
    optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, loaded["optim"]))
    return expected, [trained(model, optimizer, ranks.rank, seed) for seed in (1, 2)]


@pytest.mark.parametrize("originals", [False, True])
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (ShardingStrategy.FULL_SHARD, 2),
        (ShardingStrategy.NO_SHARD, 2),
        (ShardingStrategy.HYBRID_SHARD, 4),
    ],
)
def test_training_goes_on(strategy: ShardingStrategy, size: int, originals: bool, tmp_path: Path) -> None:
    """With chunks of the world, which replicas hold together, the losses are those of a run without a stop."""
    for expected, found in run_processes(size, losses, tmp_path, strategy, originals):
        assert found == expected


def refusal(ranks: Collectives) -> str:
    """What this rank is told of a state with a piece on a rank that does not train the model."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard, ShardMetadata

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Linear(8, 4), process_group=pairs[ranks.rank // 2], sharding_strategy=ShardingStrategy.NO_SHARD
    )
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, ranks.rank, 0)
    state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    rows = [ShardMetadata([row, 0], [1, 8], f"rank:{row}/cpu") for row in range(4)]
    state["state"]["weight"]["exp_avg"] = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(torch.ones(1, 8), rows[ranks.rank])],
        ShardedTensorMetadata(rows, torch.Size([4, 8]), TensorProperties(dtype=torch.float32)),
        process_group=dist.group.WORLD,
    )
    with pytest.raises(FlatParamError) as caught:
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
    return str(caught.value)


def test_pieces_on_ranks_that_do_not_train_the_model() -> None:
    """The error says which ranks there are, which one has the piece, and what to do."""
    for rank, message in enumerate(run_processes(4, refusal)):
        assert f"rank:{2 if rank < 2 else 0}/cpu" in message
        assert str([0, 1] if rank < 2 else [2, 3]) in message
        assert "load a full state" in message
