"""`optim_state_dict` and `optim_state_dict_to_load`, called as clients of FSDP1 call them."""

import copy
from typing import Any

import torch
import torch.distributed.fsdp as theirs
from each_row import each_row
from torch import nn

from flatparam import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives

from .models import mlp, seeded
from .worlds import assert_same_state, on_ranks, train

HERE = SingleCollectives()
FULL = StateDictType.FULL_STATE_DICT
INPUTS = [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(5)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def wrapped(*, policy: bool = True, seed: int = 7, **how: Any) -> FSDP:
    return FSDP(seeded(mlp, seed), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if policy else None, **how)


def by_name(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A plain optimizer's state over an unwrapped `mlp()`, with names for numbers."""
    names = [name for name, _ in mlp().named_parameters()]
    plain = copy.deepcopy(optimizer.state_dict())
    return {
        "state": {names[number]: values for number, values in plain["state"].items()},
        "param_groups": [{**group, "params": [names[n] for n in group["params"]]} for group in plain["param_groups"]],
    }


def assert_same_optimizer(found: Any, expected: Any) -> None:
    assert set(found["state"]) == set(expected["state"])
    for fqn, values in expected["state"].items():
        assert set(found["state"][fqn]) == set(values)
        for name, value in values.items():
            assert torch.equal(found["state"][fqn][name], value), (fqn, name)
    assert found["param_groups"] == expected["param_groups"]


def reference(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(mlp)
    optimizer = adam(model)
    train(model, optimizer, INPUTS[:steps])
    return model, optimizer


def test_the_state_is_that_of_the_unwrapped_model(use_orig_params: bool) -> None:
    """S-090: after some steps, the names and bits of a plain optimizer over the unwrapped model."""

    def rank(ranks: Collectives) -> Any:
        model = wrapped(use_orig_params=use_orig_params)
        optimizer = adam(model)
        train(model, optimizer, INPUTS[:2])
        return FSDP.optim_state_dict(model, optimizer)

    for state in on_ranks(2, rank):
        assert_same_optimizer(state, by_name(reference(2)[1]))


def test_names_are_in_the_order_of_the_model(use_orig_params: bool) -> None:
    """Whatever order each rank's optimizer holds the parameters in: programs gather states one after the other."""
    names = [name for name, _ in mlp().named_parameters()]

    def rank(ranks: Collectives) -> list[str]:
        model = wrapped(use_orig_params=use_orig_params)
        order = -1 if ranks.rank else 1
        optimizer = torch.optim.Adam([*model.parameters()][::order], lr=0.01)
        model(INPUTS[0]).sum().backward()
        optimizer.step()
        return [*FSDP.optim_state_dict(model, optimizer)["state"]]

    assert on_ranks(2, rank) == [names] * 2


@each_row("directly", [False, True])
@each_row("sizes", [(1, 2), (2, 1), (2, 2)], ids=str)
def test_resuming(sizes: tuple[int, int], directly: bool, use_orig_params: bool) -> None:
    """S-091: model and optimizer saved, loaded with other units and exposure, go on as if they had not stopped."""

    def save(ranks: Collectives) -> Any:
        model = wrapped(use_orig_params=use_orig_params)
        optimizer = adam(model)
        train(model, optimizer, INPUTS[:2])
        return copy.deepcopy((model.state_dict(), FSDP.optim_state_dict(model, optimizer)))

    state, optimizer_state = on_ranks(sizes[0], save)[0]

    def resume(ranks: Collectives) -> Any:
        model = wrapped(policy=False, seed=8, use_orig_params=not use_orig_params)
        optimizer = adam(model)
        model.load_state_dict(state)
        found = FSDP.optim_state_dict_to_load(
            model=model, optim=optimizer, optim_state_dict=optimizer_state, load_directly=directly
        )
        if not directly:
            optimizer.load_state_dict(found)
        train(model, optimizer, INPUTS[2:4])
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)

    model, optimizer = reference(4)
    for parameters, after in on_ranks(sizes[1], resume):
        assert_same_state(parameters, model.state_dict())
        assert_same_optimizer(after, by_name(optimizer))


def test_the_settings_count() -> None:
    """S-090: `rank0_only` of the chosen configuration: the other ranks take part and get an empty dict."""

    def rank(ranks: Collectives) -> Any:
        model = wrapped()
        optimizer = adam(model)
        train(model, optimizer, INPUTS[:1])
        config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, FULL, FullStateDictConfig(), config):
            return FSDP.optim_state_dict(model, optimizer)

    first, second = on_ranks(2, rank)
    assert_same_optimizer(first, by_name(reference(1)[1]))
    assert second == {}


def test_a_model_without_wrappers() -> None:
    """L-57: an optimizer of a plain model is saved and loaded by names; torch fails there."""
    model, optimizer = reference(2)
    state = FSDP.optim_state_dict(model, optimizer)
    assert_same_optimizer(state, by_name(optimizer))
    fresh = adam(model)
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, state))
    assert_same_optimizer(by_name(fresh), by_name(optimizer))


def test_wrappers_in_a_plain_parent(use_orig_params: bool) -> None:
    """Names of sharded and of other parameters are those in the parent."""

    def rank(ranks: Collectives) -> Any:
        model = nn.Sequential(seeded(lambda: nn.Linear(3, 3)), wrapped(use_orig_params=use_orig_params))
        optimizer = adam(model)
        train(model, optimizer, INPUTS[:1])
        state = FSDP.optim_state_dict(model, optimizer)
        fresh = adam(model)
        fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, state))
        return state, FSDP.optim_state_dict(model, fresh)

    names = ["0.weight", "0.bias", *(f"1.{name}" for name, _ in mlp().named_parameters())]
    for state, again in on_ranks(2, rank):
        assert set(state["state"]) == set(names)
        assert_same_optimizer(again, state)


def test_an_optimizer_from_before_wrapping_trains() -> None:
    """L-07: with `use_orig_params` it holds the very parameters that are trained, and its state is saved."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(mlp)
        optimizer = adam(module)
        model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
        train(model, optimizer, INPUTS[:3])
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)

    model, optimizer = reference(3)
    for parameters, state in on_ranks(2, rank):
        assert_same_state(parameters, model.state_dict())
        assert_same_optimizer(state, by_name(optimizer))


def test_an_optimizer_from_before_wrapping_flat() -> None:
    """L-07: it holds the originals, which are views of the shards now; it trains, saves and loads as ever."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(mlp)
        optimizer = adam(module)
        model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        train(model, optimizer, INPUTS[:2])
        optimizer.load_state_dict(
            FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
        )
        train(model, optimizer, INPUTS[2:3])
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)

    model, optimizer = reference(3)
    for parameters, state in on_ranks(2, rank):
        assert_same_state(parameters, model.state_dict())
        assert_same_optimizer(state, by_name(optimizer))


def test_names_in_groups_are_clean(use_orig_params: bool) -> None:
    """An optimizer made from `named_parameters()` keeps names in its groups; none is a wrapper's in the saved state."""

    def rank(ranks: Collectives) -> Any:
        model = wrapped(use_orig_params=use_orig_params)
        optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
        train(model, optimizer, INPUTS[:1])
        return FSDP.optim_state_dict(model, optimizer)["param_groups"][0]

    for group in on_ranks(2, rank):
        assert group["params"] == [name for name, _ in mlp().named_parameters()]
        assert group.get("param_names", group["params"]) == group["params"]


def test_a_state_that_torchs_fsdp1_saved(torch_world: None) -> None:
    """What FSDP1 wrote loads here and gives the same next step, and what we write loads in FSDP1."""
    cpu = torch.device("cpu")
    torchs = theirs.FullyShardedDataParallel(seeded(mlp), device_id=cpu, use_orig_params=True)
    optimizer = adam(torchs)
    train(torchs, optimizer, INPUTS[:2])
    written = theirs.FullyShardedDataParallel.optim_state_dict(torchs, optimizer)
    model = FSDP(seeded(mlp, 8), HERE, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    mine = adam(model)
    model.load_state_dict(torchs.state_dict())
    mine.load_state_dict(FSDP.optim_state_dict_to_load(model, mine, written))
    again = FSDP.optim_state_dict(model, mine)
    back = theirs.FullyShardedDataParallel.optim_state_dict_to_load(torchs, optimizer, again)
    optimizer.load_state_dict(back)
    train(torchs, optimizer, INPUTS[2:3])
    train(model, mine, INPUTS[2:3])
    assert_same_state(model.state_dict(), torchs.state_dict())


def test_a_state_without_groups(use_orig_params: bool) -> None:
    """A program that keeps the groups elsewhere passes the state alone, both ways, as with FSDP1."""

    def rank(ranks: Collectives) -> None:
        model = wrapped(use_orig_params=use_orig_params)
        optimizer = adam(model)
        train(model, optimizer, INPUTS[:2])
        raw = optimizer.state_dict()
        groups = raw.pop("param_groups")
        named = FSDP.optim_state_dict(model, optimizer, raw)
        assert set(named) == {"state"}
        whole = FSDP.optim_state_dict(model, optimizer)
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, named)
        assert set(loaded) == {"state"}
        expected = FSDP.optim_state_dict_to_load(model, optimizer, whole)
        for number, values in expected["state"].items():
            for name, value in values.items():
                assert torch.equal(loaded["state"][number][name], value), (number, name)
        optimizer.load_state_dict({**loaded, "param_groups": groups})

    on_ranks(2, rank)
