"""Plans with the times of the machine that the tests run on: its ranks are processes, which run steps."""

import os

import pytest
import torch
from torch import Tensor, nn

from flatparam import PlanError, plan
from flatparam_plan.fitting.fastest import fit
from flatparam_plan.hardware import samples
from flatparam_plan.planner import plans_of
from flatparam_plan.training import Setup, TrainingProgram

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """A unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    """Tokens to scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Fails(Model):
    """Runs in the process that plans, and in no other."""

    def forward(self, tokens: Tensor) -> Tensor:
        if os.getpid() != PLANNER:
            raise RuntimeError("this model runs elsewhere only")
        return super().forward(tokens)


PLANNER = os.getpid()


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are run for a tenth of a second."""
    monkeypatch.setattr(samples, "_SECONDS", 0.1)


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_two_ranks_run_the_steps_of_a_plan(transport: str) -> None:
    """The prediction is from steps that ranks have run, its words say so, and the plan's bytes are those of the transport."""
    found = plan(Model, batch=2, sequence=4, world_size=2, wrap=("Block",), profile=f"this-machine:{transport}")
    assert found.setup.transport == transport
    assert found.prediction is not None
    assert found.prediction.timings is not None
    assert found.prediction.timings.count >= 5
    assert found.prediction.seconds == pytest.approx(sum(found.prediction.parts.values()))
    assert f"predicted step, this machine, {transport}" in found.table()
    assert "of three blocks" in found.table()
    assert found.facts()["prediction"]["error"] in found.table()


def test_strategies_are_measured_side_by_side() -> None:
    """A hybrid of four ranks has both of its groups, and one rank needs none."""
    program = TrainingProgram.of(Model, batch=2, sequence=4)
    setups = [Setup(world_size=4, strategy=each, wrap=("Block",)) for each in ("full", "no_shard", "hybrid:2")]
    setups += [Setup(world_size=1, wrap=("Block",))]
    plans = plans_of(program, setups, profile="this-machine:gloo")
    assert [each.setup.strategy for each in plans] == ["full", "no_shard", "hybrid:2", "full"]
    assert all(each.prediction is not None and each.prediction.seconds > 0 for each in plans)
    assert plans[-1].prediction is not None
    assert plans[-1].prediction.communication == 0.0


def test_the_choice_is_measured_beside_each_block() -> None:
    """Both have been run in turn, and what is chosen is the faster of the two."""
    program = TrainingProgram.of(Model, batch=2, sequence=4)
    found = fit(program, Setup(world_size=2), memory=10**9, profile="this-machine:gloo", only_units=True)
    measured = [each for each in found.plans if each.prediction is not None and each.prediction.is_measured]
    assert found.best in measured
    assert found.plain in measured
    assert found.best.prediction is not None
    assert found.plain.prediction is not None
    assert found.best.prediction.seconds <= found.plain.prediction.seconds
    assert "chosen, measured" in found.table()


def test_what_fails_on_a_rank_is_the_error() -> None:
    """The error of a rank that cannot run the program is the plan's."""
    with pytest.raises(PlanError, match=r"rank [01] failed: .* raises RuntimeError: this model runs elsewhere only"):
        plan(Fails, batch=2, sequence=4, world_size=2, wrap=("Block",), profile="this-machine")
