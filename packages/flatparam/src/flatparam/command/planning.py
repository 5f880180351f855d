"""`flatparam plan`: from its arguments to plans, and their tables."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatparam.command.opening import ArgumentsError
from flatparam.observing.table import columns, shown_nbytes, shown_seconds
from flatparam.planning.costs import measure
from flatparam.planning.errors import PlanError
from flatparam.planning.plan import Plan, plan_of
from flatparam.planning.profile import profile_named
from flatparam.planning.program import TrainingProgram
from flatparam.planning.setup import Setup

__all__ = ["run"]


def run(chosen: argparse.Namespace) -> int:
    """Plan what the arguments say; returns 1 if `--check` has found a difference."""
    try:
        program = _program(chosen)
        setups = _setups(chosen)
        if chosen.fit is not None:
            return _fit(chosen, program, setups)
        plans = [plan_of(program, setup, steps=chosen.steps, profile=chosen.profile) for setup in setups]
    except PlanError as error:
        raise ArgumentsError(str(error)) from error
    if chosen.json:
        facts = [plan.facts() for plan in plans]
        _write(json.dumps(facts[0] if len(facts) == 1 else facts, indent=1))
    elif len(plans) == 1:
        _write(plans[0].table())
    else:
        _write("\n".join(_side_by_side(plans)))
    _draw(chosen, plans[0])
    return _check(chosen, program, plans[0]) if chosen.check else 0


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _program(chosen: argparse.Namespace) -> TrainingProgram:
    sys.path.insert(0, os.getcwd())
    build = functools.partial(_on(chosen.on_cpu), _maker(chosen.model, dict(chosen.arg)))
    inputs = None if chosen.inputs is None else _function(chosen.inputs)
    return TrainingProgram.of(build, inputs, batch=chosen.batch, sequence=chosen.sequence)


def _on(cpu: bool) -> Callable[[Callable[[], nn.Module]], nn.Module]:
    def make(function: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("cpu" if cpu else "meta"):
            return function()

    return make


def _maker(model: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """The function that makes the model."""
    if model.endswith(".json"):
        read = json.loads(Path(model).read_text(encoding="utf-8"))
        return _of_transformers(read.get("model_type", ""), {**read, **arguments}, is_class=False)
    if ":" in model:
        return functools.partial(_function(model), **arguments)
    return _of_transformers(model, arguments, is_class=True)


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ArgumentsError(
            f"expected MODULE:FUNCTION that can be imported, found {name!r}: {error}"
        ) from error
    return found


def _of_transformers(name: str, arguments: dict[str, Any], *, is_class: bool) -> Callable[[], nn.Module]:
    """The function that makes a causal language model, or else any model, of a configuration of transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise ArgumentsError(
            f"expected transformers to be installed, to make a model of {name!r}; install it, or give "
            "MODULE:FUNCTION, a function that makes the model"
        )
    transformers = importlib.import_module("transformers")
    if is_class:
        if not hasattr(transformers, name):
            raise ArgumentsError(
                f"expected a config class of transformers such as LlamaConfig, found {name!r}"
            )
        config = getattr(transformers, name)(**arguments)
    else:
        config = transformers.AutoConfig.for_model(name, **arguments)

    def make() -> nn.Module:
        try:
            made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            made = transformers.AutoModel.from_config(config)
        return made

    return make


def _setups(chosen: argparse.Namespace) -> list[Setup]:
    strategies = chosen.compare.split(",") if chosen.compare else [chosen.strategy]
    if len(strategies) > 1 and len(chosen.world) > 1:
        raise ArgumentsError("give either several world sizes or several strategies to compare")
    device = chosen.device or ("cpu" if chosen.profile is None else profile_named(chosen.profile).device)
    wrap: Any = tuple(chosen.wrap) if chosen.wrap else chosen.wrap_numel
    return [
        Setup(
            world_size=world,
            ranks_per_host=chosen.ranks_per_host,
            rank=chosen.rank,
            strategy=strategy,
            wrap=wrap,
            param_dtype=_dtype(chosen.dtype),
            reduce_dtype=_dtype(chosen.reduce_dtype),
            optimizer=chosen.optimizer,
            cpu_offload=chosen.offload,
            checkpointing=tuple(chosen.checkpointing),
            use_orig_params=chosen.use_orig_params,
            accumulate=chosen.accumulate,
            max_norm=chosen.clip,
            forward_prefetch=chosen.forward_prefetch,
            backward_prefetch=chosen.backward_prefetch,
            transport=chosen.transport,
            device=device,
        )
        for world in chosen.world
        for strategy in strategies
    ]


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _side_by_side(plans: list[Plan]) -> list[str]:
    """A line for each number, a column for each plan."""
    several_worlds = len({plan.setup.world_size for plan in plans}) > 1
    heads = [f"{plan.setup.world_size} ranks" if several_worlds else plan.setup.strategy for plan in plans]
    rows = [["", *heads]]

    def row(name: str, value: Callable[[Plan], str]) -> None:
        rows.append([name, *map(value, plans)])

    for what in ("parameters", "gradients", "states"):
        row(what, lambda plan, what=what: shown_nbytes(sum(getattr(plan.costs.resting, what).values())))  # type: ignore[misc]
    row("peak", lambda plan: shown_nbytes(plan.peak.nbytes))
    row("peak, bytes", lambda plan: f"{plan.peak.nbytes:,}")
    row("activations", lambda plan: shown_nbytes(plan.activation_nbytes))
    row("padding", lambda plan: shown_nbytes(sum(unit.facts.padding_nbytes for unit in plan.units)))
    row("collectives", lambda plan: str(sum(t.count for t in plan.costs.steps[-1].collectives.values())))
    row("sent by a rank", lambda plan: shown_nbytes(plan.costs.steps[-1].sent_nbytes))
    row("leaves a host", lambda plan: shown_nbytes(plan.links["to other hosts"]))
    if plans[0].prediction is not None:
        row("predicted step", lambda plan: shown_seconds(plan.prediction.seconds) if plan.prediction else "")
        row("bound by", lambda plan: plan.prediction.bound_by if plan.prediction else "")
    return columns(rows)


def _check(chosen: argparse.Namespace, program: TrainingProgram, plan: Plan) -> int:
    """Run the program for real and show where the plan is wrong."""
    real = measure(program, plan.setup, plan.setup.topology(), steps=chosen.steps)
    wrong = plan.costs.errors(real)
    for name, difference in wrong.items():
        _write(f"{name}: planned {difference:+,} too many")
    if not wrong:
        _write(f"\nchecked: it ran, and all {len(dict(real.facts()))} numbers are as planned")
    return 1 if wrong else 0


def _draw(chosen: argparse.Namespace, plan: Plan) -> None:
    for path, form in ((chosen.svg, "svg"), (chosen.trace, "json")):
        if path is not None:
            if plan.prediction is None:
                raise ArgumentsError("a picture of a step needs its time: give --profile")
            path.write_text(plan.prediction.picture(form), encoding="utf-8")


def _fit(chosen: argparse.Namespace, program: TrainingProgram, setups: list[Setup]) -> int:
    from flatparam.planning.fitting import fit

    if chosen.profile is None:
        raise ArgumentsError("--fit chooses the fastest setup: give --profile")
    fitted = fit(program, setups[0], memory=chosen.fit, profile=chosen.profile)
    _write(json.dumps(fitted.facts(), indent=1) if chosen.json else fitted.table())
    return 0
