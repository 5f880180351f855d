"""What FSDP1 has and this version has not is refused by name, with what to do, and the module is left as it was."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import nn

import flatparam as ours
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import NotYetSupportedError
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy
from flatparam_comm import SingleCollectives, Topology

from .models import mlp
from .worlds import facts_of

HERE = SingleCollectives()


def initialise(module: nn.Module) -> None:
    raise AssertionError("must not be called")


UNSUPPORTED: list[tuple[str, Any]] = [
    *(("sharding_strategy", getattr(ours.ShardingStrategy, name)) for name in ("NO_SHARD", "HYBRID_SHARD")),
    ("sharding_strategy", ours.ShardingStrategy._HYBRID_SHARD_ZERO2),
    ("sharding_strategy", theirs.ShardingStrategy.NO_SHARD),
    ("cpu_offload", ours.CPUOffload(offload_params=True)),
    ("cpu_offload", theirs.CPUOffload(offload_params=True)),
    ("mixed_precision", ours.MixedPrecision(param_dtype=torch.bfloat16)),
    ("mixed_precision", ours.MixedPrecision(reduce_dtype=torch.bfloat16)),
    ("mixed_precision", ours.MixedPrecision(buffer_dtype=torch.bfloat16)),
    ("mixed_precision", ours.MixedPrecision(keep_low_precision_grads=True)),
    ("mixed_precision", ours.MixedPrecision(cast_forward_inputs=True)),
    ("mixed_precision", theirs.MixedPrecision(param_dtype=torch.float16)),
    ("param_init_fn", initialise),
    ("process_group", (SingleCollectives(), SingleCollectives())),
]

WRONG: list[tuple[str, Any, type[Exception]]] = [
    ("sharding_strategy", 1, TypeError),
    ("sharding_strategy", "FULL_SHARD", TypeError),
    ("backward_prefetch", "BACKWARD_PRE", TypeError),
    ("backward_prefetch", ours.ShardingStrategy.FULL_SHARD, TypeError),
    ("cpu_offload", True, TypeError),
    ("mixed_precision", torch.bfloat16, TypeError),
    ("auto_wrap_policy", {nn.Linear}, ValueError),
    ("auto_wrap_policy", 3, ValueError),
    ("ignored_modules", 3, TypeError),
    ("ignored_modules", ["0"], TypeError),
    ("ignored_states", ["0.weight"], TypeError),
    ("device_id", 1.5, ValueError),
    ("param_init_fn", "xavier", ValueError),
]


def refused(kind: type[Exception], **arguments: Any) -> str:
    """The message; the module must be as before, usable, and trainable by somebody else."""
    module = mlp()
    before = facts_of(module)
    with pytest.raises(kind) as caught:
        FSDP(module, **{"process_group": HERE, **arguments})
    assert facts_of(module) == before
    module(torch.ones(2, 3)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    return str(caught.value)


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["whole", "policy"])
@pytest.mark.parametrize(
    ("argument", "value"), UNSUPPORTED, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_an_argument_that_is_not_supported_yet(argument: str, value: Any, policy: Any) -> None:
    """The error names the argument, its value and an alternative; no submodule is wrapped already."""
    message = refused(NotYetSupportedError, auto_wrap_policy=policy, **{argument: value})
    assert argument in message
    assert "is not supported by this version of flatparam" in message
    remedy = message.split("flatparam: ")[1]
    assert remedy.split()[0] in {"use", "pass", "initialise", "leave"}


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["whole", "policy"])
@pytest.mark.parametrize(
    ("argument", "value", "kind"), WRONG, ids=lambda value: getattr(value, "__name__", str(value)[:40])
)
def test_an_argument_of_the_wrong_kind(argument: str, value: Any, kind: type[Exception], policy: Any) -> None:
    """The error names the argument and what was found; no submodule is wrapped already."""
    message = refused(kind, **{"auto_wrap_policy": policy, argument: value})
    assert argument in message
    found = value[0] if isinstance(value, list) else value
    assert str(found) in message or type(found).__name__ in message


def test_a_process_group_of_the_wrong_kind() -> None:
    """Something that is no group of ranks is refused as such."""
    assert "int" in refused((TypeError, ValueError), process_group=5)  # type: ignore[arg-type]


def test_a_topology_with_replicas() -> None:
    """Hybrid sharding by any way in is refused; a topology of one group is not."""
    refused(NotYetSupportedError, process_group=Topology(HERE, HERE))
    assert FSDP(mlp(), Topology(HERE)).world_size == 1


def test_without_any_group() -> None:
    """Where no process group is initialised, the error says how to start one."""
    message = refused(ValueError, process_group=None)
    assert "init_process_group" in message


def test_two_arguments_for_one_thing() -> None:
    """A process group and a mesh, or ignored modules and ignored states, exclude each other."""
    assert "device_mesh" in refused(ValueError, device_mesh=object())
    assert "ignored_states" in refused(ValueError, ignored_modules=[], ignored_states=[])


@pytest.mark.parametrize(
    "override",
    [
        {"mixed_precision": ours.MixedPrecision(param_dtype=torch.bfloat16)},
        {"sharding_strategy": ours.ShardingStrategy.NO_SHARD},
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
    with pytest.raises((NotYetSupportedError, TypeError, ValueError), match=next(iter(override))):
        FSDP(module, HERE, auto_wrap_policy=policy)
    assert facts_of(module) == before


@pytest.mark.parametrize("where", ["first", "last", "root"])
@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["whole", "policy"])
def test_a_module_on_the_meta_device(where: str, policy: Any) -> None:
    """Tensors without values are refused, wherever in the module, before anything is wrapped."""
    module = mlp()
    if where == "first":
        module[0].to("meta")
    elif where == "last":
        module[4].to("meta")
    else:
        module.register_parameter("extra", nn.Parameter(torch.empty(2, device="meta")))
    before = facts_of(module)
    with pytest.raises(NotYetSupportedError, match="meta device"):
        FSDP(module, HERE, auto_wrap_policy=policy)
    assert facts_of(module) == before


def test_a_parameter_shared_between_units() -> None:
    """A policy that would wrap one end of a tie is refused by the parameter's name, before anything is wrapped."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3))
    module[1][0].weight = module[2].weight
    before = facts_of(module)
    with pytest.raises(ours.NotYetSupportedError.__mro__[1], match="weight"):
        FSDP(module, HERE, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    assert facts_of(module) == before


def test_a_wrapped_submodule_and_a_policy() -> None:
    """A policy over a module in which something is wrapped by hand is refused, naming it (S-014)."""
    module = mlp()
    module[2] = FSDP(module[2], HERE)
    before = facts_of(module)
    with pytest.raises(ValueError, match="'2' is wrapped already"):
        FSDP(module, HERE, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert facts_of(module) == before


def test_wrapping_twice() -> None:
    """A module that is a unit already is not made one again."""
    module = mlp()
    FSDP(module, HERE)
    before = facts_of(module)
    with pytest.raises(ours.NotYetSupportedError.__mro__[1], match="already"):
        FSDP(module, HERE)
    assert facts_of(module) == before


@pytest.mark.parametrize("argument", ["rank0_only", "offload_to_cpu", "with_grads"])
def test_summon_arguments(argument: str) -> None:
    """S-066: the three arguments that are not default are refused by name, and nothing is shown."""
    model = FSDP(mlp(), HERE)
    before = facts_of(model)
    with (
        pytest.raises(NotYetSupportedError, match=argument),
        FSDP.summon_full_params(model, **{argument: True}),
    ):
        pytest.fail("must not be entered")
    assert facts_of(model) == before


@pytest.mark.parametrize("api", [ours, theirs], ids=["ours", "torch's"])
@pytest.mark.parametrize("name", ["LOCAL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_state_dict_types(name: str, api: Any) -> None:
    """Sharded and local forms are refused by name, as a setting and as a context, and the setting stays."""
    model = FSDP(mlp(), HERE)
    before = FSDP.get_state_dict_type(model)
    kind = api.StateDictType[name]
    with pytest.raises(NotYetSupportedError, match=f"state_dict_type.*{name}.*FULL_STATE_DICT"):
        FSDP.set_state_dict_type(model, kind)
    with pytest.raises(NotYetSupportedError, match=name), FSDP.state_dict_type(model, kind):
        pytest.fail("must not be entered")
    assert FSDP.get_state_dict_type(model) == before


def test_optimizer_state_arguments() -> None:
    """The arguments of the optimizer-state functions that are not honoured are refused by name."""
    model = FSDP(mlp(), HERE, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = FSDP.optim_state_dict(model, optimizer)
    for arguments in ({"optim_state_dict": state}, {"group": object()}):
        with pytest.raises(NotYetSupportedError, match=next(iter(arguments))):
            FSDP.optim_state_dict(model, optimizer, **arguments)
    for arguments in ({"is_named_optimizer": True}, {"group": object()}):
        with pytest.raises(NotYetSupportedError, match=next(iter(arguments))):
            FSDP.optim_state_dict_to_load(model, optimizer, state, **arguments)


def test_loading_optimizer_state_of_rank_0_only() -> None:
    """`rank0_only` would broadcast what rank 0 passes; until it does, what the others pass is refused by name."""
    model = FSDP(mlp(), HERE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = ours.FullOptimStateDictConfig(rank0_only=True)
    FSDP.set_state_dict_type(model, ours.StateDictType.FULL_STATE_DICT, ours.FullStateDictConfig(), config)
    with pytest.raises(ours.NotYetSupportedError.__mro__[1], match=r"rank0_only|every rank"):
        FSDP.optim_state_dict_to_load(model, optimizer, None)  # type: ignore[arg-type]


def test_moving_and_casting_a_wrapped_module() -> None:
    """`to`, `half` and `to_empty` of a wrapped module are refused with what to do; what changes nothing is not."""
    model = FSDP(mlp(), HERE)
    before = facts_of(model)
    for change in (model.half, model.double, lambda: model.to("meta"), lambda: model.to_empty(device="meta")):
        with pytest.raises(NotYetSupportedError, match="before it is wrapped"):
            change()
        assert facts_of(model) == before
    assert model.to("cpu").float() is model


def test_casting_a_parent_changes_nothing() -> None:
    """Where a wrapped module refuses, the buffers and parameters around it in the same wrapper keep their dtype."""
    inner = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3))
    inner[1] = FSDP(inner[1], HERE)
    model = FSDP(inner, HERE)
    before = facts_of(model)
    with pytest.raises(NotYetSupportedError):
        model.double()
    assert facts_of(model) == before


def test_apply_sees_full_parameters_or_is_refused() -> None:
    """S-064: `apply` works on full parameters; until it does it says so rather than hand out shards."""

    def number(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2, "a function for whole parameters got a shard"
            with torch.no_grad():
                module.weight.copy_(torch.arange(module.weight.numel()).view_as(module.weight))

    module, model = mlp(), FSDP(mlp(), HERE)
    module.load_state_dict(model.state_dict())
    with contextlib.suppress(NotYetSupportedError):
        model.apply(number)
        module.apply(number)
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in module.state_dict().items())


MISSING = sorted(
    name
    for name in vars(theirs.FullyShardedDataParallel)
    if not name.startswith("_") and not hasattr(nn.Module, name) and name not in vars(FSDP)
)


@pytest.mark.parametrize("name", MISSING)
def test_a_method_that_is_not_there_yet(name: str) -> None:
    """A public method of FSDP1 that is missing says so by its name and that of the wrapper, on class and instance."""
    model = FSDP(mlp(), HERE)
    with pytest.raises((AttributeError, NotYetSupportedError)) as caught:
        getattr(model, name)(model)
    assert name in str(caught.value)
    assert "flatparam" in str(caught.value) or "FullyShardedDataParallel" in str(caught.value)
