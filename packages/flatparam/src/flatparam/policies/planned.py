"""The policy that plans: it chooses the units for the least predicted time within a budget of memory."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import attrs
from torch import Tensor, nn

from flatparam.planning.errors import PlanError
from flatparam.policies.policy import _Policy
from flatparam_comm import Topology

if TYPE_CHECKING:
    from flatparam.planning.profile import Profile
    from flatparam.planning.setup import Setup

__all__ = ["PlannedPolicy", "planned"]

_LOGGER = logging.getLogger(__name__)
_RANKS_PER_HOST = 8
_PREFETCHES = {None: "none", "BACKWARD_PRE": "pre", "BACKWARD_POST": "post"}


@final
@attrs.define(eq=False)
class PlannedPolicy(_Policy):
    """A policy that plans the model before it is wrapped; see `planned`, which makes it."""

    memory: int
    profile: str | Path | Profile
    inputs: Any
    batch: int
    sequence: int
    loss: Callable[[Any], Tensor] | None
    ranks_per_host: int | None
    settings: dict[str, Any]
    choices: tuple[str, ...] = attrs.field(default=(), init=False)
    """What was chosen, a line for each choice, once a model is wrapped."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: Collection[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        # The wrapper is not to import the planner, which imports the wrapper.
        from flatparam.planning.units import NamedUnits

        topology = root_kwargs.get("process_group")
        if not isinstance(topology, Topology):
            raise PlanError("planned: expected to be the auto_wrap_policy of flatparam's wrapper")
        if ignored_modules or root_kwargs["ignored_states"]:
            raise PlanError(
                "planned: expected a model of which nothing is ignored and nothing is wrapped yet; wrap it by a "
                "policy that names its units, or plan it by flatparam plan --fit"
            )
        found: Any = None
        if topology.shard.rank == 0 and (topology.replicate is None or topology.replicate.rank == 0):
            found = self._answer(root_module, topology, root_kwargs)
        # One rank plans, so that the ranks cannot differ; ranks that are threads could not plan at once.
        found = topology.exchange(found, label="planned")[0]
        if isinstance(found, str):
            raise PlanError(found)
        frees, prefetch, self.choices = found
        if topology.shard.rank == 0:
            _LOGGER.info("%s", "\n".join(self.choices))
        return NamedUnits(frees, prefetch)._run_policy(root_module, ignored_modules, root_kwargs)

    def _answer(self, model: nn.Module, topology: Topology, kwargs: dict[str, Any]) -> Any:
        """The units, the prefetch depth and the choices; or why there are none, which every rank is to say."""
        from flatparam.planning.fitting import fit
        from flatparam.planning.program import TrainingProgram

        try:
            program = TrainingProgram.of(
                functools.partial(_hollow_copy, model),
                self.inputs,
                batch=self.batch,
                sequence=self.sequence,
                loss=self.loss,
            )
            program = attrs.evolve(program, template=model, copies=_hollow_copy)
            setup = self._setup(topology, kwargs)
            fitted = fit(program, setup, memory=self.memory, profile=self.profile, only_units=True)
        except Exception as error:
            # Whatever it is, the other ranks wait for an answer.
            return str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
        frees = {unit.facts.name: unit.facts.frees_after_forward for unit in fitted.best.units[1:]}
        return frees, fitted.best.setup.wrap.forward_prefetch, fitted.choices

    def _setup(self, topology: Topology, kwargs: dict[str, Any]) -> Setup:
        from flatparam.planning.profile import profile_named
        from flatparam.planning.setup import STRATEGIES, Setup
        from flatparam.resolving.environment import Environment

        strategy = next(name for name, each in STRATEGIES.items() if each is kwargs["sharding_strategy"])
        mixed, offload, backward = (
            kwargs[name] for name in ("mixed_precision", "cpu_offload", "backward_prefetch")
        )
        dtypes = ("param_dtype", "reduce_dtype", "buffer_dtype")
        settings: dict[str, Any] = {name: getattr(mixed, name, None) for name in dtypes}
        return Setup(
            world_size=topology.data_parallel_size,
            ranks_per_host=self.ranks_per_host or Environment.read().nodes_of or _RANKS_PER_HOST,
            strategy=f"{strategy}:{topology.shard.size}" if strategy.startswith("hybrid") else strategy,
            cpu_offload=bool(getattr(offload, "offload_params", False)),
            use_orig_params=bool(kwargs["use_orig_params"]),
            forward_prefetch=int(kwargs["forward_prefetch"]),
            backward_prefetch=_PREFETCHES[getattr(backward, "name", None)],
            device=profile_named(self.profile).device,
            **settings,
            **self.settings,
        )


def planned(
    memory: int,
    profile: str | Path | Profile,
    *,
    inputs: Any = None,
    batch: int = 1,
    sequence: int = 128,
    loss: Callable[[Any], Tensor] | None = None,
    ranks_per_host: int | None = None,
    optimizer: Any = "adamw",
    accumulate: int = 1,
    max_norm: float | None = None,
    transport: str = "direct",
) -> PlannedPolicy:
    """An `auto_wrap_policy` that chooses for the least predicted time within a budget of memory.

    It chooses the modules that become units, whether each frees its parameters after the forward pass, and how many
    units are gathered ahead. The ranks, the precision and the strategy are those of the wrapper; the strategy says over
    which ranks parameters are sharded, and what is freed is chosen. While the model is wrapped, the first rank runs
    a few steps on tensors without memory, as `flatparam.plan` does, and tells the others what it has found. The
    choice is never predicted to be slower than each block with FULL_SHARD, if that fits. `choices` of the policy
    then says what was chosen, and so does the log, at the level INFO.

    Args:
        memory: the most bytes that a rank may have in use at once, in a step.
        profile: a hardware profile, or the name of one, or a TOML file.
        inputs: what the model is called with, or a function of `(batch, sequence)` that makes it; by default token ids,
            and labels if the model takes any.
        batch: the rows of a micro-batch on a rank.
        sequence: the tokens of a row.
        loss: makes a scalar of what the model returns; by default its loss, or the sum of its first tensor.
        ranks_per_host: how many ranks share a host; by default what torchrun says, or 8.
        optimizer: the optimizer that will step, by name ("adamw", "sgd", ...) or as a function of parameters.
        accumulate: the micro-batches of a step.
        max_norm: the norm that gradients will be clipped to.
        transport: how bytes travel, as far as memory shows it: "direct", "gloo" or "shared_memory".

    Raises:
        PlanError: when a model is wrapped, on every rank, if nothing fits, with the least that it takes; or if the
            model cannot be planned.
    """
    settings = {
        "optimizer": optimizer,
        "accumulate": accumulate,
        "max_norm": max_norm,
        "transport": transport,
    }
    return PlannedPolicy(memory, profile, inputs, batch, sequence, loss, ranks_per_host, settings)


def _hollow_copy(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of `model` without a byte on an accelerator: what is there is on the meta device in the copy."""
    memo = {} if memo is None else memo
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            there: Tensor = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if is_parameter else there
    return copy.deepcopy(model, memo)
