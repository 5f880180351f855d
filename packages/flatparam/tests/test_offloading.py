"""`flatparam.offload` and `flatparam.onload`: a model leaves its memory between two uses, and comes back as it was."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import CPUOffload, MixedPrecision, ShardedEMA, ShardingStrategy, fully_shard, offload, onload
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, FlatParamError
from flatparam_comm.testing import run_processes
from flatparam_runtime import units_in

from .models import Batch, Transformer, mlp, seeded
from .worlds import assert_same_state, inputs, node_groups, on_ranks, train

pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")

LINEAR = ModuleWrapPolicy({nn.Linear})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def made(**arguments: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, **arguments)
    return model, adam(model)


def accumulate(model: nn.Module, rank: int) -> None:
    model(inputs(rank)[0]).square().mean().backward()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters, gradients and states, as they are in memory now."""
    found = [each for p in model.parameters() for each in (p.detach(), p.grad) if each is not None]
    return found + [v for state in optimizer.state.values() for v in state.values() if v.dim()]


def hash_of(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def memory_of(tensors: list[torch.Tensor]) -> int:
    """The bytes of the storages that are ordinary memory, each once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values() if storage.resizable())


@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
def test_a_hundred_round_trips(on_disk: bool, tmp_path: Path, use_orig_params: bool) -> None:
    """After 100 round trips, with gradients and Adam's state, every bit is there, and training goes on as without them."""
    folder = tmp_path if on_disk else None

    def rank(world: Collectives) -> None:
        (model, optimizer), (twin, of_twin) = (made(use_orig_params=use_orig_params) for _ in range(2))
        for each, stepped in ((model, optimizer), (twin, of_twin)):
            train(each, stepped, inputs(world.rank))
            accumulate(each, world.rank)
        before = hash_of(everything(model, optimizer))
        for _ in range(100):
            offload(model, folder=folder, optimizer=optimizer)
            assert hash_of(everything(model, optimizer)) == before
            onload(model, optimizer=optimizer)
        assert hash_of(everything(model, optimizer)) == before == hash_of(everything(twin, of_twin))
        for each, stepped in ((model, optimizer), (twin, of_twin)):
            stepped.step()
            train(each, stepped, inputs(world.rank))
        assert_same_state(model.state_dict(), twin.state_dict())

    on_ranks(2, rank)
    assert list(tmp_path.iterdir()) == []


def test_the_bytes_that_are_freed(tmp_path: Path, use_orig_params: bool) -> None:
    """On a disk: a shard's bytes for the parameters, as many for gradients, twice as many for Adam; and they are back."""

    def rank(world: Collectives) -> None:
        model, optimizer = made(use_orig_params=use_orig_params)
        train(model, optimizer, inputs(world.rank))
        shard = 4 * sum(handle.flat_param.numel() for unit in units_in(model) for handle in unit.handles)
        before = memory_of(everything(model, optimizer))
        states = memory_of([v for state in optimizer.state.values() for v in state.values() if v.dim()])
        # States of originals are as long as the stretches of a shard that are stepped: without some of the padding.
        numel = sum(parameter.numel() for parameter in model.parameters())
        assert 2 * 4 * numel <= states <= 2 * shard
        assert use_orig_params or states == 2 * shard
        assert before == 2 * shard + states
        assert offload(model, folder=tmp_path, gradients=False) == shard
        assert offload(model, folder=tmp_path, parameters=False) == shard
        assert offload(model, folder=tmp_path, optimizer=optimizer) == states
        assert memory_of(everything(model, optimizer)) == 0
        assert offload(model, folder=tmp_path, optimizer=optimizer) == 0
        assert onload(model, parameters=False, gradients=False, optimizer=optimizer) == states
        assert onload(model, optimizer=optimizer) == 2 * shard
        assert memory_of(everything(model, optimizer)) == before
        assert onload(model, optimizer=optimizer) == 0

    on_ranks(2, rank)


def test_host_memory_of_a_host(use_orig_params: bool) -> None:
    """On a machine without an accelerator nothing moves to host memory: 0 bytes, the same addresses."""

    def rank(world: Collectives) -> None:
        model, optimizer = made(use_orig_params=use_orig_params)
        train(model, optimizer, inputs(world.rank))
        before = [tensor.data_ptr() for tensor in everything(model, optimizer)]
        assert offload(model, optimizer=optimizer) == 0
        with pytest.raises(FlatParamError, match="offloaded to host memory"):
            model(inputs(world.rank)[0])
        assert onload(model, optimizer=optimizer) == 0
        assert [tensor.data_ptr() for tensor in everything(model, optimizer)] == before
        model(inputs(world.rank)[0])

    on_ranks(2, rank)


class Sleeper(nn.Linear):
    """A module with a method of its own of the name."""

    def offload(self, where: str) -> str:
        return f"its own, {where}"


def test_the_methods(tmp_path: Path) -> None:
    """A wrapper's methods are the functions; a method of this name that the wrapped module has itself is called instead."""

    def rank(world: Collectives) -> None:
        model, optimizer = made()
        assert model.offload(folder=tmp_path, optimizer=optimizer) > 0
        with pytest.raises(FlatParamError, match="onload"):
            model(inputs(world.rank)[0])
        assert model.onload(optimizer=optimizer) > 0
        model(inputs(world.rank)[0])
        own = FSDP(Sleeper(3, 3))
        assert own.offload("there") == "its own, there"
        assert offload(own, folder=tmp_path) > 0
        assert own.onload() > 0

    on_ranks(2, rank)


def resident_nbytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found[1]) * 1024 if found else 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not tell")
@pytest.mark.processes
def test_the_system_has_the_memory_back(tmp_path: Path) -> None:
    """The kernel counts less memory of this process after the offload, by at least nine tenths of the formula.

    The process is a new one: where other tests have run, the allocator may give out, and keep, memory that they freed.
    """
    run_processes(1, _frees, tmp_path)


def _frees(world: Collectives, folder: Path) -> None:
    model = FSDP(nn.Linear(2048, 4096), world)
    before = resident_nbytes()
    freed = offload(model, folder=folder)
    assert freed == 4 * (2048 * 4096 + 4096)
    assert before - resident_nbytes() > 0.9 * freed
    onload(model)


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD]
)
def test_strategies(strategy: ShardingStrategy, tmp_path: Path, use_orig_params: bool) -> None:
    """Under each strategy, with mixed precision, between backward and step, training goes on to the same bits."""

    def rank(world: Collectives, leaves: bool) -> Any:
        group = node_groups(world) if strategy is ShardingStrategy.HYBRID_SHARD else world
        model, optimizer = made(
            process_group=group,
            sharding_strategy=strategy,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
            use_orig_params=use_orig_params,
        )
        for x in inputs(world.rank):
            model(x).square().mean().backward()
            if leaves:
                offload(model, folder=tmp_path, optimizer=optimizer)
                onload(model, optimizer=optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    for found, twin in zip(on_ranks(4, rank, True), on_ranks(4, rank, False), strict=True):
        assert_same_state(found, twin)


@each_row("kind", ["in place", "ignored", "tied", "offloaded"])
def test_other_models(kind: str, tmp_path: Path, use_orig_params: bool) -> None:
    """Modules of `fully_shard`, ignored and tied parameters and shards that are in host memory by a setting come back."""

    def build() -> Any:
        if kind == "in place":
            return fully_shard(seeded(mlp))
        if kind == "tied":
            return FSDP(seeded(Transformer), use_orig_params=use_orig_params)
        module = seeded(Batch)
        ignored = [module.first] if kind == "ignored" else None
        setting = CPUOffload(offload_params=True) if kind == "offloaded" else None
        return FSDP(module, ignored_modules=ignored, cpu_offload=setting, use_orig_params=use_orig_params)

    def rank(world: Collectives) -> None:
        model, twin = build(), build()
        optimizers = [adam(each) for each in (model, twin)]
        x = torch.tensor([[1, 2, 3]]) if kind == "tied" else inputs(world.rank)[0]
        for _ in range(2):
            offload(model, folder=tmp_path, optimizer=optimizers[0])
            held = everything(model, optimizers[0])
            assert memory_of([each for each in held if each.numel()]) == 0
            onload(model, optimizer=optimizers[0])
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                train(each, optimizer, [x])
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)

    on_ranks(2, rank)


def test_uses_while_offloaded(tmp_path: Path, use_orig_params: bool) -> None:
    """A forward, a gather, a state and a step are refused and name `onload`; a checkpoint can be saved, to the same bits."""
    Checkpointer = pytest.importorskip("flatparam_checkpoint").Checkpointer

    def rank(world: Collectives) -> None:
        model, optimizer = made(use_orig_params=use_orig_params)
        train(model, optimizer, inputs(world.rank))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        ema = ShardedEMA(model, 0.9)
        (tmp_path / "disk").mkdir(exist_ok=True)
        offload(model, folder=tmp_path / "disk", optimizer=optimizer)
        refused = r"rank \d: its parameters are offloaded to the folder '.*disk', .* call flatparam\.onload\(model\)"
        for use in (lambda: model(inputs(0)[0]), lambda: model[0](inputs(0)[0]), model.state_dict):
            with pytest.raises(FlatParamError, match=refused):
                use()
        with pytest.raises(FlatParamError, match=refused), FSDP.summon_full_params(model):
            pass
        with pytest.raises(FlatParamError, match=r"Adam\.step\(\): the model's parameters are offloaded.*onload"):
            optimizer.step()
        ema.update()
        with Checkpointer(tmp_path / "saved", model, optimizer, ranks=world) as checkpointer:
            checkpointer.save(1)
        onload(model, optimizer=optimizer)
        assert_same_state(model.state_dict(), before)
        train(model, optimizer, inputs(world.rank))
        checkpointer.load()
        assert_same_state(model.state_dict(), before)

    on_ranks(2, rank)


def test_between_forward_and_backward(use_orig_params: bool) -> None:
    """A backward pass through a forward pass from before a round trip is refused, as after any change of the shards."""

    def rank(world: Collectives) -> None:
        model, _ = made(use_orig_params=use_orig_params)
        loss = model(inputs(world.rank)[0]).sum()
        offload(model)
        with pytest.raises(FlatParamError, match=r"call flatparam\.onload"):
            loss.backward()
        onload(model)
        accumulate(model, world.rank)

    on_ranks(2, rank)


def test_refusals(tmp_path: Path) -> None:
    """Inside a pass, with unreduced gradients, or where one rank's disk fails, every rank refuses and nothing changes."""

    def rank(world: Collectives) -> None:
        model, optimizer = made()
        train(model, optimizer, inputs(world.rank))
        before = [tensor.data_ptr() for tensor in everything(model, optimizer)]
        handle = model.module[2].register_forward_hook(lambda *_: offload(model))
        with pytest.raises(FlatParamError, match="rank 0: InAPassError: .*inside a forward or backward pass"):
            model(inputs(world.rank)[0])
        handle.remove()
        missing = tmp_path if world.rank == 0 else tmp_path / "missing"
        with pytest.raises(
            FlatParamError, match=r"cannot offload .*nothing was changed: rank 1: FileNotFound.*missing"
        ):
            offload(model, folder=missing, optimizer=optimizer)
        with pytest.raises(ValueError, match="found a Linear without a unit"):
            offload(nn.Linear(2, 2))
        with pytest.raises(TypeError, match="expected an optimizer whose state is to move, found 'adamw'"):
            offload(model, optimizer="adamw")
        with pytest.raises(ValueError, match="found one .AdamW. that holds none of its parameters"):
            offload(model, optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters()))
        assert [tensor.data_ptr() for tensor in everything(model, optimizer)] == before
        with model.no_sync():
            accumulate(model, world.rank)
        with pytest.raises(FlatParamError, match=r"not reduced, of passes under no_sync"):
            offload(model)
        accumulate(model, world.rank)
        offload(model)
        onload(model)

    on_ranks(2, rank)


@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
def test_nothing_keeps_the_memory_that_it_had(on_disk: bool, tmp_path: Path, use_orig_params: bool) -> None:
    """What moves leaves nothing behind: not the shard, which full parameters may lie in, the gradients nor the state."""

    def rank(world: Collectives) -> None:
        model = FSDP(nn.Linear(64, 64), use_orig_params=use_orig_params)
        if model.compute_device.type == "cpu" and not on_disk:
            return  # it is in host memory already
        optimizer = adam(model)
        for _ in range(2):
            train(model, optimizer, [torch.ones(2, 64)])
            had = {each._cdata: each for each in map(torch.Tensor.untyped_storage, everything(model, optimizer))}
            assert offload(model, folder=tmp_path if on_disk else None, optimizer=optimizer) > 0
            assert [torch._C._storage_Use_Count(address) for address in had] == [1] * len(had)
            onload(model, optimizer=optimizer)

    on_ranks(1, rank)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
def test_from_a_gpu(on_disk: bool, tmp_path: Path, use_orig_params: bool) -> None:
    """To host memory or a disk and back, the GPU has the bytes of the formula free, and every bit is the same."""

    def rank(world: Collectives) -> None:
        device = torch.device("cuda", 0)
        model = FSDP(nn.Linear(1024, 1024), device_id=device, use_orig_params=use_orig_params)
        optimizer = adam(model)
        train(model, optimizer, [torch.ones(2, 1024, device=device)])
        before = hash_of(everything(model, optimizer))
        held = torch.cuda.memory_allocated()
        for _ in range(10):
            freed = offload(model, folder=tmp_path if on_disk else None, optimizer=optimizer)
            assert freed == 4 * 4 * (1024 * 1024 + 1024)
            assert held - torch.cuda.memory_allocated() >= freed
            onload(model, optimizer=optimizer)
        assert hash_of(everything(model, optimizer)) == before
        assert torch.cuda.memory_allocated() <= held
        train(model, optimizer, [torch.ones(2, 1024, device=device)])

    on_ranks(1, rank)
