"""Profile some steps: torch's profiler shows flatparam's ranges, and flatparam's own trace shows each unit.

    torchrun --standalone --nproc-per-node 2 examples/profile_steps.py
    flatparam trace draw steps.svg trace0.json trace1.json

Open profile0.json (torch's) and trace0.json (ours) at ui.perfetto.dev.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from flatparam import FullyShardedDataParallel, trace
from flatparam.wrap import ModuleWrapPolicy


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank = dist.get_rank()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=None if device.type == "cpu" else torch.accelerator.current_device_index(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.randn(32, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the first makes what all others use
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step()
    profiler.export_chrome_trace(f"profile{rank}.json")
    with trace(model, f"trace{rank}.json"):
        step()
    if rank == 0:
        for event in profiler.key_averages():
            if event.key.startswith("FullyShardedDataParallel."):
                print(f"{event.key.partition('.')[2]:40} {event.count:3} times, {event.cpu_time_total:8,.0f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
