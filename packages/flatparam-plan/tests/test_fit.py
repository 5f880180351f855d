"""The planner: what it chooses within a budget of memory, for `flatparam.wrap.planned` and `flatparam plan --fit`."""

import functools
import math
from typing import Any

import attrs
import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel, PlanError, ShardingStrategy, plan
from flatparam.wrap import planned
from flatparam_comm import Collectives, run_threads
from flatparam_plan.fitting.fastest import fit
from flatparam_plan.fitting.fitted import Fitted
from flatparam_plan.fitting.replayed import Replay
from flatparam_plan.hardware.profile import profile_named
from flatparam_plan.named_units import NamedUnits, outline_of
from flatparam_plan.planner import plan_of
from flatparam_plan.training import Setup, TrainingProgram
from flatparam_runtime import units_in

pytestmark = pytest.mark.filterwarnings("ignore")

PLENTY = 10**12


class Block(nn.Module):
    """A unit with two parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Tokens to scores."""

    def __init__(self, width: int = 64, depth: int = 4, vocabulary: int = 500) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tied(Model):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Reaches(Model):
    """The embedding's weight is used outside of its forward pass, and the head is never called."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


@functools.cache
def program(kind: type[Model] = Model) -> TrainingProgram:
    """The program that trains a model."""
    return TrainingProgram.of(kind, batch=2, sequence=8)


@functools.cache
def large() -> TrainingProgram:
    """A program whose step is bound by computing and by what is sent, and not by the host."""
    with torch.device("meta"):
        return TrainingProgram.of(Model(1024, vocabulary=50_000), batch=4, sequence=512)


def setup(**changed: Any) -> Setup:
    """Four ranks on an accelerator."""
    return Setup(**{"world_size": 4, "device": "accelerator", **changed})


@functools.cache
def fitted(memory: int, kind: type[Model] = Model, **changed: Any) -> Fitted:
    """What is chosen."""
    return fit(program(kind), setup(**changed), memory=memory, profile="h100")


def test_the_outline_of_a_model() -> None:
    """Blocks are the members of lists; what is large beside them may be a unit; parts are inside of blocks."""
    found, template = outline_of(program())
    assert template is None
    assert found.blocks == tuple(f"blocks.{number}" for number in range(4))
    assert found.rest == ("embedding", "head")
    assert found.parts[:2] == ("blocks.0.up", "blocks.0.down")


def test_tied_modules_stay_in_the_root() -> None:
    """Modules that share a parameter with another one do not become units."""
    assert outline_of(program(Tied))[0].rest == ()


def test_a_replay_is_the_prediction() -> None:
    """A step that is replayed unchanged takes the predicted time, on both kinds of devices."""
    for device in ("cpu", "accelerator"):
        found = plan_of(program(), setup(device=device, wrap=("Block",)), profile="h100")
        assert found.prediction is not None
        replay = Replay(found.rehearsal, profile_named("h100"))
        assert replay.seconds_with(()) == pytest.approx(found.prediction.seconds, rel=1e-9)


@each_row("accumulate", [1, 3])
def test_what_a_replay_says_of_kept_units_is_what_a_rehearsal_says(accumulate: int) -> None:
    """If units are kept, memory is replayed to the byte, and the time nearly."""
    changed = setup(wrap=("Block",), accumulate=accumulate)
    before = plan_of(program(), changed, profile="h100")
    said = Replay(before.rehearsal, profile_named("h100")).best(PLENTY)
    assert said is not None
    assert len(said.names) >= 3
    wrap = NamedUnits({f"blocks.{n}": f"blocks.{n}" not in said.names for n in range(4)})
    found = plan_of(program(), setup(wrap=wrap, accumulate=accumulate), profile="h100")
    assert found.prediction is not None
    assert said.peak == found.peak.nbytes
    assert said.seconds == pytest.approx(found.prediction.seconds, rel=0.02)


def test_a_search_replays_the_step_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of replays grows with the logarithm of the number of units."""
    deep = TrainingProgram.of(functools.partial(Model, 16, 20), batch=1, sequence=4)
    replay = Replay(plan_of(deep, setup(wrap=("Block",)), profile="h100").rehearsal, profile_named("h100"))
    replays: list[int] = []
    whole = Replay.seconds_with

    def counted(self: Replay, *args: Any) -> float:
        replays.append(1)
        return whole(self, *args)

    monkeypatch.setattr(Replay, "seconds_with", counted)
    assert replay.best(PLENTY) is not None
    orders = 2
    assert len(replays) <= orders * (2 + math.ceil(math.log2(20)))


def test_the_choice_is_within_the_budget_and_not_slower_than_the_default() -> None:
    """Whatever the budget is, each block with FULL_SHARD is no better, if it fits."""
    plain = plan(Model, batch=2, sequence=8, profile="h100", **_of(setup(wrap=("Block",))))
    assert plain.prediction is not None
    for memory in (plain.peak.nbytes, PLENTY):
        found = fitted(memory)
        assert found.best.peak.nbytes <= memory
        assert found.best.prediction is not None
        assert found.best.prediction.seconds <= plain.prediction.seconds


def test_micro_batches_are_not_slower_than_without_freeing() -> None:
    """Between micro-batches SHARD_GRAD_OP gathers nothing: with enough memory, that is what is chosen."""
    changed = setup(wrap=("Block",), accumulate=3)
    found = fit(program(), changed, memory=PLENTY, profile="h100")
    kept = plan_of(program(), attrs.evolve(changed, strategy="grad_op"), profile="h100")
    assert found.best.prediction is not None
    assert kept.prediction is not None
    assert found.best.prediction.seconds <= kept.prediction.seconds
    assert found.best.setup.strategy == "grad_op"
    assert "strategy grad_op on" in found.table()


def _of(chosen: Setup) -> dict[str, Any]:
    names = ("world_size", "device", "wrap")
    return {name: getattr(chosen, name) for name in names}


def test_with_enough_memory_units_are_kept_and_the_choices_say_so() -> None:
    """Each choice has a line, with the bytes that it takes and the gathers that it saves."""
    found = fit(large(), setup(param_dtype=torch.bfloat16), memory=PLENTY, profile="h100")
    kept = {unit.facts.name for unit in found.best.units if not unit.facts.frees_after_forward}
    assert {"embedding", "blocks.0", "blocks.1"} <= kept
    assert "embedding: kept after forward: +102 MB, -1 gather" in found.choices
    assert found.choices[0] == "strategy full on 4 ranks"
    assert "\n".join(found.choices) in found.table()


def test_the_same_is_chosen_again() -> None:
    """The search depends on nothing but its arguments."""
    first, second = fitted(PLENTY), fit(program(), setup(), memory=PLENTY, profile="h100")
    assert first.choices == second.choices
    assert first.table() == second.table()


def test_little_memory_recomputes_activations_of_as_few_blocks_as_fit() -> None:
    """The first blocks are recomputed, whose activations wait longest."""
    chosen = setup(wrap=("Block",), param_dtype=torch.bfloat16)
    free = plan_of(large(), chosen, profile="h100")
    block = next(unit for unit in free.units if unit.facts.name == "blocks.1")
    # The budget is too small for blocks and root alone, and for the embedding and the head as units.
    search = fit(large(), chosen, memory=PLENTY, profile="h100")
    least = min(each.peak.nbytes for each in search.plans if not each.setup.checkpointing)
    found = fit(large(), chosen, memory=least - block.activation_nbytes, profile="h100")
    names = found.best.setup.checkpointing
    assert names == tuple(f"blocks.{number}" for number in range(len(names)))
    assert names
    assert {len(each.setup.checkpointing) for each in found.plans} >= {0, 4}
    assert any(line.startswith("activations recomputed: blocks.0") for line in found.choices)


def test_a_parameter_that_is_used_elsewhere_stays_in_the_root() -> None:
    """A structure with which the program cannot run is none, and a module that is not called is no unit."""
    found = fitted(PLENTY, Reaches)
    assert not {"embedding", "head"} & {unit.facts.name for unit in found.best.units}


def test_several_hosts_try_the_hybrid_strategy() -> None:
    """With copies on each host, what leaves a host is a part."""
    found = fitted(PLENTY, world_size=8, ranks_per_host=4)
    assert {each.setup.strategy for each in found.plans} == {"full", "hybrid:4"}


def test_nothing_fits() -> None:
    """The error says what the least is that was found, and that much is enough."""
    with pytest.raises(PlanError, match="takes") as caught:
        fitted(1000)
    least = int(str(caught.value).partition("takes ")[2].partition(";")[0].replace(",", ""))
    assert fitted(least).best.peak.nbytes <= least


def wrapped(world: Collectives, memory: int, **arguments: Any) -> tuple[list[str], dict[str, bool], float]:
    """Wrap by plan on a rank, train a step, and return what was chosen, the units and the loss."""
    torch.manual_seed(0)
    policy = planned(memory, "h100", batch=2, sequence=8)
    groups = arguments.pop("groups", lambda whole: whole)(world)
    module = Model(depth=arguments.pop("depth", 4))
    model = FullyShardedDataParallel(module, process_group=groups, auto_wrap_policy=policy, **arguments)
    loss = model(torch.arange(16).view(2, 8)).sum()
    loss.backward()
    units = {unit.name: unit.plan.free_after_forward for unit in units_in(model)}
    return list(policy.choices), units, float(loss)


def pairs(world: Collectives) -> Any:
    """Shards over two ranks, copies on the other two."""
    first = world.rank - world.rank % 2
    shard = replicate = None
    for start in (0, 2):
        group = world.subgroup([start, start + 1])
        shard = group if start == first else shard
    for start in (0, 1):
        group = world.subgroup([start, start + 2])
        replicate = group if start == world.rank % 2 else replicate
    return shard, replicate


def test_the_policy_wraps_alike_on_every_rank() -> None:
    """The ranks have the same units and the same choices, and the numbers are those of a model without units."""
    found = run_threads(2, wrapped, PLENTY)
    assert found[0] == found[1]
    choices, units, loss = found[0]
    assert {f"blocks.{number}" for number in range(4)} <= units.keys()
    assert not units["blocks.0"]
    assert any(line.startswith("blocks.0 ... ") and "kept after forward" in line for line in choices)
    torch.manual_seed(0)
    assert loss == float(Model()(torch.arange(16).view(2, 8)).sum())


def test_the_policy_keeps_the_groups_of_a_hybrid_strategy() -> None:
    """Kept units of a hybrid strategy are sharded over the same ranks."""
    found = run_threads(
        4, functools.partial(wrapped, groups=pairs, sharding_strategy=ShardingStrategy.HYBRID_SHARD), PLENTY
    )
    assert all(each == found[0] for each in found)
    assert found[0][0][0] == "strategy hybrid:2 on 4 ranks"
    assert False in found[0][1].values()


@each_row("ranks", [1, 2])
def test_the_policy_wraps_what_is_not_sharded(ranks: int) -> None:
    """One rank, and NO_SHARD, have nothing to gather: the blocks are units, and nothing is chosen to be kept."""
    strategy = ShardingStrategy.NO_SHARD
    choices, units, _ = run_threads(ranks, functools.partial(wrapped, sharding_strategy=strategy, depth=2), PLENTY)[0]
    assert {"blocks.0", "blocks.1"} <= units.keys()
    assert any(line.startswith("blocks.0") and line.endswith("whole on each rank") for line in choices)


def refused(world: Collectives, **arguments: Any) -> str:
    """The error of a rank."""
    memory = arguments.pop("memory", PLENTY)
    model = Model()
    if arguments.pop("ignores", False):
        arguments["ignored_modules"] = [model.head]
    with pytest.raises(PlanError) as caught:
        FullyShardedDataParallel(model, process_group=world, auto_wrap_policy=planned(memory, "h100"), **arguments)
    return str(caught.value)


def test_every_rank_raises_if_nothing_fits() -> None:
    """The ranks that did not plan say the same."""
    found = run_threads(2, functools.partial(refused, memory=1000))
    assert found[0] == found[1]
    assert "at most 1,000 bytes" in found[0]


def test_what_the_policy_does_not_know_is_refused() -> None:
    """Ignored modules would be planned as if they were not, and a plan of a plan would not end."""
    assert "without ignored or wrapped modules" in run_threads(1, functools.partial(refused, ignores=True))[0]
    with pytest.raises(PlanError, match="--fit"):
        plan(Model, world_size=2, wrap=planned(PLENTY, "h100"))
