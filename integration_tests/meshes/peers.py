"""Two models of transformers, sharded by its own `transformers.distributed`: alone, and with flatparam behind it.

    flatparam certify integration_tests.meshes.peers:LLAMA --engine integration_tests.meshes.peers:theirs \
        --mesh dp_shard=2,tp=2 --precision fp32

It needs transformers 5.24. `nox -s meshes -- --peers` runs every row of docs/meshes.md.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import flatparam
from flatparam_certify import Case
from flatparam_certify.trainer import Trainer, whole

WORDS, LENGTH, ROWS = 32, 8, 2
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def build_llama() -> nn.Module:
    """Return a Llama of two blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**_SIZES))
    return model


def build_mixtral() -> nn.Module:
    """Return a Mixtral of two blocks, each of four experts, of which two are chosen."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model: nn.Module = MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4))
    return model


def batch(step: int, micro_batch: int, data_rank: int) -> tuple[Tensor, Tensor]:
    """Return tokens and those that follow, both of shape (ROWS, LENGTH)."""
    del step, micro_batch, data_rank
    tokens = torch.randint(0, WORDS, (ROWS, LENGTH + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: Any, given: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of all tokens."""
    tokens, targets = given
    logits = whole_with_gradient(model(input_ids=tokens, use_cache=False).logits)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def whole_with_gradient(tensor: Any) -> Tensor:
    """Return a tensor, or all of a `DTensor`, for autograd, too."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


LLAMA = Case(build_llama, batch, loss)
MIXTRAL = Case(build_mixtral, batch, loss)


class OnMeshes(Trainer):
    """A model with `DTensor`s of several meshes, and plain parameters: the norm is that of each mesh's, together."""

    def clip(self, max_norm: float) -> Tensor | float:
        """Clip to the norm of all."""
        of_meshes: dict[Any, list[Any]] = {}
        for each in self.module.parameters():
            if each.grad is not None:
                of_meshes.setdefault(getattr(each.grad, "device_mesh", None), []).append(each)
        norms = [torch.nn.utils.get_total_norm([p.grad for p in each]) for each in of_meshes.values()]
        total = torch.stack([whole(norm) for norm in norms]).square().sum().sqrt()
        for each in of_meshes.values():
            torch.nn.utils.clip_grads_with_norm_(each, max_norm, total)
        return total


def loaded(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Return the model as transformers shards it while it loads it from a directory; every rank calls it."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    sizes = {
        "dp_replicate_size": mesh["dp_replicate"].size(),
        "fsdp_size": mesh["dp_shard"].size() * mesh["ep"].size(),
        "tp_size": mesh["tp"].size(),
        "ep_size": mesh["ep"].size(),
    }
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    found: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder[0],
        distributed_config=DistributedConfig(**sizes),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    found.train()
    return found


def theirs(model: nn.Module, mesh: DeviceMesh) -> Trainer:
    """Shard by transformers, which calls torch's `fully_shard`."""
    return OnMeshes(loaded(model, mesh))


def ours(model: nn.Module, mesh: DeviceMesh) -> Trainer:
    """Shard by transformers, which calls flatparam's `fully_shard` behind torch's name."""
    flatparam.install(fsdp2=True)
    return OnMeshes(loaded(model, mesh))
