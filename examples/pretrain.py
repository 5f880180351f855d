"""Pre-train a model like Llama from zero: bfloat16, accumulation, clipping, checkpoints, and a resume on any ranks.

    torchrun --standalone --nproc-per-node 2 examples/pretrain.py --steps 20 --run runs/llama
    torchrun --standalone --nproc-per-node 3 examples/pretrain.py --steps 40 --run runs/llama    # goes on from step 20

The text is a file of bytes (`--text`), by default this program; each step takes the same rows on any number of ranks.
"""

import argparse
import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from flatparam import Checkpointer, FullyShardedDataParallel, MixedPrecision
from flatparam.wrap import ModuleWrapPolicy

CONTEXT, ROWS, ACCUMULATE = 64, 12, 2


class Block(nn.Module):
    """Attention with rotary positions, and a gated feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(turned(parts[0]), turned(parts[1]), parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: Tensor) -> Tensor:
    """Rotate the two halves of each head by an angle that grows with the position."""
    one, other = x.chunk(2, dim=-1)
    speeds = 10_000 ** (-torch.arange(one.shape[-1], device=x.device) / one.shape[-1])
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Llama(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(256, width), nn.RMSNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rows_of(text: Tensor, step: int, rank: int, world_size: int) -> Tensor:
    """Return this rank's rows of a step: the step alone decides which rows all ranks have together."""
    starts = torch.randint(len(text) - CONTEXT - 1, (ROWS,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts[rank::world_size]]).long()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--run", type=Path, default=Path("runs/llama"), help="where checkpoints are")
    options.add_argument("--text", type=Path, default=Path(__file__))
    chosen = options.parse_args()

    text = torch.frombuffer(bytearray(chosen.text.read_bytes()), dtype=torch.uint8)
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Llama(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=None if device.type == "cpu" else torch.accelerator.current_device_index(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    with Checkpointer(chosen.run, model, optimizer, keep=2, asynchronous=True) as checkpointer:
        if (loaded := checkpointer.load()) is not None:
            schedule.load_state_dict(loaded.extra["schedule"])
        for step in range(loaded.step if loaded else 0, chosen.steps):
            total = 0.0
            for part, tokens in enumerate(rows_of(text, step, rank, world_size).to(device).chunk(ACCUMULATE)):
                with model.no_sync() if part < ACCUMULATE - 1 else contextlib.nullcontext():
                    logits = model(tokens[:, :-1]).float()
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATE
                    loss.backward()
                total += loss.item()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if (step + 1) % 10 == 0:
                checkpointer.save(step + 1, extra={"schedule": schedule.state_dict()})
                if rank == 0:
                    print(f"step {step + 1}: loss {total:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
