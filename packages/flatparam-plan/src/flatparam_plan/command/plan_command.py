"""`flatparam plan`: from the model that its arguments name to plans, and their tables, JSON and pictures."""

from __future__ import annotations

import argparse
import difflib
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import torch
from torch import nn

from flatparam_files.command import ArgumentsError, shown_nbytes
from flatparam_files.disk.progress import progress_bar
from flatparam_plan.costs import measure
from flatparam_plan.hardware.profile import device_of
from flatparam_plan.picture import columns, shown_seconds
from flatparam_plan.plan_error import PlanError
from flatparam_plan.planner import plans_of
from flatparam_plan.report import Plan
from flatparam_plan.training import Setup, TrainingProgram


def run(chosen: argparse.Namespace) -> int:
    """Plan what the arguments say; returns 1 if `--check` has found a difference."""
    _check_output(chosen)
    try:
        program = program_of(chosen)
        setups = _setups_of(chosen)
        if chosen.fit is not None:
            return _fit(chosen, program, setups)
        with progress_bar("plan", len(setups), unit=" plans") as observe:
            plans = plans_of(program, setups, steps=chosen.steps, profile=chosen.profile, observe=observe)
        if chosen.json:
            facts = [plan.facts() for plan in plans]
            _write_json(facts[0] if len(facts) == 1 else facts)
        elif len(plans) == 1:
            _write(plans[0].table())
        else:
            _write("\n".join(_side_by_side(plans)))
        _draw(chosen, plans[0])
        return 0 if not chosen.check or _is_as_planned(program, plans[0], steps=chosen.steps) else 1
    except PlanError as error:
        raise ArgumentsError(str(error)) from error


def _check_output(chosen: argparse.Namespace) -> None:
    """Refuse at once what would fail once everything is planned."""
    if chosen.profile is None and chosen.fit is not None:
        raise ArgumentsError("--fit chooses the fastest setup: give --profile")
    if chosen.fit is not None and chosen.fit < 2**20:
        raise ArgumentsError(f"--fit: expected the memory of a device, as 80GB, found {chosen.fit} bytes")
    if chosen.profile is None and (chosen.svg or chosen.trace):
        raise ArgumentsError("a picture of a step needs its time: give --profile")
    if chosen.fit is not None and (chosen.compare or len(chosen.world) > 1):
        raise ArgumentsError("--fit compares strategies itself, for one world size: give one --world, and no --compare")
    several = chosen.compare is not None or len(chosen.world) > 1
    for wrong, told in (
        (
            chosen.strategy and (chosen.compare or chosen.fit is not None),
            "--compare and --fit choose strategies: leave out --strategy",
        ),
        (chosen.wrap and chosen.wrap_numel, "units are either of classes or of a size: give --wrap or --wrap-numel"),
        (several and (chosen.svg or chosen.trace), "a picture is of one plan: give one --world, and no --compare"),
        (
            chosen.check and (several or chosen.fit is not None),
            "--check runs one setup: give one --world, and neither --compare nor --fit",
        ),
        (chosen.check and chosen.json, "--json is one JSON object, and --check writes for people: give one of them"),
    ):
        if wrong:
            raise ArgumentsError(told)
    for path in (chosen.svg, chosen.trace):
        if path is not None and not path.parent.is_dir():
            raise ArgumentsError(f"expected a file in a folder that exists, found {str(path)!r}; make the folder first")


def _fit(chosen: argparse.Namespace, program: TrainingProgram, setups: list[Setup]) -> int:
    from flatparam_plan.fitting.fastest import fit

    with progress_bar("plan", None, unit=" plans") as observe:
        fitted = fit(program, setups[0], memory=chosen.fit, profile=chosen.profile, observe=observe)
    if chosen.json:
        _write_json(fitted.facts())
    else:
        _write(fitted.table())
    _draw(chosen, fitted.best)
    return 0


# How the arguments of `flatparam plan` say that a program is to be run


def _setups_of(chosen: argparse.Namespace) -> list[Setup]:
    """One setup, or several to compare."""
    strategies = chosen.compare.split(",") if chosen.compare else [chosen.strategy or "full"]
    if len(strategies) > 1 and len(chosen.world) > 1:
        raise ArgumentsError("give either several world sizes or several strategies to compare")
    device = chosen.device or ("cpu" if chosen.profile is None else device_of(chosen.profile))
    if chosen.check and device != "cpu":
        raise ArgumentsError("--check runs on this CPU, and the plan is of an accelerator's schedule: add --device cpu")
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


# A plan beside a real run: `flatparam plan --check`


def _is_as_planned(program: TrainingProgram, plan: Plan, *, steps: int) -> bool:
    """Run the program for real, and show what the plan has wrong; returns whether nothing is."""
    real = measure(program, plan.setup, plan.setup.topology(), steps=steps)
    wrong = plan.costs.errors(real)
    for name, difference in wrong.items():
        _write(f"{name}: planned {abs(difference):,} too {'many' if difference > 0 else 'few'}")
    if not wrong:
        _write(f"\nchecked: it ran, and all {len(dict(real.facts()))} numbers are as planned")
    return not wrong


# The output of `flatparam plan`: tables, JSON and pictures


def _write(text: str) -> None:
    """Write lines to stdout."""
    sys.stdout.write(text + "\n")


def _write_json(facts: Any) -> None:
    """Write facts to stdout."""
    _write(json.dumps(facts, indent=1))


def _side_by_side(plans: list[Plan]) -> list[str]:
    """Return a line for each number, a column for each plan."""
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
    return [*columns(rows), *plans[0].notes]


def _draw(chosen: argparse.Namespace, plan: Plan) -> None:
    """Draw the predicted step to the files that the arguments name."""
    for path, form in ((chosen.svg, "svg"), (chosen.trace, "json")):
        if path is not None:
            assert plan.prediction is not None, "there is a profile"
            path.write_text(plan.prediction.picture(form), encoding="utf-8")


_NOT_AS_STORED: Final = (
    "planned with parameters and optimizer's states in float32, which one trains, and not in {dtype} as in {path}; "
    "--arg dtype={dtype} plans that"
)


_PLANNED: Final = (
    "planned for {batch} x {sequence} tokens on a rank (--batch, --sequence), computed in {dtype} (--dtype)"
)


def program_of(chosen: argparse.Namespace) -> TrainingProgram:
    """Return the program that the arguments name."""
    sys.path.insert(0, os.getcwd())
    arguments = dict(chosen.arg)
    if os.path.isfile(inside := os.path.join(chosen.model, "config.json")):
        chosen.model = inside
    build = functools.partial(_on(chosen.on_cpu), _telling(chosen.model, _maker(chosen.model, arguments)))
    inputs = None if chosen.inputs is None else _function_named(chosen.inputs)
    program = TrainingProgram.of(build, inputs, batch=chosen.batch, sequence=chosen.sequence)
    dtype = _stored_dtype(chosen.model, arguments) if chosen.model.endswith(".json") else None
    notes: tuple[str, ...] = () if dtype is None else (_NOT_AS_STORED.format(dtype=dtype, path=chosen.model),)
    notes += (
        _PLANNED.format(batch=chosen.batch, sequence=chosen.sequence, dtype=chosen.dtype or "the parameters' dtype"),
    )
    return attrs.evolve(program, keeps_cache=bool(arguments.get("use_cache")), notes=notes)


def _on(cpu: bool) -> Callable[[Callable[[], nn.Module]], nn.Module]:
    def make(function: Callable[[], nn.Module]) -> nn.Module:
        with torch.device("cpu" if cpu else "meta"):
            return function()

    return make


def _telling(model: str, function: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return the function, whose errors say which model could not be made."""

    def make() -> nn.Module:
        try:
            made = function()
        except Exception as error:
            raise ArgumentsError(
                f"expected {model} to make a model of these arguments, found that it raises {type(error).__name__}: "
                f"{error}"
            ) from error
        if not isinstance(made, nn.Module):
            raise ArgumentsError(f"expected {model} to make a torch.nn.Module, found {type(made).__name__}")
        return made

    return make


def _maker(model: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return the function that makes the model."""
    if model.endswith(".json"):
        return _model_of_config(model, arguments)
    if ":" in model:
        return _function_with(model, arguments)
    return _of_transformers(model, arguments, is_class=True)


# Models of the library transformers, made of a configuration


_DTYPES: Final = ("dtype", "torch_dtype")
"""The keys of a configuration under which the dtype of its parameters is, in files of later and earlier versions."""


def _model_of_config(path: str, arguments: dict[str, Any]) -> Callable[[], nn.Module]:
    """Return the function that makes a model of a `config.json`, with `arguments` in place of what it says.

    Parameters are float32, whatever the dtype of the files that the configuration came with, unless `arguments` have a
    `dtype`: training keeps a master copy in float32, and computes in the dtype of mixed precision.

    Raises:
        ArgumentsError: if the file is none, or transformers does not know the model.
    """
    try:
        read = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentsError(
            f"expected a config.json that can be read, found {path!r}: {error.strerror}; give the path of the file"
        ) from error
    except ValueError as error:
        raise ArgumentsError(f"expected a config.json, found {path!r}, which is not JSON: {error}") from error
    if not isinstance(read, dict) or "model_type" not in read:
        raise ArgumentsError(
            f"expected a config.json of transformers, with model_type, found {path!r} without one; give "
            "MODULE:FUNCTION, a function that makes the model"
        )
    kind = read.pop("model_type")
    return _of_transformers(kind, {**_without_dtypes(read), **arguments}, is_class=False)


def _stored_dtype(path: str, arguments: dict[str, Any]) -> str | None:
    """The dtype that a `config.json` gives parameters, if that is not float32 and `arguments` do not ask for any."""
    if any(name in arguments for name in _DTYPES):
        return None
    found = _dtypes_in(json.loads(Path(path).read_text(encoding="utf-8"))) - {"float32"}
    return min(found, default=None)


def _dtypes_in(read: Any) -> set[str]:
    if not isinstance(read, dict):
        return set()
    own = {str(read[name]) for name in _DTYPES if read.get(name)}
    return own.union(*map(_dtypes_in, read.values()))


def _without_dtypes(read: Any) -> Any:
    """Return the configuration, and those in it, without the dtype of the files that it came with."""
    if not isinstance(read, dict):
        return read
    return {name: _without_dtypes(value) for name, value in read.items() if name not in _DTYPES}


def _of_transformers(name: str, arguments: dict[str, Any], *, is_class: bool) -> Callable[[], nn.Module]:
    """Return the function that makes a causal language model, or else any model, of a configuration of transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise ArgumentsError(
            f"expected transformers to be installed, to make a model of {name!r}; install it, or give "
            "MODULE:FUNCTION, a function that makes the model"
        )
    transformers = importlib.import_module("transformers")
    if is_class:
        if not hasattr(transformers, name):
            raise ArgumentsError(f"expected a config class of transformers such as LlamaConfig, found {name!r}")
        config = getattr(transformers, name)(**arguments)
    else:
        try:
            config = transformers.AutoConfig.for_model(name, **arguments)
        except ValueError as error:
            # It lists all that there are.
            near = difflib.get_close_matches(name, re.findall(r"[\w-]+", str(error)))
            told = f"; it has {', '.join(near)}" if near else f": {str(error)[:200]}"
            raise ArgumentsError(f"expected a model_type that transformers has, found {name!r}{told}") from error

    def make() -> nn.Module:
        try:
            made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            made = transformers.AutoModel.from_config(config)
        return made

    return make


# Functions that the arguments of `flatparam plan` name as `MODULE:FUNCTION`


def _function_named(name: str) -> Callable[..., Any]:
    """Return the function of this name; its module is imported.

    Raises:
        ArgumentsError: if it cannot be.
    """
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentsError(f"expected MODULE:FUNCTION that can be imported, found {name!r}: {error}") from error
    return found


def _function_with(name: str, arguments: dict[str, Any]) -> Callable[[], Any]:
    """Return the function of this name, to be called with `arguments`.

    Raises:
        ArgumentsError: if it does not take them, or cannot be imported.
    """
    make = _function_named(name)
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise ArgumentsError(
            f"expected --arg for each argument that {name} needs, and for no others, found something else: {error}"
        ) from error
    return functools.partial(make, **arguments)
