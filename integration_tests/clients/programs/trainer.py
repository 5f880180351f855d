"""Training with transformers' `Trainer`, as its users write it: `trainer.py FOLDER FORM`.

It has four steps, and saves after every second one, or with `--batch=6`, which are the sequences of a rank, after each. With
`--resume=2` it goes on from the second, and with `--resume=3` from what that run has saved. With `--lora` it trains an
adapter of PEFT, with `--bf16` in bfloat16, with `--accumulate` each step has two micro-batches, with `--checkpointing`
activations are computed again, with `--clip` gradients are clipped, and with `--generate` it generates at the end.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The batches of four steps."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    folder, form = Path(sys.argv[1]), sys.argv[2]
    batch = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--batch=")), 2)
    resumed = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    transformers.set_seed(0)
    none: dict[str, Any] = {
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, **none)
    arguments = TrainingArguments(
        output_dir=str(folder / f"after-{resumed}"),
        per_device_train_batch_size=batch,
        max_steps=4,
        save_steps=2 if batch == 2 else 1,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16="--bf16" in sys.argv,
        gradient_accumulation_steps=2 if "--accumulate" in sys.argv else 1,
        max_grad_norm=0.1 if "--clip" in sys.argv else 1.0,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config={
            "version": 1,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
            "state_dict_type": form,
            "use_orig_params": True,
            "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
            "activation_checkpointing": "--checkpointing" in sys.argv,
        },
    )
    model: Any = GPT2LMHeadModel(config)
    if "--lora" in sys.argv:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0))
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(48 if batch > 2 else 16))
    saved = str(folder / ("after-2" if resumed == 3 else "after-0") / f"checkpoint-{resumed}")
    trainer.train(resume_from_checkpoint=saved if resumed else None)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            rank, step = trainer.args.process_index, int(entry["step"]) - 1
            print(f"\nloss {rank} {step} {entry['loss']!r}\n", end="", flush=True)
    if "--generate" in sys.argv:
        ids = torch.arange(4).view(1, 4)
        with FullyShardedDataParallel.summon_full_params(trainer.model_wrapped, writeback=False):
            told = trainer.accelerator.unwrap_model(trainer.model_wrapped).generate(
                ids, max_new_tokens=8, do_sample=False
            )
        value = sum((place + 1) * token for place, token in enumerate(told[0].tolist()))
        print(f"\nloss {trainer.args.process_index} 4 {float(value)!r}\n", end="", flush=True)
    print(f"\nclass {type(trainer.model_wrapped).__module__}\n", end="", flush=True)


if __name__ == "__main__":
    main()
