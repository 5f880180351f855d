"""Adapters of PEFT of every sort, on plain and on quantised weights: two ranks have the numbers of one process."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam_comm.testing import run_processes, run_threads

if any(importlib.util.find_spec(name) is None for name in ("bitsandbytes", "transformers", "peft")):
    pytest.skip("it takes bitsandbytes, transformers and peft", allow_module_level=True)

import peft

from . import adapters
from .quantised import RANKS

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
EXPOSURES = pytest.mark.parametrize("orig", [False, True], ids=["flat", "originals"])
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, embeddings and a norm to save": {"modules_to_save": ["embed_tokens", "norm"]},
    "LoRA with biases": {"bias": "lora_only"},
    "DoRA": {"use_dora": True},
}


def bases() -> list[Any]:
    needs = pytest.mark.skipif(not HAS_TORCHAO, reason="it takes torchao")
    return [pytest.param(name, marks=needs if "torchao" in name else ()) for name in adapters.BASES]


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []


def assert_trained(make: Callable[[], nn.Module], orig: bool) -> None:
    """Two ranks have the losses, the state at the end and the answer of one process."""
    expected, wanted = adapters.train(None, make, orig)
    for rank, (found, state) in enumerate(run_threads(RANKS, adapters.train, make, orig)):
        assert found == [of_ranks[rank] for of_ranks in expected]
        assert_equal(state, wanted)


@EXPOSURES
@pytest.mark.parametrize("settings", ADAPTERS)
@pytest.mark.parametrize("base", bases())
def test_training(base: str, settings: str, orig: bool) -> None:
    """Losses, the state at the end and an answer are those of one process, bit for bit."""
    make = functools.partial(adapters.adapted, base, **ADAPTERS[settings])
    assert_trained(make, orig)


@pytest.mark.skipif(not HAS_TORCHAO, reason="it takes torchao")
@pytest.mark.parametrize("packing", ["plain", "preshuffled", "plain_int32", "tile_packed_to_4d"])
def test_int4_of_torchao_needs_a_gpu(packing: str) -> None:
    """No format of `Int4WeightOnlyConfig` is there for a CPU, sharded or not: the guide says so."""
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))
    needs = "mslk|does not support device 'cpu'|CUDA"
    with pytest.raises((ImportError, NotImplementedError, AssertionError), match=needs):
        quantize_(model, Int4WeightOnlyConfig(group_size=32, int4_packing_format=packing))


@EXPOSURES
@pytest.mark.skipif(not HAS_TORCHAO, reason="it takes torchao")
def test_int4_weights_from_a_gpu_are_sharded(orig: bool) -> None:
    """The layer sees torchao's tensor again, with the bytes that it was made of; each rank keeps half of them."""
    whole = adapters.Int4ByHand().weight
    parts = {name: getattr(whole, name) for name in whole.__tensor_flatten__()[0]}
    nbytes = sum(each.numel() * each.itemsize for each in parts.values())
    for seen, kind, block_size, kept in run_threads(RANKS, adapters.see_int4, orig):
        assert kind is type(whole)
        assert block_size == whole.block_size
        assert_equal(seen, parts)
        assert kept == nbytes // RANKS


@EXPOSURES
@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_norms_and_embeddings_are_trained_beside_an_adapter(base: str, orig: bool) -> None:
    """What `requires_grad_` has made trainable is trained as in one process, bit for bit."""
    make = functools.partial(adapters.with_norms, base)
    assert_trained(make, orig)


@EXPOSURES
@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_switching_between_adapters(base: str, orig: bool) -> None:
    """One adapter is trained, then the other, as in one process; meanwhile the other one stays as it was, to the bit."""
    expected, wanted = adapters.switch(None, base, orig)
    for rank, (found, states) in enumerate(run_threads(RANKS, adapters.switch, base, orig)):
        assert found == [of_ranks[rank] for of_ranks in expected]
        for each, other in zip(states, wanted, strict=True):
            assert_equal(each, other)
        for before, after, trained in zip(states, states[1:], ("default", "second"), strict=False):
            changed = {name for name, value in after.items() if not torch.equal(before[name], value)}
            assert changed == {name for name in after if f".{trained}." in name}


@EXPOSURES
@pytest.mark.parametrize("base", ["plain", "nf4"])
def test_merging_into_shards(base: str, orig: bool) -> None:
    """A merged model answers as that of one process, taken apart too, and trains on; quantised ones are quantised anew.

    In processes: the layers of bitsandbytes keep a part of what they are merged into beside their parameters.
    """
    expected, wanted = adapters.merge(None, base, orig)
    for rank, (found, seen) in enumerate(run_processes(RANKS, adapters.merge, base, orig)):
        assert found == [of_ranks[rank] for of_ranks in expected]
        assert_equal(seen, wanted)


@EXPOSURES
def test_a_merged_model_is_exported(orig: bool) -> None:
    """The state of a merged model, without the adapter, is that of `merge_and_unload` in one process."""
    wanted = adapters.exported(None, orig)
    for found in run_threads(RANKS, adapters.exported, orig):
        assert_equal(found, wanted)


@EXPOSURES
def test_an_adapter_is_not_unloaded_from_shards(orig: bool) -> None:
    """`merge_and_unload`, and merging of parts, are refused before anything has changed, with what to do; training goes on."""
    for rank, said in enumerate(run_threads(RANKS, adapters.refused, orig)):
        for name in ("merge_and_unload", "unload"):
            for where in ("", " in full"):
                found = said.pop(f"{name}{where}")
                assert found.startswith(
                    f"FlatParamError: rank {rank}: {name}(): the model in this LoraModel is sharded"
                )
                assert "call merge_adapter() inside summon_full_params and take state_dict()" in found
        for name in ("merge_adapter", "unmerge_adapter"):
            assert f"Call {name}() on every rank inside summon_full_params" in said.pop(name)
        assert not said


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "installed"),
    [("ours", True), ("ours", False), ("ours_in_place", False)],
    ids=["wrapper, installed", "wrapper", "fully_shard"],
)
def test_the_adapter_is_collected(kind: str, installed: bool) -> None:
    """PEFT collects the whole adapter, of the wrapper's model, with and without `install()`, and of `fully_shard`'s."""
    wanted = adapters.collected(None, kind, False)
    for found in run_processes(RANKS, adapters.collected, kind, installed):
        assert_equal(found, wanted)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ours", "ours_in_place"])
def test_the_adapter_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    """A folder that the first rank saves is loaded without flatparam: the adapter of one process, without `install()`."""
    wanted = adapters.collected(None, kind, False)
    run_processes(RANKS, adapters.saved, kind, str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(adapters.BASES["plain"](), str(tmp_path))
    assert_equal(peft.get_peft_model_state_dict(loaded), wanted)


@pytest.mark.processes
def test_torchs_wrapper_has_nothing_to_collect() -> None:
    """PEFT finds none of the adapter in a model with torch's wrappers; the guide says so."""
    assert run_processes(RANKS, adapters.collected, "torchs_with_originals", False) == [{}] * RANKS
