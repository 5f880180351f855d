"""Keep an average of the weights, sharded as they are; save it, and compute with it.

torchrun --standalone --nproc-per-node 2 examples/ema.py
"""

import torch
import torch.distributed as dist
from torch import nn

from flatparam import Checkpointer, FullyShardedDataParallel, ShardedEMA, publish
from flatparam.wrap import ModuleWrapPolicy


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=None if device.type == "cpu" else torch.accelerator.current_device_index(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = ShardedEMA(model, decay=0.9)
    with Checkpointer("runs/ema", model, optimizer, averages=ema) as checkpointer:
        loaded = checkpointer.load()  # the averages, too
        for step in range(0 if loaded is None else loaded.step, 30):
            generator = torch.Generator().manual_seed(step * world_size + rank)
            x = torch.randn(32, 16, generator=generator).to(device)
            loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        checkpointer.save(30)

    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1)).to(device)
    with torch.no_grad():
        of_weights = (model(x) - x.sum(-1, keepdim=True)).square().mean().item()
        with ema.applied(model):
            of_averages = (model(x) - x.sum(-1, keepdim=True)).square().mean().item()
            publish(model, "averages")  # averages/model.safetensors
    if rank == 0:
        print(f"loss with the weights {of_weights:.3f}, with their averages {of_averages:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
