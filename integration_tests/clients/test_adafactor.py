"""The Adafactor of transformers beside ours over shards: the same numbers, and each other's state."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import OptimStateKeyType
from flatparam.optim import TransformersAdafactor
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads

if importlib.util.find_spec("transformers") is None:
    pytest.skip("it takes transformers", allow_module_level=True)
from transformers.optimization import Adafactor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "warm-up": {"warmup_init": True},
    "fixed rate": {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
    "first moments": {"beta1": 0.9, "weight_decay": 0.1, "clip_threshold": 0.5},
}


def build(dtype: torch.dtype) -> nn.Module:
    """Matrices, vectors, a convolution, and a row that no gradient reaches."""
    torch.manual_seed(0)
    layers = (nn.Embedding(11, 6), nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 7))
    return nn.Sequential(*layers, nn.Unflatten(1, (7, 1)), nn.Conv1d(7, 5, 1)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0, stop: int = 4) -> None:
    """Train on tokens that are the same on both ranks, so that the mean of gradients rounds nothing."""
    for step in range(start, stop):
        optimizer.zero_grad()
        tokens = torch.randint(10, (4,), generator=torch.Generator().manual_seed(step))
        model(tokens).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_numbers_are_those_of_transformers(setting: str, dtype: torch.dtype, use_orig_params: bool) -> None:
    """Parameters after four steps are equal to the bit, and so they are if the state came from transformers' own."""
    settings = SETTINGS[setting]
    plain = build(dtype)
    theirs = Adafactor(plain.parameters(), **settings)
    train(plain, theirs, 0, 2)
    begun = copy.deepcopy((plain.state_dict(), theirs.state_dict()))
    train(plain, theirs, 2, 4)
    # torch casts what it loads to the parameters' dtype, so that in half precision a resumed run has other numbers.
    resumed = build(dtype)
    resumed.load_state_dict(begun[0])
    theirs = Adafactor(resumed.parameters(), **settings)
    theirs.load_state_dict(copy.deepcopy(begun[1]))
    train(resumed, theirs, 2, 4)

    def wrap(world: Collectives, model: nn.Module) -> tuple[FSDP, TransformersAdafactor]:
        policy = ModuleWrapPolicy({nn.Linear, nn.LayerNorm})
        wrapped = FSDP(model, world, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        return wrapped, TransformersAdafactor(wrapped.parameters(), **settings)

    def rank(world: Collectives) -> list[dict[str, torch.Tensor]]:
        found = []
        model, optimizer = wrap(world, build(dtype))
        train(model, optimizer)
        found.append(model.state_dict())
        begun_model = build(dtype)
        begun_model.load_state_dict(begun[0])
        model, optimizer = wrap(world, begun_model)
        by_name = FSDP.rekey_optim_state_dict(copy.deepcopy(begun[1]), OptimStateKeyType.PARAM_NAME, build(dtype))
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, by_name))
        train(model, optimizer, 2, 4)
        found.append(model.state_dict())
        return found

    for states in run_threads(2, rank):
        for state, expected in zip(states, (plain, resumed), strict=True):
            for name, value in expected.state_dict().items():
                assert torch.equal(state[name], value), name
