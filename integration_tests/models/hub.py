"""Models of transformers and diffusers, built from configurations with random weights: nothing is downloaded.

Each has few layers and short sequences, and is wide enough that one parameter of it, and the part of it that each of two
ranks holds, is longer than everything at which the code takes another way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from integration_tests.models.described import ALL_TRAINABLE, BLOCKS, LAYERS, TIES, Model, language, tokens


def of_transformers(kind: str, configuration: str, **fields: Any) -> Callable[[], nn.Module]:
    """Build the class of transformers named `kind`; attention is computed as it is written down."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, configuration)(**fields)
        config._attn_implementation = "eager"
        return getattr(transformers, kind)(config)

    return make


def of_diffusers(kind: str, **fields: Any) -> Callable[[], nn.Module]:
    """Build the class of diffusers named `kind`."""

    def make() -> nn.Module:
        import diffusers

        return getattr(diffusers, kind)(**fields)

    return make


def generated(model: Any) -> Tensor:
    """A few tokens after a prompt, each the most likely one."""
    prompt = torch.arange(5, 17).view(2, 6)
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=6, min_new_tokens=6
    )


def transcribed(model: Any) -> Tensor:
    """A few tokens for a sound."""
    sound = torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(5))
    return model.generate(sound, do_sample=False, max_new_tokens=6, min_new_tokens=6)


def pairs(vocabulary: int) -> Callable[[torch.Generator], Mapping[str, Tensor]]:
    """Sequences, and those that they are translated to."""

    def feed(generator: torch.Generator) -> Mapping[str, Tensor]:
        source = tokens(generator, vocabulary, 2, 14)
        mask = torch.ones_like(source)
        mask[1, 10:] = 0
        return {"input_ids": source, "attention_mask": mask, "labels": tokens(generator, vocabulary, 2, 9)}

    return feed


def masked(vocabulary: int) -> Callable[[torch.Generator], Mapping[str, Tensor]]:
    """Sequences of which some tokens are to be guessed."""

    def feed(generator: torch.Generator) -> Mapping[str, Tensor]:
        ids = tokens(generator, vocabulary, 2, 16)
        hidden = torch.rand(ids.shape, generator=generator) < 0.3
        hidden[:, 0] = True
        return {"input_ids": ids.masked_fill(hidden, 2), "labels": ids.masked_fill(~hidden, -100)}

    return feed


def pictures(generator: torch.Generator) -> Mapping[str, Tensor]:
    """Pictures and what is on them."""
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "labels": torch.randint(10, (2,), generator=generator),
    }


def sounds(generator: torch.Generator) -> Mapping[str, Tensor]:
    """Spectrograms and what was said."""
    return {
        "input_features": torch.randn(2, 16, 60, generator=generator),
        "labels": tokens(generator, 4300, 2, 9, first=4),
    }


def noisy(generator: torch.Generator) -> Mapping[str, Tensor]:
    """Latent pictures with noise, at some moment, under some text."""
    return {
        "sample": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 24, generator=generator),
    }


def noisy_of_class(generator: torch.Generator) -> Mapping[str, Tensor]:
    """Latent pictures with noise, at some moment, of some class."""
    return {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=generator),
        "timestep": torch.randint(1000, (2,), generator=generator),
        "class_labels": torch.randint(40, (2,), generator=generator),
    }


def distance_to(name: str) -> Callable[[Any, Mapping[str, Tensor]], Tensor]:
    """The loss of a diffusion model: it is to return what it was given under `name`."""
    return lambda output, fed: functional.mse_loss(output.sample.float(), fed[name])


def enable(model: Any) -> None:
    """Diffusers have a name of their own for it."""
    model.enable_gradient_checkpointing()


LLAMA = {
    "vocab_size": 3001,
    "hidden_size": 192,
    "intermediate_size": 640,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

MODELS = (
    Model(
        "GPT-2",
        of_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=4101,
            n_positions=64,
            n_embd=160,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        language(4101),
        blocks=("GPT2Block",),
        pretrained=True,
        layers=("Conv1D", "Linear", "Embedding"),
        generate=generated,
        not_in_torch={(LAYERS, False): TIES, (LAYERS, True): TIES},
    ),
    Model(
        "Llama",
        of_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA, pad_token_id=0),
        language(3001),
        blocks=("LlamaDecoderLayer",),
        pretrained=True,
        layers=("Linear", "Embedding"),
        generate=generated,
    ),
    Model(
        "Llama, tied",
        of_transformers("LlamaForCausalLM", "LlamaConfig", **LLAMA, pad_token_id=0, tie_word_embeddings=True),
        language(3001),
        blocks=("LlamaDecoderLayer",),
        pretrained=True,
        generate=generated,
    ),
    Model(
        "Mixtral",
        of_transformers(
            "MixtralForCausalLM",
            "MixtralConfig",
            vocab_size=1200,
            hidden_size=128,
            intermediate_size=576,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            max_position_embeddings=64,
            pad_token_id=0,
        ),
        language(1200),
        blocks=("MixtralDecoderLayer",),
        pretrained=True,
        generate=generated,
    ),
    Model(
        "Qwen2",
        of_transformers(
            "Qwen2ForCausalLM",
            "Qwen2Config",
            vocab_size=3500,
            hidden_size=160,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=5,
            num_key_value_heads=1,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        ),
        language(3500),
        blocks=("Qwen2DecoderLayer",),
        pretrained=True,
        generate=generated,
    ),
    Model(
        "T5",
        of_transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=4300,
            d_model=128,
            d_kv=32,
            d_ff=384,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        ),
        pairs(4300),
        blocks=("T5Block",),
        checkpoint_is_exact=False,
        pretrained=True,
        generate=generated,
    ),
    Model(
        "BERT",
        of_transformers(
            "BertForMaskedLM",
            "BertConfig",
            vocab_size=4300,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        masked(4300),
        blocks=("BertLayer",),
        pretrained=True,
    ),
    Model(
        "ViT",
        of_transformers(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=192,
            intermediate_size=2880,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            num_labels=10,
        ),
        pictures,
        blocks=("ViTLayer",),
        pretrained=True,
    ),
    Model(
        "Whisper",
        of_transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=4300,
            num_mel_bins=16,
            d_model=128,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=384,
            decoder_ffn_dim=384,
            max_source_positions=30,
            max_target_positions=32,
            decoder_start_token_id=3,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            begin_suppress_tokens=None,
        ),
        sounds,
        blocks=("WhisperEncoderLayer", "WhisperDecoderLayer"),
        pretrained=True,
        generate=transcribed,
        not_in_torch={(BLOCKS, False): ALL_TRAINABLE},
    ),
    Model(
        "Mamba",
        of_transformers(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=4300,
            hidden_size=128,
            state_size=8,
            num_hidden_layers=2,
        ),
        language(4300),
        blocks=("MambaBlock",),
        pretrained=True,
        generate=generated,
    ),
    Model(
        "DiT",
        of_diffusers(
            "DiTTransformer2DModel",
            num_attention_heads=4,
            attention_head_dim=80,
            in_channels=4,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=40,
            norm_num_groups=8,
        ),
        noisy_of_class,
        blocks=("BasicTransformerBlock",),
        # The root calls a module inside a block, which torch cannot have.
        blocks_in_torch=(
            "Attention",
            "FeedForward",
        ),
        loss_of=distance_to("hidden_states"),
        checkpoint=enable,
    ),
    Model(
        "UNet",
        of_diffusers(
            "UNet2DConditionModel",
            sample_size=8,
            block_out_channels=(32, 192),
            layers_per_block=1,
            norm_num_groups=8,
            cross_attention_dim=24,
            attention_head_dim=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        ),
        noisy,
        blocks=("ResnetBlock2D", "BasicTransformerBlock"),
        loss_of=distance_to("sample"),
        checkpoint=enable,
    ),
)
