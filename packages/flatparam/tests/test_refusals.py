"""What cannot be honoured is refused by name, with what to do, and the module is left as it was."""

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from each_row import each_row
from torch import nn

import flatparam as ours
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy
from flatparam_comm import SingleCollectives, Topology
from flatparam_core import FlatParamError

from .models import mlp
from .worlds import facts_of

HERE = SingleCollectives()


WRONG: list[tuple[str, Any, Any]] = [
    ("sharding_strategy", 1, TypeError),
    ("sharding_strategy", "FULL_SHARD", TypeError),
    ("backward_prefetch", "BACKWARD_PRE", TypeError),
    ("backward_prefetch", ours.ShardingStrategy.FULL_SHARD, TypeError),
    ("cpu_offload", True, TypeError),
    ("mixed_precision", torch.bfloat16, TypeError),
    ("auto_wrap_policy", {nn.Linear}, TypeError),
    ("auto_wrap_policy", 3, TypeError),
    ("ignored_modules", 3, TypeError),
    ("ignored_modules", ["0"], ValueError),
    ("ignored_states", ["0.weight"], ValueError),
    ("device_id", 1.5, TypeError),
    ("param_init_fn", "xavier", ValueError),
    *((flag, "no", ValueError) for flag in ("sync_module_states", "limit_all_gathers", "use_orig_params")),
    *((flag, "False", ValueError) for flag in ("broadcast_buffers", "clean_names")),
    ("forward_prefetch", 2.7, TypeError),
    ("forward_prefetch", "2", TypeError),
    ("process_group", (SingleCollectives(), SingleCollectives()), ValueError),
    ("process_group", (1, 2), (TypeError, ValueError)),
]


def refused(kind: Any, **arguments: Any) -> str:
    """The message; the module must be as before, usable, and trainable by somebody else."""
    module = mlp()
    before = facts_of(module)
    with pytest.raises(kind) as caught:
        FSDP(module, **{"process_group": HERE, **arguments})
    assert facts_of(module) == before
    module(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    return str(caught.value)


@each_row("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["whole", "policy"])
@each_row(("argument", "value", "kind"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)[:40]))
def test_an_argument_of_the_wrong_kind(argument: str, value: Any, kind: Any, policy: Any) -> None:
    """The error names the argument and what was found; no submodule is wrapped already."""
    message = refused(kind, **{"auto_wrap_policy": policy, argument: value})
    assert argument in message
    found = value[0] if isinstance(value, list) else value
    assert str(found) in message or type(found).__name__ in message or "a pair of groups" in message


def test_a_process_group_of_the_wrong_kind() -> None:
    """Something that is no group of ranks is refused as such."""
    assert "int" in refused((TypeError, ValueError), process_group=5)  # type: ignore[arg-type]


HYBRID = (ours.ShardingStrategy.HYBRID_SHARD, ours.ShardingStrategy._HYBRID_SHARD_ZERO2)


@each_row("strategy", HYBRID, ids=lambda strategy: strategy.name)
def test_groups_that_do_not_fit_a_hybrid_strategy(strategy: ours.ShardingStrategy) -> None:
    """S-011: one group, three groups, no groups, and what is no group at all are refused for a hybrid strategy."""
    for groups in (HERE, (HERE, HERE, HERE), (1, 2), 5, None):
        message = refused(ValueError, process_group=groups, sharding_strategy=strategy)
        assert "pair" in message or "process_group=(shard group, replicate group)" in message


def test_a_topology() -> None:
    """A topology of one group is a way to say which ranks."""
    assert FSDP(mlp(), Topology(HERE)).world_size == 1


def test_without_any_group() -> None:
    """Where no process group is initialised, the error says how to start one."""
    message = refused(ValueError, process_group=None)
    assert "init_process_group" in message


def test_two_arguments_for_one_thing() -> None:
    """A process group and a mesh, or ignored modules and ignored states, exclude each other."""
    assert "device_mesh" in refused(ValueError, device_mesh=object())
    assert "ignored_states" in refused(ValueError, ignored_modules=[], ignored_states=[])


@each_row(
    "override",
    [
        {"mixed_precision": torch.bfloat16},
        {"sharding_strategy": "NO_SHARD"},
        {"ignored_modules": [3]},
        {"no_such_argument": 1},
    ],
    ids=lambda override: next(iter(override)),
)
def test_a_policys_override_that_is_refused(override: dict[str, Any]) -> None:
    """Overrides for the last module that are refused: the modules before it are not wrapped already."""
    module = mlp()
    last = module[4]
    policy = CustomPolicy(lambda m: override if m is last else isinstance(m, nn.Linear))
    before = facts_of(module)
    with pytest.raises((TypeError, ValueError), match=next(iter(override))):
        FSDP(module, HERE, auto_wrap_policy=policy)
    assert facts_of(module) == before


def test_wrapping_twice() -> None:
    """A module that has got a parameter since it was wrapped is not wrapped again: no unit would hold that one."""
    module = mlp()
    FSDP(module, HERE)
    module.extra = nn.Linear(2, 2)
    before = facts_of(module)
    with pytest.raises(FlatParamError, match="'extra.weight', which no unit holds"):
        FSDP(module, HERE)
    assert facts_of(module) == before


def test_a_group_of_other_ranks() -> None:
    """The optimizer-state functions refuse a group that is not the model's, and what is no group at all."""
    model = FSDP(mlp(), HERE, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = FSDP.optim_state_dict(model, optimizer, group=HERE)
    for call in (
        lambda group: FSDP.optim_state_dict(model, optimizer, group=group),
        lambda group: FSDP.optim_state_dict_to_load(model, optimizer, state, group=group),
    ):
        with pytest.raises(TypeError, match="object"):
            call(object())


@each_row("use_orig_params", [False, True], ids=["flat", "originals"])
def test_casting_a_wrapped_module(use_orig_params: bool) -> None:
    """S-053, S-068: a wrapped module is cast as a whole, its shards, views and buffers, and trains on in that dtype."""
    inner = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    inner[1] = FSDP(inner[1], HERE, use_orig_params=use_orig_params)
    model = FSDP(inner, HERE, use_orig_params=use_orig_params)
    local = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    local.load_state_dict(model.state_dict())
    held = list(model.parameters())
    assert model.double() is model
    local.double()
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    for module in (model, local):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(torch.arange(6.0, dtype=torch.float64).view(2, 3)).pow(2).sum().backward()
        optimizer.step()
    found, wanted = model.state_dict(), local.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
        assert found[name].dtype == value.dtype


def test_casting_in_the_middle_of_a_pass() -> None:
    """A wrapped module is not cast between a forward call's beginning and end; nothing has changed then."""
    model = FSDP(mlp(), HERE)
    hook = model.module[2].register_forward_hook(lambda *_: model.double())
    before = facts_of(model)
    with pytest.raises(FlatParamError, match="inside a forward or backward pass"):
        model(torch.ones(2, 3))
    hook.remove()
    assert facts_of(model)["values"] == before["values"]
    model(torch.ones(2, 3)).sum().backward()


def test_apply_sees_full_parameters_or_is_refused() -> None:
    """S-064: `apply` works on full parameters; until it does it says so rather than hand out shards."""

    def number(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2, "a function for whole parameters got a shard"
            with torch.no_grad():
                module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight))

    module, model = mlp(), FSDP(mlp(), HERE)
    module.load_state_dict(model.state_dict())
    model.apply(number)
    module.apply(number)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())


def test_every_public_method_of_fsdp1() -> None:
    """There is no public name of FSDP1's class that ours has not; those of an add-on are promised without it, too."""
    wanted = {name for name in vars(theirs.FullyShardedDataParallel) if not name.startswith("_")}
    assert wanted <= {name for kind in FSDP.__mro__ for name in vars(kind)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_inside() -> None:
    """A scripted layer is refused by name, and trains beside the others if it is ignored."""
    scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(FlatParamError, match=r"0\.(weight|bias).*belongs to TorchScript.*ignored_modules"):
        FSDP(nn.Sequential(scripted, nn.Linear(2, 1)), HERE)
    with pytest.raises(FlatParamError, match=r"'(weight|bias)' belongs to TorchScript"):
        FSDP(scripted, HERE)
    model = FSDP(nn.Sequential(scripted, nn.Linear(2, 1)), HERE, ignored_modules=[scripted])
    model(torch.ones(1, 2)).sum().backward()
    assert scripted.weight.grad is not None
