"""The ranks that a wrapper's parameters are sharded over."""

from __future__ import annotations

from typing import Any

from flatparam_comm import Collectives, RanksOnly, engine_of, process_group_of
from flatparam_core import FlatParamError
from flatparam_runtime import Unit

__all__ = ["process_group", "ranks_of", "refuse_torchs_functions"]


def ranks_of(unit: Unit) -> Collectives:
    """The ranks that the parameters are sharded over, or, if they are not sharded, those that hold copies of them."""
    return unit.plan.topology.group


def process_group(unit: Unit) -> Any:
    """The same as torch's process group, or as what stands for it."""
    engine = engine_of(ranks_of(unit))
    return engine.group if isinstance(engine, RanksOnly) else process_group_of(engine) or engine


def refuse_torchs_functions(unit: Unit) -> None:
    """Refuse torch's functions for distributed state, which would save this rank's parts only.

    Raises:
        FlatParamError: on every rank, naming the functions to call.
    """
    raise FlatParamError(
        f"rank {ranks_of(unit).rank}: torch.distributed.checkpoint.state_dict does not know flatparam's units, and "
        "would take this rank's parts for the whole: call the function of this name of flatparam.checkpoint.state_dict "
        "(get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict, "
        "set_optimizer_state_dict, set_state_dict), with the same arguments"
    )
