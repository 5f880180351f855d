"""The one hook before a step of each optimizer in the process.

The step is noted, so that ranks which step otherwise are found, and a step of gradients that are not finite is left
out. An add-on may prepare it further, by the entry point `steps` of `flatparam.optimizers`: flatparam-optim refuses an
optimizer that looks at shapes on shards, and has others step neighbours in a shard as one tensor.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, final

import attrs
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import Self

from flatparam_comm import FlatParameter, FlatParamHandle, end_of_call, handle_of, module_behind, owner_of, watch_call
from flatparam_runtime.agreement.divergence import STEP
from flatparam_runtime.agreement.fingerprint import Fingerprint
from flatparam_runtime.agreement.nonfinite import NonfiniteGuard
from flatparam_runtime.autograd import in_backward, untraced
from flatparam_runtime.optimizers.leaving_out import step_instead
from flatparam_runtime.optimizers.torch_optimizers import KEEPS_OWN_PART, have_listed, keep_own_part
from flatparam_runtime.unit import WAITING, Unit, drop_waiting_of, holder_of_parameter

_LOG: Final = logging.getLogger("flatparam_runtime")
#: The types of hyper-parameters that are compared between ranks: betas are a tuple.
_PLAIN: Final = (bool, int, float, tuple)
_STEPPED: Final = "_flatparam_stepped"
"""The attribute of an optimizer that holds the trees that it steps."""
_IS_INSIDE: Final = "_flatparam_is_inside"
"""Our mark on an optimizer inside another one, which steps the same on all ranks: `ZeroRedundancyOptimizer` is one."""
_TORCHS_ZERO_GRAD: Final = optim.Optimizer.zero_grad


class StepPreparation(Protocol):
    """A module that the entry point `steps` of `flatparam.optimizers` names."""

    def prepare_step(self, optimizer: optim.Optimizer) -> None:
        """Have the optimizer step, now and later, what is best, or refuse it; it is about to step."""


@functools.cache
def _preparation() -> StepPreparation | None:
    found: StepPreparation | None = module_behind("flatparam.optimizers", "steps", "flatparam_optim")
    if found is None:
        _LOG.warning(
            "flatparam-optim is not installed: optimizers step each parameter by itself, and one that looks at shapes "
            "is not refused on shards, where it trains other numbers"
        )
    return found


@functools.cache
def notice_optimizers() -> None:
    """Have each optimizer in the process looked at when it steps, by a hook of torch; a second call does nothing.

    From then on its `zero_grad()` drops gradients that wait for a reduction (`no_sync`), too. The wrapper calls it;
    call it yourself, once, if you shard by `shard_module` alone.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    # torch has no hook for this.
    optim.Optimizer.zero_grad = _zero_grad  # type: ignore[method-assign, assignment]


@untraced
@functools.wraps(_TORCHS_ZERO_GRAD)
def _zero_grad(optimizer: optim.Optimizer, set_to_none: bool = True) -> None:
    """Drop the gradients that wait for a reduction, too: in FSDP1 those of `no_sync` are in `.grad`."""
    is_noted = not (in_backward() or torch.compiler.is_compiling())
    if is_noted:
        _note_zero_grad(optimizer)
    _TORCHS_ZERO_GRAD(optimizer, set_to_none)
    if is_noted and WAITING:
        drop_waiting_of(parameter for group in optimizer.param_groups for parameter in group["params"])


def _before_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """Look at an optimizer that is about to step; returns the arguments to step with instead, or None."""
    if torch.compiler.is_compiling():
        return None
    if _note_step(optimizer):
        # torch's own function around the step, which calls this hook and `_after_step`.
        watch_call(sys._getframe(1), f"step of {type(optimizer).__name__}")
    if KEEPS_OWN_PART not in vars(optimizer):
        keep_own_part(optimizer)
    instead = step_instead(optimizer, args, kwargs) if NonfiniteGuard.are_there else None
    preparation = _preparation()
    if preparation is not None:
        preparation.prepare_step(optimizer)
    return instead


def _after_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        end_of_call()


def _note_step(optimizer: optim.Optimizer) -> bool:
    """Add the step to the fingerprints of the trees whose parameters it changes: it has to be the same on all ranks.

    Returns whether there is such a tree.

    An optimizer that steps inside backward is left out: a rank that has no part of a parameter need not step it.
    """
    if in_backward() or _IS_INSIDE in vars(optimizer):
        return False
    inside = vars(optimizer).get("optim")
    if isinstance(inside, optim.Optimizer):
        setattr(inside, _IS_INSIDE, True)
    stepped = _stepped_by(optimizer)
    for fingerprint, groups in stepped.groups.items():
        for everywhere in (True, False):
            # Another rank may list the groups in another order.
            of_kind = (number for number, spread in groups.items() if spread is everywhere)
            settings = sorted({_hyper_parameters(optimizer.param_groups[number]) for number in of_kind})
            if settings:
                step = f"{STEP}{type(optimizer).__name__}({'; '.join(settings)})"
                step += f" on {stepped.units[fingerprint]}" if everywhere else ""
                fingerprint.note_step(step, everywhere=everywhere)
    return bool(stepped.groups)


def note_step_of(optimizer: optim.Optimizer, what: str) -> None:
    """Note that this rank is about to do `what`, in words, to the models that `optimizer` steps; see `_note_step`."""
    if not in_backward():
        for fingerprint, groups in _stepped_by(optimizer).groups.items():
            fingerprint.note_step(what, everywhere=any(groups.values()))


def _note_zero_grad(optimizer: optim.Optimizer) -> None:
    """Have the fingerprints know, at the next reduction, that the gradients were dropped."""
    for fingerprint, groups in _stepped_by(optimizer).groups.items():
        fingerprint.note_drop(everywhere=any(groups.values()))


def _told(units: Mapping[int, str]) -> str:
    names = [repr(units[number]) for number in sorted(units)]
    return f"{len(names)} units, {names[0]} to {names[-1]}" if len(names) > 1 else f"unit {names[0]}"


def _stepped_by(optimizer: optim.Optimizer) -> _Stepped:
    """Return the trees whose parameters `optimizer` has."""
    lists = [group["params"] for group in optimizer.param_groups]
    key = [(id(each), len(each)) for each in lists]
    known: _Stepped | None = vars(optimizer).get(_STEPPED)
    if known is None or known.key != key or not known.is_up_to_date:
        for parameters in lists:
            have_listed(optimizer, parameters)
        known = vars(optimizer)[_STEPPED] = _Stepped.by(lists, key)
    return known


@final
@attrs.frozen(eq=False)
class _Stepped:
    """The trees that an optimizer steps, as they were found."""

    key: list[tuple[int, int]]
    """Of each list of parameters, its identity and its length."""
    groups: dict[Fingerprint, dict[int, bool]]
    """By tree, the numbers of the groups that have parameters of it, and whether each of its ranks has elements of one.

    If not, a rank without elements may list none of them (`if p.numel()`), and have no such group or optimizer.
    """
    units: dict[Fingerprint, str]
    """By tree, the units, in words, of which it has a parameter that each of the ranks has elements of."""
    firsts: list[tuple[weakref.ReferenceType[Unit], Fingerprint | None]]
    """A unit of each tree: it gets another fingerprint when the units become part of a larger tree."""

    @property
    def is_up_to_date(self) -> bool:
        """Whether the units are in the same trees."""
        return all(
            (unit := reference()) is not None and unit.observers.fingerprint is fingerprint
            for reference, fingerprint in self.firsts
        )

    @classmethod
    def by(cls, lists: Sequence[Sequence[torch.Tensor]], key: list[tuple[int, int]]) -> Self:
        """Return the trees of the parameters in `lists`, one for each group."""
        groups: dict[Fingerprint, dict[int, bool]] = {}
        units: dict[Fingerprint, dict[int, str]] = {}
        firsts: dict[Fingerprint | None, weakref.ReferenceType[Unit]] = {}
        for number, parameters in enumerate(lists):
            for parameter in parameters:
                unit = holder_of_parameter(parameter)
                if unit is None:
                    continue
                fingerprint = unit.observers.fingerprint
                firsts.setdefault(fingerprint, weakref.ref(unit))
                if fingerprint is None:
                    continue
                fingerprint.has_new_optimizer = True
                of_tree = groups.setdefault(fingerprint, {})
                handle, index, everywhere = _place_of(parameter)
                of_tree[number] = of_tree.get(number, False) or everywhere
                if everywhere:
                    units.setdefault(fingerprint, {})[unit.observers.number] = unit.name
                if not parameter.numel():
                    fingerprint.listed.add((id(handle), index))
        told = {each: _told(of_tree) for each, of_tree in units.items()}
        return cls(key, groups, told, [(reference, each) for each, reference in firsts.items()])


def _place_of(parameter: torch.Tensor) -> tuple[FlatParamHandle | None, int, bool]:
    """The handle of a parameter of a unit, its index, and whether every rank that shares it has elements of it."""
    if isinstance(parameter, FlatParameter):
        lengths = parameter.flat_layout.shard_numels
        return handle_of(parameter), 0, all(lengths)
    owner = owner_of(parameter) if isinstance(parameter, nn.Parameter) else None
    assert owner is not None, "a unit holds it"
    handle, index = owner
    return handle, index, len(handle.layout.ranks_of(index)) == handle.layout.world_size


def _hyper_parameters(group: Mapping[str, Any]) -> str:
    """Return the hyper-parameters of a group that are plain values: reading a tensor on a device would wait for it."""
    plain = ((name, value) for name, value in group.items() if isinstance(value, _PLAIN))
    # NumPy's floats are floats, and look otherwise.
    return ", ".join(f"{name}={float(value) if isinstance(value, float) else value!r}" for name, value in plain)
