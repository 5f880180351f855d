"""A plan is what happens: memory at every stage, what rests, and every collective, with error 0.

The truth about memory is torch's own profiler of the CPU allocator; about collectives, the byte ledger.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans.configurations import CONFIGURATIONS
from torch import Tensor, nn
from torch.nn import functional

from flatparam_plan.costs import measure
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.training import Setup, TrainingProgram

pytestmark = pytest.mark.filterwarnings("ignore")


def errors_of(name: str, **chosen: Any) -> dict[str, int]:
    """The differences between the plan and one real rank among the others."""
    configuration = CONFIGURATIONS[name]
    setup = Setup(**{"wrap": configuration.units, **chosen})
    program = configuration.program()
    return rehearse(program, setup).costs.errors(measure(program, setup, setup.topology()))


def configurations(*short: str) -> list[Any]:
    """The names of all; those that are not named here are long."""
    return [each if each in short else pytest.param(each, marks=pytest.mark.long) for each in CONFIGURATIONS]


@pytest.mark.parametrize("name", configurations("mixture", "bert", "adapted"))
def test_each_transformer_as_the_page_shows_it(name: str) -> None:
    """The ten configurations of the page have no error."""
    assert errors_of(name, **CONFIGURATIONS[name].settings) == {}


@pytest.mark.parametrize("name", configurations("parallel", "translator", "vision"))
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_each_transformer_on_four_ranks(name: str, use_orig_params: bool) -> None:
    """Both exposures, three steps."""
    assert errors_of(name, world_size=4, use_orig_params=use_orig_params) == {}


class Recurrent(nn.Module):
    """Recurrent layers with one weight for all times, whose gradients are added up."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.inner = kind(16, 24, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(48, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return functional.mse_loss(self.head(self.inner(x)[0]), x)


class Convolutions(nn.Module):
    """Grouped and transposed convolutions with norms, and a loss that keeps the memory of its elements."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.down = nn.Conv1d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv1d(8, 8, 3, padding=1, groups=4)
        self.norm = nn.InstanceNorm1d(8, affine=True)
        self.up = nn.ConvTranspose1d(8, 4, 2, stride=2)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(torch.sigmoid(self.up(self.norm(self.middle(self.down(x))))), torch.sigmoid(x))


class Experts(nn.Module):
    """Four experts, the last of which is never used, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = sum(expert(x[:, number::3]).tanh() for number, expert in enumerate(self.experts[:3]))
        return self.head(x).logsumexp(-1).sum()


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Recurrent(nn.GRU),
        lambda: Recurrent(nn.LSTM),
        lambda: Convolutions(functional.mse_loss),
        lambda: Convolutions(functional.smooth_l1_loss),
        lambda: Convolutions(functional.binary_cross_entropy),
        Experts,
    ],
    ids=["gru", "lstm", "mse", "smooth", "entropy", "experts"],
)
def test_other_models_than_transformers(make: Callable[[], nn.Module], use_orig_params: bool) -> None:
    """Recurrent layers, convolutions, losses and experts that are never used."""
    wrap = ("Linear",) if make is Experts else None
    setup = Setup(world_size=3, wrap=wrap, use_orig_params=use_orig_params, accumulate=2, max_norm=1.0)
    inputs = None if make is Experts or isinstance(make(), Recurrent) else lambda *_: torch.zeros(2, 4, 64)
    program = TrainingProgram.of(make, inputs, batch=2, sequence=6)
    assert rehearse(program, setup).costs.errors(measure(program, setup, setup.topology())) == {}


STRATEGIES = {1: ("full",), 2: ("full", "grad_op", "no_shard"), 3: ("full", "grad_op", "no_shard")}
SHARDED = ("full", "grad_op", "no_shard", "hybrid:2", "hybrid_grad_op:2")
DTYPES = (None, torch.bfloat16)


@st.composite
def setups(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A transformer, and a setup that fits it."""
    name = draw(st.sampled_from(sorted(CONFIGURATIONS)))
    units = CONFIGURATIONS[name].units
    world = draw(st.sampled_from([1, 2, 3, 4, 16, 4096]))
    wrap = draw(st.sampled_from([units, None, 5000]))
    chosen = {
        "world_size": world,
        "rank": draw(st.integers(0, world - 1)),
        "strategy": draw(st.sampled_from(STRATEGIES.get(world, SHARDED))),
        "wrap": wrap,
        "param_dtype": draw(st.sampled_from(DTYPES)),
        "reduce_dtype": draw(st.sampled_from((*DTYPES, torch.float32))),
        "optimizer": draw(st.sampled_from(["adamw", "adam", "sgd", "momentum", "adagrad", "none"])),
        "cpu_offload": draw(st.booleans()),
        "checkpointing": draw(st.sampled_from([(), units])) if wrap == units else (),
        "use_orig_params": draw(st.booleans()),
        "accumulate": draw(st.integers(1, 3)),
        "max_norm": draw(st.sampled_from([None, 1.0])),
        "forward_prefetch": draw(st.integers(0, 2)),
        "backward_prefetch": draw(st.sampled_from(["pre", "post", "none"])),
        "transport": draw(st.sampled_from(["direct", "gloo", "shared_memory"])),
    }
    return name, chosen


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(setups())
def test_a_plan_is_what_happens(chosen: tuple[str, dict[str, Any]]) -> None:
    """Any transformer under any setup: plan and run are equal in every number."""
    name, setup = chosen
    assert errors_of(name, **setup) == {}


@pytest.mark.long
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(setups())
def test_many_plans_are_what_happens(chosen: tuple[str, dict[str, Any]]) -> None:
    """The same for more of them."""
    name, setup = chosen
    assert errors_of(name, **setup) == {}
