"""The choice of a policy for a model that is about to be wrapped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import attrs
from torch import Tensor, nn

from flatparam.resolving.arguments import Environment
from flatparam_comm import Topology
from flatparam_plan.fitting.fastest import fit
from flatparam_plan.hardware.profile import AnyProfile, device_of
from flatparam_plan.hollow.blank import hollow_copy
from flatparam_plan.training import STRATEGIES, PlanError, Setup, TrainingProgram

_RANKS_PER_HOST = 8
_PREFETCHES = {None: "none", "BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}


class Asked(Protocol):
    """The arguments of `flatparam.wrap.planned`."""

    memory: int
    profile: AnyProfile
    inputs: Any
    batch: int
    sequence: int
    loss: Callable[[Any], Tensor] | None
    ranks_per_host: int | None
    settings: dict[str, Any]


def answer(asked: Asked, model: nn.Module, topology: Topology, kwargs: dict[str, Any]) -> Any:
    """Return the units, the prefetch depth and the choices; or why there are none, which every rank is to say."""
    try:
        program = TrainingProgram.of(
            functools.partial(hollow_copy, model),
            asked.inputs,
            batch=asked.batch,
            sequence=asked.sequence,
            loss=asked.loss,
        )
        program = attrs.evolve(program, template=model, copies=hollow_copy)
        setup = _setup(asked, topology, kwargs)
        fitted = fit(program, setup, memory=asked.memory, profile=asked.profile, only_units=True)
    except Exception as error:
        # Whatever it is, the other ranks wait for an answer.
        return str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    frees = {unit.facts.name: unit.facts.frees_after_forward for unit in fitted.best.units[1:]}
    return frees, fitted.best.setup.wrap.forward_prefetch, fitted.choices


def _setup(asked: Asked, topology: Topology, kwargs: dict[str, Any]) -> Setup:
    strategy = next(name for name, each in STRATEGIES.items() if each is kwargs["sharding_strategy"])
    mixed, offload, backward = (
        kwargs[name] for name in ("mixed_precision", "cpu_offload", "backward_prefetch")
    )
    dtypes = ("param_dtype", "reduce_dtype", "buffer_dtype")
    settings: dict[str, Any] = {name: getattr(mixed, name, None) for name in dtypes}
    return Setup(
        world_size=topology.data_parallel_size,
        ranks_per_host=asked.ranks_per_host or Environment.read().nodes_of or _RANKS_PER_HOST,
        strategy=f"{strategy}:{topology.shard.size}" if strategy.startswith("hybrid") else strategy,
        cpu_offload=bool(getattr(offload, "offload_params", False)),
        use_orig_params=bool(kwargs["use_orig_params"]),
        forward_prefetch=int(kwargs["forward_prefetch"]),
        backward_prefetch=_PREFETCHES[getattr(backward, "name", None)],
        device=device_of(asked.profile),
        **settings,
        **asked.settings,
    )
