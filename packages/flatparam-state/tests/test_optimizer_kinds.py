"""Optimizers that hold a part of the model, states of any kind, and states that only the first rank has."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives, FlatParamError, ForwardingCollectives, SingleCollectives
from flatparam_comm.testing import run_threads
from flatparam_state import load_optimizer_state, optimizer_state_dict
from flatparam_state.optimizer.entry import PER_RANK
from flatparam_state.places import places_in

from .accounting import AllocatedBytes
from .models import Tied, mlp
from .optimizers import adam
from .worlds import assert_same_optimizer, assert_same_tensor, made_up_gradients, named_state, shard, step

UNITS = ("0", "2", "4")


class Blocks(torch.optim.Optimizer):
    """Keeps what quantised and factored optimizers do: bytes like the parameter, and others by block and by sum."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    flat = parameter.detach().reshape(-1)
                    self.state[parameter] = {
                        "codes": (parameter.detach() * 10).to(torch.int8),
                        "absmax": torch.stack([part.abs().max() for part in flat.split(4)]),
                        "table": torch.arange(3.0),
                        "calls": 2,
                    }


class Mixed(torch.optim.SGD):
    """SGD with momentum whose buffers are half as precise for matrices."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter, values in self.state.items():
            if parameter.dim() > 1:
                values["momentum_buffer"] = values["momentum_buffer"].to(torch.bfloat16)


def local(make: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = make(model.parameters())
    step(model, optimizer, made_up_gradients(model, 1))
    return model, optimizer


def sharded(
    ranks: Collectives, make: Any, units: tuple[str, ...] = UNITS, *, use_orig_params: bool, steps: int = 1
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = shard(mlp(), ranks, units, use_orig_params=use_orig_params)
    optimizer = make(model.parameters())
    for _ in range(steps):
        step(model, optimizer, made_up_gradients(mlp(), 1))
    return model, optimizer


def test_states_of_another_dtype_for_each_parameter() -> None:
    """L-42: a state may have a different dtype for each parameter; it is saved and loaded in just that."""
    expected = named_state(*local(Mixed))

    def rank(ranks: Collectives) -> None:
        model, optimizer = sharded(ranks, Mixed, use_orig_params=True)
        found = optimizer_state_dict(model, optimizer)
        assert found["state"]["0.weight"]["momentum_buffer"].dtype is torch.bfloat16
        assert_same_optimizer(found, expected)
        before = copy.deepcopy(optimizer.state_dict())
        loaded = load_optimizer_state(model, optimizer, found)
        for number, values in before["state"].items():
            assert_same_tensor(loaded["state"][number]["momentum_buffer"], values["momentum_buffer"])

    run_threads(3, rank)


def test_states_by_block(use_orig_params: bool) -> None:
    """L-42: what belongs to a rank's part is kept for each rank, and loads back bit for bit; the rest is one value."""

    def rank(ranks: Collectives) -> Any:
        model, optimizer = sharded(ranks, Blocks, use_orig_params=use_orig_params)
        found = optimizer_state_dict(model, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        loaded = load_optimizer_state(model, optimizer, found)
        for number, values in before["state"].items():
            for name, value in values.items():
                assert_same_tensor(loaded["state"][number][name], value, name)
        return found

    first, second = run_threads(2, rank)
    weight = first["state"]["2.weight"]
    assert weight["calls"] == 2
    assert_same_tensor(weight["table"], torch.arange(3.0))
    plain = local(Blocks)[0].state_dict()["2.weight"]
    assert_same_tensor(weight["codes"], (plain * 10).to(torch.int8))
    intervals = [tuple(each["interval"]) for each in weight["absmax"][PER_RANK]]
    assert len(intervals) == 2
    assert intervals[0][1] == intervals[1][0]
    assert str(first) == str(second), "every rank has the same"


def test_states_by_block_with_another_cut() -> None:
    """L-42: loaded where the ranks hold other parts, the error names the state, the parameter and the parts."""

    def save(ranks: Collectives) -> Any:
        return optimizer_state_dict(*sharded(ranks, Blocks, use_orig_params=True))

    saved = run_threads(2, save)[0]

    def load(ranks: Collectives) -> None:
        model, optimizer = sharded(ranks, Blocks, use_orig_params=True, steps=0)
        with pytest.raises(FlatParamError, match=r"'absmax' of '\d\.\w+'.*elements \[.*this rank holds"):
            load_optimizer_state(model, optimizer, saved)
        assert not optimizer.state

    run_threads(3, load)


def test_several_optimizers(use_orig_params: bool) -> None:
    """L-41: each of two optimizers has its part of the parameters; one state loads into both."""

    def rank(ranks: Collectives) -> None:
        torch.manual_seed(0)
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        names = [name for name, _ in model.named_parameters()]
        first = [p for name, p in model.named_parameters() if name.startswith("0")]
        rest = [p for name, p in model.named_parameters() if not name.startswith("0")]
        assert len(first) + len(rest) == len(names)
        optimizers = [adam(first), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]
        for optimizer in optimizers:
            step(model, optimizer, made_up_gradients(mlp(), 1))
        saved = [optimizer_state_dict(model, optimizer) for optimizer in optimizers]
        assert set(saved[0]["state"]) == {"0.weight", "0.bias"}
        assert set(saved[1]["state"]) == {"2.weight", "2.bias", "4.weight", "4.bias"}
        both = {
            "state": saved[0]["state"] | saved[1]["state"],
            "param_groups": saved[0]["param_groups"] + saved[1]["param_groups"],
        }
        for optimizer, own in zip(optimizers, saved, strict=True):
            optimizer.load_state_dict(load_optimizer_state(model, optimizer, both))
            assert_same_optimizer(optimizer_state_dict(model, optimizer), own)

    run_threads(2, rank)


@each_row("units", [("",), ("embed", "body", "head"), ("head", "body", "embed")])
def test_a_tied_parameter_has_one_name(units: tuple[str, ...], use_orig_params: bool) -> None:
    """Whichever unit holds it: that of the unsharded model, so that the state loads under any other wrapping."""

    def rank(ranks: Collectives) -> set[str]:
        torch.manual_seed(0)
        model = shard(Tied(), ranks, units, use_orig_params=use_orig_params)
        optimizer = adam(model.parameters())
        for place in places_in(model):
            place.handle.accumulate(torch.ones(place.handle.layout.shard_numel), [True] * len(place.fqns))
        optimizer.step()
        found = optimizer_state_dict(model, optimizer)
        optimizer.load_state_dict(load_optimizer_state(model, optimizer, found))
        return {name for group in found["param_groups"] for name in group["params"]} & {*found["state"]}

    for names in run_threads(2, rank):
        assert "embed.weight" in names
        assert "head.weight" not in names


def test_parameters_of_a_unit_in_two_optimizers() -> None:
    """L-41: with the originals, also the parameters of one unit may be in several optimizers, or in none."""

    def rank(ranks: Collectives) -> None:
        torch.manual_seed(0)
        model = shard(mlp(), ranks, use_orig_params=True)
        biases = [p for name, p in model.named_parameters() if "bias" in name]
        weight = dict(model.named_parameters())["2.weight"]
        for held, names in ((biases, {"0.bias", "2.bias", "4.bias"}), ([weight], {"2.weight"})):
            optimizer = adam(held)
            step(model, optimizer, made_up_gradients(mlp(), 1))
            saved = optimizer_state_dict(model, optimizer)
            assert set(saved["state"]) == names
            optimizer.load_state_dict(load_optimizer_state(model, optimizer, saved))
            assert_same_optimizer(optimizer_state_dict(model, optimizer), saved)

    run_threads(3, rank)


def test_what_is_no_parameters_state() -> None:
    """S-090: an entry under a name that is no parameter's is passed on as it is, with a warning, and loads back."""
    model, optimizer = sharded(SingleCollectives(), adam, use_orig_params=True)
    plain = optimizer.state_dict()
    plain["state"]["schedule"] = {"warm": torch.ones(2)}
    with pytest.warns(UserWarning, match="'schedule', which is no parameter"):
        found = optimizer_state_dict(model, optimizer, state_dict=plain)
    assert_same_tensor(found["state"]["schedule"]["warm"], torch.ones(2))
    for rank0_only in (False, True):
        loaded = load_optimizer_state(model, optimizer, found, rank0_only=rank0_only)
        assert_same_tensor(loaded["state"]["schedule"]["warm"], torch.ones(2))
    plain["state"][17] = {}
    with pytest.raises(FlatParamError, match="parameter 17, of which it holds 6"):
        optimizer_state_dict(model, optimizer, state_dict=plain)


def test_an_optimizer_with_names_for_keys(use_orig_params: bool) -> None:
    """S-096: a state by name is taken, and one to load is made with the very names of the optimizer."""

    class Named(torch.optim.Adam):
        def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
            pairs = list(named)
            self.names = [name for name, _ in pairs]
            super().__init__([parameter for _, parameter in pairs], lr=0.1)

        def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
            plain = super().state_dict()
            return {
                "state": {self.names[number]: values for number, values in plain["state"].items()},
                "param_groups": [
                    {**group, "params": sorted(self.names[number] for number in group["params"])}
                    for group in plain["param_groups"]
                ],
            }

    expected = named_state(*local(adam))

    def rank(ranks: Collectives) -> None:
        torch.manual_seed(0)
        model = shard(mlp(), ranks, UNITS, use_orig_params=use_orig_params)
        optimizer = Named(model.named_parameters())
        step(model, optimizer, made_up_gradients(mlp(), 1))
        found = optimizer_state_dict(model, optimizer)
        assert_same_optimizer(found, expected, ordered=False)
        loaded = load_optimizer_state(model, optimizer, found, is_named=True)
        own = optimizer.state_dict()
        assert set(loaded["state"]) == set(own["state"])
        for name, values in own["state"].items():
            for key, value in values.items():
                assert torch.equal(loaded["state"][name][key], value)
        kept = load_optimizer_state(model, optimizer, {**found, "state": {}}, is_named=True)
        assert set(kept["state"]) == set(own["state"]), "without a saved state the optimizer's own stays"

    run_threads(2, rank)


def test_a_state_that_only_the_first_rank_has(use_orig_params: bool) -> None:
    """S-091, L-43: it is sent tensor by tensor; a rank needs its result and one full tensor, to the byte."""

    def save(ranks: Collectives) -> Any:
        return optimizer_state_dict(*sharded(ranks, adam, use_orig_params=use_orig_params))

    saved = run_threads(2, save)[0]
    largest = max(values["exp_avg"].nbytes for values in saved["state"].values())

    def load(ranks: Collectives) -> int:
        model, optimizer = sharded(ranks, adam, use_orig_params=use_orig_params, steps=0)
        mine: Any = saved if ranks.rank == 0 else {"anything": "else"}
        with AllocatedBytes() as count:
            loaded = load_optimizer_state(model, optimizer, mine, rank0_only=True)
            kept = count.now
        optimizer.load_state_dict(loaded)
        assert_same_optimizer(optimizer_state_dict(model, optimizer), saved)
        own = [v for each in loaded["state"].values() for v in each.values() if isinstance(v, torch.Tensor)]
        assert kept == sum(value.nbytes for value in own)
        return count.peak - kept

    for beyond in run_threads(2, load, deliver_late=False):
        assert beyond <= largest


class Counting(ForwardingCollectives):
    """Counts the calls by name."""

    def __init__(self, inner: Collectives, calls: Counter[str]) -> None:
        super().__init__(inner)
        self.calls = calls

    def _call(self, name: str, /, *args: Any, **options: Any) -> Any:
        self.calls[name] += 1
        return super()._call(name, *args, **options)

    def _decorate(self, inner: Collectives) -> Collectives:
        return Counting(inner, self.calls)


def test_a_state_of_the_first_rank_takes_one_collective_a_tensor(use_orig_params: bool) -> None:
    """Ranks talk about the whole of it, not about each tensor: over many hosts a word costs as much as a small one."""
    saved, _ = run_threads(
        2, lambda ranks: optimizer_state_dict(*sharded(ranks, adam, use_orig_params=use_orig_params))
    )
    tensors = sum(
        isinstance(v, torch.Tensor) and v.dim() > 0 for each in saved["state"].values() for v in each.values()
    )

    def load(ranks: Collectives) -> Counter[str]:
        calls: Counter[str] = Counter()
        model, optimizer = sharded(Counting(ranks, calls), adam, use_orig_params=use_orig_params, steps=0)
        calls.clear()
        load_optimizer_state(model, optimizer, saved if ranks.rank == 0 else {}, rank0_only=True)
        return calls

    for calls in run_threads(2, load):
        assert calls["broadcast"] == tensors
        assert calls["exchange"] < tensors
