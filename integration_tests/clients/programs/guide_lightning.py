"""Train with Lightning Fabric and save after two steps; with `--resume`, take the last two steps only."""

import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


def parallelize(model: Any, mesh: Any) -> Any:
    """Shard each layer, and the model."""
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(devices=2, strategy=strategy)
fabric.launch()
fabric.seed_everything(0, verbose=False)
module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
model = fabric.setup_module(module)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
if "--resume" in sys.argv:
    fabric.load("saved", state)
while state["step"] < 4:
    x = torch.full((2, 4), fabric.global_rank + 1.0, device=fabric.device) * (state["step"] + 1)
    loss = model(x).square().mean()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(state["step"], loss.item())
    state["step"] += 1
    if state["step"] == 2:
        fabric.save("saved", state)
