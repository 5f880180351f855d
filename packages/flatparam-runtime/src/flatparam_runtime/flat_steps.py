"""An ordinary `torch.optim` optimizer over hundreds of small original parameters steps a few large tensors.

The classes of `torch.optim` collect the tensors of a parameter group in a method `_init_group`, after the step's hooks
and its closure. On an optimizer that holds original parameters of a unit it is replaced, for that object alone: what
lies side by side in a shard, with its gradients and its state, is stepped there by a twin of the optimizer that holds
one long tensor instead; the class's own `_init_group` collects the rest, for the step that is under way. So the
optimizer's groups, state and hooks are what they always were, also where something is raised.
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import Any, Final

import attrs
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import final

from flatparam_comm import owner_of
from flatparam_runtime.flat_runs import Joined, Run, find_runs

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
    """Say whether `optimizer` may step neighbouring parameters as one tensor; it may unless it is told not to.

    The numbers are the same either way.
    """
    setattr(optimizer, _OFF, not enabled)


def tensors_stepped(optimizer: optim.Optimizer) -> int | None:
    """How many tensors the last step of `optimizer` has updated; `None` where it steps each parameter by itself."""
    collect = vars(optimizer).get(_COLLECT)
    return collect.count if isinstance(collect, _Collect) else None


@functools.cache
def notice_optimizers() -> None:
    """Look at each optimizer in the process, when it steps, whether it holds original parameters of a unit."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or type(optimizer) not in _STEPS:
        return
    own = vars(optimizer)
    collect = own.get(_COLLECT)
    if own.get(_OFF, False):
        if isinstance(collect, _Collect):
            del own[_COLLECT]
    elif isinstance(collect, _Collect):
        collect.count = 0
    elif collect is None and _holds_originals(optimizer):
        own[_COLLECT] = _Collect(weakref.ref(optimizer))


def _holds_originals(optimizer: optim.Optimizer) -> bool:
    """Whether it has several, so that there is something to gain."""
    return any(
        len(group["params"]) > 1 and any(owner_of(parameter) is not None for parameter in group["params"])
        for group in optimizer.param_groups
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
        """Step the runs of `group`, and collect its other parameters as the optimizer's class does."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it calls its own method"
        rest = group
        if _may_join(group) and not torch.compiler.is_compiling():
            joined, others = self._divide(optimizer, group)
            if joined:
                _step(optimizer, group, joined)
                self.count += len(joined)
                rest = {**group, "params": others}
        result = type(optimizer)._init_group(optimizer, rest, parameters, *lists, **named)  # type: ignore[attr-defined]
        self.count += len(parameters)
        return result

    def _divide(
        self, optimizer: optim.Optimizer, group: dict[str, Any]
    ) -> tuple[list[Joined], Sequence[nn.Parameter]]:
        """The runs of `group` that are one tensor now, and the parameters that are in none."""
        number = next((n for n, each in enumerate(optimizer.param_groups) if each is group), None)
        if number is None:  # a group of somebody else's making
            return [], group["params"]
        split = self._splits.get(number)
        if split is not None and split.fits(group["params"]):
            joined = split.join(optimizer.state)
            if joined is not None:
                return joined, split.rest
        split = self._splits[number] = _Split.of(group["params"], optimizer.state, split)
        joined = split.join(optimizer.state)
        return ([], group["params"]) if joined is None else (joined, split.rest)


@final
@attrs.define(eq=False)
class _Split:
    """A parameter group in runs, and parameters that are stepped by themselves."""

    parameters: Sequence[nn.Parameter]
    runs: Sequence[Run]
    rest: Sequence[nn.Parameter]
    absent: Sequence[nn.Parameter]
    """Those of the rest that are sharded and had no gradient."""
    patience: int
    """After how many steps to look again whether more parameters can be in runs."""
    _uses: int = 0

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], state: Any, before: _Split | None) -> _Split:
        """Divide `parameters`, and make the state of each run one tensor."""
        sharded = [parameter for parameter in parameters if owner_of(parameter) is not None]
        runs = find_runs([parameter for parameter in sharded if parameter.grad is not None], state)
        for run in runs:
            run.gather(state)
        inside = {id(parameter) for run in runs for parameter in run.parameters}
        rest = [parameter for parameter in parameters if id(parameter) not in inside]
        absent = [parameter for parameter in sharded if parameter.grad is None]
        patience = 8
        if before is not None and _same(before.rest, rest):
            patience = min(before.patience * 2, 1024)
        return cls(list(parameters), runs, rest, absent, patience)

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the group has the same parameters, and none that had no gradient has one."""
        self._uses += 1
        return (
            _same(self.parameters, parameters)
            and all(parameter.grad is None for parameter in self.absent)
            and (len(self.rest) == len(self.absent) or self._uses <= self.patience)
        )

    def join(self, state: Any) -> list[Joined] | None:
        """Each run as one tensor; `None` where one is none any more."""
        joined = []
        for run in self.runs:
            one = run.join(state)
            if one is None:
                return None
            joined.append(one)
        return joined


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _step(optimizer: optim.Optimizer, group: Mapping[str, Any], joined: Iterable[Joined]) -> None:
    """Step the runs with the hyper-parameters of `group`, in a twin, so that `optimizer` stays as it is."""
    kind = type(optimizer)
    twin = object.__new__(kind)
    vars(twin).update(vars(optimizer))  # a gradient scaler leaves its numbers there
    del vars(twin)[_COLLECT]
    twin.param_groups = [{**group, "params": [each.parameter for each in joined]}]
    twin.state = defaultdict(dict, {each.parameter: each.state for each in joined})
    try:
        _STEPS[kind](twin)
    finally:
        for each in joined:
            each.run.settle(each, optimizer.state)


def _may_join(group: Mapping[str, Any]) -> bool:
    """Whether the hyper-parameters of `group` let parameters be stepped as one tensor.

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
