"""Adapt pretrained weights by low-rank adapters, in plain torch; only the adapters are trained, saved and published.

    torchrun --standalone --nproc-per-node 2 examples/lora.py

With PEFT and transformers, and with weights of 4 bits, see `examples/qlora.py`.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from flatparam import load_pretrained, publish
from flatparam.wrap import ModuleWrapPolicy

WEIGHTS, ADAPTER = Path("pretrained.safetensors"), Path("adapter")


class Adapted(nn.Module):
    """A frozen linear layer, and a low-rank change to it, which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.low = nn.Parameter(torch.empty(rank, base.in_features))
        self.high = nn.Parameter(torch.empty(base.out_features, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the adapter its first values; `load_pretrained` calls this, since no file has them."""
        nn.init.kaiming_uniform_(self.low)
        nn.init.zeros_(self.high)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.low.T @ self.high.T


class Block(nn.Module):
    """Two linear layers, added to what comes in."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def pretrained() -> nn.Module:
    """Return the model as somebody has trained it."""
    return nn.Sequential(nn.Embedding(128, 32), *(Block() for _ in range(3)), nn.Linear(32, 128))


def adapted() -> nn.Module:
    """Return the model with an adapter around each linear layer of its blocks, and all else frozen."""
    model = pretrained().requires_grad_(False)
    for block in model:
        if isinstance(block, Block):
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def in_the_model(name: str) -> str:
    """Return what the adapted model calls a tensor of the file."""
    module, _, last = name.rpartition(".")
    return f"{module}.base.{last}" if module.endswith((".up", ".down")) else name


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    if rank == 0:
        save_file(pretrained().state_dict(), WEIGHTS)  # in real life: what you have downloaded
    dist.barrier()

    # Each rank reads only the bytes that it keeps. `use_orig_params` lets frozen and trained ones share a unit.
    model = load_pretrained(
        adapted,
        WEIGHTS,
        mapping=in_the_model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        tokens = torch.randint(0, 128, (8, 16), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 128)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    catalogue = publish(model, ADAPTER, only=lambda name: name.endswith((".low", ".high")))
    if rank == 0:
        print(f"{ADAPTER} has {len(catalogue.tensors)} tensors, {catalogue.nbytes:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
