"""Large models to plan, on the meta device: `flatparam plan plans.models:llama_70b --wrap LlamaBlock`."""

from __future__ import annotations

import torch
from torch import nn

from .transformers import Decoder, LlamaBlock, Sizes


def llama(**sizes: int) -> nn.Module:
    """A Llama-like decoder of these sizes."""
    with torch.device("meta"):
        return Decoder(Sizes(**sizes), LlamaBlock)


def llama_70b(layers: int = 80) -> nn.Module:
    """A decoder of the sizes of Llama 3 70B."""
    return llama(layers=layers, width=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=128256)
