"""The wrapped module in the hands of programs that reach past its wrapper, or change it."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardingStrategy, StateDictType, fully_shard
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from flatparam_comm import Collectives, FlatParamError, SingleCollectives
from flatparam_comm.testing import run_processes
from flatparam_core import clean_fqn

from .models import seeded
from .worlds import on_ranks

X = torch.ones(3, 2)


class Gain(nn.Module):
    """A parameter whose shards would broadcast: to compute with them is no error."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.g


class Outer(nn.Module):
    """A module inside a unit, which its methods call."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Gain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain(x) + 1  # type: ignore[no-any-return]


def replaced(model: nn.Module) -> Callable[..., torch.Tensor]:
    model.module.forward = MethodType(Gain.forward, model.module)
    return model.module  # type: ignore[return-value]


def made_of_its_function(model: nn.Module) -> Callable[..., torch.Tensor]:
    function = model.module.forward.__func__
    model.module.forward = MethodType(lambda self, x: function(self, x).float(), model.module)
    return model.module  # type: ignore[return-value]


def copied(model: nn.Module) -> Callable[..., torch.Tensor]:
    kept = copy.deepcopy(model)
    return lambda x: kept.module(x)  # type: ignore[no-any-return]


def pickled(model: nn.Module) -> Callable[..., torch.Tensor]:
    read = pickle.loads(pickle.dumps(model))
    return lambda x: read.module(x)  # type: ignore[no-any-return]


CHANGES = {
    "as it is": lambda model: model.module,
    "its forward": lambda model: model.module.forward,
    "another forward": replaced,
    "a forward of its function": made_of_its_function,
    "a copy": copied,
    "from a file": pickled,
}


@each_row("change", CHANGES)
@each_row("recorded", [False, True])
def test_calling_the_wrapped_module(change: str, recorded: bool, use_orig_params: bool) -> None:
    """It computes with full parameters, whatever a program has done to it, and the wrapper goes on."""

    def rank(world: Collectives) -> Any:
        model = FSDP(Gain(), world if change != "from a file" else None, use_orig_params=use_orig_params)
        with torch.set_grad_enabled(recorded):
            called = CHANGES[change](model)
            return [called(X)[0].tolist(), model(X)[0].tolist(), called(X)[0].tolist()]

    assert on_ranks(2, rank) == [[[2.0, 3.0]] * 3] * 2


def test_its_hooks_see_full_parameters(use_orig_params: bool) -> None:
    """Hooks before and after its call find the whole weight if it is called past its wrapper, too."""

    def rank(world: Collectives) -> Any:
        model, seen = FSDP(Gain(), use_orig_params=use_orig_params), []
        model.module.register_forward_pre_hook(lambda module, args: seen.append(module.g.tolist()))
        model.module.register_forward_hook(lambda module, args, output: seen.append(module.g.tolist()))
        model.module(X)
        return seen

    assert on_ranks(2, rank) == [[[2.0, 3.0]] * 2] * 2


def test_its_forward_is_like_a_method() -> None:
    """Programs that look at it find the function, its arguments and the module."""

    def rank(world: Collectives) -> None:
        model = FSDP(Outer())
        for module, kind in ((model.module, Outer), (model.module.gain, Gain)):
            forward = module.forward
            assert forward.__func__ is kind.forward
            assert forward.__self__ is module
            assert forward.__code__ is kind.forward.__code__
            assert forward.__name__ == "forward"
            assert [*inspect.signature(forward).parameters] == ["x"]
            with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
                _ = forward.nothing

    on_ranks(2, rank)


@pytest.mark.filterwarnings("ignore:the world has one rank")
def test_exporting_the_wrapped_module(use_orig_params: bool) -> None:
    """It is exported inside `summon_full_params`, and computes there."""
    model = FSDP(Outer(), SingleCollectives(), use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model, writeback=False):
        # What is exported has the full parameters, which are freed afterwards.
        exported = torch.export.export(model.module, (X,))
        assert exported.module()(X)[0].tolist() == [3.0, 4.0]


def compiled_parts(world: Collectives, use_orig_params: bool) -> dict[str, tuple[list[float], list[float]]]:
    """For each way to call a part of a unit compiled, its output and the gradient that it gives the part."""
    found = {}
    for what in ("module", "forward", "function"):
        model = FSDP(Outer(), use_orig_params=use_orig_params)
        part = model.module.gain
        called = {"module": part, "forward": part.forward, "function": lambda x, part=part: part(x) * 1}[what]
        output = torch.compile(called, backend="eager")(X)
        output.sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            found[what] = output[0].tolist(), part.g.grad.tolist()
        torch._dynamo.reset()
    model = FSDP(Gain(), use_orig_params=use_orig_params)
    model.module.compile(backend="eager")
    for _ in range(2):
        model(X)
        model.zero_grad()
        output = model.module(X)
        output.sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        found["in place"] = output[0].tolist(), model.module.g.grad.tolist()
    return found


@pytest.mark.processes
def test_compiling_a_module_inside(use_orig_params: bool) -> None:
    """A compiled call of a part of a unit, or of the wrapped module, computes with full parameters, and trains them."""
    for found in run_processes(2, compiled_parts, use_orig_params):
        assert found == dict.fromkeys(("module", "forward", "function", "in place"), ([2.0, 3.0], [3.0, 3.0]))


def compiled(where: str) -> nn.Module:
    """A model of which `torch.compile` has returned the whole, a unit, a part of a unit, or what is around a unit."""
    model = seeded(
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 2))
    )
    if where == "part":
        model[1][0] = torch.compile(model[1][0], backend="eager")
    elif where == "unit":
        model[1] = torch.compile(model[1], backend="eager")
    return torch.compile(model, backend="eager") if where == "whole" else model  # type: ignore[return-value]


def states_of_compiled(world: Collectives, where: str, use_orig_params: bool, kind: StateDictType) -> Any:
    """What loading a state that the model has given, and one with FSDP1's names, says and leaves behind."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = compiled(where)
        inner = getattr(module, "_orig_mod", module)
        policy = CustomPolicy(lambda each: each is inner[1])
        model = FSDP(module, world, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = make()
    model(X).square().mean().backward()
    optimizer.step()
    with FSDP.state_dict_type(model, kind):
        state, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        clean = list(state)
        # FSDP1 keeps the names that modules have.
        named = (*model.named_parameters(), *model.named_buffers())
        theirs = {clean_fqn(name): name.replace("_fsdp_wrapped_module.", "") for name, _ in named}
        said, hashes = [], []
        for names in ({}, theirs):
            again, other = make()
            loaded = OrderedDict((names.get(key, key), value) for key, value in state.items())
            if kind is not StateDictType.LOCAL_STATE_DICT:
                said.append(again.load_state_dict(loaded))
                found = {
                    "state": {names.get(key, key): value for key, value in states["state"].items()},
                    "param_groups": [
                        {**group, "params": [names.get(key, key) for key in group["params"]]}
                        for group in states["param_groups"]
                    ],
                }
                other.load_state_dict(FSDP.optim_state_dict_to_load(again, other, found))
                again(X).square().mean().backward()
                other.step()
            elif not names:
                said.append(again.load_state_dict(state))
            hashes.append([each.tolist() for each in (*again.parameters(), *again.buffers())])
        if kind is not StateDictType.LOCAL_STATE_DICT:
            model.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        expected = [each.tolist() for each in (*model.parameters(), *model.buffers())]
    return clean, [[*each] for each in said], [each == expected for each in hashes]


def all_states_of_compiled(world: Collectives, use_orig_params: bool) -> Any:
    cases = itertools.product(("whole", "unit", "part"), StateDictType)
    return {(where, kind): states_of_compiled(world, where, use_orig_params, kind) for where, kind in cases}


def test_states_of_what_is_compiled(use_orig_params: bool) -> None:
    """A state has the names of the model that is not compiled; it is loaded by these names, and by FSDP1's."""
    for found in run_processes(2, all_states_of_compiled, use_orig_params):
        for (where, kind), (clean, said, same) in found.items():
            ways = 1 if kind is StateDictType.LOCAL_STATE_DICT else 2
            assert not any("_orig_mod" in name for name in clean), (where, kind)
            assert said == [[[], []]] * ways, (where, kind)
            assert same[:ways] == [True] * ways, (where, kind)


def test_a_compiled_model_refuses_by_the_names_of_the_state() -> None:
    """What does not fit is named as in the state, and nothing is changed."""
    model = FSDP(compiled("unit"), SingleCollectives())
    state = model.state_dict()
    before = [each.tolist() for each in model.parameters()]
    wrong = {**state, "1.0.weight": torch.ones(7, 7)}
    del wrong["1.0.bias"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(wrong)
    assert "'1.0.weight'" in str(caught.value)
    assert '"1.0.bias"' in str(caught.value)
    assert "_orig_mod" not in str(caught.value)
    assert [each.tolist() for each in model.parameters()] == before


ENCODER_POLICIES = {
    "attention": ModuleWrapPolicy({nn.MultiheadAttention}),
    "norms": ModuleWrapPolicy({nn.LayerNorm}),
    "size": lambda **named: size_based_auto_wrap_policy(**named, min_num_params=100),
}


@each_row("policy", ENCODER_POLICIES)
def test_parts_of_an_encoder_layer(policy: str, use_orig_params: bool) -> None:
    """In evaluation torch's layer reads the weights of its parts, unless a hook is there: the parts may be units."""

    def make() -> nn.Module:
        return nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
            2,
            enable_nested_tensor=False,
        )

    x = torch.randn(2, 5, 8)
    reference = seeded(make)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            expected = reference.eval()(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(make), auto_wrap_policy=ENCODER_POLICIES[policy], use_orig_params=use_orig_params).eval()
        with torch.no_grad():
            model(x)
            return model(x)

    for found in on_ranks(2, rank):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


class Viewed(nn.Module):
    """A unit whose output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.randn(4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.g).view(-1, 4)


class Changing(nn.Module):
    """It changes the outputs of its parts in place."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Viewed() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + torch.relu_(part(x))
        return x


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_outputs_that_are_changed_in_place(strategy: str, use_orig_params: bool) -> None:
    """The backward pass gathers a unit whose output, a view, was changed in place outside; all bits are those of one."""
    x = torch.randn(5, 4)

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def rank(world: Collectives) -> list[float]:
        return train(
            FSDP(
                seeded(Changing),
                sharding_strategy=ShardingStrategy[strategy],
                auto_wrap_policy=ModuleWrapPolicy({Viewed}),
                use_orig_params=use_orig_params,
            )
        )

    assert on_ranks(2, rank) == [train(seeded(Changing))] * 2


def test_a_thread_that_is_refused(use_orig_params: bool) -> None:
    """The thread whose pass is running goes on, with full parameters."""

    class Waiting(Gain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is main:
                other = threading.Thread(target=call)
                other.start()
                other.join()
            return super().forward(x)

    refused: list[str] = []

    def call() -> None:
        try:
            model(X)
        except FlatParamError as error:
            refused.append(str(error))

    main = threading.current_thread()
    # Threads of a world would wait for their turns.
    model = FSDP(Waiting(), SingleCollectives(), use_orig_params=use_orig_params)
    for _ in range(2):
        model(X).sum().backward()
    assert len(refused) == 2
    assert all("is in the forward pass of another thread" in each for each in refused)
    assert [call.module for unit in (model._unit,) for call in unit.calls] == []


class Saves(Outer):
    """As a model of transformers or diffusers: saves its own state, unless it is given one."""

    def save_pretrained(self, state_dict: dict[str, Any] | None = None) -> dict[str, Any]:
        return self.state_dict() if state_dict is None else state_dict


def by_wrapper(ranks: Collectives, **arguments: Any) -> tuple[nn.Module, Any]:
    model = FSDP(Saves(), ranks, **arguments)
    return model, model.module


def in_place(ranks: Collectives) -> tuple[nn.Module, Any]:
    """A module inside of what is sharded."""
    model = fully_shard(nn.Sequential(Saves()), mesh=ranks)
    return model, model[0]


@each_row(
    "arguments",
    [
        {},
        {"use_orig_params": True},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
        None,
    ],
    ids=str,
)
def test_a_state_past_the_wrapper(arguments: dict[str, Any] | None) -> None:
    """It is refused as this rank's part, by one rank alone too; with full parameters in place, or with a state, it is whole.

    A copy of the model refuses and saves for itself.
    """

    def saved(ranks: Collectives) -> None:
        model, inside = in_place(ranks) if arguments is None else by_wrapper(ranks, **arguments)
        twin = copy.deepcopy(model)
        for each in (model, twin):
            inside = each[0] if arguments is None else each.module
            if ranks.rank == 0:
                for save in (inside.save_pretrained, inside.state_dict):
                    with pytest.raises(FlatParamError, match="rank 0.*save_pretrained.folder, state_dict=model.state"):
                        save()
            whole = each.state_dict()
            assert inside.save_pretrained(state_dict=whole) is whole
            with FSDP.summon_full_params(each, writeback=False):
                assert inside.save_pretrained()["gain.g"].tolist() == [2.0, 3.0]
            assert each(X).sum().backward() is None

    on_ranks(2, saved)


def test_a_state_past_the_wrapper_that_is_whole() -> None:
    """If each rank has whole parameters in modules, or every part is in units below, the state is as it was."""

    def saved(ranks: Collectives) -> None:
        whole = FSDP(Saves(), ranks, ShardingStrategy.NO_SHARD, use_orig_params=True)
        below = FSDP(Saves(), ranks, auto_wrap_policy=ModuleWrapPolicy({Gain}))
        for model in (whole, below):
            assert model.module.save_pretrained()["gain.g"].tolist() == [2.0, 3.0]

    on_ranks(2, saved)
