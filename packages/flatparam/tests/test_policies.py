"""Policies choose the modules that torch's FSDP1 chooses with its own policies on the same model."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_wrap
from each_row import each_row
from torch import nn

import flatparam.wrap as our_wrap
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy
from flatparam_comm import SingleCollectives, Topology

from .models import Block, Transformer, mlp, seeded
from .worlds import wrapped_names

HERE = SingleCollectives()


class Tree(nn.Module):
    """Containers, a leaf with parameters of its own, attention, and a large and many small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(11))
        self.large = nn.Linear(20, 20)
        self.list = nn.ModuleList([nn.Linear(3, 3), nn.Sequential(nn.Linear(6, 6), nn.Linear(3, 3)), Block(8)])
        self.dict = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.ModuleDict({"c": nn.Linear(9, 9)})})
        self.attention = nn.MultiheadAttention(8, 2)
        self.empty = nn.Sequential()
        self.missing: nn.Module | None = None
        self.register_module("none", None)


Policy = Callable[[Any], Any]
"""From the module that the names come from (torch's or ours) to a policy."""


def size(wrap: Any, least: int, **more: Any) -> Any:
    return functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=least, **more)


POLICIES: dict[str, Policy] = {
    "classes": lambda wrap: wrap.ModuleWrapPolicy({nn.Linear, Block}),
    "classes of containers": lambda wrap: wrap.ModuleWrapPolicy([nn.Sequential, nn.ModuleDict]),
    "a class and its subclasses": lambda wrap: wrap.ModuleWrapPolicy({nn.Module}),
    "no class": lambda wrap: wrap.ModuleWrapPolicy(set()),
    "custom": lambda wrap: wrap.CustomPolicy(lambda m: isinstance(m, nn.Linear) and m.in_features > 3),
    "custom with overrides": lambda wrap: wrap.CustomPolicy(
        lambda m: {"forward_prefetch": True} if isinstance(m, nn.Linear) else False
    ),
    "custom with nothing to override": lambda wrap: wrap.CustomPolicy(
        lambda m: {} if isinstance(m, nn.Linear) else isinstance(m, Block)
    ),
    "always": lambda wrap: wrap.always_wrap_policy,
    "lambda": lambda wrap: functools.partial(
        wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: getattr(m, "in_features", 0) == 3
    ),
    "transformer": lambda wrap: functools.partial(
        wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.LayerNorm}
    ),
    "classes as a function": lambda wrap: functools.partial(
        wrap._or_policy, policies=[wrap.ModuleWrapPolicy({Block}), wrap.ModuleWrapPolicy({nn.LayerNorm})]
    ),
    "or": lambda wrap: functools.partial(
        wrap._or_policy,
        policies=[
            size(wrap, 100),
            functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={nn.LayerNorm}),
        ],
    ),
    **{
        f"size {n}": functools.partial(lambda wrap, n: size(wrap, n), n=n)
        for n in (1, 12, 50, 90, 100, 420, 700, 2000, 9999)
    },
    "size, by default": lambda wrap: wrap.size_based_auto_wrap_policy,
    "size with leaves": lambda wrap: size(wrap, 12, force_leaf_modules={nn.Sequential, Block}),
    "size with exclusions": lambda wrap: size(wrap, 12, exclude_wrap_modules={nn.Linear}),
    "size with neither": lambda wrap: size(wrap, 12, force_leaf_modules=set(), exclude_wrap_modules=set()),
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "tree": Tree,
    "mlp": mlp,
    "blocks": lambda: nn.Sequential(Block(), Block()),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.filterwarnings("ignore")
def test_the_modules_that_torch_wraps(torch_world: None, name: str, model: str) -> None:
    """The wrapped names are those of torch's FSDP1 with torch's policy of the same arguments; with torch's here too."""
    theirs_wrapped = theirs.FullyShardedDataParallel(
        MODELS[model](), auto_wrap_policy=POLICIES[name](their_wrap), device_id=torch.device("cpu")
    )
    expected = wrapped_names(theirs_wrapped, theirs.FullyShardedDataParallel)
    for policy in (POLICIES[name](our_wrap), POLICIES[name](their_wrap)):
        assert wrapped_names(FSDP(MODELS[model](), HERE, auto_wrap_policy=policy)) == expected


def ignored_of(model: nn.Module) -> Iterator[nn.Module]:
    yield model.get_submodule("list.1")
    yield model.get_submodule("large")


@pytest.mark.parametrize("name", ["classes", "custom", "always", "lambda", "size 12", "size 420", "size 700"])
@pytest.mark.filterwarnings("ignore")
def test_the_modules_that_torch_wraps_beside_ignored_ones(torch_world: None, name: str) -> None:
    """Ignored modules are not wrapped, nor what is in them, and do not count for sizes."""
    found = []
    for wrapper, wrap, where in (
        (FSDP, our_wrap, {"process_group": HERE}),
        (theirs.FullyShardedDataParallel, their_wrap, {"device_id": torch.device("cpu")}),
    ):
        module = Tree()
        policy = POLICIES[name](wrap)
        model = wrapper(module, auto_wrap_policy=policy, ignored_modules=list(ignored_of(module)), **where)
        found.append(wrapped_names(model, wrapper))
    assert found[0] == found[1]


def test_size_policy_attributes() -> None:
    """S-112: the defaults of the size policy can be read and changed on the function, as in torch."""
    for name in ("FORCE_LEAF_MODULES", "EXCLUDE_WRAP_MODULES"):
        ours = getattr(our_wrap.size_based_auto_wrap_policy, name)
        assert ours == getattr(their_wrap.size_based_auto_wrap_policy, name)


def test_size_policy_reads_its_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed default counts from then on."""
    monkeypatch.setattr(our_wrap.size_based_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", {nn.Linear})
    policy = functools.partial(our_wrap.size_based_auto_wrap_policy, min_num_params=1)
    assert wrapped_names(FSDP(mlp(), HERE, auto_wrap_policy=policy)) == {""}


def test_custom_policy_overrides_reach_the_wrapper() -> None:
    """S-111: a dict changes the arguments of that module only; the others and the root keep the root's.

    In a world of one that is `NO_SHARD`.
    """
    module = mlp()
    two = module[2]
    policy = our_wrap.CustomPolicy(
        lambda m: {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if m is two else isinstance(m, nn.Linear)
    )
    model = FSDP(module, HERE, auto_wrap_policy=policy, use_orig_params=True)
    strategies = [wrapper.sharding_strategy.name for wrapper in FSDP.fsdp_modules(model)]
    assert strategies == ["NO_SHARD", "NO_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
    assert all(isinstance(p, nn.Parameter) for p in two.parameters()), "the other arguments are the root's"


@each_row("answer", [1, None, "yes", [("forward_prefetch", True)]])
def test_custom_policy_refuses_other_answers(answer: Any) -> None:
    """S-111: anything but a bool or a dict is a ValueError that shows the answer."""
    with pytest.raises(ValueError, match="bool or a dict") as caught:
        FSDP(mlp(), HERE, auto_wrap_policy=our_wrap.CustomPolicy(lambda m: answer))
    assert repr(answer) in str(caught.value)


def test_the_root_is_asked_but_not_wrapped_twice() -> None:
    """A policy that matches the root does not put a second wrapper inside."""
    model = FSDP(
        nn.Sequential(nn.Sequential(nn.Linear(2, 2))),
        HERE,
        auto_wrap_policy=our_wrap.ModuleWrapPolicy({nn.Sequential}),
    )
    assert [type(m).__name__ for m in model.modules()] == ["FullyShardedDataParallel", "Sequential"] * 2 + ["Linear"]


def shared() -> nn.Module:
    """One layer that three places hold."""
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Sequential(nn.Linear(3, 3), layer), nn.ModuleDict({"again": layer}))


@each_row(
    "policy",
    [
        our_wrap.ModuleWrapPolicy({nn.Linear}),
        their_wrap.ModuleWrapPolicy({nn.Linear}),
        functools.partial(our_wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)),
        functools.partial(our_wrap.size_based_auto_wrap_policy, min_num_params=12),
    ],
    ids=["classes", "torch's classes", "lambda", "size"],
)
def test_a_shared_module_is_wrapped_once(policy: Any) -> None:
    """All the places that hold it then hold the one wrapper."""
    module = shared()
    model = FSDP(module, HERE, auto_wrap_policy=policy)
    holders = [module[0], module[1][1], module[2]["again"]]
    assert all(holder is module[0] for holder in holders)
    assert isinstance(module[0], FSDP)
    assert isinstance(module[0].module, nn.Linear)
    assert len([m for m in FSDP.fsdp_modules(model) if isinstance(m.module, nn.Linear)]) == 2


def test_a_policy_function_is_asked_with_torchs_arguments() -> None:
    """A user's own function gets `module`, `recurse` and `nonwrapped_numel` by name, in torch's order of calls."""
    calls: dict[Any, list[Any]] = {}

    def policy(into: list[Any], module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        into.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or nonwrapped_numel > 15

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for wrapper in (FSDP, theirs.FullyShardedDataParallel):
            calls[wrapper] = []
            asked = functools.partial(policy, calls[wrapper])
            wrapper(Tree(), auto_wrap_policy=asked, device_id=torch.device("cpu"))
    finally:
        torch.distributed.destroy_process_group()
    assert calls[FSDP] == calls[theirs.FullyShardedDataParallel]


def test_tied_parameters_in_one_unit() -> None:
    """A policy that leaves both ends of a tie to the root wraps the blocks alone, and the tie stays."""
    model = FSDP(seeded(Transformer), HERE, auto_wrap_policy=our_wrap.ModuleWrapPolicy({Block}))
    assert wrapped_names(model) == {"", "blocks.0", "blocks.1"}
    state = model.state_dict()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()


def test_policies_describe_themselves() -> None:
    """`repr` of a class policy names the classes."""
    assert repr(our_wrap.ModuleWrapPolicy({nn.Linear})) == "ModuleWrapPolicy(['Linear'])"


class InHalf(FSDP):
    """A wrapper that has its own mind about linear layers."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        if isinstance(module, nn.Linear):
            arguments |= {"use_orig_params": True, "mixed_precision": MixedPrecision(torch.bfloat16)}
        super().__init__(module, **arguments)


def test_a_subclass_may_change_what_a_policy_passes_on() -> None:
    """Arguments that a subclass of the wrapper gives a module are those that count, as if it was wrapped by hand."""
    model = InHalf(mlp(), process_group=HERE, auto_wrap_policy=our_wrap.ModuleWrapPolicy({nn.Linear}))
    inner = [module for module in model.modules() if isinstance(module, InHalf) and module is not model]
    assert inner
    for wrapper in inner:
        assert wrapper.mixed_precision.param_dtype is torch.bfloat16
        assert [p.dim() for p in wrapper.parameters()] == [2, 1]
    assert model.mixed_precision.param_dtype is None


class Recorded(FSDP):
    """A wrapper that keeps the arguments that it is made with."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__(module, **arguments)
        self.arguments = arguments


def test_a_subclass_is_called_with_fsdp1s_arguments() -> None:
    """The constructor of a subclass gets nothing but what a user may pass, for a module that a policy chose too."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    mixed = MixedPrecision(torch.bfloat16)
    policy = our_wrap.ModuleWrapPolicy({nn.Linear})
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        model = Recorded(
            module,
            process_group=HERE,
            auto_wrap_policy=policy,
            mixed_precision=mixed,
            ignored_modules=[module[2]],
            device_id=torch.device("cpu"),
        )
    first, norm, last = model.module
    assert [type(each) for each in (first, norm, last)] == [Recorded, Recorded, nn.Linear]
    assert first.arguments["mixed_precision"] is mixed
    assert norm.arguments["mixed_precision"] is None
    for wrapper in (first, norm):
        assert wrapper.arguments["auto_wrap_policy"] is None
        assert wrapper.arguments["ignored_states"] == tuple(module[2].parameters())
        assert isinstance(wrapper.arguments["process_group"], Topology)
        assert "_offered" not in vars(wrapper)
    output = norm(torch.ones(2, 3, dtype=torch.bfloat16))
    assert output.dtype is torch.bfloat16, "computed in fp32, and cast back"
    assert norm.module.weight.dtype is torch.float32


def test_a_policy_that_is_called_with_the_roots_arguments() -> None:
    """A policy object of a user gets the root's arguments by FSDP1's names, and what is left out."""
    seen: dict[str, Any] = {}

    class Asked(our_wrap._Policy):
        def _run_policy(self, root_module: nn.Module, ignored_modules: Any, root_kwargs: dict[str, Any]) -> Any:
            seen.update(root_kwargs, ignored=set(ignored_modules))
            return {root_module[0]: root_kwargs}

    module = mlp()
    FSDP(
        module,
        HERE,
        auto_wrap_policy=Asked(),
        ignored_states=iter(module[2].parameters()),
        use_orig_params=True,
    )
    assert isinstance(module[0], FSDP)
    assert seen["use_orig_params"] is True
    assert list(map(id, seen["ignored_states"])) == list(map(id, module[2].parameters()))
    assert seen["ignored"] == set()


@each_row("given", ["Linear", nn.Linear, [nn.Linear(1, 1)], 3, None])
def test_classes_that_are_none_are_refused(given: Any) -> None:
    """A name, a single class or a module would wrap nothing, or something else."""
    with pytest.raises(TypeError, match="ModuleWrapPolicy: expected the classes of the modules to wrap, .* found"):
        our_wrap.ModuleWrapPolicy(given)


@each_row(
    ("module", "policy", "message"),
    [
        (None, None, "FullyShardedDataParallel: expected a module, found None"),
        (nn.Linear, None, "FullyShardedDataParallel: expected a module, found <class"),
        (
            nn.Sequential(nn.Linear(2, 2)),
            nn.Linear,
            "auto_wrap_policy: expected a policy object or a function",
        ),
        (
            nn.Sequential(nn.Linear(2, 2)),
            our_wrap.CustomPolicy(lambda module: {"foo": 1} if isinstance(module, nn.Linear) else False),
            "auto_wrap_policy: expected arguments of FullyShardedDataParallel for a Linear, found 'foo'; they are",
        ),
    ],
)
def test_what_cannot_be_wrapped_is_named(module: Any, policy: Any, message: str) -> None:
    """The error says which argument is wrong, and what it should be."""
    with pytest.raises(TypeError, match=message):
        FSDP(module, HERE, auto_wrap_policy=policy)


@each_row("tied", ["transposed", "sliced", "one object", "apart", "beside"])
def test_parameters_in_the_same_memory_get_a_warning(tied: str) -> None:
    """A parameter made of the transposed data of another is not tied to it any more; one object for both names is."""
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    memory = torch.randn(8, 4)
    if tied == "transposed":
        second.weight = nn.Parameter(first.weight.data.t())
    elif tied == "sliced":
        second.weight = nn.Parameter(first.weight.data[1:3])
    elif tied == "one object":
        second.weight = first.weight
    elif tied == "beside":
        first.weight, second.weight = nn.Parameter(memory[:4]), nn.Parameter(memory[4:])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(nn.Sequential(first, second), HERE)
    told = [str(each.message) for each in caught if "in one memory" in str(each.message)]
    assert len(told) == (tied in ("transposed", "sliced"))
    assert all("'0.weight'" in text and "'1.weight'" in text for text in told)
