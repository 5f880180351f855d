"""Refusals: torch's own ways to spread a model over ranks do not take a wrapper, and the error names ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NoReturn, final

import attrs

from flatparam.wrapper.ranks import ranks_of
from flatparam_core import FlatParamError
from flatparam_runtime import Unit

__all__ = ["DDP_ASKS", "FSDP_MARKS", "refuse_join", "refuse_torchs_functions"]

_BEFORE = (
    "give it the module that is not wrapped, or call flatparam.install() before anything else, so that the class which "
    "it looks for is flatparam's"
)


@final
@attrs.frozen(eq=False)
class _NoDDP:
    """The names that `DistributedDataParallel` asks a module to leave out; to list them refuses it."""

    _unit: Unit

    def __iter__(self) -> Iterator[str]:
        """Refuse.

        Raises:
            FlatParamError: on every rank, in the constructor of `DistributedDataParallel`.
        """
        raise FlatParamError(
            f"rank {ranks_of(self._unit).rank}: DistributedDataParallel was given a model that flatparam shards, and "
            "would add up gradients that are reduced already. If a library did that, such as Accelerator.prepare, "
            f"{_BEFORE}"
        )


def refuse_join(unit: Unit, **kwargs: object) -> NoReturn:
    """Refuse `torch.distributed.algorithms.Join`, which asks each model for a hook.

    Raises:
        FlatParamError: on every rank.
    """
    raise FlatParamError(
        f"rank {ranks_of(unit).rank}: Join was given a sharded model, but a rank without inputs still has to gather "
        "and reduce with the others, in a whole forward and backward pass; give all ranks equally many batches "
        "(DistributedSampler, drop_last=True), or have a rank without inputs run its last batch with a loss times zero"
    )


def refuse_torchs_functions(module: Any) -> NoReturn:
    """Refuse torch's functions for distributed state, which ask each module for this, and would save parts only.

    Raises:
        FlatParamError: on every rank, naming the functions to call.
    """
    rank = ranks_of(module._unit).rank
    raise FlatParamError(
        f"rank {rank}: torch.distributed.checkpoint.state_dict does not know flatparam's units, and would take "
        "this rank's parts for the whole: call the function of this name of flatparam.checkpoint.state_dict "
        "(get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict, "
        "set_optimizer_state_dict, set_state_dict), with the same arguments"
    )


def _refuse_another_fsdp(module: Any, value: object) -> NoReturn:
    """Refuse torch's FSDP1 or `fully_shard`, which set this on each module that they take over.

    Raises:
        FlatParamError: on every rank.
    """
    rank = ranks_of(module._unit).rank
    raise FlatParamError(
        f"rank {rank}: torch's FSDP1 or fully_shard was given a model that flatparam shards already. "
        f"If a library did that, {_BEFORE}"
    )


def _asked_by_ddp(module: Any) -> _NoDDP:
    """Refuse `DistributedDataParallel`, which asks the module that it is given for this."""
    return _NoDDP(module._unit)


def _is_managed(module: Any) -> bool:
    """Tell the compiler that the parameters are sharded."""
    return True


# For the classes of sharded modules, whose `_unit` is their unit.
DDP_ASKS: Final = property(_asked_by_ddp)
"""The attribute `_ddp_params_and_buffers_to_ignore`."""
FSDP_MARKS: Final = property(_is_managed, _refuse_another_fsdp)
"""The attribute `_is_fsdp_managed_module`."""
