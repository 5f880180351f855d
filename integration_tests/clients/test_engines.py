"""FSDP1's functions of RL trainers and others, as they are in their wheels, with flatparam installed; `nox -s clients` runs them."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, run_threads
from flatparam_comm.testing import run_processes
from integration_tests.clients.sources import functions_of, module_of, wheel_of

LINEAR = ModuleWrapPolicy({nn.Linear})
VERL = """
fsdp_version get_fsdp_wrap_policy get_fsdp_state_ctx get_fsdp_full_state_dict
offload_fsdp_model_to_cpu load_fsdp_model_to_gpu offload_fsdp_optimizer load_fsdp_optimizer
layered_summon_lora_params collect_lora_params collect_merged_lora_params fsdp_merge_unmerge merged_lora_context
backup_base_model_weights restore_base_model_weights _merge_or_unmerge_lora_ _clean_merged_lora_
fsdp1_sharded_save_to_cpu fsdp1_sharded_load_from_cpu
"""


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """FSDP1's names are ours in this file."""
    with flatparam.install():
        yield


def wheel(project: str) -> Path:
    """The wheel of `project`, or the test is skipped."""
    found = wheel_of(project)
    if found is None:
        pytest.skip(f"the wheel of {project} is not here; `nox -s clients` downloads it")
    return found


@pytest.fixture(params=[True, False], ids=["use_orig_params", "flat"])
def original(request: pytest.FixtureRequest) -> bool:
    """`use_orig_params`."""
    return bool(request.param)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 2))


def wrapped(original: bool = True, **arguments: Any) -> Any:
    return flatparam.FullyShardedDataParallel(mlp(), auto_wrap_policy=LINEAR, use_orig_params=original, **arguments)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def step(world: Collectives, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.full((2, 3), world.rank + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


# verl


@pytest.fixture(scope="module")
def verl() -> Any:
    """Its functions; it knows no device that is a CPU."""
    on_cpu = {
        "get_device_id": lambda: 0,
        "get_device_name": lambda: "cpu",
        "get_torch_device": lambda: SimpleNamespace(empty_cache=lambda: None),
    }
    return functions_of(wheel("verl"), "verl/utils/fsdp_utils.py", VERL.split(), **on_cpu)


def test_verl_offloads(verl: Any, original: bool) -> None:
    """After 100 rounds of offload and onload, of the model and of Adam, every bit is that of a model that never moved."""

    def rank(world: Collectives) -> None:
        models = [wrapped(original) for _ in range(2)]
        optimizers = [optimizer_of(model) for model in models]
        assert verl.fsdp_version(models[0]) == 1
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(world, model, optimizer)
            for _ in range(25):
                verl.offload_fsdp_model_to_cpu(models[0])
                verl.offload_fsdp_optimizer(optimizers[0])
                verl.load_fsdp_model_to_gpu(models[0])
                verl.load_fsdp_optimizer(optimizers[0], "cpu")
        assert same(*(model.state_dict() for model in models))
        full, expected = verl.get_fsdp_full_state_dict(models[0]), models[1].state_dict()
        assert same(full, expected) if world.rank == 0 else full == {}

    run_threads(2, rank)


def test_verl_keeps_shards(verl: Any, original: bool) -> None:
    """What it saves of the shards is what it loads, into the same model after further steps."""

    def rank(world: Collectives) -> None:
        model = wrapped(original)
        optimizer = optimizer_of(model)
        step(world, model, optimizer)
        before, kept = model.state_dict(), verl.fsdp1_sharded_save_to_cpu(model)
        step(world, model, optimizer)
        assert not same(model.state_dict(), before)
        # It ends with a barrier of the default group, and threads have none.
        barrier, torch.distributed.barrier = torch.distributed.barrier, lambda: None
        try:
            verl.fsdp1_sharded_load_from_cpu(model, kept)
        finally:
            torch.distributed.barrier = barrier
        assert same(model.state_dict(), before)

    run_threads(2, rank)


class Block(nn.Module):
    """Two layers, as adapters are for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks and a head."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.blocks[0](x)))  # type: ignore[no-any-return]


@pytest.fixture
def copies_to_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """`.cpu()` is a copy, as from an accelerator; here it would be the summoned memory itself, which is freed."""
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)


def with_adapter() -> Any:
    if importlib.util.find_spec("peft") is None:
        pytest.skip("PEFT is not here; `nox -s clients` has it")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config: Any = LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False)
    return get_peft_model(Net(), config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "is_lora", "units"),
    [
        ({"transformer_layer_cls_to_wrap": ["Block"]}, False, 3),
        ({"min_num_params": 30}, False, 3),
        ({"transformer_layer_cls_to_wrap": ["Block"]}, True, 11),
        ({"disable": True}, False, 1),
    ],
)
def test_verl_wraps(verl: Any, config: dict[str, Any], is_lora: bool, units: int) -> None:
    """The policy that it makes, by class, by size and for adapters, chooses the modules that it says."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not here; `nox -s clients` has it")

    def rank(world: Collectives) -> None:
        module = with_adapter() if is_lora else Net()
        policy = verl.get_fsdp_wrap_policy(module, config, is_lora)
        model = flatparam.FullyShardedDataParallel(module, auto_wrap_policy=policy, use_orig_params=True)
        assert len(flatparam.FullyShardedDataParallel.fsdp_modules(model)) == units

    run_threads(2, rank)


@pytest.mark.usefixtures("copies_to_host")
@pytest.mark.parametrize("policy", [{"min_num_params": 30}, {"transformer_layer_cls_to_wrap": ["Block"]}])
@pytest.mark.parametrize("layered", [True, False], ids=["layered", "whole"])
def test_verl_collects_adapters(verl: Any, policy: dict[str, Any], layered: bool, original: bool) -> None:
    """What it sends of an adapter to the rollout has the names and values of the adapter that is not wrapped."""
    from_peft = pytest.importorskip("peft.utils.save_and_load").get_peft_model_state_dict

    def rank(world: Collectives) -> None:
        expected = from_peft(with_adapter())
        module = with_adapter()
        model = flatparam.FullyShardedDataParallel(
            module,
            auto_wrap_policy=verl.get_fsdp_wrap_policy(module, policy, is_lora=True),
            use_orig_params=original,
        )
        x = torch.full((2, 3), world.rank + 1.0)
        before = model(x)
        for _ in range(2):
            found = verl.collect_lora_params(model, layered, base_sync_done=True)
            # Collected by layers, FSDP1's part of a name is cut off, and there is a prefix for each unit.
            assert {name.rpartition("blocks")[2] for name in found} == {
                name.rpartition("blocks")[2] for name in expected
            }
            for name, value in found.items():
                match = next(each for each in expected if each.endswith(name.rpartition("blocks")[2]))
                assert torch.equal(value, expected[match])
        assert torch.equal(model(x), before)

    run_threads(2, rank)


@pytest.mark.usefixtures("copies_to_host")
def test_verl_merges_adapters(verl: Any, original: bool) -> None:
    """Merged and unmerged, the model computes what it did; the merged weights have the names of the model below."""
    pytest.importorskip("peft")

    def rank(world: Collectives) -> None:
        module = with_adapter()
        policy = verl.get_fsdp_wrap_policy(module, {"transformer_layer_cls_to_wrap": ["Block"]}, is_lora=True)
        model = flatparam.FullyShardedDataParallel(module, auto_wrap_policy=policy, use_orig_params=original)
        x = torch.full((2, 3), world.rank + 1.0)
        before = model(x)
        base = verl.collect_lora_params(model, layered_summon=False, base_sync_done=False)
        assert same(base, Net().state_dict())
        merged = verl.collect_merged_lora_params(model)
        assert list(merged) == list(base)
        alone = Net()
        alone.load_state_dict(merged)
        torch.testing.assert_close(alone(x), before)
        assert torch.equal(model(x), before)
        with verl.merged_lora_context(model, backup_adapters=True):
            torch.testing.assert_close(model(x), before)
        torch.testing.assert_close(model(x), before)

    run_threads(2, rank)


# RLinf


class Settings(dict[str, Any]):
    """Settings as attributes."""

    __getattr__ = dict.__getitem__


def rlinf_strategy() -> Any:
    """Its strategy for FSDP1, without the base class, which needs ray."""
    norm = functions_of(wheel("rlinf"), "rlinf/hybrid_engines/fsdp/utils.py", ["get_grad_norm_for_mixed_precision"])
    return functions_of(
        wheel("rlinf"),
        "rlinf/hybrid_engines/fsdp/strategy/fsdp.py",
        ["FSDPStrategy"],
        FSDP=flatparam.FullyShardedDataParallel,
        FSDPStrategyBase=object,
        FSDPVersion=SimpleNamespace(FSDP="fsdp"),
        Worker=SimpleNamespace(torch_device_type="cpu"),
        clear_memory=lambda: None,
        **vars(norm),
    ).FSDPStrategy()


def test_rlinf_offloads(original: bool) -> None:
    """After 100 rounds, with gradients and Adam, every bit is that of a model that never moved."""

    strategy, cpu = rlinf_strategy(), torch.device("cpu")

    def rank(world: Collectives) -> None:
        models = [wrapped(original) for _ in range(2)]
        optimizers = [optimizer_of(model) for model in models]
        assert len(strategy._iter_fsdp_handles(models[0])) == 3
        for _ in range(4):
            for model in models:
                model(torch.full((2, 3), world.rank + 1.0)).sum().backward()
            for _ in range(25):
                strategy.offload_param_and_grad(models[0], offload_grad=True)
                strategy.offload_optimizer(optimizers[0])
                strategy.onload_param_and_grad(models[0], cpu, onload_grad=True)
                strategy.onload_optimizer(optimizers[0], cpu)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert same(*(model.state_dict() for model in models))
        assert len(strategy.get_optimizer_state_dict(models[0], optimizers[0])["state"]) == 6

    run_threads(2, rank)


def rlinf_clips(world: Collectives, original: bool) -> tuple[float, float]:
    with flatparam.install(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        strategy = rlinf_strategy()
        strategy.cfg, strategy._dp_group = Settings(optim=Settings(clip_grad=0.5)), None
        model, twin = wrapped(original), wrapped(original)
        for each in (model, twin):
            each(torch.full((2, 3), world.rank + 1.0)).sum().backward()
        norms = strategy.clip_grad_norm_(model), twin.clip_grad_norm_(0.5).item()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        return norms


@pytest.mark.processes
def test_rlinf_clips(original: bool) -> None:
    """The norm that it computes from handles is that of `clip_grad_norm_`, and so are the gradients."""
    wheel("rlinf")
    for mine, other in run_processes(2, rlinf_clips, original):
        assert mine == pytest.approx(other, rel=1e-6)


# Composer


@pytest.fixture(scope="module")
def composer() -> Any:
    """Its functions for hooks, states and recovery."""
    trainer = functions_of(
        wheel("mosaicml"),
        "composer/trainer/trainer.py",
        ["_fsdp_reshard_and_cleanup", "_readd_fsdp_sync_hooks"],
        # With today's torch it patches nothing.
        patch_unshard_for_automicrobatching=lambda auto_microbatch_size_found: None,
    )
    state = functions_of(
        wheel("mosaicml"),
        "composer/core/state.py",
        [
            "fsdp_state_dict_type_context",
            "_legacy_optim_state_dict_to_load",
            "get_fsdp_full_optim_state_dict",
            "get_fsdp_sharded_optim_state_dict",
        ],
        log=logging.getLogger("composer"),
    )
    return SimpleNamespace(**vars(trainer), **vars(state))


class Failing(nn.Linear):
    """Fails like a lack of memory."""

    fails = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("none left")
        return super().forward(input)


def test_composer_recovers(composer: Any, original: bool) -> None:
    """With its hooks on every module, and cleaned up by it after a lack of memory, a model trains as one that had none."""

    def rank(world: Collectives) -> None:
        def made() -> Any:
            torch.manual_seed(0)
            module = nn.Sequential(Failing(3, 4), nn.Linear(4, 2))
            return flatparam.FullyShardedDataParallel(module, auto_wrap_policy=LINEAR, use_orig_params=original)

        model, twin = made(), made()
        called: list[int] = []
        hooks = composer._readd_fsdp_sync_hooks(dict(model.named_modules()), lambda *_: called.append(1))
        x = torch.full((2, 3), world.rank + 1.0, requires_grad=True)
        for each in (model, twin):
            each(x).sum().backward()
        assert called
        model[0].module.fails = True
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
        model[0].module.fails = False
        composer._fsdp_reshard_and_cleanup(model)
        for hook in hooks:
            hook.remove()
        for each in (model, twin):
            each(x).sum().backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            # A parameter without a part on this rank has no gradient here.
            assert one.grad is other.grad if one.grad is None else torch.equal(one.grad, other.grad)

    run_threads(2, rank)


def test_composer_saves(composer: Any, original: bool) -> None:
    """Full states by its context, and optimizer state by its older functions, are resumed exactly."""

    def rank(world: Collectives) -> None:
        model, other = wrapped(original), wrapped(original)
        optimizer, again = optimizer_of(model), optimizer_of(other)
        for _ in range(2):
            step(world, model, optimizer)
        with composer.fsdp_state_dict_type_context(model, "full"):
            state = model.state_dict()
            assert bool(state) == (world.rank == 0)
        full = composer.get_fsdp_full_optim_state_dict(model, optimizer, rank0_only=True)
        with composer.fsdp_state_dict_type_context(other, "full"):
            other.load_state_dict(state)
        again.load_state_dict(composer.get_fsdp_sharded_optim_state_dict(full, other))
        again.load_state_dict(composer._legacy_optim_state_dict_to_load(full, other, again, "full"))
        for each, stepped in ((model, optimizer), (other, again)):
            step(world, each, stepped)
        assert same(model.state_dict(), other.state_dict())

    run_threads(2, rank)


# fairseq2


def fairseq2() -> Any:
    """Its functions for FSDP1; the rest of it needs an extension in C++."""
    common = functions_of(
        wheel("fairseq2"),
        "fairseq2/nn/utils/module.py",
        ["apply_to_parameters", "load_state_dict", "maybe_infer_device", "_get_named_modules"],
        CPU=torch.device("cpu"),
        StateDictError=ValueError,
    )
    names = [
        "to_fsdp1",
        "fsdp1_local_state_dict",
        "fsdp1_load_local_state_dict",
        "fsdp1_summon_full_parameters",
    ]
    module = module_of(
        wheel("fairseq2"),
        "fairseq2/nn/fsdp/fsdp1.py",
        names,
        FSDP1Module=flatparam.FullyShardedDataParallel,
        GangError=RuntimeError,
        NotSupportedError=RuntimeError,
        OperationalError=RuntimeError,
        log=logging.getLogger("fairseq2"),
        **vars(common),
    )
    # As if the program had imported it.
    sys.modules[module.__name__] = module
    return module


def fairseq2_trains(world: Collectives, dtype: torch.dtype | None) -> None:
    with flatparam.install():
        functions, group = fairseq2(), torch.distributed.group.WORLD
        several = SimpleNamespace(size=world.size, rank=world.rank, as_process_group=lambda: group)
        gangs = SimpleNamespace(sdp=several, rdp=SimpleNamespace(size=1), dp=several, device=torch.device("cpu"))

        def each_layer(module: nn.Module, wrap: Callable[..., Any]) -> nn.Module:
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, wrap(child, True))
            return module

        def made() -> Any:
            return functions.to_fsdp1(mlp(), gangs, each_layer, mixed_precision_dtype=dtype, fp32_reduce=True)

        model, other = made(), made()
        step(world, model, torch.optim.AdamW(model.parameters(), lr=0.1))
        local = functions.fsdp1_local_state_dict(model)
        with flatparam.FullyShardedDataParallel.state_dict_type(model, flatparam.StateDictType.FULL_STATE_DICT):
            full = model.state_dict()
        # It puts the parts of all ranks together along dimension 0.
        for name, value in full.items():
            chunks = value.chunk(world.size)
            expected = chunks[world.rank] if world.rank < len(chunks) else value.new_empty(0)
            assert torch.equal(local[name], expected), name
        functions.fsdp1_load_local_state_dict(other, {name: value.clone() for name, value in local.items()})
        x = torch.full((2, 3), world.rank + 1.0)
        expected = model(x)
        assert torch.equal(other(x), expected)
        with functions.fsdp1_summon_full_parameters(model):
            inside = model(x if dtype is None else x.to(dtype))
        torch.testing.assert_close(inside.to(expected.dtype), expected)
        assert torch.equal(model(x), expected)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_fairseq2(dtype: torch.dtype | None) -> None:
    """A model that it wraps trains, saves and loads local states, and runs on summoned parameters in place of `forward`."""
    wheel("fairseq2")
    run_processes(2, fairseq2_trains, dtype)


# llama-recipes, which is llama-cookbook now


@pytest.mark.processes
def test_llama_recipes(tmp_path: Path) -> None:
    """Its sharded checkpoint of the model and its full ones of the model and of AdamW are resumed exactly."""
    wheel("llama_cookbook")
    run_processes(2, llama_recipes_saves, str(tmp_path))


def llama_recipes_saves(world: Collectives, folder: str) -> None:
    with flatparam.install():
        from torch.distributed.fsdp import FullStateDictConfig

        names = ["save_model_and_optimizer_sharded", "load_model_sharded", "save_fsdp_model_checkpoint_full"]
        recipes = functions_of(
            wheel("llama_cookbook"),
            "llama_cookbook/model_checkpointing/checkpoint_handler.py",
            [*names, "load_model_checkpoint", "save_optimizer_checkpoint", "load_optimizer_checkpoint"],
            fullstate_save_policy=FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        )
        settings = SimpleNamespace(
            dist_checkpoint_root_folder=folder,
            dist_checkpoint_folder="saved",
            model_name="net",
            checkpoint_folder=f"{folder}/saved-net",
            checkpoint_model_filename="net-1.pt",
        )
        model = wrapped()
        optimizer = optimizer_of(model)
        for _ in range(2):
            step(world, model, optimizer)
        recipes.save_model_and_optimizer_sharded(model, world.rank, settings, optimizer)
        recipes.save_fsdp_model_checkpoint_full(model, optimizer, world.rank, settings)
        recipes.save_optimizer_checkpoint(model, optimizer, world.rank, settings)
        other = wrapped()
        recipes.load_model_sharded(other, world.rank, settings)
        assert same(model.state_dict(), other.state_dict())
        module = mlp()
        recipes.load_model_checkpoint(module, world.rank, settings)
        third = flatparam.FullyShardedDataParallel(
            module, auto_wrap_policy=LINEAR, use_orig_params=True, sync_module_states=True
        )
        again = optimizer_of(third)
        saved = Path(folder) / "saved-net" / "optimizer-net-1.pt"
        # It scatters this state, and forgets it.
        recipes.load_optimizer_checkpoint(third, saved, world.rank)
        full = torch.load(saved) if world.rank == 0 else None
        scatter = flatparam.FullyShardedDataParallel.scatter_full_optim_state_dict
        again.load_state_dict(scatter(full, third))
        for each, stepped in ((model, optimizer), (third, again)):
            step(world, each, stepped)
        assert same(model.state_dict(), third.state_dict())
