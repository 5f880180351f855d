"""A Llama with adapters of PEFT on plain weights and on quantised ones, and what is done with it on ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from flatparam import FullyShardedDataParallel
from flatparam_comm import Collectives

from . import quantised
from .quantised import llama, losses

QUESTION: Final = torch.arange(12).view(1, 12)


def four_bits() -> LlamaForCausalLM:
    """In NF4, and marked as transformers marks what it loads so: PEFT takes its layers for bitsandbytes'."""
    model = quantised.in_four_bits()
    for _, _, layer in quantised.linear_layers(model.model):
        # On a CPU with AVX512-BF16 it would give its weight other data when it evaluates.
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    model.is_loaded_in_4bit = model.is_quantized = True
    return model


def torchao_int8() -> LlamaForCausalLM:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model.model, Int8WeightOnlyConfig())
    return model


def torchao_int4() -> LlamaForCausalLM:
    from torchao.quantization import IntxWeightOnlyConfig, quantize_

    model = llama()
    quantize_(model.model, IntxWeightOnlyConfig(weight_dtype=torch.int4))
    return model


def torchao_float8() -> LlamaForCausalLM:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = llama()
    quantize_(model.model, Float8WeightOnlyConfig())
    return model


BASES: Final[dict[str, Callable[[], LlamaForCausalLM]]] = {
    "plain": llama,
    "nf4": four_bits,
    "torchao int8": torchao_int8,
    "torchao int4": torchao_int4,
    "torchao float8": torchao_float8,
}


def adapted(base: str, **settings: Any) -> nn.Module:
    """With an adapter; `settings` are those of LoRA."""
    return quantised.with_adapter(BASES[base](), **settings)


def with_norms(base: str) -> nn.Module:
    """With an adapter, and norms and embeddings that are trained beside it."""
    model = adapted(base)
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed" in name:
            parameter.requires_grad_()
    return model


def with_two(base: str) -> nn.Module:
    """With a second adapter, of a different rank and on other layers."""
    model = adapted(base)
    torch.manual_seed(2)
    second = LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8, target_modules=["q_proj", "o_proj"])
    model.add_adapter("second", second)  # type: ignore[operator]
    return model


def sharded(model: nn.Module, world: Collectives | None, *, use_orig_params: bool, apart: bool = False) -> nn.Module:
    """On `world`, or whole; `apart` makes each layer of an adapter a unit of its own."""
    if world is None:
        return model
    layers = {
        id(module)
        for name, module in model.named_modules()
        if apart and isinstance(module, nn.Linear) and "lora_" in name
    }

    def policy(module: nn.Module, recurse: bool, **_: Any) -> bool:
        return recurse or isinstance(module, LlamaDecoderLayer) or id(module) in layers

    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)


def inner(model: nn.Module) -> Any:
    """The model of PEFT."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all that both have: of quantised weights bitsandbytes adds how, if a model is whole."""
    found = {}
    for name, value in model.state_dict().items():
        if "weight." not in name.rpartition("base_layer.")[2] and not name.endswith(_HOW):
            found[name] = value.dequantize() if "torchao" in type(value).__module__ else value.clone()
    return found


_HOW: Final = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4")


@contextlib.contextmanager
def summoned(model: nn.Module, *, writeback: bool) -> Iterator[None]:
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=writeback):
            yield
    else:
        yield


def answer(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=QUESTION).logits.clone()
    model.train()
    return found


# What is done with a model, by one process that does the work of all ranks if there is no world.


def train(world: Collectives | None, make: Callable[[], nn.Module], orig: bool) -> Any:
    """The losses, the state at the end and an answer."""
    torch.set_num_threads(1)
    model = sharded(make(), world, use_orig_params=orig)
    found = losses(model, None if world is None else world.rank)
    return found, {**state(model), "answer": answer(model)}


def switch(world: Collectives | None, base: str, orig: bool) -> Any:
    """Train one adapter, then the other; the losses, and the state before, between and at the end."""
    torch.set_num_threads(1)
    # What of a flat parameter is trained cannot change.
    model = sharded(with_two(base), world, use_orig_params=orig, apart=not orig)
    rank = None if world is None else world.rank
    found, states = [], [state(model)]
    for name in ("default", "second"):
        inner(model).set_adapter(name)
        found += losses(model, rank)
        states.append(state(model))
    return found, states


def merge(world: Collectives | None, base: str, orig: bool) -> Any:
    """Train, merge, answer, take apart, answer, and train on; the losses, and what it was between."""
    torch.set_num_threads(1)
    model = sharded(adapted(base), world, use_orig_params=orig)
    rank = None if world is None else world.rank
    found = losses(model, rank)
    with summoned(model, writeback=True):
        inner(model).merge_adapter()
    seen = {"merged": answer(model)}
    seen |= {f"merged {name}": value for name, value in state(model).items()}
    with summoned(model, writeback=True):
        inner(model).unmerge_adapter()
    seen["apart"] = answer(model)
    return found + losses(model, rank), seen


def exported(world: Collectives | None, orig: bool) -> Any:
    """The weights of the merged model, in the names of the model without adapters."""
    torch.set_num_threads(1)
    model = sharded(adapted("plain"), world, use_orig_params=orig)
    losses(model, None if world is None else world.rank)
    if world is None:
        return inner(model).merge_and_unload().state_dict()
    with summoned(model, writeback=True):
        inner(model).merge_adapter()
    prefix = "base_model.model."
    return {
        name.removeprefix(prefix).replace(".base_layer.", "."): value
        for name, value in model.state_dict().items()
        if ".lora_" not in name
    }


def refused(world: Collectives, orig: bool) -> dict[str, str]:
    """What PEFT's methods that change the model say of a sharded one; it trains on."""
    model = sharded(adapted("plain"), world, use_orig_params=orig)
    said = {}
    for name in ("merge_and_unload", "unload", "merge_adapter", "unmerge_adapter"):
        for where in (contextlib.nullcontext(), summoned(model, writeback=True)):
            inside = "" if isinstance(where, contextlib.nullcontext) else " in full"
            if inside and not name.endswith("unload"):
                continue
            try:
                with where:
                    getattr(inner(model), name)()
            except Exception as error:
                said[f"{name}{inside}"] = f"{type(error).__name__}: {error}"
    losses(model, world.rank)
    return said


class Int4ByHand(nn.Module):
    """A weight as `Int4WeightOnlyConfig` makes it on a GPU, and a parameter that is trained."""

    def __init__(self) -> None:
        from torchao.quantization import Int4Tensor

        super().__init__()
        torch.manual_seed(0)
        qdata = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
        scale, zero = torch.rand(2, 64).bfloat16(), torch.zeros(2, 64).bfloat16()
        weight = Int4Tensor(qdata, scale, zero, [1, 32], torch.Size([64, 64]))
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.trained = nn.Parameter(torch.ones(1))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        parts = {name: getattr(weight, name).clone() for name in weight.__tensor_flatten__()[0]}
        self.seen += [parts, type(weight), weight.block_size]
        return x * self.trained


def see_int4(world: Collectives, orig: bool) -> Any:
    """What a sharded layer sees of its weight, and the bytes of it that this rank keeps."""
    model = sharded(Int4ByHand(), world, use_orig_params=orig)
    model(torch.ones(2)).sum().backward()
    return [*inner(model).seen, quantised.kept_nbytes(model)]


def collected(world: Collectives | None, kind: str, installed: bool) -> dict[str, Tensor]:
    """What PEFT collects as the adapter."""
    import peft

    import flatparam

    if installed:
        flatparam.install()
    model = adapted("plain")
    if world is None:
        return peft.get_peft_model_state_dict(model)  # type: ignore[no-any-return]
    model = getattr(quantised, kind)(model)
    found = peft.get_peft_model_state_dict(inner_of(model), state_dict=model.state_dict())
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def saved(world: Collectives, kind: str, folder: str) -> None:
    """Have the first rank save the adapter as PEFT's users do."""
    model = getattr(quantised, kind)(adapted("plain"))
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    if world.rank == 0:
        inner_of(model).save_pretrained(folder, state_dict=state)


def inner_of(model: nn.Module) -> Any:
    """The module in a wrapper of ours or of torch's."""
    return getattr(model, "_fsdp_wrapped_module", model)
