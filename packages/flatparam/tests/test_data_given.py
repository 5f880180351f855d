"""Other data that the user gives parameters between passes (`.data =`, or a new object), and who reads them next."""

import copy
import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn
from torch.func import functional_call

import flatparam
from flatparam import FullyShardedDataParallel as FSDP
from flatparam import ShardedEMA, ShardingStrategy, fully_shard, offload, onload
from flatparam.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_core import FlatParamError

from .models import mlp, seeded
from .worlds import inputs, on_ranks

LINEAR = ModuleWrapPolicy({nn.Linear})


def in_place() -> nn.Module:
    model = seeded(mlp)
    for layer in (0, 2):
        fully_shard(model[layer])
    fully_shard(model)
    return model


def wrapped(**settings: Any) -> nn.Module:
    return FSDP(seeded(mlp), auto_wrap_policy=LINEAR, **settings)


SHARDINGS: dict[str, Callable[[], nn.Module]] = {
    "flat": wrapped,
    "original": lambda: wrapped(use_orig_params=True),
    "original-zero2": lambda: wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "original-whole": lambda: wrapped(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
    "one-unit": lambda: FSDP(seeded(mlp), use_orig_params=True),
    "in-place": in_place,
}
pytestmark = pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")


def full_state(model: nn.Module, world: Collectives) -> Any:
    return {name: value.clone() for name, value in model.state_dict().items()}


def by_dcp(model: nn.Module, world: Collectives) -> Any:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def by_checkpoint(model: nn.Module, world: Collectives) -> Any:
    (folder,) = {*world.exchange(tempfile.mkdtemp() if world.rank == 0 else None, label="folder")} - {None}
    with flatparam.Checkpointer(folder, model, ranks=world) as checkpointer:
        checkpointer.save(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        checkpointer.load()
    return full_state(model, world)


def by_averages(model: nn.Module, world: Collectives) -> Any:
    averages = ShardedEMA(model, decay=0.5)
    with averages.applied(model):
        return full_state(model, world)


def by_copy(model: nn.Module, world: Collectives) -> Any:
    return full_state(copy.deepcopy(model), world)


def by_offload(model: nn.Module, world: Collectives) -> Any:
    offload(model)
    onload(model)
    return full_state(model, world)


def by_summoning(model: nn.Module, world: Collectives) -> Any:
    with FSDP.summon_full_params(model, writeback=False):
        return {name: each.detach().clone() for name, each in model.state_dict().items()}


WITH_CHECKPOINTS = pytest.mark.skipif(
    importlib.util.find_spec("flatparam_checkpoint") is None, reason="flatparam-checkpoint is not installed"
)
READERS = [
    full_state,
    by_dcp,
    pytest.param(by_checkpoint, marks=WITH_CHECKPOINTS),
    by_averages,
    by_copy,
    by_offload,
    by_summoning,
]


@pytest.mark.pairs
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("how", SHARDINGS)
def test_whoever_reads_next_has_the_new_values(how: str, reader: Callable[..., Any]) -> None:
    """State of every kind, a checkpoint, averages, a copy and an offload have the values of the last `.data =`."""

    def rank(world: Collectives) -> Any:
        model = SHARDINGS[how]()
        model(inputs(world.rank)[0]).sum().backward()
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 7.0)
        return reader(model, world)

    for state in on_ranks(2, rank):
        assert {value.unique().item() for value in state.values()} == {7.0}


@each_row("how", SHARDINGS)
def test_what_is_loaded_is_newer(how: str) -> None:
    """A state that is loaded after `.data =` is what the model has then; the data are not taken over later."""

    def rank(world: Collectives) -> Any:
        model = SHARDINGS[how]()
        state = full_state(model, world)
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 7.0)
        model.load_state_dict(state)
        model(inputs(world.rank)[0])
        after = full_state(model, world)
        return all(torch.equal(after[name], value) for name, value in state.items())

    assert on_ranks(2, rank) == [True, True]


@each_row("trains", [False, True], ids=["no-grad", "trained"])
@each_row("how", SHARDINGS)
def test_weights_that_are_swapped_by_reference_come_back(how: str, trains: bool) -> None:
    """`keep = p.data; p.data = average; evaluate; p.data = keep` ends with the weights from before."""

    def rank(world: Collectives) -> bool:
        model = SHARDINGS[how]()
        x = inputs(world.rank)[0]
        with torch.no_grad():
            before = model(x)
        keep = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter)
        with torch.set_grad_enabled(trains):
            assert not model(x).any()
        for parameter, values in zip(model.parameters(), keep, strict=True):
            parameter.data = values
        with torch.no_grad():
            return torch.equal(model(x), before)

    assert on_ranks(2, rank) == [True, True]


@each_row("how", [how for how in SHARDINGS if how != "flat"])
def test_parameters_that_are_swapped_come_back(how: str) -> None:
    """A parameter that another one stood for, and that is put back, has its own values and is trained again."""

    def rank(world: Collectives) -> bool:
        model = SHARDINGS[how]()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x = inputs(world.rank)[0]
        with torch.no_grad():
            before = model(x)
        owner = next(module for module in model.modules() if isinstance(module, nn.Linear))
        old, owner.weight = owner.weight, nn.Parameter(torch.zeros_like(owner.weight))
        with torch.no_grad():
            assert not torch.equal(model(x), before)
        owner.weight = old
        with torch.no_grad():
            same = torch.equal(model(x), before)
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            return same and not torch.equal(model(x), before) and owner.weight is old

    assert on_ranks(2, rank) == [True, True]


def test_a_flat_parameter_that_is_replaced_is_refused() -> None:
    """Values for a flat parameter by functional_call, or another object there, are refused on every rank by name."""

    def rank(world: Collectives) -> None:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR)
        zeros = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
        x = inputs(world.rank)[0]
        with pytest.raises(FlatParamError, match="flat parameter '_flat_param'.*use_orig_params=True"):
            functional_call(model, zeros, (x,))
        model(x).sum().backward()
        inner = model.module[0]
        kept = inner.module._flat_param
        inner.module._flat_param = nn.Parameter(torch.zeros_like(kept))
        for reads in (lambda: model(x), model.state_dict):
            with pytest.raises(FlatParamError, match="flat parameter '_flat_param'"):
                reads()
        inner.module._flat_param = kept
        model(x).sum().backward()

    on_ranks(2, rank)
