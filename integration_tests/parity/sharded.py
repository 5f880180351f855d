"""The thing under test: the zoo wrapped, trained, and its shards put together again outside of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from flatparam import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from flatparam_comm import Collectives, FlatLayout, resolve_topology
from flatparam_runtime import (
    ROOT_NAME,
    BackwardOrder,
    PrefetchPlan,
    Unit,
    UnitPlan,
    notice_optimizers,
    shard_module,
    units_in,
)
from integration_tests.parity.runs import OPTIMIZERS, Named, Run
from integration_tests.parity.zoo import STEPS, Case, named


@attrs.frozen
class Setting:
    """How a model is wrapped, and by what it is trained. The strings are names of members of FSDP1's enums."""

    strategy: str = "FULL_SHARD"
    use_orig_params: bool = False
    optimizer: str = "sgd"
    forward_prefetch: bool = False
    backward_prefetch: str | None = "BACKWARD_PRE"


@attrs.frozen(eq=False)
class FlatPart:
    """What one rank holds of one flat parameter (or of its gradient): one tensor for the shard, or one per parameter."""

    names: tuple[str, ...]
    layout: FlatLayout
    shard: Tensor | None = None
    fragments: tuple[Tensor | None, ...] | None = None


@attrs.frozen(eq=False)
class RankRun:
    """What one rank saw of a run."""

    losses: list[Tensor]
    gradients: list[list[FlatPart]]
    parameters: list[list[FlatPart]]


def replace(model: nn.Module, path: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Put ``wrap(module)`` where ``model`` has the module of this path."""
    parent, _, name = path.rpartition(".")
    home = model.get_submodule(parent)
    home._modules[name] = wrap(model.get_submodule(path))


def wrap(case: Case, setting: Setting, group: Any = None) -> FullyShardedDataParallel:
    """The case's model with every unit wrapped, and wrapped itself."""
    prefetch = None if setting.backward_prefetch is None else BackwardPrefetch[setting.backward_prefetch]

    def wrapped(module: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module,
            group,
            ShardingStrategy[setting.strategy],
            use_orig_params=setting.use_orig_params,
            forward_prefetch=setting.forward_prefetch,
            backward_prefetch=prefetch,
        )

    model = case.build()
    for path in case.units:
        replace(model, path, wrapped)
    return wrapped(model)


_ORDERS = {
    None: BackwardOrder.NEVER,
    "BACKWARD_PRE": BackwardOrder.BEFORE_COMPUTE,
    "BACKWARD_POST": BackwardOrder.AFTER_COMPUTE,
}


def shard(case: Case, setting: Setting, group: Any = None) -> nn.Module:
    """The case's model with the same units, but not wrapped: by hooks alone, through the runtime."""
    notice_optimizers()
    early = setting.strategy == "FULL_SHARD"
    plan = UnitPlan(
        resolve_topology(group),
        free_after_forward=early,
        free_after_unsynced_backward=early,
        prefetch=PrefetchPlan(int(setting.forward_prefetch), _ORDERS[setting.backward_prefetch]),
        use_orig_params=setting.use_orig_params,
    )
    model = case.build()
    for path in (*case.units, ""):
        shard_module(model.get_submodule(path), plan)
    return model


def optimizer_of(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """The setting's optimizer over what ``parameters()`` lists."""
    return OPTIMIZERS[setting.optimizer](model.parameters())


def train(group: Collectives, name: str, setting: Setting, make: Callable[..., nn.Module] = wrap) -> RankRun:
    """One rank's part of a training run."""
    case = named(name)
    model = make(case, setting, group)
    optimizer = optimizer_of(model, setting)
    run = RankRun([], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = case.loss(model, step, group.rank)
        loss.backward()
        run.losses.append(loss.detach())
        run.gradients.append(held_gradients(model))
        optimizer.step()
        run.parameters.append(held_parameters(model))
    return run


def held_gradients(model: nn.Module) -> list[FlatPart]:
    """A copy of this rank's part of every gradient."""
    return _held(model, lambda parameter: parameter.grad)


def held_parameters(model: nn.Module) -> list[FlatPart]:
    """A copy of this rank's part of every parameter."""
    return _held(model, lambda parameter: parameter.detach())


def _held(model: nn.Module, read: Callable[[nn.Parameter], Tensor | None]) -> list[FlatPart]:
    """Read from what the optimizer holds, and only from that."""
    parts = []
    for unit in units_in(model):
        for handle in unit.handles:
            copies = tuple(None if (t := read(p)) is None else t.clone() for p in handle.exposure.parameters())
            names = full_names(unit, handle.layout)
            if unit.plan.use_orig_params:
                parts.append(FlatPart(names, handle.layout, fragments=copies))
            else:
                parts.append(FlatPart(names, handle.layout, shard=copies[0]))
    return parts


def full_names(unit: Unit, layout: FlatLayout) -> tuple[str, ...]:
    """The names of the parameters from the root on."""
    return layout.fqns if unit.name == ROOT_NAME else tuple(f"{unit.name}.{fqn}" for fqn in layout.fqns)


def join(runs: Sequence[RankRun]) -> Run:
    """The whole of what the ranks hold parts of."""
    return Run(
        list(zip(*(run.losses for run in runs), strict=True)),
        [join_parts(parts) for parts in zip(*(run.gradients for run in runs), strict=True)],
        [join_parts(parts) for parts in zip(*(run.parameters for run in runs), strict=True)],
    )


def join_parts(of_ranks: Sequence[list[FlatPart]]) -> Named:
    """Full tensors by name; the ranks must agree on which are None, and padding must be zero."""
    whole: dict[str, Tensor | None] = {}
    for parts in zip(*of_ranks, strict=True):
        layout = parts[0].layout
        if parts[0].fragments is None:
            whole.update(_cut([part.shard for part in parts], parts[0].names, layout))
            continue
        for index, (name, slot) in enumerate(zip(parts[0].names, layout.slots, strict=True)):
            pieces = [part.fragments[index] for part in parts if part.fragments is not None]
            flat = _concatenate(_of_owners(pieces, layout, index), name)
            whole[name] = None if flat is None else flat.as_strided(slot.spec.shape, slot.spec.stride)
    return whole


def _of_owners(pieces: Sequence[Tensor | None], layout: FlatLayout, index: int) -> list[Tensor | None]:
    """The pieces of the ranks that have elements of parameter `index`; a gradient of nothing is None elsewhere."""
    owners = layout.ranks_of(index) if layout.slots[index].span else range(len(pieces))
    return [piece for rank, piece in enumerate(pieces) if rank in owners]


def _cut(shards: Sequence[Tensor | None], names: Sequence[str], layout: FlatLayout) -> dict[str, Tensor | None]:
    flat = _concatenate(shards, names[0])
    if flat is None:
        return dict.fromkeys(names)
    for gap in layout.gaps:
        assert not flat[gap.as_slice()].any(), f"the padding of {names} is {flat[gap.as_slice()]}, not zero"
    return {
        name: flat.as_strided(slot.spec.shape, slot.spec.stride, slot.span.start)
        for name, slot in zip(names, layout.slots, strict=True)
    }


def _concatenate(pieces: Sequence[Tensor | None], name: str) -> Tensor | None:
    given = [piece for piece in pieces if piece is not None]
    assert len(given) in (0, len(pieces)), f"{name}: some ranks have a gradient, others None"
    return torch.cat(given) if given else None
