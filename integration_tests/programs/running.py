"""Running a program: in one process on the unsharded model, and on each rank of a world on the sharded one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from flatparam import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from flatparam_comm import Collectives
from flatparam_core import all_thresholds, clean_fqn
from flatparam_state.optimizer.held import held_parameters as held_parameters_of
from integration_tests.parity.runs import Named, gradients_of, parameters_of
from integration_tests.parity.sharded import FlatPart, held_gradients, held_parameters, replace
from integration_tests.programs.recipes import PRECISIONS, Configuration, Micro, Program, Step
from integration_tests.programs.trees import build, inputs, loss_of, main_of, wrap_around

#: What optimizers add to a root that may be 0, as that of padding is; a float16 parameter knows no 1e-8.
EPS = 2.0**-10
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.1, eps=EPS),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.5, eps=EPS),
}
MAX_NORM = 2.5


def aliases_of(program: Program) -> dict[str, str]:
    """For every name of a parameter, the first of its names."""
    first: dict[int, str] = {}
    model = build(program.tree, program.ties)
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


class NothingToReduceError(Exception):
    """The program collects gradients in `no_sync()`, and no backward pass follows that would reduce them."""


@attrs.define(eq=False)
class Record:
    """What came of a program.

    Attributes:
        numbers: for each rank of this process, every loss, input gradient and norm, in order.
        gradients: before each step of the optimizer.
        parameters: after it.
        looks: the full parameters as the steps that look see them.
    """

    numbers: list[list[Tensor]]
    gradients: list[Any] = attrs.field(factory=list)
    parameters: list[Any] = attrs.field(factory=list)
    looks: list[Named] = attrs.field(factory=list)


def optimizers_of(program: Program, parameters: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """The program's optimizer, or both of them, over parameters with their names."""
    if program.optimizer in OPTIMIZERS:
        return [OPTIMIZERS[program.optimizer]([parameter for _, parameter in parameters])]
    groups: tuple[dict[str, Any], dict[str, Any]] = {"params": []}, {"params": []}
    for name, parameter in parameters:
        groups[program.is_apart(name, parameter.dtype)]["params"].append(parameter)
    if program.optimizer == "groups":
        groups[1].update(lr=0.25, weight_decay=0.0)
        return [OPTIMIZERS["adamw"](groups)]
    return [OPTIMIZERS["adamw"](groups[:1]), OPTIMIZERS["sgd"](groups[1:])]


class Side(Protocol):
    """What differs between the two ways to run a program."""

    ranks: Sequence[int]
    model: nn.Module
    """Whose forward is called."""

    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        """What the optimizers get, with one of its names in the unsharded model."""

    def quiet(self) -> AbstractContextManager[None]:
        """Where gradients are not synchronised."""

    def backward(self, losses: Sequence[Tensor], *, keep: bool) -> None:
        """Differentiate the losses of the ranks of this process."""

    def clip(self, order: float) -> Tensor:
        """Clip the gradients and return their norm."""

    def note(self, what: str) -> Any:
        """A copy of the "gradients" or "parameters"."""

    def look(self, how: str) -> Named:
        """The full parameters, see `Step`."""

    def stepped(self) -> None:
        """The parameters have changed."""

    def flip(self, names: Collection[str]) -> None:
        """Have these parameters frozen that were trained at the beginning, or the other way round; all others as then."""


@attrs.define(eq=False)
class Training:
    """A program in progress."""

    program: Program
    side: Side
    record: Record
    optimizers: list[torch.optim.Optimizer]
    moment: int = 0
    """How many forward passes there have been."""
    computes: bool = False
    """Whether the model did anything in this micro-batch, other than to pass its input on."""

    @classmethod
    def begin(cls, program: Program, side: Side) -> Training:
        """Before the first step."""
        return cls(program, side, Record([[] for _ in side.ranks]), optimizers_of(program, side.named()))

    def run(self, steps: Sequence[Step]) -> Record:
        """Do these steps; what came of all so far."""
        side, record = self.side, self.record
        for step in steps:
            self.step(step)
            record.gradients.append(side.note("gradients"))
            for optimizer in self.optimizers:
                optimizer.step()
            record.parameters.append(side.note("parameters"))
            with torch.no_grad():
                for parameter in self._held():
                    parameter.copy_(wrap_around(parameter * 2, 4) / 2)  # few bits again, for the next step
            for optimizer in self.optimizers:
                optimizer.zero_grad(step.set_to_none)
            side.stepped()
            if step.look:
                record.looks.append(side.look(step.look))
        return record

    def _held(self) -> Iterable[Tensor]:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return (parameter for group in groups for parameter in group["params"])

    def step(self, step: Step) -> None:
        if any(each.flipped for each in self.program.steps):
            aliases = aliases_of(self.program)
            self.side.flip({name for name, first in aliases.items() if first in step.flipped})
        collected = False
        for operation in step.operations:
            if isinstance(operation, Micro):
                if self.micro(operation):
                    collected = not operation.is_reduced
            else:
                self.evaluate(inference=operation.inference)
        if collected:
            raise NothingToReduceError
        if step.clip:
            norm = self.side.clip(step.clip)
            for numbers in self.record.numbers:
                numbers.append(norm.float())

    def micro(self, micro: Micro) -> bool:
        """Do it; returns whether there was anything to differentiate."""
        fed: list[list[Tensor]] = [[] for _ in self.side.ranks]
        self.computes = False
        with self._quiet_if(micro.quiet in ("forward", "both")):
            losses = self._forward(fed)
            for _ in range(micro.forwards - 1):
                losses = [a + b for a, b in zip(losses, self._forward(fed), strict=True)]
        if micro.evaluates:
            self.evaluate(inference=False)
        with self._quiet_if(micro.quiet in ("backward", "both")):
            if losses[0].requires_grad:
                self.side.backward(losses, keep=micro.again)
                if micro.again:
                    self.side.backward([2 * loss for loss in losses], keep=False)
        for numbers, of_rank in zip(self.record.numbers, fed, strict=True):
            numbers.extend(x.grad for x in of_rank if x.grad is not None)
        return losses[0].requires_grad and self.computes

    def evaluate(self, *, inference: bool) -> None:
        self.side.model.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            self._forward([[] for _ in self.side.ranks])
        self.side.model.train()

    def _forward(self, fed: list[list[Tensor]]) -> list[Tensor]:
        losses = []
        for rank, numbers, of_rank in zip(self.side.ranks, self.record.numbers, fed, strict=True):
            x = inputs(self.moment, rank).requires_grad_(self.program.differentiates_inputs and torch.is_grad_enabled())
            of_rank.append(x)
            output = self.side.model(x, self.moment)
            self.computes = self.computes or main_of(output) is not x
            losses.append(loss_of(output))
            numbers.append(losses[-1].detach())
        self.moment += 1
        return losses

    def _quiet_if(self, wanted: bool) -> AbstractContextManager[None]:
        return self.side.quiet() if wanted else contextlib.nullcontext()


# One process


@attrs.define(eq=False)
class Local:
    """All ranks in one graph, of the sum of their losses; the gradient is divided by their number, which is exact."""

    configuration: Configuration
    weights: nn.Module
    model: nn.Module
    """`weights` itself, or a copy of it in the dtype of computation."""
    trained: Mapping[str, bool]
    """By name, whether a parameter is trained at the beginning."""

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.configuration.ranks)

    @classmethod
    def of(cls, program: Program, configuration: Configuration) -> Local:
        """The unsharded model, before training."""
        weights = build(program.tree, program.ties)
        compute, _ = PRECISIONS[configuration.precision]
        model = weights if compute is None else copy.deepcopy(weights).to(compute)
        if compute is not None:
            model.register_forward_pre_hook(lambda _, given: (given[0].to(compute), *given[1:]))
        return cls(configuration, weights, model, {n: p.requires_grad for n, p in weights.named_parameters()})

    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.weights.named_parameters()

    def quiet(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, losses: Sequence[Tensor], *, keep: bool) -> None:
        before = [parameter.grad for parameter in self.weights.parameters()]
        self.model.zero_grad()
        torch.stack(list(losses)).sum().backward(retain_graph=keep)
        for parameter, computed, held in zip(self.weights.parameters(), self.model.parameters(), before, strict=True):
            if computed.grad is None:
                parameter.grad = held
            else:
                mean = computed.grad.to(parameter.dtype) / len(losses)
                parameter.grad = mean if held is None else held + mean

    def clip(self, order: float) -> Tensor:
        """Clip as documented: the norm is one of fp32, or of float64 if some gradient is."""
        gradients = [p.grad for p in self.weights.parameters() if p.grad is not None]
        trained = {p.dtype for p in self.weights.parameters() if p.grad is not None or p.requires_grad}
        dtype = torch.float64 if torch.float64 in trained else torch.float32
        norms = [torch.linalg.vector_norm(g.to(dtype).flatten(), order) for g in gradients if g.numel()]
        norm = torch.linalg.vector_norm(torch.stack([torch.zeros((), dtype=dtype), *norms]), order)
        factor = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))
        return norm

    def note(self, what: str) -> Named:
        if what == "parameters":
            return parameters_of(self.weights)
        self._share_zeros()
        return gradients_of(self.weights)

    def look(self, how: str) -> Named:
        return parameters_of(self.weights)

    def stepped(self) -> None:
        if self.model is not self.weights:
            with torch.no_grad():
                for computed, held in zip(self.model.parameters(), self.weights.parameters(), strict=True):
                    computed.copy_(held)

    def state(self) -> Named:
        """A copy of everything that is saved of the model."""
        for name, buffer in self.model.named_buffers():
            self.weights.get_buffer(name).copy_(buffer)
        return {name: tensor.clone() for name, tensor in self.weights.state_dict().items()}

    def joined(self) -> list[list[nn.Parameter]]:
        """The parameters that are one flat parameter for the optimizer."""
        unit_of: dict[int, str] = {}
        for unit in self.configuration.in_order:
            for parameter in self.weights.get_submodule(unit).parameters():
                unit_of.setdefault(id(parameter), unit)
        together: dict[Any, list[nn.Parameter]] = {}
        for name, p in self.weights.named_parameters():
            unit = unit_of.get(id(p))
            if unit is not None and not self.configuration.lists_originals(unit):
                together.setdefault((unit, p.dtype, self.trained[name]), []).append(p)
        return list(together.values())

    def flip(self, names: Collection[str]) -> None:
        ignored = {id(p) for name in self.configuration.ignored for p in self.weights.get_submodule(name).parameters()}
        flipped = {id(p) for name, p in self.weights.named_parameters() if name in names} - ignored
        for parameters in self.joined():
            if any(id(p) in flipped for p in parameters):
                flipped |= {id(p) for p in parameters}
        for (name, held), computed in zip(self.weights.named_parameters(), self.model.parameters(), strict=True):
            for p in (held, computed):
                p.requires_grad_(self.trained[name] != (id(held) in flipped))

    def _share_zeros(self) -> None:
        """Where `parameters()` lists a flat parameter, its gradient is there for all, or for none, of what is in it."""
        for parameters in self.joined():
            if any(p.grad is not None for p in parameters):
                for p in parameters:
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad


def run_locally(program: Program, configuration: Configuration) -> Record:
    """What one process makes of the program, with the mean of the losses of so many ranks."""
    return Training.begin(program, Local.of(program, configuration)).run(program.steps)


# Ranks


@attrs.define(eq=False)
class Sharded:
    """One rank's part; every unit's optimizer state and shards are its own."""

    model: nn.Module
    ranks: Sequence[int]
    configuration: Configuration = attrs.field(factory=Configuration)
    _trained: dict[int, bool] = attrs.field(factory=dict, init=False)
    """By identity, whether a parameter was trained at the beginning."""

    def __attrs_post_init__(self) -> None:
        self._trained.update((id(p), p.requires_grad) for p in self.model.parameters())

    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        held = held_parameters_of(self.model)
        pairs = [(held[id(parameter)].fqns[0], parameter) for parameter in self.model.parameters()]
        first = self.ranks[0] % len(pairs) if self.configuration.turned and pairs else 0
        return pairs[first:] + pairs[:first]

    def flip(self, names: Collection[str]) -> None:
        held = held_parameters_of(self.model)
        ignored = tuple(f"{name}." for name in self.configuration.ignored)
        for parameter in self.model.parameters():
            fqns = held[id(parameter)].fqns
            is_flipped = any(fqn in names for fqn in fqns) and not (ignored and fqns[0].startswith(ignored))
            parameter.requires_grad_(self._trained[id(parameter)] != is_flipped)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for root in FullyShardedDataParallel.fsdp_modules(self.model, root_only=True):
                stack.enter_context(root.no_sync())
            yield

    def backward(self, losses: Sequence[Tensor], *, keep: bool) -> None:
        losses[0].backward(retain_graph=keep)

    def clip(self, order: float) -> Tensor:
        assert isinstance(self.model, FullyShardedDataParallel)
        return self.model.clip_grad_norm_(MAX_NORM, order)

    def note(self, what: str) -> list[FlatPart]:
        return held_gradients(self.model) if what == "gradients" else held_parameters(self.model)

    def look(self, how: str) -> Named:
        if how in ("save", "reload"):
            state = self.model.state_dict()
            if how == "reload":
                self.model.load_state_dict(state)
            buffers = {clean_fqn(name) for name, _ in self.model.named_buffers(remove_duplicate=False)}
            return {name: tensor.clone() for name, tensor in state.items() if name not in buffers}
        with FullyShardedDataParallel.summon_full_params(self.model):
            return {clean_fqn(name): p.detach().clone() for name, p in self.model.named_parameters()}

    def stepped(self) -> None:
        pass


Sabotage = Callable[[FullyShardedDataParallel], None]


def run_sharded(
    group: Collectives, program: Program, configuration: Configuration, sabotage: Sabotage | None = None
) -> Record:
    """What one rank makes of the program."""
    model = shard(program, configuration, group)
    if sabotage is not None:
        sabotage(model)
    return Training.begin(program, Sharded(model, [group.rank], configuration)).run(program.steps)


def shard(
    program: Program,
    configuration: Configuration,
    world: Collectives,
    prepare: Callable[[nn.Module], None] | None = None,
) -> Any:
    """The program's model, wrapped; `prepare` is called with it before."""
    prefetch = configuration.backward_prefetch
    compute, reduce = PRECISIONS[configuration.precision]
    groups = _groups(configuration, world)

    def wrapped(module: nn.Module, unit: str) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module,
            groups,
            ShardingStrategy[configuration.strategy],
            CPUOffload(configuration.offload),
            backward_prefetch=BackwardPrefetch[prefetch] if prefetch else None,
            mixed_precision=MixedPrecision(param_dtype=compute, reduce_dtype=reduce)
            if configuration.precision
            else None,
            forward_prefetch=configuration.forward_prefetch,
            limit_all_gathers=configuration.limit_all_gathers,
            ignored_modules=ignored or None,
            use_orig_params=configuration.lists_originals(unit),
        )

    model: nn.Module = build(program.tree, program.ties)
    if prepare is not None:
        prepare(model)
    ignored = [model.get_submodule(name) for name in configuration.ignored]
    checkpointed = [model.get_submodule(name) for name in configuration.checkpointed]
    for unit in configuration.in_order:
        if unit:
            replace(model, unit, lambda module, unit=unit: wrapped(module, unit))
        else:
            model = wrapped(model, "")
    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda module: any(module is each for each in checkpointed))
    return model


@contextlib.contextmanager
def thresholds_of(configuration: Configuration, but: str = "-") -> Iterator[None]:
    """Have the configuration's thresholds set, without those of the layer `but`."""
    with contextlib.ExitStack() as stack:
        for each in all_thresholds():
            for name, value in configuration.thresholds:
                if each.name == name and not name.startswith(f"{but}."):
                    stack.enter_context(each.set_to(value))
        yield


def _groups(configuration: Configuration, world: Collectives) -> Any:
    """The world, or for the hybrid strategies this rank's pair of groups."""
    if "HYBRID" not in configuration.strategy:
        return world
    size = configuration.shard_size
    rows = [list(range(start, start + size)) for start in range(0, world.size, size)]
    return _mine(world, rows), _mine(world, [list(column) for column in zip(*rows, strict=True)])


def _mine(world: Collectives, groups: Sequence[Sequence[int]]) -> Collectives:
    made = [world.subgroup(ranks) for ranks in groups]
    return next(group for group in made if group is not None)
