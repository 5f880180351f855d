"""Train with Muon, which steps whole matrices, though each is sharded: to the numbers of one process.

    torchrun --standalone --nproc-per-node 2 examples/muon.py

Each matrix is gathered on one rank, which steps it; the ranks share the matrices. Vectors and embeddings take AdamW.
"""

import torch
import torch.distributed as dist
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam.optim import Muon
from flatparam.wrap import ModuleWrapPolicy


class Block(nn.Module):
    """Two linear layers, added to what comes in."""

    def __init__(self, width: int = 32) -> None:
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
    model = FSDP(
        nn.Sequential(nn.Embedding(128, 32), *(Block() for _ in range(4)), nn.Linear(32, 128)),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=None if device.type == "cpu" else torch.accelerator.current_device_index(),
        use_orig_params=True,
    )
    hidden = [parameter for name, parameter in model.named_parameters() if ".up." in name or ".down." in name]
    others = [parameter for parameter in model.parameters() if all(parameter is not each for each in hidden)]
    optimizers = [Muon(hidden, lr=0.02, adamw_lr=3e-3), torch.optim.AdamW(others, lr=3e-3)]
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        tokens = torch.randint(0, 128, (8, 16), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 128)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    print(f"rank {rank} has stepped {optimizers[0].whole_steps} whole matrices")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
