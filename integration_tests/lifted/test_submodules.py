"""Calls of something else than the root's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, ShardingStrategy
from flatparam_comm import Collectives
from flatparam_runtime import EventLog, observe, units_in
from integration_tests.lifted.our_half import (
    batch,
    both_exposures,
    full_parameters,
    on_two_ranks,
    seeded,
    sgd,
    train,
    train_local,
    wrapped,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors


class Coder(nn.Module):
    """Two layers, a parameter of its own, and methods beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.decoder = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encode(x))

    def generate(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self(x)
        return x


Call = Callable[[Any, Tensor], Tensor]

CALLS: dict[str, Call] = {
    "module": lambda model, x: model.encoder(x),
    "module-inside": lambda model, x: model.encoder[0](x).sum(1),
    "method": lambda model, x: model.encode(x),
    "generate": lambda model, x: model.generate(x),
    "forward-then-module": lambda model, x: model.decoder(model(x)),
    "module-then-forward": lambda model, x: model(model.decoder(x)),
}

UNITS: dict[str, tuple[type[nn.Module], ...]] = {
    "whole": (),
    "units": (nn.Linear, nn.Sequential),
    "leaves": (nn.Linear,),
}


def torch_l20_first(group: Collectives, use_orig_params: bool) -> Tensor:
    """A module inside the root's unit, before the root has run."""
    return fsdp1(seeded(Coder), use_orig_params=use_orig_params).decoder(batch(0, 0))


def torch_l20_after_root(group: Collectives, use_orig_params: bool) -> Tensor:
    """The same after the root has run, whose unit keeps its full parameters in memory until the backward pass."""
    model = fsdp1(seeded(Coder), use_orig_params=use_orig_params)
    model(batch(0, 0))
    return model.decoder(batch(0, 0)).detach()


def torch_l20_generate(group: Collectives, use_orig_params: bool) -> Tensor:
    """A method that calls `forward` from inside, past the wrapper."""
    return fsdp1(seeded(Coder), nn.Linear, use_orig_params=use_orig_params).generate(batch(0, 0))


@both_exposures
@pytest.mark.parametrize("half", [torch_l20_first, torch_l20_generate])
def test_l20_torch_fails_outside_of_the_root(
    processes: Outcomes, half: Callable[[Collectives, bool], Tensor], use_orig_params: bool
) -> None:
    """L-20: a submodule or a method that is called by itself finds the parameters sharded in torch."""
    assert processes.error(half, use_orig_params).startswith("RuntimeError")


def test_l20_torch_works_by_accident(processes: Outcomes) -> None:
    """L-20: with use_orig_params=False, once the root has run, its own parameters are still there in torch."""
    for found in processes.values(torch_l20_after_root, False):
        assert torch.equal(found, seeded(Coder).decoder(batch(0, 0)))


def test_l20_torch_fails_on_originals_after_the_root_too(processes: Outcomes) -> None:
    """L-20: with use_orig_params=True not even these are."""
    assert processes.error(torch_l20_after_root, True).startswith("RuntimeError")


@both_exposures
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize(
    ("call", "units"),
    [pytest.param(call, units) for call in CALLS for units in UNITS],
)
def test_l20_anything_may_be_called(call: str, units: str, strategy: str, use_orig_params: bool) -> None:
    """L-20: any submodule, and a method that is registered, finds full parameters, and is trained by its loss."""

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        return CALLS[call](model, batch(step, rank)).square().mean()

    def rank(group: Collectives) -> dict[str, Tensor]:
        model = wrapped(
            seeded(Coder),
            *UNITS[units],
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=use_orig_params,
        )
        FullyShardedDataParallel.register_forward_method(model, "encode")
        train(model, sgd(model.parameters()), group.rank, loss)
        return full_parameters(model)

    reference = seeded(Coder)
    expected = train_local(reference, sgd(reference.parameters()), loss)
    for found in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l20_inference_by_a_method(use_orig_params: bool) -> None:
    """L-20: without gradients too, and nothing is left unsharded afterwards."""

    def rank(group: Collectives) -> tuple[Tensor, list[str]]:
        model = wrapped(seeded(Coder), nn.Linear, use_orig_params=use_orig_params)
        with torch.no_grad():
            output = model.generate(batch(0, group.rank))
        units = [wrapper._unit for wrapper in FullyShardedDataParallel.fsdp_modules(model)]
        return output, [unit.residency.name for unit in units]

    for number, (output, residencies) in enumerate(on_two_ranks(rank)):
        assert torch.equal(output, seeded(Coder).generate(batch(0, number)))
        assert residencies == ["SHARDED"] * 4


@both_exposures
def test_l20_a_unit_that_is_called_alone_gathers_itself_only(use_orig_params: bool) -> None:
    """L-20: calling a unit by itself costs the memory and the traffic of that unit, not those of the unit around it."""

    def rank(group: Collectives) -> None:
        model = wrapped(seeded(Coder), nn.Linear, use_orig_params=use_orig_params)
        log = EventLog()
        with torch.no_grad(), observe(model.module, log):
            model.decoder(batch(0, group.rank))
        decoder = next(unit for unit in units_in(model.decoder))
        assert log.events
        assert {(event.unit, event.nbytes) for event in log.events} == {(decoder.name, decoder.unsharded_nbytes)}

    on_two_ranks(rank)
