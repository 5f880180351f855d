"""`flatparam.plan` and `flatparam plan`: what they say, and what they refuse."""

import functools
import importlib.machinery
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import Plan, PlanError, plan
from flatparam.command import main
from flatparam_plan.costs import measure
from flatparam_plan.fitting.fastest import fit, with_little_to_collect
from flatparam_plan.hardware.profile import profile_named
from flatparam_plan.planner import plan_of
from flatparam_plan.training import Setup, TrainingProgram

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """A unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * 0.5)


class Model(nn.Module):
    """Tokens to scores."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def planned(**settings: object) -> Plan:
    """A plan of the model."""
    return plan(Model, **{"batch": 2, "sequence": 8, "world_size": 4, "wrap": ("Block",), **settings})


@each_row("on", ["cpu", "meta"])
def test_a_module_is_planned_and_stays_as_it_is(on: str) -> None:
    """A given module is copied, whatever device it is on."""
    with torch.device(on):
        model = Model()
    before = {name: (id(p), p.device) for name, p in model.named_parameters()}
    found = plan(model, batch=2, sequence=8, world_size=4, wrap=("Block",))
    assert before == {name: (id(p), p.device) for name, p in model.named_parameters()}
    assert found.numel == sum(p.numel() for p in model.parameters())
    assert found.costs.resting == planned().costs.resting


def test_a_plan_is_what_happens() -> None:
    """The numbers that autograd keeps with a product are counted, too."""
    setup = Setup(world_size=4, wrap=("Block",), max_norm=1.0, accumulate=2)
    program = TrainingProgram.of(Model, batch=2, sequence=8)
    found = plan(Model, batch=2, sequence=8, world_size=4, wrap=("Block",), max_norm=1.0, accumulate=2)
    assert found.costs.errors(measure(program, setup, setup.topology())) == {}


@pytest.mark.parametrize("checkpointing", [(), ("Block",)], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda scores: (scores * 0.5).mean(),
        lambda scores: (scores.tanh() / 2.0).tanh().sum(),
        lambda scores: scores.sigmoid().add(1.0).mul_(2.0).tanh().sum(),
    ],
    ids=["mean of a product", "quotient", "in place"],
)
def test_numbers_of_products(loss: Callable[[Tensor], Tensor], checkpointing: tuple[str, ...]) -> None:
    """Autograd keeps the number of a product, inside a checkpoint too, and the backward pass does not make it again."""
    setup = Setup(world_size=2, wrap=("Block",), checkpointing=checkpointing, optimizer="none")
    program = TrainingProgram.of(Model, batch=2, sequence=8, loss=loss)
    assert plan_of(program, setup).costs.errors(measure(program, setup, setup.topology())) == {}


class Failing(Model):
    """Raises in one of its passes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, tokens: Tensor) -> Tensor:
        if self.where == "forward":
            raise KeyError("no such head")
        found = super().forward(tokens)
        return found.detach() if self.where == "backward" else found.view(3, -1)


@each_row(
    ("where", "told"),
    [
        ("forward", "its forward pass raises KeyError: 'no such head' (line "),
        ("backward", "its backward pass raises RuntimeError: element 0 of tensors does not require grad"),
        ("shape", "its forward pass raises RuntimeError: shape '[3, -1]' is invalid"),
    ],
)
def test_a_program_that_fails(where: str, told: str) -> None:
    """Its error says in which pass, and the line of the user's file; the exception itself is the cause."""
    with pytest.raises(PlanError) as caught:
        plan(functools.partial(Failing, where), batch=2, sequence=8, world_size=2)
    assert told in str(caught.value)
    assert caught.value.__cause__ is not None
    if where != "backward":
        assert f"of {__file__}, in forward); plan it with inputs that fit" in str(caught.value)


def test_the_units_of_a_plan() -> None:
    """What units hold, gather and send; the last one is kept between the passes."""
    units = {unit.facts.name: unit for unit in planned().units}
    assert list(units) == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert [unit.gathers for unit in units.values()] == [1, 2, 2, 1]
    assert all(unit.reductions == 1 for unit in units.values())
    block = units["blocks.0"]
    assert block.facts.full_nbytes == (32 * 32 + 32) * 4 == 4 * block.facts.shard_nbytes
    assert block.sent_nbytes == 3 * block.facts.full_nbytes * 3 // 4


@each_row("strategy", ["full", "grad_op", "no_shard"])
def test_the_work_of_a_unit_has_its_backward(strategy: str) -> None:
    """A block computes three times as much forward and backward as forward alone, whether it is gathered anew or stays."""
    found = planned(strategy=strategy)
    units = {unit.facts.name: unit.flops for unit in found.units}
    assert {units[f"blocks.{number}"] for number in range(3)} == {3 * 2 * 16 * 32 * 32}
    assert sum(units.values()) <= found.flops


class Twice(Model):
    """Has blocks of two classes with one name."""

    def __init__(self) -> None:
        super().__init__()

        class Other(Block):
            pass

        Other.__name__ = "Block"
        self.blocks = nn.Sequential(Block(32), Other(32))


def test_classes_of_one_name_are_both_meant() -> None:
    """`wrap=("Block",)` wraps the modules of every class that is called so."""
    found = plan(Twice, batch=2, sequence=8, world_size=2, wrap=("Block",))
    assert [unit.facts.name for unit in found.units] == ["(root)", "blocks.0", "blocks.1"]


class Encoded(nn.Module):
    """As a model of transformers with an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids) * self.embedding(decoder_input_ids)


class Seeing(nn.Module):
    """As a model of transformers for pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(image_size=6, num_channels=2)
        self.patches = nn.Conv2d(2, 4, 3, stride=3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.patches(pixel_values)


@each_row("kind", [Encoded, Seeing])
def test_inputs_that_a_model_asks_for(kind: type[nn.Module]) -> None:
    """Token ids for a decoder, too, and pixels as the configuration says: the plan is what happens."""
    setup = Setup(world_size=2)
    program = TrainingProgram.of(kind, batch=2, sequence=8)
    assert plan_of(program, setup).costs.errors(measure(program, setup, setup.topology())) == {}


def test_links_of_two_hosts() -> None:
    """In a ring one of a host's ranks sends to another host."""
    found = planned(ranks_per_host=2)
    sent = found.costs.steps[-1].sent_nbytes
    assert sum(found.links.values()) == 2 * sent
    assert abs(found.links["to other hosts"] - sent) <= 1
    assert planned(ranks_per_host=4).links["to other hosts"] == 0


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_padding_of_an_accelerator(precision: torch.dtype | None, use_orig_params: bool) -> None:
    """On an accelerator parameters and shards begin at multiples of 16 bytes where they are computed, and plans say so."""
    found = plan(
        functools.partial(Model, 30),
        batch=2,
        sequence=8,
        world_size=4,
        wrap=("Block",),
        device="accelerator",
        use_orig_params=use_orig_params,
        param_dtype=precision,
    )
    step = 4 if precision is None else 8
    block = found.units[1].facts
    # A matrix and a bias, of which each begins at a multiple of the step, and so does each of four shards.
    numel = -(-(-(-30 * 30 // step) * step + 30) // (4 * step)) * 4 * step
    assert block.full_nbytes == numel * 16 // step
    assert block.padding_nbytes == (numel - 930) * 16 // step
    assert block.shard_nbytes == numel


def test_an_accelerators_schedule_gathers_ahead() -> None:
    """An accelerator takes memory for units that are gathered ahead."""
    assert planned(device="accelerator").numel == planned().numel
    assert (
        planned(device="accelerator").costs.steps[-1].collectives.keys() == planned().costs.steps[-1].collectives.keys()
    )


def test_a_profile_predicts_the_time() -> None:
    """The parts of a step add up, and the picture has every unit."""
    found = planned(profile="h100", device="accelerator").prediction
    assert found is not None
    assert found.seconds >= found.computing > 0
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=0.2)
    assert "blocks.1" in found.picture("svg")
    assert json.loads(found.picture("json"))["traceEvents"]


def test_profiles_ship_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    """The four profiles are read; a file without a number says so."""
    for name in ("h100", "h200", "a100", "mi300x"):
        assert profile_named(name).flops["bfloat16"] > 1e14
    with pytest.raises(PlanError, match="expected a hardware profile"):
        profile_named("h900")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text('name = "x"\n')
    with pytest.raises(PlanError, match="source"):
        profile_named(wrong)


def test_fit_chooses_the_fastest_that_fits() -> None:
    """The choice is within the budget, and no other that fits is faster; without any that fits, it says how much."""
    program = TrainingProgram.of(Model, batch=2, sequence=8)
    setup = Setup(world_size=4, wrap=("Block",))
    everything = fit(program, setup, memory=10**9, profile="h100")
    assert everything.best.prediction.seconds == min(each.prediction.seconds for each in everything.plans)
    with pytest.raises(PlanError, match="the smallest"):
        fit(program, setup, memory=1000, profile="h100")


class Chooses(Model):
    """Looks at a value."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens))
        return self.head(x if bool(x.sum() > 0) else -x)


class Selects(Model):
    """Makes a shape of values."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens))
        return self.head(x[x.sum(-1) > 0])


@each_row("kind", [Chooses, Selects])
def test_what_depends_on_values_is_refused(kind: type[nn.Module]) -> None:
    """A plan does not guess."""
    with pytest.raises(PlanError, match="plan"):
        plan(kind, batch=2, sequence=8, world_size=2)


@each_row(
    ("settings", "match"),
    [
        ({"strategy": "half"}, "hybrid:N"),
        ({"strategy": "hybrid:3"}, "divisor"),
        ({"rank": 4}, "rank"),
        ({"wrap": ("Layer",)}, "Block"),
        ({"checkpointing": ("blocks.9",)}, "no module named 'blocks.9'"),
        ({"checkpointing": ("Model",)}, "found the whole model, Model; name its blocks"),
        ({"max_norm": float("nan")}, "max_norm: expected a number above 0"),
        ({"optimizer": "newton"}, "adamw"),
        ({"transport": "pigeon"}, "gloo"),
    ],
)
def test_wrong_setups_are_refused(settings: dict[str, object], match: str) -> None:
    """With what was expected."""
    with pytest.raises(PlanError, match=match):
        planned(**settings)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A factory with arguments, as a table, as JSON, side by side, checked and drawn."""
    source = Path(__file__).read_text(encoding="utf-8").partition("def planned")[0]
    (tmp_path / "planned_models.py").write_text(source, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    model = ["plan", "planned_models:Model", "--arg", "depth=2", "--wrap", "Block", "--sequence", "8"]
    assert main([*model, "--world", "4", "--check"]) == 0
    said = capsys.readouterr().out
    assert "on 4 ranks" in said
    assert "all " in said
    assert "as planned" in said
    assert main([*model, "--world", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setup"]["world_size"] == 2
    assert main([*model, "--world", "2..8"]) == 0
    assert "8 ranks" in capsys.readouterr().out
    assert main([*model, "--compare", "full,grad_op", "--profile", "a100"]) == 0
    assert "bound by" in capsys.readouterr().out
    assert main([*model, "--fit", "1GB", "--profile", "h100"]) == 0
    assert "chosen" in capsys.readouterr().out
    assert main([*model, "--profile", "h200", "--svg", "step.svg", "--trace", "step.json"]) == 0
    assert Path("step.svg").read_text().startswith("<svg")
    assert json.loads(Path("step.json").read_text())
    capsys.readouterr()
    assert main(["plan", "planned_models:Nothing"]) == 2
    assert "MODULE:FUNCTION" in capsys.readouterr().err


def test_many_plans_are_kept_at_once() -> None:
    """A plan gives the addresses back that it was made with; a refused one does, too."""
    plans = []
    with with_little_to_collect():
        for _ in range(40):
            plans.append(planned(steps=1))
            with pytest.raises(PlanError):
                plan(Chooses, batch=2, sequence=8, world_size=2)
    assert len({each.peak.nbytes for each in plans}) == 1


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """A stand-in for transformers that makes the model of this file; what it was asked for."""
    asked: list[tuple[str, dict[str, Any]]] = []

    class AutoConfig:
        @staticmethod
        def for_model(model_type: str, **values: Any) -> dict[str, Any]:
            if model_type != "llama":
                raise ValueError(f"Unrecognized model identifier: {model_type}")
            asked.append((model_type, values))
            return values

    class AutoModelForCausalLM:
        @staticmethod
        def from_config(config: dict[str, Any]) -> nn.Module:
            made = Model(config["hidden_size"], config["num_hidden_layers"])
            return made.to(getattr(torch, config.get("dtype", "float32")))

    made = types.ModuleType("transformers")
    made.__spec__ = importlib.machinery.ModuleSpec("transformers", None)
    vars(made).update(AutoConfig=AutoConfig, AutoModelForCausalLM=AutoModelForCausalLM)
    monkeypatch.setitem(sys.modules, "transformers", made)
    return asked


def test_a_config_json_is_planned(
    transformers: list[tuple[str, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `model_type` chooses the configuration, its other values make it, and `--arg` changes one."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2}))
    assert main(["plan", str(path), "--arg", "num_hidden_layers=4", "--wrap", "Block", "--world", "2"]) == 0
    assert transformers == [("llama", {"hidden_size": 8, "num_hidden_layers": 4})]
    assert "blocks.0 ... blocks.2 (3)" in capsys.readouterr().out
    path.write_text(json.dumps({"model_type": "lama"}))
    assert main(["plan", str(path)]) == 2
    assert "expected a model_type that transformers has, found 'lama'" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_masters_are_in_float32(
    transformers: list[tuple[str, dict[str, Any]]],
    key: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The dtype of the files that a configuration came with is not that of what is trained, unless one asks for it."""
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 8, "num_hidden_layers": 2}
    inside = {"text_config": {key: "bfloat16"}}
    for config in ({key: "bfloat16", **inside}, inside):
        path.write_text(json.dumps({"model_type": "llama", **sizes, **config}))
        command = ["plan", str(path), "--world", "2", "--dtype", "bf16", "--reduce-dtype", "fp32"]
        assert main(command) == 0
        assert transformers[-1] == ("llama", {**sizes, "text_config": {}})
        said = capsys.readouterr().out
        assert "parameters, float32" in said
        assert "states, bfloat16" not in said
        assert f"in float32, which one trains, and not in bfloat16 as in {path}" in said
    assert main([*command, "--compare", "full,grad_op"]) == 0
    assert "in float32, which one trains" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert "in float32, which one trains" in json.loads(capsys.readouterr().out)["notes"][0]
    assert main([*command, "--arg", "dtype=bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "states, bfloat16" in said
    assert "which one trains" not in said


class Caches(Model):
    """As a causal model of transformers: keeps keys and values while it trains, if its configuration says so."""

    def __init__(self, config: types.SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        self.blocks[0].config = config

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> tuple[Tensor, list[Tensor]]:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        x, cache = self.embedding(input_ids), []
        for block in self.blocks:
            x = block(x)
            if use_cache:
                cache.append(x + 1)
        return self.head(x), cache


def test_no_cache_is_planned() -> None:
    """The cache of keys and values is not trained with, unless the inputs ask for it; the configuration stays."""

    def found(use_cache: bool, inputs: Any = None, **settings: Any) -> Plan:
        config = types.SimpleNamespace(use_cache=use_cache)
        planned = plan(lambda: Caches(config), inputs, batch=2, sequence=8, wrap=("Block",), **settings)
        assert config.use_cache is use_cache
        return planned

    without, ignored = found(False), found(True)
    assert ignored.peak == without.peak
    assert without.notes == ()
    assert "without the cache of keys and values" in str(ignored)
    module = Caches(types.SimpleNamespace(use_cache=True))
    assert plan(module, batch=2, sequence=8, wrap=("Block",)).peak == without.peak
    assert module.config.use_cache
    assert module.blocks[0].config is module.config
    tokens = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    assert found(True, tokens).peak == found(False, tokens).peak
    kept = found(True, {**tokens, "use_cache": True})
    assert kept.costs.steps[-1].peaks["forward"] > without.costs.steps[-1].peaks["forward"]
    assert kept.notes == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "No such file or directory; give the path of the file"),
        (["fractions:Fraction"], "to make a torch.nn.Module, found Fraction"),
        (
            ["torch.nn:Linear", "--arg", "in_features=a", "--arg", "out_features=1"],
            "found that it raises TypeError",
        ),
        (["torch.nn:ReLU", "--svg", "step.svg"], "give --profile"),
        (["torch.nn:ReLU", "--fit", "1GB"], "give --profile"),
        (["torch.nn:ReLU", "--fit", "1GB", "--profile", "h100", "--compare", "full,grad_op"], "no --compare"),
        (["torch.nn:ReLU", "--profile", "h100", "--svg", "nowhere/step.svg"], "make the folder first"),
        (
            ["torch.nn:ReLU", "--fit", "1GB", "--profile", "h100", "--strategy", "full"],
            "leave out --strategy",
        ),
        (["torch.nn:ReLU", "--compare", "full,grad_op", "--strategy", "full"], "leave out --strategy"),
        (["torch.nn:ReLU", "--fit", "1GB", "--profile", "h100", "--check"], "--check runs one setup"),
        (["torch.nn:ReLU", "--world", "2,4", "--check"], "--check runs one setup"),
        (["torch.nn:ReLU", "--world", "2,4", "--profile", "h100", "--svg", "x.svg"], "of one plan"),
        (["torch.nn:ReLU", "--wrap", "ReLU", "--wrap-numel", "9"], "give --wrap or --wrap-numel"),
        (["torch.nn:ReLU", "--check", "--json"], "--json is one JSON object"),
        (["torch.nn:ReLU", "--check", "--profile", "h100"], "add --device cpu"),
        (["torch.nn:Bilinear", "--arg", "a=1"], "for each argument that torch.nn:Bilinear needs"),
        ([":make"], "MODULE:FUNCTION that can be imported"),
        (
            ["torch.nn:Linear", "--arg", "in_features=4", "--arg", "out_features=4"],
            "found that aten.addmm.default raises RuntimeError",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A line says what was expected, without a traceback, and the exit code is 2."""
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_profile_that_is_no_toml_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line names the file, and what is wrong in it."""
    (tmp_path / "mine.toml").write_text("name = \n")
    assert main(["plan", "torch.nn:ReLU", "--profile", str(tmp_path / "mine.toml")]) == 2
    assert "mine.toml', which is not TOML: " in capsys.readouterr().err


def test_arguments_that_cannot_be_read_are_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The line names the argument and the help, and not every option stands before it."""
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "torch.nn:ReLU", "--world", "many"])
    said = capsys.readouterr().err
    assert said.startswith("flatparam plan: error: argument --world: ")
    assert said.endswith("; see flatparam plan --help\n")
    assert said.count("\n") == 1


def test_worlds_are_given_from_the_smaller_to_the_larger(capsys: pytest.CaptureFixture[str]) -> None:
    """Another order is refused."""
    with pytest.raises(SystemExit):
        main(["plan", "torch.nn:ReLU", "--world", "8..3"])
    assert "expected the smaller number of ranks first" in capsys.readouterr().err
