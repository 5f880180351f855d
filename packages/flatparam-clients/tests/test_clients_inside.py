"""What programs do inside FSDP1, with flatparam installed: their calls, written out."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, FlatParamError
from packages.flatparam.tests.models import mlp, seeded
from packages.flatparam.tests.worlds import node_groups, on_ranks, train

LINEAR = ModuleWrapPolicy({nn.Linear})


@pytest.fixture(autouse=True, scope="module")
def installed(leftovers_do_not_count: None) -> Iterator[None]:
    """FSDP1's names are ours in this file."""
    with flatparam.install():
        yield


def of_torch(module: str, name: str = "") -> Any:
    """What programs import of FSDP1."""
    found = importlib.import_module(f"torch.distributed.fsdp{'.' if module else ''}{module}")
    return getattr(found, name) if name else found


def wrapped(**arguments: Any) -> Any:
    """A model in the way of a program."""
    return of_torch("", "FullyShardedDataParallel")(seeded(mlp), auto_wrap_policy=LINEAR, **arguments)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def batch(rank: int = 0) -> torch.Tensor:
    return torch.full((2, 3), rank + 1.0)


# RL trainers: what is offloaded between phases


def offload(model: Any, device: torch.device) -> None:
    """The parameters to `device`, as engines of RL trainers do."""
    of_torch("_runtime_utils", "_lazy_init")(model, model)
    assert model._is_root, "only a root is offloaded"
    for handle in model._all_handles:
        if handle._offload_params:
            continue
        flat_param = handle.flat_param
        assert flat_param.data.data_ptr() == flat_param._local_shard.data_ptr()
        assert id(flat_param.data) != id(flat_param._local_shard)
        assert flat_param.data.size() == flat_param._local_shard.size()
        handle.flat_param_to(device, non_blocking=True)
        flat_param._local_shard = flat_param.data
        assert id(flat_param._local_shard) != id(flat_param.data)


def round_trips(world: Collectives, here: torch.device, there: torch.device, original: bool) -> None:
    model, twin = [wrapped(use_orig_params=original, device_id=here) for _ in range(2)]
    optimizer, of_twin = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (model, twin)]
    before = state_of(model)
    for _ in range(100):
        offload(model, there)
        assert {p.device.type for p in model.parameters()} == {there.type}
        offload(model, here)
    assert_same(state_of(model), before)
    x = batch(world.rank).to(here)
    for each, stepped in ((model, optimizer), (twin, of_twin)):
        train(each, stepped, [x, x])
    offload(model, there)
    offload(model, here)
    for each, stepped in ((model, optimizer), (twin, of_twin)):
        train(each, stepped, [x])
    assert_same(state_of(model), state_of(twin))


def test_offload_and_onload(use_orig_params: bool) -> None:
    """After 100 round trips, before and between steps, every bit is that of a model which never moved."""
    on_ranks(2, round_trips, torch.get_default_device(), torch.device("cpu"), use_orig_params)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_offload_from_a_gpu(use_orig_params: bool) -> None:
    """The same between a GPU and the CPU."""
    on_ranks(2, round_trips, torch.device("cuda", 0), torch.device("cpu"), use_orig_params)


def test_moved_while_full_parameters_are_there(use_orig_params: bool) -> None:
    """What is in memory between forward and backward is freed first; inside a pass it is refused by name."""

    def rank(world: Collectives) -> None:
        model = wrapped(use_orig_params=use_orig_params)
        handle = model._all_handles[0]
        handle.unshard()
        assert not handle.needs_unshard()
        handle.flat_param_to(torch.device("cpu"))
        assert handle.needs_unshard()
        handle._fully_sharded_module.register_forward_hook(lambda *_: handle.flat_param_to("cpu"))
        with pytest.raises(FlatParamError, match="pass"):
            model(batch())

    on_ranks(2, rank)


def test_offloaded_by_a_setting() -> None:
    """With `CPUOffload(True)` handles say so, and programs leave them alone."""

    def rank(world: Collectives) -> None:
        assert [h._offload_params for h in wrapped()._all_handles] == [False] * 3
        model = wrapped(cpu_offload=of_torch("", "CPUOffload")(offload_params=True))
        assert [h._offload_params for h in model._all_handles] == [True] * 3

    on_ranks(2, rank)


def test_given_shards_of_other_memory(use_orig_params: bool) -> None:
    """A `_local_shard` of other memory becomes the shard, and `_use_sharded_views` has the originals follow at once."""

    def rank(world: Collectives) -> None:
        model = wrapped(use_orig_params=use_orig_params)
        with torch.no_grad():
            for handle in model._all_handles:
                handle.flat_param._local_shard = handle.flat_param._local_shard * 2
                handle._use_sharded_views()
                assert handle.flat_param.data_ptr() == handle.flat_param._local_shard.data_ptr()
                for param in handle.flat_param._params or []:
                    inside = param.data_ptr() - handle.flat_param.data_ptr()
                    assert not param.numel() or 0 <= inside < handle.flat_param.nbytes
        assert_same(state_of(model), {name: value * 2 for name, value in seeded(mlp).state_dict().items()})
        model(batch()).sum().backward()

    on_ranks(2, rank)


def test_layered_summoning() -> None:
    """Summoning unit by unit, each declared a root before and none afterwards, and training after that is as without."""

    def rank(world: Collectives) -> None:
        fsdp = of_torch("", "FullyShardedDataParallel")
        model, twin = wrapped(), wrapped()
        for submodule in fsdp.fsdp_modules(model)[1:]:
            submodule._is_root = True
            with fsdp.summon_full_params(submodule, writeback=False):
                assert all(value.dim() <= 2 for value in submodule.state_dict().values())
            submodule._is_root = False
        for each in (model, twin):
            each(batch(world.rank)).sum().backward()
        assert (model._is_root, model[0]._is_root) == (True, False)
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
        # FSDP1 would find the root anew; here every pass does.
        model[0]._is_root = None
        assert (model._is_root, model[0]._is_root) == (True, False)

    on_ranks(2, rank)


def test_moved_while_summoned(use_orig_params: bool) -> None:
    """Inside `summon_full_params` the full parameters move, or are cast, until it ends; with `writeback` values are kept."""

    def rank(world: Collectives) -> None:
        fsdp = of_torch("", "FullyShardedDataParallel")
        model = wrapped(use_orig_params=use_orig_params)
        before = state_of(model)
        with fsdp.summon_full_params(model, writeback=False):
            model.module.to("cpu")
            model.module.to(torch.float64)
            assert {p.dtype for p in model.module.parameters()} == {torch.float64}
            assert model.module(batch().double()).dtype == torch.float64
        assert_same(state_of(model), before)
        with fsdp.summon_full_params(model, writeback=True), torch.no_grad():
            model.module.to(torch.float64)
            for param in model.module.parameters():
                param.mul_(2)
        assert_same(state_of(model), {name: value * 2 for name, value in before.items()})
        model(batch()).sum().backward()

    on_ranks(2, rank)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("writeback", [True, False])
def test_moved_from_a_gpu_while_summoned(use_orig_params: bool, writeback: bool) -> None:
    """To the host and back inside `summon_full_params`, as engines of RL trainers do; shards and values stay."""

    def rank(world: Collectives) -> None:
        fsdp, device = of_torch("", "FullyShardedDataParallel"), torch.device("cuda", 0)
        model = wrapped(use_orig_params=use_orig_params, device_id=device)
        before = state_of(model)
        with fsdp.summon_full_params(model, writeback=writeback):
            model.module.to("cpu")
            moved = dict(model.named_parameters())
            assert all(torch.equal(moved[name], value.cpu()) for name, value in before.items())
            if not writeback:
                model.module.to(device)
        assert_same(state_of(model), before)
        assert {p.device for p in model.parameters()} == {device}
        model(batch().to(device)).sum().backward()

    on_ranks(2, rank)


# Weight synchronisation and surgery


def test_what_a_shard_holds() -> None:
    """From `_params`, `_param_infos` and `_shard_param_infos` a program finds each original's part of the shard."""

    def rank(world: Collectives) -> Any:
        model = wrapped(use_orig_params=True)
        full = seeded(mlp).state_dict()
        found = []
        for handle in of_torch("_traversal_utils", "_get_fsdp_handles")(model):
            flat_param = handle.flat_param
            parts = zip(flat_param._params, flat_param._param_infos, flat_param._shard_param_infos, strict=True)
            for fqn, (param, (name, module, _), part) in zip(flat_param._fqns, parts, strict=True):
                assert module._parameters[name] is param
                if not part.in_shard:
                    assert (part.offset_in_shard, param.numel()) == (None, 0)
                    continue
                shard = flat_param[part.offset_in_shard : part.offset_in_shard + part.numel_in_shard]
                path = f"{module_name(model, module)}.{name}"
                flat = full[path].flatten()[part.intra_param_start_idx : part.intra_param_end_idx + 1]
                assert torch.equal(shard, flat), fqn
                found.append((path, part.numel_in_shard))
        return found

    counted: dict[str, int] = {}
    for of_rank in on_ranks(2, rank):
        for path, numel in of_rank:
            counted[path] = counted.get(path, 0) + numel
    assert counted == {name: value.numel() for name, value in seeded(mlp).state_dict().items()}


def module_name(model: nn.Module, module: nn.Module) -> str:
    clean = of_torch("_common_utils", "clean_tensor_name")
    return next(str(clean(name)) for name, each in model.named_modules() if each is module)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(input))


def test_shared_parameters() -> None:
    """`_shared_param_infos` has the further places of a parameter, with the first one."""

    def rank(world: Collectives) -> None:
        model = of_torch("", "FullyShardedDataParallel")(Tied())
        (info,) = model._flat_param._shared_param_infos
        assert info[:3] == ("weight", model.module.second, "second")
        assert info[3:] == ("weight", model.module.first, "first")
        assert model._flat_param._params is None

    on_ranks(2, rank)


def test_memory_that_we_do_not_have() -> None:
    """`hasattr` tells the truth, and asking says what to use instead."""

    def rank(world: Collectives) -> None:
        model = wrapped()
        flat_param = model._all_handles[0].flat_param
        for name in ("_mp_shard", "_full_prec_full_param_padded", "_saved_grad_shard", "_cpu_grad"):
            assert not hasattr(flat_param, name)
        with pytest.raises(AttributeError, match=r"no _cpu_grad: an offloaded shard's gradient is \.grad"):
            _ = flat_param._cpu_grad
        assert flat_param._full_param_padded.untyped_storage().size() == 0

    on_ranks(2, rank)


def test_unsharding_by_hand(use_orig_params: bool) -> None:
    """Unsharding by a handle, in one call or in three, shows full parameters; `reshard(True)` frees them."""

    def rank(world: Collectives) -> None:
        model = wrapped(use_orig_params=use_orig_params)
        model(batch()).sum().backward()
        handle = model[0]._handle
        assert handle.uses_sharded_strategy
        with pytest.raises(FlatParamError, match=r"not in memory; call handle\.unshard\(\)"):
            handle._get_padded_unsharded_flat_param()
        handle.unshard()
        full = handle._get_padded_unsharded_flat_param()
        assert full.numel() == handle.flat_param.numel() * handle.world_size
        assert model[0].module.weight.shape == (5, 3) == seeded(mlp)[0].weight.shape
        handle._use_unsharded_views(as_params=True)
        handle._setattr_tensor(model[0].module, "weight", model[0].module.weight)
        with pytest.raises(FlatParamError, match=r"'weight' cannot be given a different tensor.*summon_full_params"):
            handle._setattr_tensor(model[0].module, "weight", torch.ones(5, 3))
        handle.reshard(True)
        assert handle.needs_unshard()

        allocated = handle._alloc_padded_unsharded_flat_param()
        assert allocated.untyped_storage().size() > 0
        handle._use_unsharded_flat_param(handle._all_gather_flat_param(allocated))
        assert torch.equal(model[0].module.weight, seeded(mlp)[0].weight)
        handle._free_unsharded_flat_param()
        assert handle.flat_param._full_param_padded.untyped_storage().size() == 0
        of_torch("_runtime_utils", "_unshard")(model[0], handle, model._unshard_stream, model._pre_unshard_stream)
        of_torch("_runtime_utils", "_reshard")(model[0], handle, True)
        model(batch()).sum().backward()

    on_ranks(2, rank)


def test_a_part_that_is_shown_by_hand() -> None:
    """At rest a program may show each parameter's part of the shard itself: nothing is left to do; all else is refused."""

    def rank(world: Collectives) -> None:
        model = wrapped(use_orig_params=False)
        for handle in model._all_handles:
            flat_param = handle.flat_param
            for part, (name, module, _) in zip(flat_param._shard_param_infos, flat_param._param_infos, strict=True):
                shown = torch.empty(0)
                if part.in_shard:
                    shown = flat_param[part.offset_in_shard : part.offset_in_shard + part.numel_in_shard]
                handle._setattr_tensor(module, name, shown)
                with pytest.raises(FlatParamError, match=f"'{name}' cannot be given a different tensor"):
                    handle._setattr_tensor(module, name, torch.ones(3))
        model(batch()).sum().backward()

    on_ranks(2, rank)


def test_handles_are_told_apart_by_identity() -> None:
    """Who collects handles by `id`, module by module, has each of them once, and has all."""

    def rank(world: Collectives) -> None:
        model = wrapped()
        found: dict[int, Any] = {}
        for module in model.modules():
            for handle in [getattr(module, "_handle", None), *getattr(module, "_all_handles", [])]:
                if handle is not None:
                    found.setdefault(id(handle), handle)
        assert list(found.values()) == model._all_handles

    on_ranks(2, rank)


def test_a_method_of_handles_that_is_replaced() -> None:
    """Who replaces `FlatParamHandle.unshard` is told what to register instead; nothing is replaced."""
    handle = of_torch("_flat_param", "FlatParamHandle")
    before = handle.unshard
    with pytest.raises(FlatParamError, match=r"FlatParamHandle\.unshard cannot be replaced.*stage='all_gather'"):
        handle.unshard = lambda self: None
    assert handle.unshard is before


# Recovery


class Failing(nn.Linear):
    """Fails once, like a lack of memory."""

    fails = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("none left")
        return super().forward(input)


def test_after_a_lack_of_memory() -> None:
    """After an exception in a pass a trainer cleans up at the root, and trains on as if it had not been."""

    def rank(world: Collectives) -> None:
        fsdp = of_torch("", "FullyShardedDataParallel")
        clean_up = of_torch("_runtime_utils", "_post_backward_final_callback")
        models = [
            fsdp(nn.Sequential(seeded(lambda: Failing(3, 4)), nn.Linear(4, 2)), auto_wrap_policy=LINEAR)
            for _ in range(2)
        ]
        models[1].load_state_dict(models[0].state_dict())
        model, twin = models
        model(batch()).sum().backward()
        twin(batch()).sum().backward()
        model[0].module.fails = True
        with pytest.raises(torch.OutOfMemoryError):
            model(batch())
        model[0].module.fails = False
        for module in model.modules():
            if isinstance(module, fsdp) and module.check_is_root():
                clean_up(module, module)
        assert all(handle.needs_unshard() for handle in model._all_handles)
        for each in models:
            each(batch()).sum().backward()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
        with pytest.raises(FlatParamError, match="not a root"):
            clean_up(model[0], model[0])
        model[0].module.register_forward_hook(lambda *_: clean_up(model, model))
        with pytest.raises(FlatParamError, match="a pass is running"):
            model(batch())

    on_ranks(2, rank)


# Facts


def test_finding_wrappers() -> None:
    """The functions that find wrappers and handles agree with `fsdp_modules`."""

    def rank(world: Collectives) -> None:
        model = wrapped()
        traversal, common = of_torch("_traversal_utils"), of_torch("_common_utils")
        wrappers = of_torch("", "FullyShardedDataParallel").fsdp_modules(model)
        assert traversal._get_fsdp_states(model) == wrappers == model._all_fsdp_states
        assert traversal._get_fsdp_states_with_modules(model) == (wrappers, wrappers)
        handles = traversal._get_fsdp_handles(model)
        assert handles == [w._handle for w in wrappers if w._handle] == model._all_handles
        assert len(set(handles)) == 3
        assert common._get_module_fsdp_state_if_fully_sharded_module(model) is model
        assert common._get_module_fsdp_state(model.module) is None
        assert (common._has_fsdp_params(model, model), common._module_handle(model, model)) == (False, None)
        assert of_torch("_runtime_utils")._get_fsdp_root_states(nn.Sequential(model)) == [model]
        assert of_torch("_runtime_utils")._is_fsdp_root(model, model)
        tensor = torch.ones(1)
        assert not common._is_fsdp_flattened(tensor)
        common._set_fsdp_flattened(tensor)
        assert common._is_fsdp_flattened(tensor)
        assert model._has_params is False
        assert [p._fsdp_flattened for p in model.parameters()] == [True] * 3
        assert hasattr(model, "_fsdp_wrapped_module")
        assert model.training_state == common.TrainingState.IDLE

    on_ranks(2, rank)


def test_the_hybrid_strategies() -> None:
    """Composer tells hybrid models by the list of strategies, and asks for the group across nodes."""

    def rank(world: Collectives) -> None:
        shard, replicate = node_groups(world)
        strategy = of_torch("", "ShardingStrategy").HYBRID_SHARD
        model = wrapped(sharding_strategy=strategy, process_group=(shard, replicate))
        assert model.sharding_strategy in of_torch("_init_utils", "HYBRID_SHARDING_STRATEGIES")
        assert model._inter_node_pg.size == replicate.size
        assert not hasattr(wrapped(), "_inter_node_pg")
        assert wrapped().sharding_strategy not in of_torch("_init_utils", "HYBRID_SHARDING_STRATEGIES")

    on_ranks(4, rank)


def test_the_device() -> None:
    """`_device_handle` is torch's module of the device, and its streams are those of the computation."""

    def rank(world: Collectives) -> None:
        model = wrapped()
        device = model._device_handle
        assert device is torch.cpu
        device.synchronize()
        with device.stream(model._unshard_stream):
            model(batch()).sum().backward()
        device.current_stream()
        assert type(model._post_backward_stream) is type(device.current_stream())

    on_ranks(2, rank)


def test_the_upcast_of_mixed_precision(use_orig_params: bool) -> None:
    """accelerate casts trained flat parameters to fp32 before the first pass, module by module."""

    def rank(world: Collectives) -> None:
        fsdp = of_torch("", "FullyShardedDataParallel")
        model = fsdp(seeded(mlp).bfloat16(), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        upcast = []
        for module in fsdp.fsdp_modules(model):
            if not module._has_params:
                continue
            param = module._flat_param
            if param.dtype != torch.float32 and param.device != torch.device("meta") and param.requires_grad:
                upcast.append((module.module.__class__.__name__, param._fqns))
                param.data = param.data.to(torch.float32)
                module._handle._orig_param_dtype = torch.float32
        assert [name for name, _ in upcast] == ["Linear"] * 3
        with torch.autocast("cpu", torch.bfloat16):
            model(batch()).sum().backward()
        assert {value.dtype for value in model.state_dict().values()} == {torch.float32}

    on_ranks(2, rank)
