"""Training with transformers' `Trainer` and its default settings of FSDP, which is FSDP2: `fsdp2_trainer.py FOLDER`.

It has four steps of a Llama, and saves after every second one; with `--resume=2` it goes on from there. With `--bf16`,
`--accumulate`, `--checkpointing`, `--tied`, `--full` for full states, and `--lora` for an adapter of PEFT.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The batches of four steps."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    folder, resumed = Path(sys.argv[1]), 2 if "--resume=2" in sys.argv else 0
    transformers.set_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings="--tied" in sys.argv,
    )
    settings: dict[str, Any] = {"state_dict_type": "FULL_STATE_DICT"} if "--full" in sys.argv else {}
    if "--checkpointing" in sys.argv:
        settings["activation_checkpointing"] = True
    arguments = TrainingArguments(
        output_dir=str(folder / f"after-{resumed}"),
        per_device_train_batch_size=2,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16="--bf16" in sys.argv,
        gradient_accumulation_steps=2 if "--accumulate" in sys.argv else 1,
        report_to=[],
        disable_tqdm=True,
        fsdp=True,
        fsdp_config=settings,
    )
    model: Any = LlamaForCausalLM(config)
    if "--lora" in sys.argv:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0))
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=str(folder / "after-0" / "checkpoint-2") if resumed else None)
    for entry in trainer.state.log_history:
        if "loss" in entry and entry["step"] > resumed:
            numbers = f"{entry['loss']!r} {entry['grad_norm']!r}"
            print(f"\nloss {trainer.args.process_index} {entry['step'] - 1} {numbers}\n", end="", flush=True)
    kinds = [kind.__module__ for kind in type(trainer.model_wrapped).__mro__ if kind.__name__ == "FSDPModule"]
    print(f"\nclass {kinds[0]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
