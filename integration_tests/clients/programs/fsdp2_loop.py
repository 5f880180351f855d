"""A training loop with accelerate and FSDP2, as its users write it: `fsdp2_loop.py FOLDER`.

It has four steps of a Llama, and saves after the first two; with `--resume=2` it goes on from there. With `--bf16`,
`--accumulate`, `--checkpointing`, `--tied`, and `--ram` for `cpu_ram_efficient_loading`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    folder = Path(sys.argv[1])
    first = 2 if "--resume=2" in sys.argv else 0
    parts = 2 if "--accumulate" in sys.argv else 1
    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading="--ram" in sys.argv,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(
        fsdp_plugin=plugin,
        mixed_precision="bf16" if "--bf16" in sys.argv else "no",
        gradient_accumulation_steps=parts,
    )
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings="--tied" in sys.argv,
    )
    module: Any = LlamaForCausalLM(config)
    if "--checkpointing" in sys.argv:
        module.gradient_checkpointing_enable()
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    if first:
        accelerator.load_state(str(folder / "saved-2"))
    for step in range(first, 4):
        if step == 2 and not first:
            accelerator.save_state(str(folder / "saved-2"))
        norm = torch.zeros(())
        for part in range(parts):
            seed = 100 * step + 10 * part + accelerator.process_index
            ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed))
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        rank = accelerator.process_index
        print(f"\nloss {rank} {step} {loss.item()!r} {float(norm)!r}\n", end="", flush=True)
    kinds = [kind.__module__ for kind in type(model).__mro__ if kind.__name__ == "FSDPModule"]
    print(f"\nclass {kinds[0]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
