"""`fully_shard`: the module itself is sharded, and has FSDP2's methods; what cannot mean the same is refused."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import flatparam
from flatparam import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from flatparam.checkpoint import state_dict as functions
from flatparam_comm import Collectives
from flatparam_core import FlatParamError
from flatparam_runtime import summon_full_params, unit_of, units_in

from .models import mlp, seeded
from .worlds import assert_same_state, facts_of, inputs, node_groups, on_ranks, train, train_on_mean


class Reduced(nn.Module):
    """A block and what is around it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x) * self.scale
        return out


def sharded(**arguments: Any) -> Any:
    """The model, with its block and itself sharded."""
    model = seeded(Reduced)
    fully_shard(model.block, **arguments)
    return fully_shard(model, **arguments)


def test_the_module_itself_is_sharded() -> None:
    """The same object is returned, with the same names; its class is derived from its own class and `FSDPModule`."""

    def rank(ranks: Collectives) -> None:
        model = seeded(Reduced)
        names = [name for name, _ in model.named_parameters()]
        hooked = model.block[0].weight.numel() + model.block[0].bias.numel()
        fully_shard(model.block)
        assert fully_shard(model) is model
        assert isinstance(model, FSDPModule)
        assert isinstance(model, Reduced)
        assert type(model).__name__ == "FSDPReduced"
        assert type(model.block).__name__ == "FSDPSequential"
        assert type(model.block[0]) is nn.Linear
        assert [name for name, _ in model.named_parameters()] == names
        assert [unit.name for unit in units_in(model)] == ["Reduced", "Sequential"]
        assert sum(parameter.numel() for parameter in model.block[0].parameters()) < hooked

    on_ranks(2, rank)


@each_row("world_size", [1, 2, 4])
def test_trains_as_one_process(world_size: int) -> None:
    """In fp32 the state after training is that of one process on the mean of the ranks' losses, bit for bit."""

    def rank(ranks: Collectives) -> Any:
        model = sharded()
        train(model, torch.optim.Adam(model.parameters(), lr=0.1), inputs(ranks.rank))
        return model.state_dict()

    reference = seeded(Reduced)
    train_on_mean(reference, torch.optim.Adam(reference.parameters(), lr=0.1), world_size)
    for state in on_ranks(world_size, rank):
        assert_same_state(state, reference.state_dict())


def test_groups_of_collectives() -> None:
    """A pair of groups, as the wrapper takes it, is hybrid sharding too."""

    def rank(ranks: Collectives) -> Any:
        model = sharded(mesh=node_groups(ranks))
        train(model, torch.optim.Adam(model.parameters(), lr=0.1), inputs(ranks.rank))
        return model.state_dict()

    reference = seeded(Reduced)
    train_on_mean(reference, torch.optim.Adam(reference.parameters(), lr=0.1), 4, per_node=2)
    for state in on_ranks(4, rank):
        assert_same_state(state, reference.state_dict())


@each_row(
    ("arguments", "error", "text"),
    [
        (
            {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() > 1 else None},
            ValueError,
            r"expected None or Shard\(0\) for '.*weight', found Shard\(dim=1\): .* leave the function out",
        ),
        ({"shard_placement_fn": lambda parameter: 0}, ValueError, r"expected None or Shard\(0\) for '.*', found 0"),
        ({"dp_mesh_dims": "shard"}, ValueError, "dp_mesh_dims: pass"),
        ({"reshard_after_forward": 3}, ValueError, "a divisor of the 4 ranks"),
        ({"reshard_after_forward": "yes"}, TypeError, "reshard_after_forward: expected a bool"),
        ({"mp_policy": None}, TypeError, "mp_policy: expected a MixedPrecisionPolicy"),
        ({"offload_policy": True}, TypeError, "offload_policy: expected a OffloadPolicy"),
        (
            {"ignored_params": [nn.Linear(1, 1)]},
            ValueError,
            "ignored_params: expected parameters, found a Linear",
        ),
        ({"mesh": "nowhere"}, TypeError, "nowhere"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """An argument that cannot be honoured is refused by name, before anything is changed."""

    def rank(ranks: Collectives) -> None:
        model = seeded(mlp)
        before = facts_of(model)
        with pytest.raises(error, match=text):
            fully_shard(model, **arguments)
        assert facts_of(model) == before

    on_ranks(4, rank)


def test_a_placement_that_is_so_anyway() -> None:
    """A function that has every parameter cut as it is anyway is accepted, and asked of those of this call's units."""

    def rank(ranks: Collectives) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1))
        fully_shard(model[0])
        asked: list[tuple[int, ...]] = []

        def place(parameter: nn.Parameter) -> Shard | None:
            asked.append(tuple(parameter.shape))
            return Shard(0) if parameter.dim() > 1 else None

        fully_shard(model, shard_placement_fn=place, ignored_params=iter(model[1].parameters()))
        assert asked == [(1, 4), (1,)]

    on_ranks(2, rank)


class Stack(nn.ModuleList):
    """A list that has a forward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def test_a_list_with_a_forward_pass(recwarn: pytest.WarningsRecorder) -> None:
    """A `ModuleList` that is called is a module like any other, for `fully_shard` and without a warning of the wrapper."""

    def rank(ranks: Collectives) -> None:
        model = seeded(lambda: Stack([nn.Linear(3, 3), nn.Linear(3, 2)]))
        expected = model(torch.ones(2, 3))
        assert torch.equal(FullyShardedDataParallel(copy.deepcopy(model))(torch.ones(2, 3)), expected)
        assert torch.equal(fully_shard(model)(torch.ones(2, 3)), expected)

    on_ranks(2, rank)
    assert not [each for each in recwarn if "forward pass" in str(each.message)]


def test_refused_modules() -> None:
    """What has no forward pass, is sharded already, or is nothing to shard is refused by name."""

    def rank(ranks: Collectives) -> None:
        for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
            with pytest.raises(ValueError, match="has no forward pass; shard the modules in it"):
                fully_shard(container)
        with pytest.raises(TypeError, match="expected a module or a list of modules"):
            fully_shard([nn.Linear(2, 2), 3])  # type: ignore[list-item]
        model = fully_shard(nn.Linear(2, 2))
        with pytest.raises(FlatParamError, match="this FSDPLinear is sharded already"):
            fully_shard(model)
        with pytest.raises(FlatParamError, match="is wrapped in FullyShardedDataParallel"):
            fully_shard(nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2))))
        with pytest.raises(FlatParamError, match="'0' is sharded by fully_shard; use one of the two"):
            FullyShardedDataParallel(nn.Sequential(model))
        with pytest.raises(TypeError, match=r"call fully_shard\(module\)"):
            FSDPModule()
        around = fully_shard(Reduced())
        with pytest.raises(FlatParamError, match=r"'0.weight' .* around it already.*inside first"):
            fully_shard(around.block)
        assert not isinstance(around.block, FSDPModule)

    on_ranks(2, rank)


def test_policies_of_torch() -> None:
    """Torch's policy objects mean what ours do; one that asks for something else is refused by the field's name."""

    def rank(ranks: Collectives) -> None:
        low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "output_dtype": torch.float64}
        plans = [
            units_in(sharded(mp_policy=kind(**low)))[0].plan
            for kind in (MixedPrecisionPolicy, TorchMixedPrecisionPolicy)
        ]
        assert (plans[0].precision, plans[0].casting) == (plans[1].precision, plans[1].casting)
        assert plans[0].casting.output_dtype is torch.float64
        for policy in (CPUOffloadPolicy(pin_memory=False), TorchCPUOffloadPolicy()):
            assert units_in(sharded(offload_policy=policy))[0].plan.storage_device == torch.device("cpu")
        assert units_in(sharded(offload_policy=OffloadPolicy()))[0].plan.storage_device is None

    on_ranks(2, rank)


def test_a_field_of_torchs_policy_that_is_unknown() -> None:
    """A later torch may have more fields: one with a different value than its default is refused by name."""
    import dataclasses

    newer = dataclasses.make_dataclass("MixedPrecisionPolicy", [("param_dtype", Any, None), ("extra", int, 0)])

    def rank(ranks: Collectives) -> None:
        fully_shard(nn.Linear(2, 2), mp_policy=newer())
        with pytest.raises(ValueError, match="mp_policy: extra=3 is not supported; leave it at 0"):
            fully_shard(nn.Linear(2, 2), mp_policy=newer(extra=3))

    on_ranks(2, rank)


def test_torchs_arguments_are_there() -> None:
    """Each argument of torch's `fully_shard` is one of ours, in this order, with torch's default or a policy of ours."""
    theirs = inspect.signature(inspect.unwrap(torch_fully_shard)).parameters
    ours = inspect.signature(fully_shard).parameters
    assert list(theirs) == [name for name in ours if name in theirs]
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind
        if "policy" not in name:
            # Before torch 2.13 the default of `reshard_after_forward` was True.
            assert ours[name].default in (parameter.default, None)


def test_torchs_methods_are_there() -> None:
    """Each public method of torch's `FSDPModule` is one of ours, but for those that the guide lists as not needed."""
    theirs = {name for name in vars(TorchFSDPModule) if not name.startswith("_")}
    assert theirs - set(dir(FSDPModule)) <= {
        "finalize_backward",
        "reset_iter_state",
        "set_all_reduce_hook",
        "set_allocate_memory_from_process_group_for_comm",
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "set_force_sum_reduction_for_comms",
        "set_keep_unsharded_storage",
        "set_manual_backward_finalization",
        "set_reduce_scatter_max_input_buffers",
        "set_reduce_scatter_unused_params",
        "set_separate_reduce_scatter_group",
        "set_symm_mem_for_comm",
    }


@each_row(
    "name",
    [
        "set_reshard_after_forward",
        "set_reshard_after_backward",
        "set_unshard_in_backward",
        "set_is_last_backward",
        "set_requires_gradient_sync",
        "set_requires_all_reduce",
    ],
)
def test_flags_are_checked(name: str) -> None:
    """A flag that is no bool is refused by name."""

    def rank(ranks: Collectives) -> None:
        with pytest.raises(ValueError, match=f"{name.removeprefix('set_')}: expected a bool, found 2"):
            getattr(sharded(), name)(2)

    on_ranks(2, rank)


def test_settings_of_a_module_and_of_those_inside() -> None:
    """`recurse` says whether the modules inside follow; a divisor is that of the module alone, as in torch."""

    def rank(ranks: Collectives) -> None:
        model = sharded()
        outer, inner = units_in(model)
        model.set_requires_gradient_sync(False, recurse=False)
        assert (outer.reducer.synchronises, inner.reducer.synchronises) == (False, True)
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)
        assert (outer.reducer.sums_copies, inner.reducer.sums_copies) == (False, False)
        model.set_reshard_after_forward(False, recurse=False)
        assert (outer.plan.free_after_forward, inner.plan.free_after_forward) == (False, True)
        model.set_reshard_after_backward(False)
        assert not inner.plan.free_after_unsynced_backward
        with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
            model.set_reduce_scatter_divide_factor(4.0)
        assert (outer.reducer.divide_factor, inner.reducer.divide_factor) == (4.0, None)
        with pytest.raises(ValueError, match="above zero"):
            model.set_gradient_divide_factor(0.0)
        for wrong in (float("inf"), float("nan"), "2", True):
            with pytest.raises(ValueError, match="expected a divide factor above zero"):
                model.set_gradient_divide_factor(wrong)
        model.set_modules_to_forward_prefetch([model.block])
        model.set_modules_to_backward_prefetch([])
        assert outer.links.forward_prefetch == [inner]
        assert outer.links.backward_prefetch is None
        with pytest.raises(ValueError, match="that is not"):
            model.set_modules_to_forward_prefetch([model.block[0]])

    on_ranks(2, rank)


def test_a_divide_factor_between_accumulations() -> None:
    """A divisor that would hold for a part of the gradients only is refused; once they are reduced, it is taken."""

    def rank(ranks: Collectives) -> None:
        model = sharded()
        unit = units_in(model)[0]
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(FlatParamError, match="a new divisor of gradients between two accumulations"):
            model.set_gradient_divide_factor(3.0)
        assert unit.reducer.divide_factor is None
        model.set_requires_gradient_sync(True)
        model(torch.ones(2, 3)).sum().backward()
        model.set_gradient_divide_factor(3.0)
        assert unit.reducer.divide_factor == 3.0

    on_ranks(2, rank)


def test_unshard_and_reshard() -> None:
    """`unshard` shows full parameters, of this module only, and `reshard` frees them; `async_op` gives a handle."""

    def rank(ranks: Collectives) -> None:
        model = sharded()
        model.set_post_optim_event(event := Recorded())
        assert event.waits == 1
        model.set_post_optim_event(torch.cpu.current_stream().record_event())  # type: ignore[attr-defined]
        handle = model.block.unshard(async_op=True)
        handle.wait()
        handle.wait()
        assert model.block[0].weight.shape == (5, 3)
        assert model.scale.numel() < 3
        listed = dict(model.named_parameters())
        assert sum(parameter.numel() for name, parameter in listed.items() if "block" in name) < 38
        model.block.reshard()
        assert sum(parameter.numel() for layer in model.block for parameter in layer._parameters.values()) < 38
        assert model.unshard() is None
        assert torch.equal(model.scale, torch.ones(3))
        model.reshard()
        told = []

        def too_early(*_: Any) -> None:
            with pytest.raises(FlatParamError, match="cannot be freed while a forward pass"):
                model.block.reshard()
            told.append(True)

        model.block[0].register_forward_hook(too_early)
        model(torch.ones(1, 3)).sum().backward()
        assert told == [True]

    on_ranks(2, rank)


class Recorded:
    """Stands for an event of a device."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


@each_row("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies(again: Any) -> None:
    """A copied or pickled model is sharded too, and trains to the same state."""

    def rank(ranks: Collectives) -> Any:
        model = sharded()
        other = again(model)
        assert type(other) is type(model)
        assert unit_of(other) is not unit_of(model)
        for each in (model, other):
            train(each, torch.optim.Adam(each.parameters(), lr=0.1), inputs(ranks.rank))
        return model.state_dict(), other.state_dict()

    for mine, others in on_ranks(2, rank):
        assert_same_state(others, mine)


def test_slices_are_of_the_original_class() -> None:
    """A slice of a sharded `Sequential` is a plain one."""

    def rank(ranks: Collectives) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
        assert type(model[:1]) is nn.Sequential  # type: ignore[index]

    on_ranks(2, rank)


def test_apply_sees_full_parameters() -> None:
    """`apply(fn)` initialises full parameters, so it gives the values that it gives an unsharded model."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)

    def rank(ranks: Collectives) -> Any:
        model = sharded()
        torch.manual_seed(3)
        assert model.apply(init) is model
        return model.state_dict()

    reference = seeded(Reduced)
    torch.manual_seed(3)
    reference.apply(init)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


class Drawn(nn.Module):
    """Layers that the module itself gives values, by a method of a usual name, and a buffer that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
        self.scale = nn.Parameter(torch.empty(4)) if self.has_own else None
        self.register_buffer("table", torch.zeros(2), persistent=False)

    has_own = False

    def init_weights(self) -> None:
        for layer in (self.last, self.first):
            layer.reset_parameters()
        nn.init.normal_(self.last.weight)
        self.table.fill_(3.0)


class Owning(Drawn):
    """The same with a parameter of its own."""

    has_own = True


def test_a_module_on_the_meta_device() -> None:
    """It is initialised by `reset_parameters()`, unit by unit; what has a parameter and no such method is refused."""

    def rank(ranks: Collectives) -> Any:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        torch.manual_seed(0)
        for layer in model:
            fully_shard(layer)
        root = fully_shard(model)
        with torch.device("meta"):
            nameless = Owning()
        with pytest.raises(ValueError, match="a Owning is on the meta device and has no reset_parameters"):
            fully_shard(nameless)
        return root.state_dict()

    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_values_after_sharding_on_the_meta_device() -> None:
    """FSDP2's order: shard, `to_empty()`, then the model's own method, which finds full parameters in place."""

    def rank(ranks: Collectives) -> Any:
        with torch.device("meta"):
            model = Drawn()
        fully_shard(model.first)
        root = fully_shard(model)
        assert model.table.is_meta
        with pytest.raises(FlatParamError, match="is on cpu, found device='meta'; its parameters have"):
            root.to_empty(device="meta")
        assert root.to_empty(device="cpu") is root
        torch.manual_seed(0)
        model.init_weights()
        assert torch.equal(model.table, torch.full((2,), 3.0))
        first = model.first.weight.numel() + model.first.bias.numel()
        assert first < 16, "only this rank's part is left"
        return root.state_dict()

    reference = Drawn()
    torch.manual_seed(0)
    reference.init_weights()
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_a_sharded_layer_is_initialised_anew() -> None:
    """`reset_parameters()` of a sharded module draws the values of the whole, not those of a rank's part."""

    def rank(ranks: Collectives) -> Any:
        layer = fully_shard(nn.Linear(3, 5))
        torch.manual_seed(1)
        layer.reset_parameters()
        return layer.state_dict()

    torch.manual_seed(1)
    reference = nn.Linear(3, 5)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_to_moves_and_casts_the_shards() -> None:
    """`double()` casts a sharded model, which then trains in the new dtype."""

    def rank(ranks: Collectives) -> Any:
        model = sharded().double()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), [x.double() for x in inputs(ranks.rank)])
        return model.state_dict()

    for state in on_ranks(2, rank):
        assert {value.dtype for value in state.values()} == {torch.float64}


def test_to_casts_summoned_parameters() -> None:
    """Inside `summon_full_params`, `double()` casts full parameters until it ends, as with the wrapper."""

    def rank(ranks: Collectives) -> None:
        model = sharded()
        with summon_full_params(model, writeback=False):
            model.double()
            assert model.block[0].weight.dtype is torch.float64
            assert model.block[0].weight.shape == (5, 3)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs(ranks.rank))

    on_ranks(2, rank)


def test_a_registered_method_gathers() -> None:
    """`register_fsdp_forward_method` has a method gather; for a module that is not sharded it does nothing."""

    class Coder(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).tanh()

    def rank(ranks: Collectives) -> None:
        model: Any = fully_shard(seeded(lambda: Coder(3, 3)))
        register_fsdp_forward_method(model, "encode")
        x = torch.ones(1, 3)
        assert torch.equal(model.encode(x), seeded(lambda: Coder(3, 3)).encode(x))
        with pytest.raises(ValueError, match="FSDPCoder has no method 'decode'"):
            register_fsdp_forward_method(model, "decode")
        register_fsdp_forward_method(nn.Linear(1, 1), "decode")

    on_ranks(2, rank)


def test_clipping_counts_all_ranks() -> None:
    """Torch's function and ours clip sharded gradients by the norm of all ranks; an ignored parameter counts once."""

    def loss(model: nn.Module) -> torch.Tensor:
        out: torch.Tensor = model(torch.ones(2, 3)).square().sum()
        return out

    reference = seeded(Reduced)
    loss(reference).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)

    def rank(ranks: Collectives) -> None:
        for clip in (torch.nn.utils.clip_grad_norm_, flatparam.clip_grad_norm_):
            model = seeded(Reduced)
            fully_shard(model.block)
            fully_shard(model, ignored_params={model.scale})
            loss(model).backward()
            torch.testing.assert_close(clip(model.parameters(), 0.5), expected)
            torch.testing.assert_close(model.scale.grad, reference.scale.grad)
            with pytest.raises(FlatParamError, match="call flatparam.clip_grad_norm_"):
                torch.nn.utils.get_total_norm([p.grad for p in model.block.parameters() if p.grad is not None])
        # Of a single parameter, which one of the ranks does not have; of a flat parameter; and of what is not sharded.
        model = sharded()
        loss(model).backward()
        bias = reference.block[0].bias
        norm = flatparam.clip_grad_norm_(model.block[0].bias, 1e9)
        assert norm > 0
        assert norm.dtype is bias.dtype
        wrapped = FullyShardedDataParallel(seeded(Reduced))
        loss(wrapped).backward()
        torch.testing.assert_close(torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5), expected)

    on_ranks(2, rank)
    plain = seeded(Reduced)
    loss(plain).backward()
    assert torch.equal(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5), expected)
    assert flatparam.clip_grad_norm_(plain.parameters(), 0.5) <= 0.5 + 1e-6
    assert torch.equal(torch.nn.utils.clip_grad_norm_([], 1.0), torch.tensor(0.0))
    assert torch.nn.utils.get_total_norm([torch.ones(4)]) == 2
    with pytest.warns(UserWarning, match="empty generator"):
        torch.nn.utils.clip_grad_norm_(iter(parameter for parameter in ()), 1.0)


def test_state_functions_of_a_module_without_a_root() -> None:
    """The functions of `flatparam.checkpoint.state_dict` save and load a model of which only blocks are sharded."""

    def rank(ranks: Collectives) -> Any:
        model = seeded(Reduced)
        fully_shard(model.block)
        options = functions.StateDictOptions(full_state_dict=True)
        state = functions.get_model_state_dict(model, options=options)
        assert_same_state(model.state_dict(), state)
        with pytest.raises(FlatParamError, match="set_model_state_dict"):
            model.load_state_dict(state)
        ones = {name: torch.ones_like(value) for name, value in state.items()}
        functions.set_model_state_dict(model, ones)
        assert functions.set_model_state_dict(model, {}).missing_keys == []
        return functions.get_model_state_dict(model, options=options)

    for state in on_ranks(2, rank):
        assert all(value.eq(1).all() for value in state.values())


def test_a_wrong_state_changes_nothing() -> None:
    """A shape that is wrong on one rank is refused on all, and no parameter has changed."""

    def rank(ranks: Collectives) -> None:
        model = sharded()
        before = model.state_dict()
        state = {name: torch.ones_like(value) for name, value in before.items()}
        if ranks.rank == 1:
            state["scale"] = torch.ones(7)
        with pytest.raises(RuntimeError, match="scale"):
            model.load_state_dict(state)
        assert_same_state(model.state_dict(), before)
        assert model.load_state_dict({"scale": torch.zeros(3)}, strict=False).missing_keys[0] == "seen"

    on_ranks(2, rank)


def test_saved_files_are_of_full_tensors() -> None:
    """In a world of threads a state is full, and `torch.save` writes it."""

    def rank(ranks: Collectives) -> None:
        file = io.BytesIO()
        torch.save(sharded().state_dict(), file)
        file.seek(0)
        assert_same_state(torch.load(file), seeded(Reduced).state_dict())

    on_ranks(2, rank)


@each_row("fused", [False, True])
def test_torchs_scaler_skips_a_step_on_all_ranks(fused: bool) -> None:
    """An infinite gradient on one rank has every rank skip the step, even a rank that holds no part of a parameter."""

    def rank(ranks: Collectives) -> Any:
        model = seeded(Reduced)
        fully_shard(model.block)
        fully_shard(model)
        optimizer = torch.optim.SGD([model.block[0].weight], lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before, scales = model.state_dict(), []
        for is_infinite in (True, False):
            scaler.scale(model(torch.ones(2, 3)).sum()).backward()
            mine = model.block[0].weight.grad
            if is_infinite and ranks.rank == 0:
                mine.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(
                (
                    scaler.get_scale(),
                    torch.equal(model.state_dict()["block.0.weight"], before["block.0.weight"]),
                )
            )
        return scales

    assert on_ranks(4, rank) == [[(2.0, True), (2.0, False)]] * 4


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("refer", ["forward", "backward", "tied"])
def test_copies_of_units_that_refer_to_each_other(refer: str, way: Any) -> None:
    """A unit that lists later ones to gather, or has a weight of one, is copied with them; the copy trains alike."""

    def rank(ranks: Collectives) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        if refer == "tied":
            model[2].weight = model[0].weight
        for layer in reversed(model):
            fully_shard(layer)
        fully_shard(model)
        if refer != "tied":
            for layer, later in zip(model, [*model][1:], strict=False):
                getattr(layer, f"set_modules_to_{refer}_prefetch")([later])
        twin = way(model)
        for each in (model, twin):
            each(torch.ones(2, 4)).square().mean().backward()
        found, expected = ([each.grad for each in module.parameters() if each.numel()] for module in (twin, model))
        assert all(map(torch.equal, found, expected))

    on_ranks(2, rank)
