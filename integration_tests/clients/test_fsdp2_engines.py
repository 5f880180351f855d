"""Functions for FSDP2 of verl and torchtitan, as they are in their wheels, with torch's `fully_shard` and flatparam's.

`nox -s clients` downloads the wheels, and runs them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import flatparam
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from integration_tests.clients.sources import functions_of, wheel_of

pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.processes]

NAMES = """
fsdp_version apply_fsdp2 fsdp2_load_full_state_dict fsdp2_clip_grad_norm_ get_fsdp_full_state_dict
offload_fsdp2_model_to_cpu load_fsdp2_model_to_gpu offload_fsdp_optimizer load_fsdp_optimizer
fsdp2_sharded_save_to_cpu fsdp2_sharded_load_from_cpu maybe_patch_fsdp_module _select_fsdp2_wrap_targets
"""


def functions() -> Any:
    """Its functions; it knows no device that is a CPU."""
    import torch.distributed.fsdp._fully_shard._fully_shard as home

    wheel = wheel_of("verl")
    assert wheel is not None
    return functions_of(
        wheel,
        "verl/utils/fsdp_utils.py",
        NAMES.split(),
        fully_shard_module=home,
        get_device_id=lambda: "cpu",
        get_device_name=lambda: "cpu",
        get_torch_device=lambda: SimpleNamespace(empty_cache=lambda: None),
    )


def trained(ranks: Collectives, installed: bool, tied: bool) -> list[Any]:
    """What its engine for FSDP2 does around steps of a Llama: the losses, norms and weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if installed:
        flatparam.install()
    verl = functions()
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=tied, **shape))
    full = model.state_dict() if ranks.rank == 0 else {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    settings = {
        "wrap_policy": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        "forward_prefetch": True,
    }
    verl.apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, settings)
    verl.fsdp2_load_full_state_dict(model, full, mesh, None)
    assert verl.fsdp_version(model) == 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    for step in range(4):
        if step == 2:
            kept, spec = verl.fsdp2_sharded_save_to_cpu(model)
            # On a CPU, it copies nothing.
            kept = {name: (value.clone(), cut) for name, (value, cut) in kept.items()}
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(10 * min(step, 2) + ranks.rank))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = verl.fsdp2_clip_grad_norm_(model.parameters(), 0.5)
        found += [loss.item(), norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()]
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            # The next step begins with the weights that this one began with.
            verl.fsdp2_sharded_load_from_cpu(model, kept, spec)
        for _ in range(5):
            verl.offload_fsdp2_model_to_cpu(model)
            verl.offload_fsdp_optimizer(optimizer)
            verl.load_fsdp2_model_to_gpu(model)
            verl.load_fsdp_optimizer(optimizer, "cpu")
    assert found[-2] == found[-4]
    state = verl.get_fsdp_full_state_dict(model)
    assert bool(state) == (dist.get_rank() == 0)
    return [*found, *(value.tolist() for value in state.values())]


def needs(project: str) -> None:
    """Skip the test if the wheel of `project` is not here."""
    if wheel_of(project) is None:
        pytest.skip(f"the wheel of {project} is not here; `nox -s clients` downloads it")


@pytest.mark.parametrize("tied", [False, True])
def test_verl(tied: bool) -> None:
    """Sharding, loading from rank 0, clipping, rounds of offloading and copies of shards: all bits are those with FSDP2."""
    needs("verl")
    theirs = run_processes(2, trained, False, tied)
    assert run_processes(2, trained, True, tied) == theirs


class Decoder(nn.Module):
    """What torchtitan's function asks of its decoders."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(17, 12)
        self.layers = nn.ModuleDict({str(number): nn.Linear(12, 12) for number in range(3)})
        self.norm, self.lm_head = nn.LayerNorm(12), nn.Linear(12, 17, bias=False)
        self.enable_weight_tying = tied
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = x + layer(x).relu()
        found: torch.Tensor = self.lm_head(self.norm(x))
        return found


def pretrained(ranks: Collectives, installed: bool, tied: bool, dtype: torch.dtype) -> list[Any]:
    """What torchtitan's trainer does around steps: losses are sums over the tokens of all ranks, and nothing is divided."""
    if installed:
        flatparam.install()
    wheel = wheel_of("torchtitan")
    assert wheel is not None
    names = [
        "apply_fsdp_to_decoder",
        "disable_fsdp_gradient_division",
        "get_fsdp_reshard_after_forward_policy",
    ]
    log = SimpleNamespace(info=lambda text: None)
    titan = functions_of(wheel, "torchtitan/distributed/fsdp.py", names, logger=log)
    torch.manual_seed(0)
    model = Decoder(tied)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    titan.apply_fsdp_to_decoder(model, mesh, dtype, torch.float32, pp_enabled=False)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            # Gloo has no sum that multiplies, which torch asks for otherwise.
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    for step in range(4):
        for part in range(2):
            seed = 100 * step + 10 * part + ranks.rank
            ids = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(seed))
            logits = model(ids).flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, ids.flatten(), reduction="sum") / 48
            loss.backward()
            found.append(loss.item())
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        found.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_torchtitan(tied: bool, dtype: torch.dtype) -> None:
    """A decoder that its function shards trains to FSDP2's bits, with its way to divide and to clip."""
    needs("torchtitan")
    theirs = run_processes(2, pretrained, False, tied, dtype)
    assert run_processes(2, pretrained, True, tied, dtype) == theirs
