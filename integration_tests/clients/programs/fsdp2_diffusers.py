"""Training a denoiser of diffusers as its examples do, with accelerate and FSDP2: `fsdp2_diffusers.py FOLDER`.

It has four steps of a prior, which makes embeddings of noise, and saves after the first two; with `--resume=2` it goes on from there. With
`--bf16`, `--accumulate` and `--full` for full states.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from diffusers import DDPMScheduler, PriorTransformer


def main() -> None:
    folder = Path(sys.argv[1])
    first = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    parts = 2 if "--accumulate" in sys.argv else 1
    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["BasicTransformerBlock"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT" if "--full" in sys.argv else "SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(
        fsdp_plugin=plugin,
        mixed_precision="bf16" if "--bf16" in sys.argv else "no",
        gradient_accumulation_steps=parts,
    )
    module: Any = PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, embedding_dim=16, num_embeddings=3
    )
    # What training does not use has no state of the optimizer, and cannot be resumed.
    for unused in (module.clip_mean, module.clip_std):
        unused.requires_grad_(False)
    trained = [each for each in module.parameters() if each.requires_grad]
    scheduler: Any = DDPMScheduler(num_train_timesteps=10)
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(trained, lr=0.01))
    model.train()
    if first:
        accelerator.load_state(str(folder / f"saved-{first}"))
    rank = accelerator.process_index
    for step in range(first, 4):
        if step == 2 and not first:
            accelerator.save_state(str(folder / f"saved-{step}"))
        for part in range(parts):
            torch.manual_seed(100 * step + 10 * part + rank)
            clean, noise = torch.randn(2, 16), torch.randn(2, 16)
            times, text = torch.randint(10, (2,)), torch.randn(2, 3, 16)
            noisy = scheduler.add_noise(clean, noise, times)
            with accelerator.accumulate(model):
                told = model(noisy, times, text.mean(1), text).predicted_image_embedding
                loss = torch.nn.functional.mse_loss(told.float(), noise)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        print(f"\nloss {rank} {step} {loss.item()!r}\n", end="", flush=True)
    kinds = [kind.__module__ for kind in type(model).__mro__ if kind.__name__ == "FSDPModule"]
    print(f"\nclass {kinds[0]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
