"""fairseq2's states, which are this rank's only part of each sharded tensor; its module is made up here."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam_comm.testing import run_processes

NAME = "fairseq2.nn.fsdp.fsdp1"


def wrapped() -> Any:
    torch.manual_seed(0)
    return flatparam.FullyShardedDataParallel(nn.Linear(3, 5), use_orig_params=True)


def local_state(model: Any, config: Any) -> dict[str, torch.Tensor]:
    """As fairseq2's: a rank without a part has nothing."""
    kind = flatparam.StateDictType.SHARDED_STATE_DICT
    flatparam.FullyShardedDataParallel.set_state_dict_type(model, kind, config)
    return {
        name: value.local_tensor() if value.local_shards() else torch.empty(0)
        for name, value in model.state_dict().items()
    }


def parts(ranks: Any) -> None:
    """The parts are FSDP1's chunks, whose concatenation is the tensor; those of any other program are where they were."""
    home: Any = types.ModuleType(NAME)
    with flatparam.install():
        sys.modules[NAME] = home
        from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig

        home.ShardedStateDictConfig = ShardedStateDictConfig
        home.ShardedOptimStateDictConfig = ShardedOptimStateDictConfig
        # It makes the configurations when it has wrapped the model.
        model = wrapped()
        found = local_state(model, home.ShardedStateDictConfig(offload_to_cpu=False))
        torch.manual_seed(0)
        for name, value in nn.Linear(3, 5).state_dict().items():
            assert torch.equal(found[name], value.chunk(ranks.size)[ranks.rank]), name
        assert home.ShardedOptimStateDictConfig().dim_0_chunks
        assert not home.ShardedStateDictConfig(dim_0_chunks=False).dim_0_chunks
        assert not ShardedStateDictConfig().dim_0_chunks
        with pytest.raises(NotImplementedError, match="single local shard"):
            local_state(model, ShardedStateDictConfig())
    assert home.ShardedStateDictConfig is ShardedStateDictConfig


@pytest.mark.processes
def test_fairseq2_gets_chunks() -> None:
    """After `install()` fairseq2's states have FSDP1's chunks, and states of other programs move nothing."""
    run_processes(2, parts)
