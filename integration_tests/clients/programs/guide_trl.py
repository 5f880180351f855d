"""Fine-tune with TRL and save after two steps; with `--resume`, go on from there."""

import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(28))]
vocabulary = {word: number for number, word in enumerate(words)}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
texts = [" ".join(f"w{(row * 5 + place * 3) % 28}" for place in range(8)) for row in range(16)]
arguments = SFTConfig(
    output_dir="saved",
    per_device_train_batch_size=2,
    max_steps=4,
    save_steps=2,
    logging_steps=1,
    learning_rate=1e-2,
    bf16=False,
    report_to=[],
    disable_tqdm=True,
    fsdp=True,
    fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=64, **shape, **ids)),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
)
trainer.train(resume_from_checkpoint="saved/checkpoint-2" if "--resume" in sys.argv else None)
if trainer.is_world_process_zero():
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(entry["step"], entry["loss"])
