"""Modules that were made on the meta device get their values when they are wrapped."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import fully_shard
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives
from flatparam_runtime import summon_full_params

from .models import Block, Transformer, mlp
from .worlds import assert_same_state, inputs, on_ranks, train, train_on_mean

HERE = SingleCollectives()
LINEAR = ModuleWrapPolicy({nn.Linear})


def on_meta(make: Any = mlp) -> Any:
    with torch.device("meta"):
        return make()


def fill(module: nn.Module) -> None:
    """A `param_init_fn`: values that depend on the shape only."""
    module.to_empty(device=torch.get_default_device(), recurse=False)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        torch.arange(tensor.numel(), out=tensor.detach().view(-1)) if tensor.is_floating_point() else tensor.zero_()


class Normed(nn.Module):
    """A weight of its own beside modules with parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Sequential(nn.Linear(4, 2), nn.ReLU())

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(self.first(x)) * self.scale)


@pytest.mark.parametrize(
    "policy", [None, {nn.Linear, nn.BatchNorm1d}, {nn.Sequential}], ids=["whole", "leaves", "inner"]
)
def test_the_values_that_torch_gives(torch_world: None, policy: Any, use_orig_params: bool) -> None:
    """S-018: with the same seed the parameters and buffers have the bits of torch's FSDP1 for the same meta module."""
    states = []
    for kind, wrap in ((theirs, theirs.FullyShardedDataParallel), (None, FSDP)):
        chosen = None if policy is None else (kind.wrap.ModuleWrapPolicy if kind else ModuleWrapPolicy)(policy)
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = wrap(
                on_meta(Normed),
                auto_wrap_policy=chosen,
                use_orig_params=use_orig_params,
                device_id=torch.device("cpu"),
            )
        states.append(model.state_dict())
    assert_same_state(states[1], states[0])


@pytest.mark.parametrize("policy", [None, LINEAR], ids=["whole", "policy"])
def test_training_from_the_meta_device(policy: Any, use_orig_params: bool) -> None:
    """S-018: every rank keeps its part of the values, and training goes on as one process that starts from them."""

    def rank(world: Collectives) -> Any:
        model = FSDP(on_meta(), param_init_fn=fill, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        train(model, torch.optim.Adam(model.parameters()), inputs(world.rank))
        return model.state_dict()

    reference = on_meta()
    for module in reference.modules():
        fill(module)
    train_on_mean(reference, torch.optim.Adam(reference.parameters()), 2)
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_whom_param_init_fn_is_called_with() -> None:
    """S-018: breadth first, each module with something on the meta device in it, its own or not; no unit, nothing ignored."""
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2))
    names = {child: name for name, child in module.named_modules()}
    for child in (module[0][0], module[1]):
        child.to("meta")
    real = module[0][1].weight.detach().clone()
    module[2].to("meta")
    module[2] = FSDP(module[2], HERE, param_init_fn=fill)
    called: list[str] = []

    def note(child: nn.Module) -> None:
        called.append(names[child])
        fill(child)

    model = FSDP(module, HERE, param_init_fn=note)
    assert called == ["", "0", "1", "0.0"]
    assert torch.equal(model.state_dict()["0.1.weight"], real)


@pytest.mark.parametrize(
    "policy", [None, {nn.Linear, nn.BatchNorm1d}, {nn.Sequential}], ids=["whole", "leaves", "inner"]
)
def test_param_init_fn_is_called_as_by_torch(torch_world: None, policy: Any) -> None:
    """S-018: in the same order, with the modules that hold parameters or buffers, as torch's FSDP1 calls it."""
    orders = []
    for package, wrap in ((theirs.wrap, theirs.FullyShardedDataParallel), (None, FSDP)):
        module = on_meta(Normed)
        names = {child: name for name, child in module.named_modules()}
        called: list[str] = []

        def note(child: nn.Module, names: Any = names, called: Any = called) -> None:
            called.append(names[child])
            fill(child)

        kind = ModuleWrapPolicy if package is None else package.ModuleWrapPolicy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrap(
                module,
                auto_wrap_policy=kind(policy) if policy else None,
                param_init_fn=note,
                device_id=torch.device("cpu"),
            )
        holding = {name for name, child in Normed().named_modules() if child._parameters or child._buffers}
        orders.append([name for name in called if name in holding])
    assert orders[0] == orders[1]


def test_ignored_modules_stay_on_the_meta_device() -> None:
    """S-017, S-018: what is left whole is left on the meta device too."""
    module = on_meta()
    FSDP(module, HERE, param_init_fn=fill, ignored_modules=[module[2]])
    assert {parameter.is_meta for parameter in module[2].parameters()} == {True}


def test_only_modules_with_tensors_are_reset() -> None:
    """S-018: without `param_init_fn` containers and activations need no `reset_parameters`."""
    model = FSDP(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))), HERE)
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_module_that_cannot_be_reset() -> None:
    """S-018: the error of the module comes out, after a warning that names its class."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    with pytest.warns(UserWarning, match="Bare"), pytest.raises(AttributeError, match="reset_parameters"):
        FSDP(on_meta(Bare), HERE)


def test_a_function_that_leaves_parameters_behind() -> None:
    """S-018: a `param_init_fn` that does not give all parameters values is named, with the parameters."""
    with pytest.raises(ValueError, match=r"param_init_fn.*weight.*Linear"):
        FSDP(on_meta(), HERE, param_init_fn=lambda module: None)


@pytest.mark.parametrize("policy", [None, LINEAR], ids=["whole", "policy"])
def test_values_of_the_first_rank(policy: Any, use_orig_params: bool) -> None:
    """S-018, S-020: with `sync_module_states` every rank's values, drawn from its own seed, give way to rank 0's."""

    def rank(world: Collectives) -> Any:
        torch.manual_seed(world.rank)
        return FSDP(
            on_meta(Normed), auto_wrap_policy=policy, sync_module_states=True, use_orig_params=use_orig_params
        ).state_dict()

    torch.manual_seed(0)
    alone = FSDP(on_meta(Normed), HERE, auto_wrap_policy=policy, use_orig_params=use_orig_params).state_dict()
    for state in on_ranks(2, rank):
        assert_same_state(state, alone)


def test_a_real_rank_and_meta_ranks() -> None:
    """S-018, S-020: rank 0 has the values, the others build on the meta device, and `sync_module_states` gives them."""

    def rank(world: Collectives) -> Any:
        torch.manual_seed(3)
        module = mlp() if world.rank == 0 else on_meta()
        return FSDP(module, param_init_fn=fill, auto_wrap_policy=LINEAR, sync_module_states=True).state_dict()

    torch.manual_seed(3)
    expected = mlp().state_dict()
    for state in on_ranks(3, rank):
        assert_same_state(state, expected)


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Sequential})], ids=["whole", "policy"])
@pytest.mark.parametrize("make", [Normed, Transformer])
def test_a_real_rank_and_meta_ranks_of_deep_units(make: Any, policy: Any, use_orig_params: bool) -> None:
    """S-018, S-020: the same where a unit has modules in modules, buffers and ties, whichever order ranks make them in."""

    def rank(world: Collectives) -> Any:
        torch.manual_seed(3)
        module = make() if world.rank == 0 else on_meta(make)
        model = FSDP(
            module,
            param_init_fn=fill,
            auto_wrap_policy=policy,
            sync_module_states=True,
            use_orig_params=use_orig_params,
        )
        return model.state_dict()

    torch.manual_seed(3)
    expected = make().state_dict()
    for state in on_ranks(3, rank):
        assert_same_state(state, expected)


def test_tied_parameters_on_the_meta_device() -> None:
    """S-018: a tie of the meta module is one of the wrapped module."""

    def rank(world: Collectives) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = FSDP(on_meta(Transformer), param_init_fn=fill, auto_wrap_policy=ModuleWrapPolicy({Block}))
        with FSDP.summon_full_params(model):
            assert model.head.weight is model.embed.weight
        return model.state_dict()

    for state in on_ranks(2, rank):
        assert torch.equal(state["head.weight"].view(-1), torch.arange(28.0))


class Tied(nn.Module):
    """An embedding and a head, which are units of their own, share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


@each_row("how", ["wrapper", "in place", "list"])
def test_a_tie_between_units_on_the_meta_device(how: str, use_orig_params: bool) -> None:
    """The weight that one unit makes is the one that the other shows, and has the gradient of both."""
    torch.manual_seed(1)
    values = Tied().state_dict()

    def gradient(world: Collectives, *, meta: bool) -> torch.Tensor:
        model: Any = on_meta(Tied) if meta else Tied()
        if how == "wrapper":
            policy = ModuleWrapPolicy({nn.Embedding, nn.Linear})
            model = FSDP(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        else:
            for unit in (model.embed, model.head) if how == "in place" else ([model.embed, model.head],):
                fully_shard(unit)
            fully_shard(model)
        model.load_state_dict(values)
        model(torch.arange(6) * world.rank % 6).square().sum().backward()
        with summon_full_params(model, with_grads=True):
            (parameter,) = model.parameters()
            return parameter.grad.clone()

    expected = on_ranks(2, lambda world: gradient(world, meta=False))
    for found, wanted in zip(on_ranks(2, lambda world: gradient(world, meta=True)), expected, strict=True):
        assert torch.equal(found, wanted)


def test_memory_of_deferred_values() -> None:
    """L-51: while a unit gets its values, no more than one of its modules is whole in memory."""
    module = on_meta(lambda: nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))))
    whole: list[int] = []

    def note(child: nn.Module) -> None:
        held = [layer.weight for layer in module if not layer.weight.is_meta]
        whole.append(sum(weight.untyped_storage().nbytes() for weight in held))
        fill(child)

    FSDP(module, HERE, param_init_fn=note)
    assert whole == [0] * 5  # the sequence, and each layer


class Rotary(nn.Module):
    """A buffer and no parameter of its own, around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        self.scale.fill_(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize("init", [None, fill], ids=["reset_parameters", "param_init_fn"])
@pytest.mark.parametrize("synced", [False, True])
def test_buffers_of_a_unit_without_parameters(init: Any, synced: bool, use_orig_params: bool) -> None:
    """If all parameters are in units inside, the buffers of the module around them get their values, too."""

    def rank(ranks: Collectives) -> Any:
        torch.manual_seed(0)
        model = FSDP(
            on_meta(Rotary),
            auto_wrap_policy=LINEAR,
            param_init_fn=init,
            sync_module_states=synced,
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        assert model(torch.ones(2, 3)).shape == (2, 3)
        return model.module.scale.tolist()

    expected = [3.0] * 3 if init is None else [0.0, 1.0, 2.0]
    assert on_ranks(2, rank) == [expected] * 2
