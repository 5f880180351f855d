"""A wrapped module behaves like the module, and shows what FSDP1's wrapper shows."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from each_row import each_row
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flatparam import BackwardPrefetch, ShardingStrategy
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, SingleCollectives
from flatparam_runtime import BackwardOrder

from .models import Batch, Block, Transformer, mlp, seeded
from .worlds import on_ranks

HERE = SingleCollectives()


def test_the_module_is_wrapped_in_place() -> None:
    """S-010, S-060: `module` is the very module, and the child has FSDP1's name."""
    module = mlp()
    model = FSDP(module, HERE)
    assert model.module is module
    assert model._fsdp_wrapped_module is module
    assert [name for name, _ in model.named_children()] == ["_fsdp_wrapped_module"]
    assert type(model) is FSDP


def test_module_looks_through_activation_checkpointing() -> None:
    """S-060: with a checkpoint wrapper in between, `module` is what that wraps."""
    layer = nn.Linear(2, 2)
    model = FSDP(checkpoint_wrapper(layer), HERE)
    assert model.module is layer
    assert type(model._fsdp_wrapped_module).__name__ == "CheckpointWrapper"


def test_attributes_are_the_modules() -> None:
    """S-061: what the wrapper has not is looked up in the module, methods too; what nobody has is an AttributeError."""

    class Model(nn.Module):
        vocabulary = 7

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.note = ["x"]

        def generate(self) -> str:
            return "text"

    module = Model()
    model = FSDP(module, HERE)
    assert model.vocabulary == 7
    assert model.note is module.note
    assert model.layer is module.layer
    assert model.generate() == "text"
    assert not hasattr(model, "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018


def test_indexing_is_the_modules() -> None:
    """S-061: a wrapped `Sequential` can be indexed and sliced."""
    module = mlp()
    model = FSDP(module, HERE)
    assert model[2] is module[2]
    assert len(model[1:3]) == 2
    assert FSDP(checkpoint_wrapper(mlp()), HERE)[0].in_features == 3


@pytest.mark.parametrize("policy", [None, {Block}, {nn.Linear, nn.LayerNorm}], ids=["one", "blocks", "layers"])
@pytest.mark.parametrize("use_orig", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_parameter_names_are_fsdp1s(torch_world: None, policy: Any, use_orig: bool) -> None:
    """`named_parameters` and `named_buffers` list the same names in the same order as torch's FSDP1."""
    names = []
    for wrapper, wrap, where in (
        (FSDP, ModuleWrapPolicy, {"process_group": HERE}),
        (theirs.FullyShardedDataParallel, theirs.wrap.ModuleWrapPolicy, {"device_id": torch.device("cpu")}),
    ):
        arguments = {
            "auto_wrap_policy": wrap(policy) if policy else None,
            "use_orig_params": use_orig,
            **where,
        }
        model = wrapper(nn.Sequential(Block(), Batch(), Block()), **arguments)
        names.append([[name for name, _ in found] for found in (model.named_parameters(), model.named_buffers())])
    assert names[0] == names[1]


def test_original_parameters_are_the_same_objects() -> None:
    """With `use_orig_params` `parameters()` lists the objects from before, in order, each marked as flattened."""
    module = seeded(Transformer)
    before = list(module.parameters())
    model = FSDP(module, HERE, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    after = list(model.parameters())
    assert {id(p) for p in after} == {id(p) for p in before}
    assert len(after) == len(before)
    assert all(p._fsdp_flattened for p in after)  # type: ignore[attr-defined]


@each_row("make", [lambda: nn.ModuleList([nn.Linear(2, 2)]), lambda: nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_containers_without_a_forward_are_warned_of(make: Any) -> None:
    """S-010: a bare list or dict of modules is never called, so nothing would gather its parameters."""
    with pytest.warns(UserWarning, match="forward"):
        FSDP(make(), HERE)


@each_row(
    ("make", "told"),
    [
        (
            lambda: nn.ParameterList([torch.ones(2)]),
            "a ParameterList has no forward pass, so its parameters are gathered when a forward pass reads",
        ),
        (lambda: nn.ParameterDict({"a": torch.ones(2)}), "a ParameterDict has no forward pass"),
        (lambda: nn.MultiheadAttention(4, 2).out_proj, "does not call it.*wrap the nn.MultiheadAttention"),
    ],
)
def test_parameters_that_other_modules_read_are_warned_of(make: Any, told: str) -> None:
    """The parameters of what is never called are gathered where they are read, not ahead; FSDP1 says nothing."""
    module = nn.ModuleDict({"inner": make()})
    policy = CustomPolicy(lambda each: each is module["inner"])
    with pytest.warns(UserWarning, match=told):
        FSDP(module, HERE, auto_wrap_policy=policy)


def test_nothing_is_warned_of_otherwise() -> None:
    """Wrapping, training and saving an ordinary module emits no warning, but that one rank shards nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the world has one rank")
        model = FSDP(mlp(), HERE, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        model.load_state_dict(model.state_dict())
        FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))


def test_facts_about_the_ranks() -> None:
    """`process_group`, `rank`, `world_size`, `sharding_strategy` and `compute_device` say what is so."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(mlp(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        recorded = FSDP(mlp(), RecordingCollectives(ranks, ByteLedger()))
        assert model.process_group is ranks
        assert recorded.process_group is ranks
        return model.rank, model.world_size, model.sharding_strategy, model.compute_device

    facts = on_ranks(3, rank)
    here = torch.get_default_device()
    assert facts == [(r, 3, ShardingStrategy.SHARD_GRAD_OP, here) for r in range(3)]


def test_settings_of_the_schedule(use_orig_params: bool) -> None:
    """A wrapper tells what it was asked for, unit by unit, and follows what it is set to; a wrong value changes nothing."""
    model: Any = FSDP(
        mlp(),
        HERE,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        backward_prefetch=None,
        forward_prefetch=True,
        limit_all_gathers=False,
        use_orig_params=use_orig_params,
    )
    below = model.module[0]
    for wrapper in (model, below):
        assert wrapper.backward_prefetch is None
        assert wrapper.forward_prefetch is True
        assert wrapper.limit_all_gathers is False
    below.backward_prefetch = BackwardPrefetch.BACKWARD_POST
    below.forward_prefetch = 3
    with pytest.raises(TypeError, match="backward_prefetch"):
        below.backward_prefetch = "BACKWARD_PRE"
    with pytest.raises(ValueError, match="-1"):
        below.forward_prefetch = -1
    assert (below.backward_prefetch, below.forward_prefetch) == (BackwardPrefetch.BACKWARD_POST, 3)
    plan = below._unit.plan.prefetch
    assert (plan.backward, plan.forward) == (BackwardOrder.AFTER_COMPUTE, 3)
    assert (model.backward_prefetch, model.forward_prefetch) == (None, True)
    assert [len(wrapper.params) for wrapper in FSDP.fsdp_modules(model)] == [0, 1, 1, 1]
    assert below.params == [handle.flat_param for handle in below._unit.handles]


def test_torchs_enums_and_configurations_are_accepted() -> None:
    """A program that goes on importing them from torch builds the same wrapper."""
    model = FSDP(
        mlp(),
        HERE,
        theirs.ShardingStrategy.NO_SHARD,
        theirs.CPUOffload(offload_params=False),
        theirs.wrap.ModuleWrapPolicy({nn.Linear}),
        theirs.BackwardPrefetch.BACKWARD_POST,
        theirs.MixedPrecision(),
    )
    assert [m.sharding_strategy for m in FSDP.fsdp_modules(model)] == [ShardingStrategy.NO_SHARD] * 4
    state = theirs.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    optimizer = theirs.FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, theirs.StateDictType.FULL_STATE_DICT, state, optimizer):
        settings = FSDP.get_state_dict_type(model)
        assert settings.state_dict_config.rank0_only  # type: ignore[attr-defined]
        assert settings.state_dict_config.offload_to_cpu
        assert settings.optim_state_dict_config.rank0_only  # type: ignore[attr-defined]


@each_row("prefetch", [None, *theirs.BackwardPrefetch])
def test_every_backward_prefetch(prefetch: Any) -> None:
    """S-015: whichever is chosen, the gradients are the same."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(
            seeded(mlp),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            backward_prefetch=prefetch,
            forward_prefetch=True,
        )
        for _ in range(2):
            model(torch.ones(2, 3)).square().sum().backward()
        with FSDP.summon_full_params(model):
            weight = model[0].weight.detach().clone()
        return weight, torch.cat([p.grad for p in model.parameters()])

    reference = seeded(mlp)
    for _ in range(2):
        reference(torch.ones(2, 3)).square().sum().backward()
    (first, _), (_, _) = found = on_ranks(2, rank)
    assert torch.equal(first, reference[0].weight)
    gradient = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert sum(float(part.double().sum()) for _, part in found) == pytest.approx(float(gradient.double().sum()))


def test_check_is_root() -> None:
    """S-062: only the outermost wrapper is the root, asked before or after a forward; a submodule alone is its own."""
    model = FSDP(mlp(), HERE, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert model.check_is_root()
    assert [m.check_is_root() for m in FSDP.fsdp_modules(model)] == [True, False, False, False]
    model(torch.ones(1, 3))
    assert [m._is_root for m in FSDP.fsdp_modules(model)] == [True, False, False, False]
    alone = FSDP(mlp(), HERE)
    assert alone.check_is_root()
    outer = FSDP(nn.Sequential(alone, nn.Linear(1, 1)), HERE)
    assert outer.check_is_root()
    assert not alone.check_is_root()


def test_fsdp_modules() -> None:
    """S-063: depth first, each once, the module itself included; with `root_only` the outermost; none is a list too."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    inner = module[1][0] = FSDP(module[1][0], HERE)
    middle = module[1] = FSDP(module[1], HERE)
    other = FSDP(nn.Linear(2, 2), HERE)
    parent = nn.ModuleList([module, other, middle, other])
    assert FSDP.fsdp_modules(parent) == [middle, inner, other]
    assert FSDP.fsdp_modules(middle) == [middle, inner]
    assert FSDP.fsdp_modules(parent, root_only=True) == [middle, other]
    assert FSDP.fsdp_modules(mlp()) == []


def test_the_forward_takes_and_returns_anything() -> None:
    """S-065: positional and keyword arguments go to the module, and what it returns comes back as it is."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, *more: Any, scale: float = 1.0, **rest: Any) -> Any:
            return {"y": self.layer(x) * scale, "more": more, "rest": rest}

    found = FSDP(Model(), HERE)(torch.ones(1, 2), "a", None, scale=2.0, flag=True)
    assert found["more"] == ("a", None)
    assert found["rest"] == {"flag": True}
    assert found["y"].requires_grad


def test_a_unit_without_parameters() -> None:
    """S-010: everything may be in units below; the wrapper then has no flat parameter, and runs, saves and trains."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = FSDP(module, HERE, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert model.params == []
    assert model.compute_device == torch.device("cpu")
    model(torch.ones(1, 2)).sum().backward()
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
