"""Training with transformers' `Trainer` and its default settings of FSDP, which is FSDP2: `fsdp2_trainer.py FOLDER`.

It has four steps of a Llama, and saves after every second one, or with `--batch=6`, which are the sequences of a rank,
after each. With `--resume=2` it goes on from the second, and with `--resume=3` from what that run has saved. With
`--bf16`, `--accumulate`, `--checkpointing`, `--tied`, `--full` for full states, `--lora` for an adapter of PEFT,
`--generate` to generate at the end, `--compile` to compile the model, and `--loaded` for a model that transformers shards
while it loads it.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The batches of four steps."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    folder = Path(sys.argv[1])
    batch = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--batch=")), 2)
    resumed = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
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
        per_device_train_batch_size=batch,
        max_steps=4,
        save_steps=2 if batch == 2 else 1,
        save_strategy="no" if "--loaded" in sys.argv else "steps",
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16="--bf16" in sys.argv,
        gradient_accumulation_steps=2 if "--accumulate" in sys.argv else 1,
        report_to=[],
        disable_tqdm=True,
        torch_compile_backend="aot_eager" if "--compile" in sys.argv else None,
        **({} if "--loaded" in sys.argv else {"fsdp": True, "fsdp_config": settings}),
    )
    model: Any = LlamaForCausalLM(config)
    if "--loaded" in sys.argv:
        from transformers.distributed import DistributedConfig

        with tempfile.TemporaryDirectory() as plain:
            save_model(model, Path(plain) / "model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(plain)
            model = LlamaForCausalLM.from_pretrained(plain, distributed_config=DistributedConfig(fsdp_size=2))
    if "--lora" in sys.argv:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.0))
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    saved = folder / ("after-2" if resumed == 3 else "after-0") / f"checkpoint-{resumed}"
    trainer.train(resume_from_checkpoint=str(saved) if resumed else None)
    for entry in trainer.state.log_history:
        if "loss" in entry and entry["step"] > resumed:
            numbers = f"{entry['loss']!r} {entry['grad_norm']!r}"
            print(f"\nloss {trainer.args.process_index} {entry['step'] - 1} {numbers}\n", end="", flush=True)
    if "--generate" in sys.argv:
        rank = trainer.args.process_index
        ids = torch.arange(4).view(1, 4) + rank
        told = trainer.model.generate(ids, max_new_tokens=8, do_sample=False, synced_gpus=True)
        print(f"\nloss {rank} 4 {' '.join(map(str, told[0].tolist()))}\n", end="", flush=True)
    kinds = [
        kind.__module__
        for module in trainer.model.modules()
        for kind in type(module).__mro__
        if kind.__name__ == "FSDPModule"
    ]
    print(f"\nclass {kinds[0]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
