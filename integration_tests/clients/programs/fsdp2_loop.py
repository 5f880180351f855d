"""A training loop with accelerate and FSDP2, as its users write it: `fsdp2_loop.py FOLDER`.

It has four steps of a Llama, and saves after the first two; with `--resume=2` it goes on from there, and saves one step
later; with `--resume=3` it has the last step. With `--launched` the settings are those of accelerate's launcher. With
`--bf16`, `--accumulate`, `--checkpointing`, `--tied`, `--ram` for `cpu_ram_efficient_loading`, `--full` for full states,
`--lora` for an adapter of PEFT, `--qlora` for one on weights in 4 bits (`--bytes` has
bitsandbytes keep them as uint8), and `--generate` to generate at the end.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from safetensors.torch import save_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM


def model_of() -> Any:
    """A small Llama; with an adapter if one is asked for."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64 if "--qlora" in sys.argv else 32,
        intermediate_size=64 if "--qlora" in sys.argv else 48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings="--tied" in sys.argv,
    )
    model: Any = LlamaForCausalLM(config)
    if "--qlora" in sys.argv:
        settings = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=torch.uint8 if "--bytes" in sys.argv else torch.float32,
        )
        with tempfile.TemporaryDirectory() as plain:
            save_model(model, Path(plain) / "model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(plain)
            model = LlamaForCausalLM.from_pretrained(plain, quantization_config=settings)
    if {"--lora", "--qlora"} & {*sys.argv}:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    model.train()
    if "--checkpointing" in sys.argv:
        model.gradient_checkpointing_enable()
    return model


def main() -> None:
    folder = Path(sys.argv[1])
    first = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    parts = 2 if "--accumulate" in sys.argv else 1
    set_seed(0)
    options: dict[str, Any] = {}
    if "--launched" not in sys.argv:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            reshard_after_forward=True,
            cpu_ram_efficient_loading="--ram" in sys.argv,
            state_dict_type="FULL_STATE_DICT" if "--full" in sys.argv else "SHARDED_STATE_DICT",
        )
        options["mixed_precision"] = "bf16" if "--bf16" in sys.argv else "no"
    accelerator = Accelerator(gradient_accumulation_steps=parts, **options)
    module = model_of()
    trained = [each for each in module.parameters() if each.requires_grad]
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(trained, lr=0.01))
    if first:
        accelerator.load_state(str(folder / f"saved-{first}"))
    rank = accelerator.process_index
    for step in range(first, 4):
        if step == max(2, first + 1):
            accelerator.save_state(str(folder / f"saved-{step}"))
        norm = torch.zeros(())
        for part in range(parts):
            seed = 100 * step + 10 * part + rank
            ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed))
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        print(f"\nloss {rank} {step} {loss.item()!r} {float(norm)!r}\n", end="", flush=True)
    if "--generate" in sys.argv:
        ids = torch.arange(4).view(1, 4) + rank
        told = model.generate(ids, max_new_tokens=8, do_sample=False, synced_gpus=True)
        print(f"\nloss {rank} 4 {' '.join(map(str, told[0].tolist()))}\n", end="", flush=True)
    kinds = [kind.__module__ for kind in type(model).__mro__ if kind.__name__ == "FSDPModule"]
    print(f"\nclass {kinds[0]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
