"""Optimizers over a wrapper's original parameters step neighbours as one tensor: files and casts in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import tensors_stepped

from ..models import mlp, seeded
from ..worlds import assert_same_state, inputs, on_ranks, train, train_on_mean


def adamw(model: nn.Module) -> optim.Optimizer:
    """Decay for weights, none for biases."""
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    groups: list[dict[str, Any]] = [
        {"params": weights, "weight_decay": 0.1},
        {"params": biases, "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, lr=0.1)


def steps_in_double(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
    """Two steps of the model and its state in float64, and back."""
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        for state in optimizer.state.values():
            state.update({name: value.to(dtype) for name, value in state.items() if name != "step"})
        if dtype is torch.float64:
            train(model, optimizer, [x.double()] * 2)


def test_a_model_that_is_cast_between_steps() -> None:
    """After steps in float64 the parameters and their state have the plain optimizer's bits, in as few tensors."""
    model, plain = FSDP(seeded(mlp), SingleCollectives(), use_orig_params=True), seeded(mlp)
    optimizers = [adamw(model), adamw(plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        train(each, optimizer, inputs(0, 2))
        steps_in_double(each, optimizer, inputs(0)[0])
        train(each, optimizer, inputs(0, 3))
    assert_same_state(model.state_dict(), plain.state_dict())
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for found, wanted in zip(states[0].values(), states[1].values(), strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name].flatten(), value.flatten()) for name, value in wanted.items())
    assert tensors_stepped(optimizers[0]) == 2


def test_optimizer_state_and_checkpoints(tmp_path: Path) -> None:
    """Saved after flat steps by name and in a checkpoint, loaded into new models: they go on in the same bits."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
        optimizer = adamw(model)
        train(model, optimizer, inputs(ranks.rank, 2))
        Checkpointer(tmp_path, model, optimizer, ranks=ranks).save(1)
        state = FSDP.optim_state_dict(model, optimizer)
        finals = []
        for by_name in (False, True):
            other = FSDP(seeded(mlp), use_orig_params=True)
            resumed = adamw(other)
            if by_name:
                other.load_state_dict(model.state_dict())
                resumed.load_state_dict(FSDP.optim_state_dict_to_load(other, resumed, state))
            else:
                Checkpointer(tmp_path, other, resumed, ranks=ranks).load()
            train(other, resumed, inputs(ranks.rank)[2:])
            assert tensors_stepped(resumed) == sum(
                any(p.numel() for p in group["params"]) for group in resumed.param_groups
            )
            finals.append(other.state_dict())
        return finals

    plain = seeded(mlp)
    train_on_mean(plain, adamw(plain), 2)
    for finals in on_ranks(2, rank):
        for final in finals:
            assert_same_state(final, plain.state_dict())
