"""What one unit may hold: frozen beside trainable, several dtypes, parameters without a dimension."""

from __future__ import annotations

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import ShardingStrategy
from flatparam_comm import Collectives
from flatparam_runtime import EventLog, observe
from integration_tests.lifted.our_half import (
    both_exposures,
    full_parameters,
    on_two_ranks,
    seeded,
    sgd,
    square_loss,
    train,
    train_local,
    wrapped,
)
from integration_tests.lifted.torch_half import Outcomes, fsdp1
from integration_tests.parity.runs import assert_same_tensors


class Adapter(nn.Module):
    """A large frozen layer with a small trainable detour, as in LoRA, all of it one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 100).requires_grad_(False)
        self.down = nn.Linear(4, 2, bias=False)
        self.up = nn.Linear(2, 100, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


class Mixed(nn.Module):
    """Parameters of seven dtypes, all of which the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.f32 = nn.Parameter(torch.randn(4, 4))
        self.f64 = nn.Parameter(torch.randn(4, 5, dtype=torch.float64))
        self.bf16 = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.codes = frozen(torch.randint(-3, 3, (5, 3), dtype=torch.int8))
        self.scales = nn.Parameter(torch.randn(3) / 10)
        self.keep = frozen(torch.tensor([True, False, True]))
        self.order = frozen(torch.tensor([2, 0, 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = ((x @ self.f32).double() @ self.f64).float() + self.bf16.float()
        x = x @ (self.codes.float() * self.scales)
        x = torch.fft.ifft(torch.fft.fft(x) * self.filter).real
        return (x * self.keep)[:, self.order]


TRAINED = ("f32", "f64", "bf16", "filter", "scales")


class Scalar(nn.Module):
    """A parameter without a dimension beside one with two, and one alone in its unit."""

    class Temperature(nn.Module):
        """One number."""

        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.value

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(0.25))
        self.layer = nn.Linear(4, 3)
        self.temperature = Scalar.Temperature()

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature(self.layer(x)) + self.shift


def torch_l24(group: Collectives, use_orig_params: bool) -> tuple[int, int]:
    """The elements of the gradient that a rank holds, and those of all its parameters."""
    model = fsdp1(seeded(Adapter), use_orig_params=use_orig_params)
    square_loss(model, 0, group.rank).backward()
    flat = model._flat_param
    return flat._saved_grad_shard.numel() if flat.grad is None else flat.grad.numel(), flat.numel()


def torch_l25_mixed(group: Collectives, use_orig_params: bool) -> None:
    fsdp1(nn.ParameterList([torch.ones(4), torch.ones(4).double()]), use_orig_params=use_orig_params)


def torch_l25_complex(group: Collectives, use_orig_params: bool) -> None:
    fsdp1(nn.ParameterList([torch.ones(4).cfloat()]), use_orig_params=use_orig_params)


def torch_l25_integer(group: Collectives, use_orig_params: bool) -> None:
    fsdp1(nn.ParameterList([frozen(torch.ones(4).char())]), use_orig_params=use_orig_params)


def torch_l26(group: Collectives, use_orig_params: bool) -> None:
    fsdp1(seeded(Scalar), use_orig_params=use_orig_params)


def ours_l25(group: Collectives, use_orig_params: bool) -> dict[str, Tensor]:
    return trained_mixed(group, use_orig_params, ShardingStrategy.FULL_SHARD)


def trained_mixed(group: Collectives, use_orig_params: bool, strategy: ShardingStrategy) -> dict[str, Tensor]:
    model = wrapped(seeded(Mixed), sharding_strategy=strategy, use_orig_params=use_orig_params)
    train(model, sgd(model.parameters()), group.rank)
    return full_parameters(model)


def test_l24_torch_refuses_frozen_beside_trainable(processes: Outcomes) -> None:
    """L-24: with use_orig_params=False torch demands that all of a unit is frozen, or nothing."""
    assert "uniform `requires_grad`" in processes.error(torch_l24, False)


def test_l24_torch_holds_gradients_of_what_is_frozen(processes: Outcomes) -> None:
    """L-24: with use_orig_params=True torch's gradient is as large as the whole unit."""
    for of_gradient, of_parameters in processes.values(torch_l24, True):
        assert of_gradient == of_parameters


@both_exposures
def test_l24_gradients_of_what_is_trained_only(use_orig_params: bool) -> None:
    """L-24: what is reduced, and held as gradients, are the trainable elements; training is the unsharded model's."""

    def rank(group: Collectives) -> tuple[set[int], int, dict[str, Tensor]]:
        model = wrapped(seeded(Adapter), use_orig_params=use_orig_params)
        log = EventLog()
        with observe(model.module, log):
            train(model, sgd(model.parameters()), group.rank)
        held = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        reduced = {event.nbytes for event in log.events if event.kind in ("reduce", "finish")}
        return reduced, held, full_parameters(model)

    reference = seeded(Adapter)
    expected = train_local(reference, sgd(reference.parameters()))
    trainable = sum(p.nbytes for p in reference.parameters() if p.requires_grad)
    assert trainable < sum(p.nbytes for p in reference.parameters()) / 3
    of_ranks = on_two_ranks(rank)
    assert sum(held for _, held, _ in of_ranks) == trainable
    for reduced, _, found in of_ranks:
        assert reduced == {trainable}
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l25_torch_holds_one_floating_dtype(processes: Outcomes, use_orig_params: bool) -> None:
    """L-25: torch refuses two dtypes in a unit, and complex and integer parameters anywhere."""
    assert "uniform dtype" in processes.error(torch_l25_mixed, use_orig_params)
    assert "integer dtype" in processes.error(torch_l25_complex, use_orig_params)
    assert "integer dtype" in processes.error(torch_l25_integer, use_orig_params)


@both_exposures
@each_row("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated")
def test_l25_several_dtypes_in_a_unit(strategy: str, use_orig_params: bool) -> None:
    """L-25: floats of three sizes and complex numbers train, integers and booleans are gathered: as unsharded."""
    reference = seeded(Mixed)
    expected = train_local(reference, sgd(reference.parameters()))
    before = dict(seeded(Mixed).named_parameters())
    for name, theirs in expected.items():
        assert theirs.isfinite().all()
        assert torch.equal(theirs, before[name]) == (name not in TRAINED)
    for found in on_two_ranks(trained_mixed, use_orig_params, ShardingStrategy[strategy]):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l25_several_dtypes_over_gloo(processes: Outcomes, use_orig_params: bool) -> None:
    """L-25: the same over gloo, which has to be able to move every one of these dtypes."""
    reference = seeded(Mixed)
    expected = train_local(reference, sgd(reference.parameters()))
    for found in processes.values(ours_l25, use_orig_params):
        assert_same_tensors(found, expected, "parameter")


@both_exposures
def test_l25_state_of_several_dtypes(use_orig_params: bool) -> None:
    """L-25: the state dict is that of the unwrapped module, and loads into another one."""

    def rank(group: Collectives) -> list[dict[str, Tensor]]:
        model = wrapped(seeded(Mixed), use_orig_params=use_orig_params)
        other = wrapped(Mixed(), use_orig_params=use_orig_params)
        other.load_state_dict(model.state_dict())
        return [dict(model.state_dict()), full_parameters(other)]

    for states in on_two_ranks(rank):
        for state in states:
            assert_same_tensors(state, seeded(Mixed).state_dict(), "state")


@both_exposures
def test_l26_torch_refuses_numbers(processes: Outcomes, use_orig_params: bool) -> None:
    """L-26: torch refuses a parameter without a dimension, and asks for a vector of one."""
    assert "doesn't support scalar parameters" in processes.error(torch_l26, use_orig_params)


@both_exposures
@each_row("units", [(), (nn.Linear,), (Scalar.Temperature,)], ids=["whole", "layer", "number-alone"])
def test_l26_numbers_train(units: tuple[type[nn.Module], ...], use_orig_params: bool) -> None:
    """L-26: a parameter without a dimension trains, beside others or alone in a unit, and has no dimension anywhere."""

    def rank(group: Collectives) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = wrapped(seeded(Scalar), *units, use_orig_params=use_orig_params)
        train(model, sgd(model.parameters()), group.rank)
        return full_parameters(model), model.state_dict()

    reference = seeded(Scalar)
    expected = train_local(reference, sgd(reference.parameters()))
    assert expected["shift"].shape == expected["temperature.value"].shape == ()
    for found, state in on_two_ranks(rank):
        assert_same_tensors(found, expected, "parameter")
        assert_same_tensors(state, expected, "state")
