"""An ordinary `torch.optim` optimizer steps tensors of the best length, whatever parameters it has.

The classes of `torch.optim` collect the tensors of a parameter group in a method `_init_group`, after the step's hooks
and its closure. On an optimizer that holds parameters of a unit it is replaced, for that object alone: a twin of the
optimizer steps one tensor in place of original parameters that lie side by side in a shard, with their gradients and
state (`flat_runs`), and several in place of a long one (`flat_pieces`); the class's own `_init_group` collects the
rest, for the step that is under way. So the optimizer's groups, state and hooks are what they always were, also where
something is raised.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Final, TypeAlias

import attrs
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import Self, final

from flatparam_comm import owner_of, streams_of
from flatparam_runtime.optimizers.flat_pieces import Pieces, can_be_cut, is_long
from flatparam_runtime.optimizers.flat_runs import find_runs
from flatparam_runtime.optimizers.shape_rules import check_sees_no_shards
from flatparam_runtime.optimizers.stand_in import StandIn, State, Substitution

__all__ = ["notice_optimizers", "set_flat_steps", "tensors_stepped"]

_STEPS: Final[Mapping[type[optim.Optimizer], Callable[[Any], Any]]] = {
    kind: inspect.unwrap(kind.step)
    for kind in (
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    )
}
"""The optimizers that treat each element alone, and what their `step` does between its hooks."""

_COLLECT: Final = "_init_group"
_OFF: Final = "_flatparam_steps_each"


def set_flat_steps(optimizer: optim.Optimizer, enabled: bool) -> None:
    """Say whether `optimizer` may step neighbours as one tensor, and long ones in pieces; it may unless told not to.

    The numbers are the same either way.
    """
    setattr(optimizer, _OFF, not enabled)


def tensors_stepped(optimizer: optim.Optimizer) -> int | None:
    """How many tensors the last step of `optimizer` has updated; `None` where it steps each parameter by itself."""
    collect = vars(optimizer).get(_COLLECT)
    return collect.count if isinstance(collect, _Collect) else None


@functools.cache
def notice_optimizers() -> None:
    """Look at each optimizer in the process, when it steps, whether it holds parameters of a unit."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if type(optimizer) not in _STEPS:
        check_sees_no_shards(optimizer)
        return
    own = vars(optimizer)
    collect = own.get(_COLLECT)
    if own.get(_OFF, False):
        if isinstance(collect, _Collect):
            del own[_COLLECT]
    elif isinstance(collect, _Collect):
        collect.count = 0
    elif collect is None and _has_to_gain(optimizer):
        own[_COLLECT] = _Collect(weakref.ref(optimizer))


def _has_to_gain(optimizer: optim.Optimizer) -> bool:
    """Whether it has several original parameters in a group, or a long one of any kind."""
    groups = [group["params"] for group in optimizer.param_groups]
    return any(
        any(map(is_long, group)) or (len(group) > 1 and any(owner_of(p) is not None for p in group))
        for group in groups
    )


@final
@attrs.define(eq=False)
class _Collect:
    """Stands in for the method `_init_group` of one optimizer."""

    _optimizer: weakref.ReferenceType[optim.Optimizer]
    count: int = 0
    """Tensors stepped since the step began."""
    _splits: dict[int, _Split] = attrs.field(factory=dict)
    """For each parameter group, by its number."""

    def __call__(self, group: dict[str, Any], parameters: list[Tensor], *lists: Any, **named: Any) -> Any:
        """Step stand-ins for parameters of `group`, and collect its other parameters as the optimizer's class does."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it calls its own method"
        rest = group
        if _may_join(group) and not torch.compiler.is_compiling():
            stand_ins, others = self._divide(optimizer, group)
            if stand_ins:
                self.count += _step(optimizer, group, stand_ins)
                rest = {**group, "params": others}
        result = type(optimizer)._init_group(optimizer, rest, parameters, *lists, **named)  # type: ignore[attr-defined]
        self.count += len(parameters)
        return result

    def _divide(
        self, optimizer: optim.Optimizer, group: dict[str, Any]
    ) -> tuple[_StandIns, Sequence[nn.Parameter]]:
        """What to step in place of parameters of `group`, and the others, which are stepped as they are."""
        number = next((n for n, each in enumerate(optimizer.param_groups) if each is group), None)
        if number is None:  # a group of somebody else's making
            return [], group["params"]
        split = self._splits.get(number)
        if split is not None and split.fits(group["params"], optimizer.state):
            stand_ins = split.stand_ins(optimizer.state)
            if stand_ins is not None:
                return stand_ins, split.rest
        split = self._splits[number] = _Split.of(group, optimizer.state, split)
        stand_ins = split.stand_ins(optimizer.state)
        return ([], group["params"]) if stand_ins is None else (stand_ins, split.rest)


_StandIns: TypeAlias = list[tuple[Substitution, list[StandIn]]]


@final
@attrs.define(eq=False)
class _Split:
    """A parameter group in runs, pieces, and parameters that are stepped by themselves."""

    parameters: Sequence[nn.Parameter]
    substitutions: Sequence[Substitution]
    rest: Sequence[nn.Parameter]
    absent: Sequence[nn.Parameter]
    """Those of the rest that belong to units and had no gradient."""
    whole: Sequence[nn.Parameter]
    """Long ones that could not be cut, as before the first step, which makes their state."""
    patience: int
    """After how many steps to look again whether more parameters can be in runs."""
    _uses: int = 0

    @classmethod
    def of(cls, group: Mapping[str, Any], state: State, before: _Split | None) -> Self:
        """Divide the parameters of `group`, and make the state of each run one tensor."""
        parameters: list[nn.Parameter] = list(group["params"])
        listed = Counter(map(id, parameters))
        # One that is listed twice is stepped twice; and a step of `foreach` has temporaries of all pieces at once.
        long = [p for p in parameters if is_long(p) and listed[id(p)] == 1 and not group.get("foreach")]
        ours = [p for p in parameters if owner_of(p) is not None or is_long(p)]
        pieces = [Pieces(parameter) for parameter in long if can_be_cut(parameter, state)]
        cut = {id(each.parameter) for each in pieces}
        runs = find_runs([p for p in ours if p.grad is not None and id(p) not in cut], state)
        for run in runs:
            run.gather(state)
        substitutions: list[Substitution] = [*runs, *pieces]
        inside = {id(parameter) for each in substitutions for parameter in each.parameters}
        rest = [parameter for parameter in parameters if id(parameter) not in inside]
        absent = [parameter for parameter in ours if parameter.grad is None]
        whole = [parameter for parameter in long if id(parameter) not in cut]
        patience = 8
        if before is not None and _same(before.rest, rest):
            patience = min(before.patience * 2, 1024)
        return cls(parameters, substitutions, rest, absent, whole, patience)

    def fits(self, parameters: Sequence[nn.Parameter], state: State) -> bool:
        """Whether the group has the same parameters, and none of the rest has got the gradient or state it lacked."""
        self._uses += 1
        return (
            _same(self.parameters, parameters)
            and all(parameter.grad is None for parameter in self.absent)
            and not any(can_be_cut(parameter, state) for parameter in self.whole)
            and (
                len(self.rest) == len(self.absent)
                or self._uses <= self.patience
                or streams_of(self.rest[0].device).is_capturing  # to look again would read from the device
            )
        )

    def stand_ins(self, state: State) -> _StandIns | None:
        """What is stepped in place of parameters; `None` where something is not as it was."""
        found = []
        for each in self.substitutions:
            stand_ins = each.stand_ins(state)
            if stand_ins is None:
                return None
            found.append((each, stand_ins))
        return found


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _step(optimizer: optim.Optimizer, group: Mapping[str, Any], stand_ins: _StandIns) -> int:
    """Step them with the hyper-parameters of `group`, in a twin, so that `optimizer` stays as it is; how many."""
    kind = type(optimizer)
    every = [each for _, some in stand_ins for each in some]
    twin = object.__new__(kind)
    vars(twin).update(vars(optimizer))  # a gradient scaler leaves its numbers there
    del vars(twin)[_COLLECT]
    twin.param_groups = [{**group, "params": [each.parameter for each in every]}]
    twin.state = defaultdict(dict, {each.parameter: each.state for each in every})
    try:
        _STEPS[kind](twin)
    finally:
        for substitution, some in stand_ins:
            substitution.settle(some, optimizer.state)
    return len(every)


def _may_join(group: Mapping[str, Any]) -> bool:
    """Whether the hyper-parameters of `group` let other tensors be stepped in the parameters' place.

    The padding between them has to stay zero, as its gradient is. It does with all these optimizers where no number is
    infinite and none divides by zero. The fused kernels of the CPU do not round the last elements of a tensor as the
    others. Tensors as hyper-parameters, and steps that are differentiated, are left to the optimizer too.
    """
    if group.get("differentiable", False):
        return False
    if group.get("fused", False) and any(parameter.device.type == "cpu" for parameter in group["params"]):
        return False
    for value in group.values():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, Tensor) or (isinstance(number, float) and not math.isfinite(number)):
                return False
    return bool(group.get("eps", 1.0) >= torch.finfo(torch.float32).smallest_normal)
