"""The configurations that are planned and run: transformers, each under its own setup."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from attrs import field, frozen
from gpt.model import GPT
from gpt.shape import Shape
from torch import Tensor, nn

from flatparam_plan.training import TrainingProgram

from .transformers import (
    Bert,
    Decoder,
    LlamaBlock,
    Looped,
    MixtureBlock,
    ParallelBlock,
    Sizes,
    Torchs,
    Translator,
    Vision,
    adapted,
)

SIZES: Final = Sizes()


@frozen
class Configuration:
    """A transformer and how it is trained."""

    what: str
    make: Callable[[], nn.Module]
    units: tuple[str, ...]
    settings: dict[str, Any] = field(factory=dict)
    """The setup that the page shows, beside the wrapping."""
    inputs: Callable[[int, int], tuple[Tensor, ...]] | None = None

    def program(self, batch: int = 2, sequence: int = 32) -> TrainingProgram:
        """The training program."""
        return TrainingProgram.of(self.make, self.inputs, batch=batch, sequence=sequence)


def images(batch: int, _: int) -> tuple[Tensor, ...]:
    """Images and their classes."""
    return torch.zeros(batch, 3, 32, 32), torch.zeros(batch, dtype=torch.int64)


_MIXED: Final = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

CONFIGURATIONS: Final = {
    "gpt": Configuration(
        "the main job's GPT, tied head", lambda: GPT(Shape(3, 64, 4, 32)), ("Block",), {"world_size": 1}
    ),
    "llama": Configuration(
        "RMS norms, rotary, grouped queries, SwiGLU",
        lambda: Decoder(SIZES, LlamaBlock),
        ("LlamaBlock",),
        {"world_size": 64, "max_norm": 1.0, **_MIXED},
    ),
    "parallel": Configuration(
        "attention beside the network, biases, tied head",
        lambda: Decoder(SIZES, ParallelBlock, norm=nn.LayerNorm, tied=True),
        ("ParallelBlock",),
        {"world_size": 2, "strategy": "grad_op", "accumulate": 2},
    ),
    "mixture": Configuration(
        "experts and latent attention, as DeepSeek-V3",
        lambda: Decoder(SIZES, MixtureBlock),
        ("MixtureBlock",),
        {"world_size": 1024, "strategy": "hybrid:8", "checkpointing": ("MixtureBlock",)},
    ),
    "bert": Configuration(
        "a bidirectional encoder, biases, post-norm",
        lambda: Bert(SIZES),
        ("BertBlock",),
        {"world_size": 3, "cpu_offload": True, "use_orig_params": True},
    ),
    "translator": Configuration(
        "encoder, decoder, cross attention",
        lambda: Translator(SIZES),
        ("BertBlock", "CrossBlock"),
        {"world_size": 4, "forward_prefetch": 2, "optimizer": "momentum"},
    ),
    "looped": Configuration(
        "one block three times, as ALBERT",
        lambda: Looped(SIZES, LlamaBlock),
        ("LlamaBlock",),
        {"world_size": 4, "strategy": "no_shard", "max_norm": 1.0},
    ),
    "vision": Configuration(
        "patches of images, as ViT",
        lambda: Vision(SIZES),
        ("ParallelBlock",),
        {"world_size": 16, "use_orig_params": True, **_MIXED},
        images,
    ),
    "torchs": Configuration(
        "torch's own encoder layers",
        lambda: Torchs(SIZES),
        ("TransformerEncoderLayer",),
        {"world_size": 4096, "backward_prefetch": "post", "accumulate": 3},
    ),
    "adapted": Configuration(
        "a frozen Llama with trained adapters, as LoRA",
        lambda: adapted(SIZES),
        ("LlamaBlock",),
        {"world_size": 8, "strategy": "hybrid_grad_op:4", "transport": "shared_memory"},
    ),
}


def llama_of_transformers() -> nn.Module:
    """The Llama of the library transformers, as its configuration makes it: with a cache, which a plan leaves out."""
    library = importlib.import_module("transformers")
    config = library.LlamaConfig(
        hidden_size=SIZES.width,
        intermediate_size=SIZES.hidden,
        num_hidden_layers=SIZES.layers,
        num_attention_heads=SIZES.heads,
        num_key_value_heads=SIZES.kv_heads,
        vocab_size=SIZES.vocabulary,
    )
    made: nn.Module = library.AutoModelForCausalLM.from_config(config)
    return made


OF_TRANSFORMERS: Final = {
    "LlamaForCausalLM": Configuration(
        "of the library transformers",
        llama_of_transformers,
        ("LlamaDecoderLayer",),
        {"world_size": 8, "checkpointing": ("LlamaDecoderLayer",), **_MIXED},
    ),
}
"""The configurations that need that library."""
