"""Train an adapter of PEFT and save after two steps; with `--resume`, go on from there."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2))
model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1))
rows = torch.randint(0, 32, (16, 8)).tolist()
arguments = TrainingArguments(
    output_dir="saved",
    per_device_train_batch_size=2,
    max_steps=4,
    save_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    report_to=[],
    disable_tqdm=True,
    fsdp=True,
    fsdp_config={"transformer_layer_cls_to_wrap": ["GPT2Block"]},
)
trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train(resume_from_checkpoint="saved/checkpoint-2" if "--resume" in sys.argv else None)
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(entry["step"], entry["loss"])
