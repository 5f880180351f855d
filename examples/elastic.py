"""Go on after a rank has failed, and on another number of ranks: torchrun starts all again, and each resumes.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint localhost:29500 --rdzv-id job examples/elastic.py --fail-at 12

Without the environment variable, restarted ranks of torch's rendezvous may not find each other (torch 2.13).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from flatparam import Checkpointer, FullyShardedDataParallel
from flatparam.wrap import ModuleWrapPolicy

ROWS = 12


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--run", default="runs/elastic", help="where checkpoints are, seen by every host")
    options.add_argument("--fail-at", type=int, help="the last rank fails before this step, once")
    chosen = options.parse_args()

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=None if device.type == "cpu" else torch.accelerator.current_device_index(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(chosen.run, model, optimizer, keep=2) as checkpointer:
        loaded = checkpointer.load()
        start = 0 if loaded is None else loaded.step
        if rank == 0:
            print(f"{world_size} ranks begin after step {start}", flush=True)
        for step in range(start, chosen.steps):
            if step == chosen.fail_at and rank == world_size - 1 and start == 0:
                raise RuntimeError("the power went off")
            # The rows of a step depend on the step alone, and the ranks share them.
            rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(step)).to(device)
            x = rows[rank::world_size]
            loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 5 == 0:
                checkpointer.save(step + 1)
    if rank == 0:
        print(f"step {chosen.steps}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
