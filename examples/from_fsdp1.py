"""A program of torch's FSDP1 on flatparam: two import lines changed.

    torchrun --standalone --nproc-per-node 2 examples/from_fsdp1.py

Without a changed line: `torchrun --standalone --nproc-per-node 2 -m flatparam run your_program.py`.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn

# Before: from torch.distributed.fsdp import ...
from flatparam import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)

# Before: from torch.distributed.fsdp.wrap import ...
from flatparam.wrap import transformer_auto_wrap_policy


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())

    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(4)]
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Embedding(256, 32), *layers, nn.Linear(32, 256)),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=None if device.type == "cpu" else torch.accelerator.current_device_index(),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(20):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        first = torch.randint(0, 256, (16, 1), generator=generator)
        tokens = ((first + torch.arange(17)) % 256).to(device)  # they count upwards
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    to_rank_0 = {"offload_to_cpu": True, "rank0_only": True}
    FullyShardedDataParallel.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(**to_rank_0),
        FullOptimStateDictConfig(**to_rank_0),
    )
    saved = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save(saved, "fsdp1.pt")
        print(f"fsdp1.pt has {len(saved[0])} parameters and the states of {len(saved[1]['state'])}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
