"""Refusals: what knows no wrapper would take a rank's parts for the whole, and the error names what to call."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Final, NoReturn, final

import attrs
from torch import nn

from flatparam.wrapper.interior import ranks_of
from flatparam_core import FlatParamError
from flatparam_runtime import Phase, Unit, holder_of_parameter, unit_of

_asks_names: contextvars.ContextVar[bool] = contextvars.ContextVar("_asks_names", default=False)

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
    rank = ranks_of(unit_behind(module)).rank
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
    rank = ranks_of(unit_behind(module)).rank
    raise FlatParamError(
        f"rank {rank}: torch's FSDP1 or fully_shard was given a model that flatparam shards already. "
        f"If a library did that, {_BEFORE}"
    )


def refuse_parts_in_states(unit: Unit) -> None:
    """Have the modules of `unit` refuse `state_dict()` past the model's own, while this rank shows parts.

    Programs save by it what the wrapper is around: `model.module.save_pretrained(...)`.
    """
    # The unit's module is asked first, so that it refuses before units inside gather with ranks that may not call.
    holders = {unit.module} if unit.handles else set()
    if unit.plan.use_orig_params:
        holders.update(info.module for handle in unit.handles for infos in handle.param_infos for info in infos)
    for module in holders:
        module.register_state_dict_pre_hook(_refuse_parts)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def asking_names() -> Iterator[None]:
    """Inside, `state_dict()` of any module may be asked for, because of the names in it."""
    token = _asks_names.set(True)
    try:
        yield
    finally:
        _asks_names.reset(token)


# It finds the unit anew, so that a copy of a module finds its own.
def _refuse_parts(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    own = (holder_of_parameter(each) for each in module._parameters.values() if each is not None)
    unit = unit_of(module) or next(filter(None, own), None)
    if unit is None or unit.phase is Phase.INSPECTING or _asks_names.get():
        return
    if any(handle.faces is not None for handle in unit.handles):
        return
    has_all = unit.plan.use_orig_params and all(handle.is_whole for handle in unit.handles)
    if has_all or all(handle.is_unsharded for handle in unit.handles):
        return
    first = unit.handles[0].layout.fqns[0]
    raise FlatParamError(
        f"rank {unit.topology.rank}: state_dict() of {type(module).__name__}, which is inside of what was sharded as "
        f"unit {unit.name!r}, was called by itself, and would give this rank's part of {first!r}, ... as if it were "
        "the whole: call state_dict() of the sharded model on every rank and pass it on, as in "
        "model.module.save_pretrained(folder, state_dict=model.state_dict()), or enter "
        "summon_full_params(model, writeback=False) on every rank around the call"
    )


def unit_behind(module: Any) -> Unit:
    """Return the unit of a module that is sharded in place, or of a wrapper."""
    return unit_of(module) or module._unit


DDP_ASKS: Final = property(lambda module: _NoDDP(unit_behind(module)))
"""`_ddp_params_and_buffers_to_ignore`, for which `DistributedDataParallel` asks the module that it is given."""
FSDP_MARKS: Final = property(lambda _: True, _refuse_another_fsdp)
"""`_is_fsdp_managed_module`, which tells the compiler that the parameters are sharded."""
