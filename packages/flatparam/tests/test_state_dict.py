"""`state_dict()` and `load_state_dict()` of anything that contains wrappers are those of the unwrapped model."""

import copy
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from each_row import each_row
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from flatparam import FullStateDictConfig, StateDictType, fully_shard
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives
from flatparam_comm.testing import run_processes
from flatparam_core import clean_fqn
from flatparam_runtime import summon_full_params

from .models import Batch, Block, Transformer, mlp, seeded
from .worlds import assert_same_state, on_ranks

HERE = SingleCollectives()
LINEAR = ModuleWrapPolicy({nn.Linear})


def parent() -> nn.Module:
    """A plain module around others."""
    return nn.ModuleDict({"before": nn.Linear(2, 2), "net": mlp(), "after": Batch()})


class Encoder(nn.Module):
    """Activation checkpointing around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.out = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(x))


WAYS: dict[str, Any] = {
    "whole": (Transformer, lambda m, **how: FSDP(m, **how)),
    "blocks": (Transformer, lambda m, **how: FSDP(m, auto_wrap_policy=ModuleWrapPolicy({Block}), **how)),
    "layers": (Batch, lambda m, **how: FSDP(m, auto_wrap_policy=LINEAR, **how)),
    "a plain parent": (parent, lambda m, **how: wrap_children(m, ["net", "after"], **how)),
    "a wrapper in a wrapper": (mlp, lambda m, **how: FSDP(FSDP(m, **how), **how)),
    "checkpointed blocks": (Encoder, lambda m, **how: wrap_checkpointed(m, **how)),
    "blocks checkpointed outside": (Encoder, lambda m, **how: checkpoint_wrapped(m, **how)),
}


def wrap_children(module: nn.Module, names: list[str], **how: Any) -> nn.Module:
    for name in names:
        setattr(module, name, FSDP(module.get_submodule(name), auto_wrap_policy=LINEAR, **how))
        module._modules[name] = getattr(module, name)
    return module


def wrap_checkpointed(module: nn.Module, **how: Any) -> nn.Module:
    for number in range(2):
        module.blocks[number] = FSDP(checkpoint_wrapper(module.blocks[number]), **how)
    return FSDP(module, **how)


def checkpoint_wrapped(module: nn.Module, **how: Any) -> nn.Module:
    for number in range(2):
        module.blocks[number] = checkpoint_wrapper(FSDP(module.blocks[number], **how))
    return FSDP(module, **how)


@each_row("world_size", [1, 2, 3])
@each_row("name", WAYS)
def test_saving_and_loading(name: str, world_size: int, use_orig_params: bool) -> None:
    """The unwrapped model's keys in order, and its bits; loading another state reports nothing and takes it all."""
    make, wrap = WAYS[name]

    def rank(ranks: Collectives) -> Any:
        model = wrap(seeded(make), use_orig_params=use_orig_params)
        saved = copy.deepcopy(model.state_dict())  # what is not wrapped is in it as it is
        report = model.load_state_dict(seeded(make, 8).state_dict())
        return saved, (report.missing_keys, report.unexpected_keys), model.state_dict()

    for saved, report, loaded in on_ranks(world_size, rank):
        assert_same_state(saved, seeded(make).state_dict())
        assert report == ([], [])
        assert_same_state(loaded, seeded(make, 8).state_dict())


def test_ways_to_call_state_dict() -> None:
    """A destination, a prefix and `keep_vars` are honoured by name and by position, as torch's own takes them."""
    model, reference = FSDP(seeded(mlp), HERE, auto_wrap_policy=LINEAR), seeded(mlp)
    destination = OrderedDict([("x.other", torch.ones(1))])
    for found in (
        model.state_dict(destination=destination.copy(), prefix="x."),
        model.state_dict(destination.copy(), "x.", False),
        model.state_dict(destination.copy(), prefix="x."),
    ):
        assert_same_state(found, {**destination, **reference.state_dict(prefix="x.")})
    mine = destination.copy()
    assert model.state_dict(destination=mine, prefix="x.") is mine
    assert all(isinstance(value, nn.Parameter) for value in model.state_dict(keep_vars=True).values())
    assert_same_state(model.state_dict(None, ""), reference.state_dict())


def test_versions_are_saved_under_clean_names() -> None:
    """`_metadata` of the state has the unwrapped model's entries, with each module's version."""
    found = FSDP(seeded(Batch), HERE, auto_wrap_policy=LINEAR).state_dict()._metadata
    assert dict(found) == dict(seeded(Batch).state_dict()._metadata)


class Versioned(nn.Module):
    """Since version 2 it saves its weight negated."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.zeros(2))
        self.versions: list[Any] = []

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.versions.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_modules_are_told_the_version_that_was_saved() -> None:
    """A module that translates old states by their version gets it, through any number of wrappers."""
    for where in (lambda: Versioned(), lambda: nn.Sequential(Versioned())):
        saved, unwrapped = where().state_dict(), where()
        model = FSDP(where(), HERE)
        if isinstance(unwrapped, nn.Sequential):
            model = FSDP(where(), HERE, auto_wrap_policy=ModuleWrapPolicy({Versioned}))
        model.load_state_dict(saved)
        (told,) = [m.versions for m in model.modules() if isinstance(m, Versioned)]
        assert told == [2]


def test_the_users_load_hooks_rename(use_orig_params: bool) -> None:
    """A module's own hook that translates old names works as in the unwrapped model, in a unit and below one."""

    def translate(state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "gamma" in state:
            state[prefix + "weight"] = state.pop(prefix + "gamma")

    def make() -> nn.Module:
        module = mlp()
        for layer in (module[0], module[2]):
            layer._register_load_state_dict_pre_hook(translate)
        return module

    state = seeded(make, 8).state_dict()
    for name in ("0", "2"):
        state[f"{name}.gamma"] = state.pop(f"{name}.weight")
    module = seeded(make)
    module[2] = FSDP(module[2], HERE, use_orig_params=use_orig_params)
    model = FSDP(module, HERE, use_orig_params=use_orig_params)
    report = model.load_state_dict(state)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    assert_same_state(model.state_dict(), seeded(make, 8).state_dict())


@pytest.mark.parametrize("policy", [None, LINEAR], ids=["whole", "policy"])
def test_a_module_under_two_names(policy: Any, use_orig_params: bool) -> None:
    """A module that is reached by two paths is saved under both and loaded from both."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        module.append(module[0])
        return module

    model = FSDP(seeded(make), HERE, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    state = seeded(make, 8).state_dict()
    assert list(model.state_dict()) == list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    report = model.load_state_dict(state)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    assert_same_state(model.state_dict(), state)


def test_offload_and_rank0_only() -> None:
    """S-083: with `rank0_only` the others get nothing of a unit, buffers neither; rank 0 gets everything."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(Batch), auto_wrap_policy=LINEAR)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
            return model.state_dict()

    first, second = on_ranks(2, rank)
    assert_same_state(first, seeded(Batch).state_dict())
    assert list(second) == []


def test_offloading_leaves_nothing_of_the_model_in_the_state() -> None:
    """S-083: with `offload_to_cpu` parameters are copies, and changing them does not change the model."""
    model = FSDP(seeded(Batch), HERE)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
        for name, value in model.state_dict().items():
            if "weight" in name or "bias" in name:
                value.zero_()
        assert_same_state(model.state_dict(), seeded(Batch).state_dict())


def test_state_inside_summon_full_params() -> None:
    """The state can be taken while full parameters are summoned, with what was changed there."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR)
        with FSDP.summon_full_params(model):
            with torch.no_grad():
                model[2].bias.fill_(3.0)
            return model.state_dict()

    expected = seeded(mlp).state_dict()
    expected["2.bias"].fill_(3.0)
    for state in on_ranks(2, rank):
        assert_same_state(state, expected)


def test_a_state_that_torchs_fsdp1_saved(torch_world: None) -> None:
    """What FSDP1 wrote with FULL_STATE_DICT loads here, and the other way round."""
    cpu = torch.device("cpu")
    torchs = theirs.FullyShardedDataParallel(seeded(Transformer), device_id=cpu, use_orig_params=True)
    ours = FSDP(seeded(Transformer, 8), HERE, auto_wrap_policy=ModuleWrapPolicy({Block}))
    ours.load_state_dict(torchs.state_dict())
    assert_same_state(ours.state_dict(), torchs.state_dict())
    again = theirs.FullyShardedDataParallel(seeded(Transformer, 9), device_id=cpu)
    again.load_state_dict(ours.state_dict())
    assert_same_state(again.state_dict(), ours.state_dict())


TIED_STATES = {
    "both names": lambda state: None,
    "the first name only": lambda state: state.pop("head.weight"),
    "the last name only": lambda state: state.pop("embed.weight"),
    "different values": lambda state: state.update({"head.weight": torch.ones(7, 4)}),
}


@each_row("change", TIED_STATES)
def test_tied_parameters_load_as_in_torch(change: str, use_orig_params: bool) -> None:
    """Whichever names of a tied parameter a state has: the values and the report are those of the unwrapped model."""
    state = seeded(Transformer, 8).state_dict()
    TIED_STATES[change](state)
    model, reference = FSDP(seeded(Transformer), HERE, use_orig_params=use_orig_params), seeded(Transformer)
    found, expected = (m.load_state_dict(state, strict=False) for m in (model, reference))
    assert found.missing_keys == expected.missing_keys
    assert found.unexpected_keys == expected.unexpected_keys
    assert_same_state(model.state_dict(), reference.state_dict())


def noted_by_hooks(module: nn.Module) -> list[list[str]]:
    """What the post hook of each module inside reads as missing, in the order in which they are called."""
    found: list[list[str]] = []

    def note(_: nn.Module, incompatible: Any) -> None:
        found.append([clean_fqn(name) for name in incompatible.missing_keys])

    for inside in module.modules():
        inside.register_load_state_dict_post_hook(note)
    return found


@each_row("left_out", [0, 1])
@each_row("way", WAYS)
def test_the_hooks_of_modules_read_what_is_missing(way: str, left_out: int, use_orig_params: bool) -> None:
    """A post hook that a model's own module has reads the report of torch on the unwrapped model, at each module."""
    build, wrap = WAYS[way]
    reference, model = seeded(build), seeded(build)
    state = seeded(build, 8).state_dict()
    for name in list(state)[:left_out]:
        del state[name]
    expected, found = noted_by_hooks(reference), noted_by_hooks(model)
    # Modules that wrapping adds have no hook of these.
    wrapped = wrap(model, process_group=HERE, use_orig_params=use_orig_params)
    reference.load_state_dict(state, strict=False)
    wrapped.load_state_dict(state, strict=False)
    assert found == expected
    assert any(expected) is bool(left_out)


@each_row("left_out", [0, 1])
def test_the_hooks_of_modules_that_are_sharded_in_place(left_out: int) -> None:
    """The same for `fully_shard`, on two ranks."""
    state = seeded(mlp, 8).state_dict()
    for name in list(state)[:left_out]:
        del state[name]

    def rank(world: Collectives) -> list[list[str]]:
        model = seeded(mlp)
        found = noted_by_hooks(model)
        for inside in model:
            if isinstance(inside, nn.Linear):
                fully_shard(inside, mesh=world)
        fully_shard(model, mesh=world)
        model.load_state_dict(state, strict=False)
        return found

    reference = seeded(mlp)
    expected = noted_by_hooks(reference)
    reference.load_state_dict(state, strict=False)
    assert on_ranks(2, rank) == [expected] * 2


class Fused(nn.Linear):
    """Makes its weight and bias from the three parts that older states have."""

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        for name, parameter in list(self._parameters.items()):
            parts = [state.pop(f"{prefix}{name}_{part}", None) for part in "qkv"]
            if None not in parts:
                assert parameter is not None
                with torch.no_grad():
                    parameter.copy_(torch.cat(parts))
                state[prefix + name] = parameter.detach().clone()
        super()._load_from_state_dict(state, prefix, *arguments)


class Choosy(nn.Linear):
    """Drops entries whose shape is not that of its parameters."""

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        for name, parameter in self._parameters.items():
            assert parameter is not None
            if prefix + name in state and state[prefix + name].shape != parameter.shape:
                del state[prefix + name]
        super()._load_from_state_dict(state, prefix, *arguments)


def tied_by_a_hook() -> nn.Module:
    def tie(module: Any, incompatible: Any) -> None:
        with torch.no_grad():
            module[1].weight.copy_(module[0].weight)

    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module.register_load_state_dict_post_hook(tie)
    return module


def cached_by_a_hook() -> nn.Module:
    def note(module: Any, incompatible: Any) -> None:
        module.norm.copy_(module.weight.detach().norm())

    module = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3))
    module[0].register_buffer("norm", torch.zeros(()))
    module[0].register_load_state_dict_post_hook(note)
    return module


def parts_of(state: dict[str, Any]) -> dict[str, Any]:
    """The state of `Fused` in three parts."""
    return {
        f"{name}_{part}": piece
        for name, value in state.items()
        for part, piece in zip("qkv", value.chunk(3), strict=True)
    }


OWN_CODE: dict[str, Any] = {
    "fused": (lambda: nn.Sequential(Fused(3, 9), Fused(9, 3)), parts_of),
    "choosy": (lambda: nn.Sequential(Choosy(3, 7), Choosy(7, 3)), lambda s: {**s, "1.bias": torch.ones(4)}),
    "tied by a hook": (tied_by_a_hook, dict),
    "cached by a hook": (cached_by_a_hook, dict),
}


@each_row("in_place", [False, True], ids=["wrapped", "in place"])
@each_row("name", OWN_CODE)
def test_code_that_looks_at_parameters_while_they_are_loaded(name: str, in_place: bool, use_orig_params: bool) -> None:
    """A module's own way to load itself, and its hooks, see full parameters and change them, as in the unwrapped model.

    If something else does not fit, all is as it was, also what such code has written.
    """
    build, change = OWN_CODE[name]
    state = change(seeded(build, 8).state_dict())
    reference = seeded(build)
    found = reference.load_state_dict(state, strict=False)

    def rank(world: Collectives) -> None:
        model = seeded(build)
        if in_place:
            fully_shard(model, mesh=world)
        else:
            model = FSDP(model, process_group=world, use_orig_params=use_orig_params)
        before = copy.deepcopy(full_state_of(model))
        with pytest.raises(RuntimeError, match="more"):
            model.load_state_dict({**state, "more": torch.ones(1)}, strict=True)
        assert_same_state(full_state_of(model), before)
        report = model.load_state_dict(state, strict=False)
        assert report.missing_keys == found.missing_keys
        assert_same_state(full_state_of(model), reference.state_dict())
        x = torch.ones(2, 3)
        assert torch.equal(model(x), reference(x))

    on_ranks(2, rank)


def full_state_of(model: nn.Module) -> dict[str, Any]:
    if isinstance(model, FSDP):
        return dict(model.state_dict())
    with summon_full_params(model):
        found = {k: v.detach().clone() for k, v in (*model.named_parameters(), *model.named_buffers())}
    return {name: found[name] for name in model.state_dict()}


def test_an_exception_of_such_code_leaves_what_was_there(use_orig_params: bool) -> None:
    """A hook that raises in the middle of a load: no value has changed, and the model is sharded and trains."""

    def fail(*_: Any) -> None:
        raise ValueError("too old")

    def rank(world: Collectives) -> None:
        model = FSDP(seeded(mlp), process_group=world, auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        before = dict(model.state_dict())
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
        hooked = model.module[2].module.register_load_state_dict_post_hook(fail)
        with pytest.raises(ValueError, match="too old"):
            model.load_state_dict(seeded(mlp, 8).state_dict())
        assert [tuple(parameter.shape) for parameter in model.parameters()] == shapes
        assert_same_state(dict(model.state_dict()), before)
        hooked.remove()
        model(torch.ones(2, 3)).sum().backward()
        model.load_state_dict(seeded(mlp, 8).state_dict())
        assert_same_state(dict(model.state_dict()), seeded(mlp, 8).state_dict())

    on_ranks(2, rank)


def mixed() -> nn.Module:
    """Vectors and matrices whose lengths tell nothing: every one of them is a multiple of every alignment."""
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))


def mixed_wrapped(world: Collectives, seed: int, is_frozen: str, use_orig_params: bool) -> FSDP:
    """`mixed` with one frozen parameter, or none."""
    module = seeded(mixed, seed)
    if is_frozen:
        module.get_parameter(is_frozen).requires_grad_(False)
    return FSDP(module, process_group=world, use_orig_params=use_orig_params)


def load_local(world: Collectives, orders: tuple[bool, bool], frozen: tuple[str, str]) -> None:
    fits = orders[0] == orders[1] and frozen[0] == frozen[1]
    source = mixed_wrapped(world, 0, frozen[0], orders[0])
    target = mixed_wrapped(world, 8, frozen[1], orders[1])
    before, expected = dict(target.state_dict()), dict(source.state_dict())
    with FSDP.state_dict_type(source, StateDictType.LOCAL_STATE_DICT):
        state = source.state_dict()
    with FSDP.state_dict_type(target, StateDictType.LOCAL_STATE_DICT):
        if fits:
            target.load_state_dict(copy.copy(state))
        else:
            with pytest.raises(RuntimeError, match=r"expected one of .*weight.*, in this order, found one of"):
                target.load_state_dict(copy.copy(state))
    assert_same_state(dict(target.state_dict()), expected if fits else before)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with FSDP.state_dict_type(target, StateDictType.LOCAL_STATE_DICT):
            target.load_state_dict(dict(state))
    told = [each for each in found if "does not tell the order" in str(each.message)]
    assert len(told) == int(orders[1])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("orders", "frozen"),
    [
        ((False, True), ("", "")),
        ((True, False), ("", "")),
        ((True, True), ("0.weight", "0.bias")),
        ((True, True), ("", "")),
        ((False, False), ("", "")),
    ],
    ids=["flat to originals", "originals to flat", "other frozen", "originals", "flat"],
)
def test_a_local_state_in_a_different_order(orders: tuple[bool, bool], frozen: tuple[str, str]) -> None:
    """It loads if the flat parameter has the same parameters in the same order, and is refused otherwise, by name.

    If its metadata are lost, as with a state of FSDP1, a model with a different order than FSDP1's warns.
    """
    run_processes(2, load_local, orders, frozen)


def test_hooks_of_a_wrapper_see_clean_names(use_orig_params: bool) -> None:
    """A hook that a program registers on a wrapper finds, and deletes, entries under their names in the module."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        seen: list[list[str]] = []
        inner = next(module for module in FSDP.fsdp_modules(model) if module is not model)

        def drop(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
            seen.append([key[len(prefix) :] for key in state if key.startswith(prefix)])
            state.pop(f"{prefix}bias", None)

        inner.register_state_dict_post_hook(drop)
        model.register_state_dict_post_hook(drop)
        return list(model.state_dict()), seen

    names = list(mlp().state_dict())
    first = names[0].removesuffix("weight")
    for keys, seen in on_ranks(2, rank):
        assert keys == [name for name in names if name != f"{first}bias"]
        assert seen == [["weight", "bias"], keys]
