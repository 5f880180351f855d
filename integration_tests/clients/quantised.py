"""A model whose layers are quantised by bitsandbytes as it comes, with an adapter of PEFT, and its training by ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import bitsandbytes as bnb
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from flatparam import FullyShardedDataParallel, fully_shard
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_state.places import places_in

RANKS: Final = 2
STEPS: Final = 4
VOCABULARY: Final = 64


def llama() -> LlamaForCausalLM:
    """A small one, in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def in_four_bits(storage: torch.dtype = torch.uint8) -> LlamaForCausalLM:
    """With all linear layers but the head in NF4; `storage` is the dtype under which the bytes go."""
    model = llama()
    for parent, name, layer in list(linear_layers(model.model)):
        quantised = bnb.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=torch.float32,
            quant_type="nf4",
            quant_storage=storage,
        )
        # As transformers makes it; so the layer has what it takes to read the bytes, too.
        quantised.weight = bnb.nn.Params4bit(
            layer.weight.data,
            requires_grad=False,
            quant_type="nf4",
            quant_storage=storage,
            module=quantised,
        )
        setattr(parent, name, quantised)
    # This quantises.
    return model.to("cpu")


def with_adapter(model: nn.Module, **adapter: Any) -> nn.Module:
    """Of LoRA, on some layers; `adapter` are its settings, such as `use_dora=True`."""
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **adapter}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))


def whole(*, storage: torch.dtype = torch.uint8, **adapter: Any) -> nn.Module:
    """In NF4, with an adapter; bitsandbytes has the storage uint8 if nobody says otherwise."""
    return with_adapter(in_four_bits(storage), **adapter)


def linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in module.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def losses(model: nn.Module, rank: int | None = None, after_step: Callable[[], object] = lambda: None) -> list[Any]:
    """Train, and return the loss of each step; of one process that does the work of all ranks, those of each rank."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found: list[Any] = []
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(step))
        parts = tokens.chunk(RANKS) if rank is None else [tokens.chunk(RANKS)[rank]]
        of_ranks = [model(input_ids=part, labels=part).loss for part in parts]
        torch.stack(of_ranks).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step()
        found.append([loss.item() for loss in of_ranks])
    return found if rank is None else [only for (only,) in found]


def ours(model: nn.Module, **options: Any) -> nn.Module:
    """The wrapper."""
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), **options)


def ours_in_place(model: nn.Module) -> nn.Module:
    """Our function."""
    for layer in model.base_model.model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    return fully_shard(model)


def torchs(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as Policy

    device = torch.device("cpu")
    return FSDP1(model, auto_wrap_policy=Policy({LlamaDecoderLayer}), device_id=device, **options)


def torchs_with_originals(model: nn.Module) -> nn.Module:
    """FSDP1, which shards frozen parameters beside trained ones only so."""
    return torchs(model, use_orig_params=True)


def torchs_in_place(model: nn.Module) -> nn.Module:
    """FSDP2."""
    from torch.distributed.fsdp import fully_shard as fsdp2

    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.base_model.model.model.layers:  # type: ignore[union-attr]
        fsdp2(layer, mesh=mesh)
    return fsdp2(model, mesh=mesh)


def trained(
    world: Collectives, shard: Callable[..., nn.Module], adapter: dict[str, Any], options: dict[str, Any]
) -> Any:
    """The losses of this rank, or the error; and the bytes of quantised weights that it keeps between two steps."""
    torch.set_num_threads(1)
    try:
        model = shard(whole(**adapter), **options)
        found = losses(model, world.rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found, kept_nbytes(model)


def kept_nbytes(model: nn.Module) -> int:
    """The bytes of memory of all uint8 parameters, whoever holds them: the shards, and modules that have taken some."""
    storages = {}
    held = [place.handle.flat_param for place in places_in(model)]
    for module in model.modules():
        held += [each for each in module._parameters.values() if each is not None]
    for parameter in held:
        if parameter.dtype == torch.uint8:
            # A DTensor's own storage is none.
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
