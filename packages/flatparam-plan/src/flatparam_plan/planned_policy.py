"""The policy that plans: it chooses the units for the least predicted time within a budget of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar, final

import attrs
from torch import Tensor, nn

from flatparam.wrap import _Policy
from flatparam_comm import Topology
from flatparam_plan.plan_error import PlanError

if TYPE_CHECKING:
    from flatparam_plan.hardware.profile import AnyProfile

_LOGGER = logging.getLogger("flatparam.plan")


@final
@attrs.define(eq=False)
class PlannedPolicy(_Policy):
    """A policy that plans the model before it is wrapped; see `planned`, which makes it."""

    _plans: ClassVar[bool] = True
    memory: int
    profile: AnyProfile
    inputs: Any
    batch: int
    sequence: int
    loss: Callable[[Any], Tensor] | None
    ranks_per_host: int | None
    settings: dict[str, Any]
    choices: tuple[str, ...] = attrs.field(default=(), init=False)
    """The choices, a line for each, once a model is wrapped."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: Collection[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        # Who wraps without a plan has no need of the planner.
        from flatparam_plan.fitting.fastest import answer
        from flatparam_plan.named_units import NamedUnits

        topology = root_kwargs.get("process_group")
        if not isinstance(topology, Topology):
            raise PlanError("planned: expected to be the auto_wrap_policy of flatparam's wrapper")
        if ignored_modules or root_kwargs["ignored_states"]:
            raise PlanError(
                "planned: expected a model without ignored or wrapped modules, found one that has some; wrap it with "
                "a policy that names its units, or plan it with flatparam plan --fit"
            )
        found: Any = None
        if topology.is_first:
            found = answer(self, root_module, topology, root_kwargs)
        # One rank plans, so that the ranks cannot differ; ranks that are threads could not plan at once.
        found = topology.exchange(found, label="planned")[0]
        if isinstance(found, str):
            raise PlanError(found)
        frees, prefetch, self.choices = found
        if topology.shard.rank == 0:
            _LOGGER.info("%s", "\n".join(self.choices))
        return NamedUnits(frees, prefetch)._run_policy(root_module, ignored_modules, root_kwargs)


def planned(
    memory: int,
    profile: AnyProfile,
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
    """Return an `auto_wrap_policy` that chooses for the least predicted time within a budget of memory.

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
    settings = {"optimizer": optimizer, "accumulate": accumulate, "max_norm": max_norm, "transport": transport}
    return PlannedPolicy(memory, profile, inputs, batch, sequence, loss, ranks_per_host, settings)
