"""Training with TRL, as its users write it: `trl_trainers.py FOLDER FORM KIND`.

It has four steps, and saves after every second one, or with `--batch=6`, which are the texts of a rank, after each. With
`--resume=2` it goes on from the second, and with `--resume=3` from what that run has saved. KIND is `sft`, `dpo`,
`reward` or `grpo`, which generates by the model, or with `--rollout` by a stand-in for a server of generators. With `--lora` it trains an adapter of PEFT, with `--bf16` in bfloat16, and with `--clip` it clips gradients.
With `--accumulate` each step has two micro-batches, and with `--checkpointing` activations are computed again. With `--fsdp2`
it uses FSDP2.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

WORDS = [f"w{number}" for number in range(28)]
TRAINERS: dict[str, tuple[Any, Any, Any]] = {
    "sft": (SFTTrainer, SFTConfig, LlamaForCausalLM),
    "dpo": (DPOTrainer, DPOConfig, LlamaForCausalLM),
    "grpo": (GRPOTrainer, GRPOConfig, LlamaForCausalLM),
    "reward": (RewardTrainer, RewardConfig, LlamaForSequenceClassification),
}


def tokenizer_of_words() -> PreTrainedTokenizerFast:
    """One token for each word."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def texts(start: int, number: int) -> list[str]:
    """Texts of eight words."""
    return [" ".join(WORDS[(start + row * 5 + place * 3) % 28] for place in range(8)) for row in range(number)]


def rewards(completions: list[str], **_: Any) -> list[float]:
    """A reward for each completion."""
    return [float(sum(map(ord, each)) % 7) for each in completions]


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """What a server would generate, and how likely it says that it is: made of the prompts."""
    tokens = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    completions = [
        [4 + (sum(each) + number * (place + 3)) % 28 for place in range(4)] for number, each in enumerate(tokens)
    ]
    return {"prompt_ids": tokens, "completion_ids": completions, "logprobs": [[-3.0] * 4 for _ in tokens]}


def main() -> None:
    folder, form, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    batch = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--batch=")), 2)
    resumed = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    rows = 48 if batch > 2 else 16
    trainer_of, arguments_of, model_of = TRAINERS[kind]
    transformers.set_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    labels = {"num_labels": 1} if kind == "reward" else {}
    model = model_of(LlamaConfig(vocab_size=32, max_position_embeddings=64, **shape, **tokens, **labels))
    data = (
        {"text": texts(0, rows)}
        if kind == "sft"
        else {"prompt": texts(0, rows), "chosen": texts(1, rows), "rejected": texts(2, rows)}
    )
    arguments = arguments_of(
        output_dir=str(folder / f"after-{resumed}"),
        per_device_train_batch_size=batch,
        max_steps=4,
        save_steps=2 if batch == 2 else 1,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.1 if "--clip" in sys.argv else 0.0,
        use_cpu=True,
        bf16="--bf16" in sys.argv,
        gradient_accumulation_steps=2 if "--accumulate" in sys.argv else 1,
        gradient_checkpointing="--checkpointing" in sys.argv,
        report_to=[],
        disable_tqdm=True,
        **({"num_generations": 2, "max_completion_length": 4} if kind == "grpo" else {}),
        fsdp=True,
        fsdp_config={
            "version": 2 if "--fsdp2" in sys.argv else 1,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": form,
            "use_orig_params": True,
            "sync_module_states": False,
            "cpu_ram_efficient_loading": False,
        },
    )
    others: dict[str, Any] = {}
    if kind == "grpo":
        data = {"prompt": texts(0, rows)}
        others["reward_funcs"] = rewards
        if "--rollout" in sys.argv:
            others["rollout_func"] = rollout
    if "--lora" in sys.argv:
        from peft import LoraConfig

        others["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    elif kind == "dpo":
        others["ref_model"] = copy.deepcopy(model)
    trainer = trainer_of(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer_of_words(),
        **others,
    )
    saved = str(folder / ("after-2" if resumed == 3 else "after-0") / f"checkpoint-{resumed}")
    trainer.train(resume_from_checkpoint=saved if resumed else None)
    for entry in trainer.state.log_history:
        if "loss" in entry:
            rank, step = trainer.args.process_index, int(entry["step"]) - 1
            numbers = " ".join(repr(entry[name]) for name in ("loss", "grad_norm") if name in entry)
            print(f"\nloss {rank} {step} {numbers}\n", end="", flush=True)
    for model in (trainer.model_wrapped, *([trainer.ref_model] if "ref_model" in others else ())):
        kinds = [kind for kind in type(model).__mro__ if kind.__name__.startswith(("FSDPModule", "FullySharded"))]
        print(f"\nclass {kinds[0].__module__}\n", end="", flush=True)


if __name__ == "__main__":
    main()
