"""A training loop of DistributedDataParallel, moved to flatparam: the lines with `# DDP:` are all that changed.

    torchrun --standalone --nproc-per-node 2 examples/from_ddp.py

It trains to the same numbers as before, and each rank keeps only its part of the parameters, the gradients and the
optimizer's state.
"""

import torch
import torch.distributed as dist
from torch import nn

# DDP: from torch.nn.parallel import DistributedDataParallel
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy


class Block(nn.Module):
    """Two linear layers around a nonlinearity, added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 1)).to(device)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))  # DDP: DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        x = torch.randn(8, 16, generator=generator).to(device)
        with model.no_sync():  # the first of two micro-batches
            (model(x).sub(x.sum(-1, keepdim=True)).square().mean() / 2).backward()
        x = x.flip(0)
        loss = model(x).sub(x.sum(-1, keepdim=True)).square().mean() / 2
        loss.backward()
        norm = model.clip_grad_norm_(1.0)  # DDP: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}, norm of the gradients {norm.item():.3f}")

    state = model.state_dict()  # DDP: model.module.state_dict(), on rank 0 alone; here every rank calls it
    if rank == 0:
        torch.save(state, "model.pt")
        print(f"model.pt has {sum(value.numel() for value in state.values()):,} numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
