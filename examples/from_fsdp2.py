"""A program of torch's FSDP2 on flatparam: `fully_shard` comes from `flatparam`, and parameters are plain tensors.

    torchrun --standalone --nproc-per-node 2 examples/from_fsdp2.py

Without a changed line, and with real DTensors: `torchrun ... -m flatparam run your_program.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

# Before: from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from flatparam import MixedPrecisionPolicy, fully_shard


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())

    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 32), *layers, nn.Linear(32, 256)).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        first = torch.randint(0, 256, (16, 1), generator=generator)
        tokens = ((first + torch.arange(17)) % 256).to(device)  # they count upwards
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
