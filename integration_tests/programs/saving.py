"""The property with state: what is loaded is what was saved, under any other sharding, and training goes on from it."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from flatparam import (
    Checkpointer,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from flatparam.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from flatparam.command import main
from flatparam_comm import Collectives, RankError, run_threads
from integration_tests.parity.runs import Named, assert_same_tensors
from integration_tests.programs.checking import compare_numbers
from integration_tests.programs.recipes import Configuration, Program
from integration_tests.programs.running import Local, Sharded, Training, aliases_of, shard, thresholds_of
from integration_tests.programs.trees import Recipe
from integration_tests.state.comparing import assert_same

State: TypeAlias = dict[str, Any]

IN_MEMORY = ("full", "streamed", "broadcast")
"""Full state dicts: everywhere; only on rank 0; and the latter through the functions of `flatparam.checkpoint`."""
BROADCAST = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True, strict=False)
CONVERSIONS = {
    "torch": (["export", "--to", "torch"], ["import"]),
    "dcp": (["export", "--to", "dcp"], ["import"]),
    "reshard": (["reshard", "--world-size", "3"],),
}
"""The commands by which a checkpoint becomes another one."""
SHARDED = ("sharded", "chunked", "dtensor", "local")
PROCESSES = (*SHARDED, "distributed")
THREADED = ("checkpointer", "asynchronous", *CONVERSIONS, *IN_MEMORY)


@attrs.frozen(repr=False)
class Saving(Recipe):
    """How and when a program is saved.

    Attributes:
        way: one of `THREADED`, or of `PROCESSES`.
        after: how many steps.
        into_trained: whether what loads has made steps of its own before.
    """

    way: str = "checkpointer"
    after: int = 1
    into_trained: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether an optimizer without any state is saved as one."""
        return self.way not in ("broadcast", "distributed")


Case: TypeAlias = tuple[Program, Configuration, Configuration, Saving]


# One process


@attrs.frozen(eq=False)
class Expected:
    """What one process makes of the program: at the time of saving, and at the end.

    Attributes:
        saved: the state of the model, with buffers.
        states: the names of the parameters whose state is saved.
        loaded: by parameter name, the state that the optimizers load; where it is for a flat parameter, there is one for all
            that is in it.
        fits: whether it can be loaded: the counters of parameters that become one flat parameter are the same.
    """

    saved: Named
    states: Collection[str]
    loaded: State
    groups: list[State]
    fits: bool
    numbers: list[list[Tensor]]
    parameters: list[Named]


class NothingToSaveError(Exception):
    """An optimizer has no state yet, and the functions of `flatparam.checkpoint` would make one."""


def expect(program: Program, before: Configuration, after: Configuration, saving: Saving) -> Expected:
    """Train the unsharded model, first with the one number of ranks, then with the other."""
    local = Local.of(program, before)
    training = Training.begin(program, local)
    training.run(program.steps[: saving.after])
    if not saving.is_exact and not all(optimizer.state for optimizer in training.optimizers):
        raise NothingToSaveError
    saved = local.state()
    groups = _groups(group for optimizer in training.optimizers for group in optimizer.param_groups)
    states = set(_states(local, training.optimizers))
    for parameter in local.weights.parameters():
        parameter.grad = None  # gradients are not saved
    local.configuration = after
    fits = _join_states(local, training.optimizers)
    loaded = _states(local, training.optimizers)
    record = training.record = attrs.evolve(
        training.record, numbers=[[] for _ in local.ranks], gradients=[], parameters=[]
    )
    if fits:
        training.run(program.steps[saving.after :])
    return Expected(saved, states, loaded, groups, fits, record.numbers, record.parameters)


def _states(local: Local, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    return {
        name: copy.deepcopy(dict(optimizer.state[parameter]))
        for name, parameter in local.weights.named_parameters()
        for optimizer in optimizers
        if optimizer.state.get(parameter)
    }


def _groups(groups: Iterable[Mapping[str, Any]]) -> list[State]:
    """The settings of the groups that hold something: a group is found by its parameters' names."""
    return [{key: value for key, value in group.items() if key != "params"} for group in groups if group["params"]]


def _join_states(local: Local, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Give all parameters of a flat one a state where one has; False where their counters are not the same."""
    for optimizer in optimizers:
        for parameters in local.joined():
            having = [p for p in parameters if optimizer.state.get(p)]
            if not having:
                continue
            counters = {key: value for key, value in optimizer.state[having[0]].items() if key == "step"}
            for p in having:
                if any(not torch.equal(optimizer.state[p][key], value) for key, value in counters.items()):
                    return False
            for p in parameters:
                if not optimizer.state.get(p):
                    names = optimizer.state[having[0]]
                    zeros = {name: torch.zeros_like(p) for name in names if name not in counters}
                    optimizer.state[p] = copy.deepcopy(counters) | zeros
    return True


# Ranks


def check_saving(program: Program, before: Configuration, after: Configuration, saving: Saving) -> None:
    """Demand that what is loaded is what one process has, bit for bit, and remains so in further training."""
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = expect(program, before, after, saving)
        path = Path(directory)
        with thresholds_of(before):
            given = run_threads(before.ranks, save, program, before, saving, path / "run")
            there = convert(saving, path)
        try:
            with thresholds_of(after):
                found = run_threads(after.ranks, load, program, after, saving, there, given[0])
        except RankError as error:
            if expected.fits or "flat parameter" not in str(error):
                raise
            return
    assert expected.fits, "counters that differ were loaded into one flat parameter"
    compare(found, expected, aliases_of(program))


@attrs.frozen(eq=False)
class Found:
    """What one rank has after loading, and at the end."""

    model: State
    optimizer: State
    numbers: list[Tensor]
    parameters: list[Named]


def compare(found: Sequence[Found], expected: Expected, aliases: Mapping[str, str]) -> None:
    """Compare what each rank has."""
    for rank, mine in enumerate(found):
        assert_same_tensors(mine.model, expected.saved, f"rank {rank}, loaded:")
        states = {aliases[name]: value for name, value in mine.optimizer["state"].items()}
        assert len(states) == len(mine.optimizer["state"])
        # A sharded state of an optimizer that has not stepped is what its first step starts from.
        states = {name: value for name, value in states.items() if name in expected.loaded or not _is_zero(value)}
        assert_same(states, expected.loaded, f"rank {rank}, loaded states:")
        assert_same(_groups(mine.optimizer["param_groups"]), expected.groups, "groups")
        compare_numbers(mine.numbers, expected.numbers[rank], rank)
        for step, (ours, theirs) in enumerate(zip(mine.parameters, expected.parameters, strict=True)):
            ours = {name: tensor for name, tensor in ours.items() if name in theirs}
            assert_same_tensors(ours, theirs, f"rank {rank}, {step} steps later:")


def _is_zero(values: Mapping[str, Any]) -> bool:
    return not any(torch.as_tensor(value).count_nonzero() for value in values.values() if value is not None)


@attrs.define(eq=False)
class Whole(Sharded):
    """Shows whole parameters."""

    def note(self, what: str) -> Any:
        return whole_model(self.model) if what == "parameters" else None


def whole_model(model: nn.Module) -> State:
    """Every rank has everything."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def whole_optimizer(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> State:
    """The state of all optimizers in one."""
    state: State = {"state": {}, "param_groups": []}
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        for optimizer in optimizers:
            found = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            state["state"] |= found["state"]
            state["param_groups"] += found["param_groups"]
    return state


def save(world: Collectives, program: Program, configuration: Configuration, saving: Saving, path: Path) -> Any:
    """Train, save, and go on where that disturbs no reference."""
    model = shard(program, configuration, world)
    training = Training.begin(program, Whole(model, [world.rank], configuration))
    training.run(program.steps[: saving.after])
    if saving.way in IN_MEMORY:
        if saving.way == "broadcast":
            return get_state_dict(model, training.optimizers, options=BROADCAST)
        with _streaming(saving, model):
            optim_state_dict = FullyShardedDataParallel.optim_state_dict
            return model.state_dict(), [optim_state_dict(model, each) for each in training.optimizers]
    is_asynchronous = saving.way == "asynchronous"
    with Checkpointer(
        path, model, _by_name(training.optimizers), ranks=world, asynchronous=is_asynchronous
    ) as checkpointer:
        checkpointer.save(saving.after)
        if is_asynchronous:
            training.run(program.steps[saving.after :])
    return None


def _by_name(optimizers: Sequence[torch.optim.Optimizer]) -> Any:
    return optimizers[0] if len(optimizers) == 1 else dict(zip(("adamw", "sgd"), optimizers, strict=True))


def _streaming(saving: Saving, model: nn.Module) -> Any:
    kind = StateDictType.FULL_STATE_DICT
    if saving.way == "full":
        return FullyShardedDataParallel.state_dict_type(model, kind)
    configs = FullStateDictConfig(True, True), FullOptimStateDictConfig(True, True)
    return FullyShardedDataParallel.state_dict_type(model, kind, *configs)


def convert(saving: Saving, path: Path) -> Path:
    """Do the conversions; returns the directory of the checkpoint to load."""
    source = path / "run"
    for number, (command, *options) in enumerate(CONVERSIONS.get(saving.way, ())):
        target = path / f"{number}"
        step = ["--step", str(saving.after)] if command == "import" else []
        told = io.StringIO()
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            code = main(["ckpt", command, str(source), str(target), *options, *step])
        assert code == 0, told.getvalue()
        source = target
    return source


def load(
    world: Collectives, program: Program, configuration: Configuration, saving: Saving, path: Path, given: Any
) -> Found:
    """Load into a different model, and train it."""
    model, training = beginning(world, program, configuration, saving)
    if saving.way == "broadcast":
        state, states = given if world.rank == 0 else ({}, {})
        set_state_dict(model, training.optimizers, model_state_dict=state, optim_state_dict=states, options=BROADCAST)
    elif saving.way in IN_MEMORY:
        state, states = given if saving.way == "full" or world.rank == 0 else ({}, [{} for _ in given[1]])
        to_load = FullyShardedDataParallel.optim_state_dict_to_load
        with _streaming(saving, model):
            model.load_state_dict(state)
            for optimizer, each in zip(training.optimizers, states, strict=True):
                optimizer.load_state_dict(to_load(model, optimizer, each))
    else:
        with Checkpointer(path, model, _by_name(training.optimizers), ranks=world) as checkpointer:
            loaded = checkpointer.load()
        assert loaded is not None
        assert loaded.step == saving.after
    return going_on(training, saving)


def beginning(
    world: Collectives, program: Program, configuration: Configuration, saving: Saving
) -> tuple[Any, Training]:
    """A model and optimizers of which every number is another one."""
    model = shard(program, configuration, world, spoil)
    training = Training.begin(program, Whole(model, [world.rank], configuration))
    if saving.into_trained:
        training.run(program.steps)
        for optimizer in training.optimizers:
            optimizer.zero_grad()  # a zero gradient is not the same as none
    for group in (group for optimizer in training.optimizers for group in optimizer.param_groups):
        group["lr"] += 1
    return model, training


def spoil(model: nn.Module) -> None:
    """Change all that a state dict has."""
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in model.state_dict().values()}.values():
            tensor += 1


def going_on(training: Training, saving: Saving) -> Found:
    """What there is after the loading, and the rest of the program."""
    side = training.side
    model, optimizer = whole_model(side.model), whole_optimizer(side.model, training.optimizers)
    again = attrs.evolve(
        training,
        record=attrs.evolve(training.record, numbers=[[]], gradients=[], parameters=[], looks=[]),
        moment=sum(_passes(training.program.steps[: saving.after])),
    )
    record = again.run(training.program.steps[saving.after :])
    return Found(model, optimizer, record.numbers[0], record.parameters)


def _passes(steps: Sequence[Any]) -> Iterator[int]:
    """How many forward passes each operation makes."""
    for step in steps:
        for operation in step.operations:
            yield operation.passes
