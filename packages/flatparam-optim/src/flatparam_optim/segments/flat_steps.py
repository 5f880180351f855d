"""An ordinary `torch.optim` optimizer steps tensors of the best length, whatever parameters it has.

An optimizer that steps neighbours in a shard, or a long parameter on the CPU, steps segments in their place from then
on. Any other steps its parameters, such as short flat ones, as it always did. The runtime calls `prepare_step`
before each step, by the entry point `steps` of `flatparam.optimizers`.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import Tensor, nn, optim

from flatparam_comm import FlatParameter, owner_of, streams_of
from flatparam_optim.segments.joined import join_adjacent
from flatparam_optim.segments.step_segment import (
    STEP_NUMEL,
    DividedSegment,
    Segment,
    State,
    SteppedTensor,
    can_be_divided,
    is_long,
)
from flatparam_optim.shape_rules import check_sees_no_shards
from flatparam_runtime.optimizers.torch_optimizers import INIT_GROUP, STEPS

STEPS_EACH: Final = "_flatparam_steps_each"
"""Our mark on an optimizer that may not step segments."""


def set_flat_steps(optimizer: optim.Optimizer, enabled: bool) -> None:
    """Say whether `optimizer` may step neighbours as one tensor, and long ones in pieces; it may unless told not to.

    The numbers are the same either way.
    """
    setattr(optimizer, STEPS_EACH, not enabled)


def tensors_stepped(optimizer: optim.Optimizer) -> int | None:
    """The number of tensors that the last step of `optimizer` updated; `None` if it steps each parameter by itself."""
    stepper = vars(optimizer).get(INIT_GROUP)
    return stepper.count if isinstance(stepper, _SegmentStepper) else None


def step_in_segments(optimizer: optim.Optimizer) -> None:
    """Step an optimizer of `torch.optim` that is a part of another one, without the hooks that torch has around a step.

    It steps neighbours as one tensor, and long parameters in pieces, as one by itself does.

    Args:
        optimizer: of a class that treats each element alone.
    """
    if not torch.compiler.is_compiling():
        prepare_step(optimizer)
    STEPS[type(optimizer)](optimizer)


def prepare_step(optimizer: optim.Optimizer) -> None:
    """Have an optimizer that is about to step do so in segments, if it may and has to gain by it.

    Raises:
        FlatParamError: if it looks at shapes, and holds parameters that have lost theirs.
    """
    if type(optimizer) not in STEPS:
        check_sees_no_shards(optimizer)
        return
    own = vars(optimizer)
    stepper = own.get(INIT_GROUP)
    if own.get(STEPS_EACH, False):
        if isinstance(stepper, _SegmentStepper):
            del own[INIT_GROUP]
    elif isinstance(stepper, _SegmentStepper):
        stepper.count = 0
    elif stepper is None and _has_to_gain(optimizer):
        own[INIT_GROUP] = _SegmentStepper(weakref.ref(optimizer))


def _has_to_gain(optimizer: optim.Optimizer) -> bool:
    """Return whether it has several original parameters in a group, or a long parameter of any kind."""
    limit = STEP_NUMEL.value
    for group in optimizer.param_groups:
        has_several = len(group["params"]) > 1
        for parameter in group["params"]:
            if not isinstance(parameter, FlatParameter):
                if owner_of(parameter) is None:
                    continue
                if has_several:
                    return True
            if parameter.numel() > limit and is_long(parameter):
                return True
    return False


# A plan of segments: how a parameter group is divided for a step, and the step that follows the plan.
#
# The classes of `torch.optim` collect the tensors of a parameter group in a method `_init_group`, after the step's
# hooks and its closure. `prepare_step` puts a `_SegmentStepper` in the place of this method of one optimizer. There a
# twin of the optimizer steps the segments of the group, and the class's own method collects the other parameters for
# the step that is under way. So the optimizer's groups, state and hooks are what they always were, also if something
# is raised.


_Tensors: TypeAlias = list[tuple[Segment, list[SteppedTensor]]]
"""The tensors that are stepped in place of each segment's parameters."""


@final
@attrs.define(eq=False)
class _SegmentStepper:
    """A segment stepper takes the place of the method `_init_group` of one optimizer, and steps its segments there."""

    _optimizer: Callable[[], optim.Optimizer | None]
    """A weak reference: the optimizer holds the stepper."""
    count: int = 0
    """The tensors stepped since the step began."""
    _plans: dict[int, _SegmentPlan] = attrs.field(factory=dict)
    """The plan for each parameter group, by its number."""

    def __call__(self, group: dict[str, Any], parameters: list[Tensor], *lists: Any, **named: Any) -> Any:
        """Step the segments of `group`, and collect its other parameters as the optimizer's class does."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it calls its own method"
        rest = group
        if _may_have_segments(group) and not torch.compiler.is_compiling():
            tensors, others = self._divide(optimizer, group)
            if tensors:
                self.count += _step(optimizer, group, tensors)
                rest = {**group, "params": others}
        result = getattr(type(optimizer), INIT_GROUP)(optimizer, rest, parameters, *lists, **named)
        self.count += len(parameters)
        return result

    def _divide(self, optimizer: optim.Optimizer, group: dict[str, Any]) -> tuple[_Tensors, Sequence[nn.Parameter]]:
        """Return the tensors to step for the segments of `group`, and the parameters that are stepped by themselves."""
        number = next((n for n, each in enumerate(optimizer.param_groups) if each is group), None)
        if number is None:
            # Somebody else has made this group, for this step.
            return [], group["params"]
        plan = self._plans.get(number)
        if plan is not None and plan.fits(group["params"], optimizer.state):
            tensors = plan.tensors(optimizer.state)
            if tensors is not None:
                return tensors, plan.alone
        plan = self._plans[number] = _SegmentPlan.of(group, optimizer.state, plan)
        tensors = plan.tensors(optimizer.state)
        return ([], group["params"]) if tensors is None else (tensors, plan.alone)


@final
@attrs.define(eq=False)
class _SegmentPlan:
    """A plan of segments says how one parameter group is divided: into segments, and parameters stepped alone."""

    parameters: Sequence[nn.Parameter]
    segments: Sequence[Segment]
    alone: Sequence[nn.Parameter]
    """The parameters in no segment."""
    absent: Sequence[nn.Parameter]
    """Those of them that belong to units and had no gradient."""
    whole: Sequence[nn.Parameter]
    """Long ones that could not be divided, as before the first step, which makes their state."""
    patience: int
    """After so many steps more parameters are looked for that can be in segments."""
    _uses: int = 0

    @classmethod
    def of(cls, group: Mapping[str, Any], state: State, before: _SegmentPlan | None) -> _SegmentPlan:
        """Divide the parameters of `group`, and make the state of each joined segment one tensor."""
        parameters: list[nn.Parameter] = list(group["params"])
        listed = Counter(map(id, parameters))
        # One that is listed twice is stepped twice; and a step of `foreach` has temporaries of all pieces at once.
        long = [p for p in parameters if is_long(p) and listed[id(p)] == 1 and not group.get("foreach")]
        ours = [p for p in parameters if owner_of(p) is not None or is_long(p)]
        divided = [DividedSegment(parameter) for parameter in long if can_be_divided(parameter, state)]
        cut = {id(each.parameter) for each in divided}
        joined = join_adjacent([p for p in ours if p.grad is not None and id(p) not in cut], state)
        for segment in joined:
            segment.unify_state(state)
        segments: list[Segment] = [*joined, *divided]
        inside = {id(parameter) for segment in segments for parameter in segment.parameters}
        alone = [parameter for parameter in parameters if id(parameter) not in inside]
        absent = [parameter for parameter in ours if parameter.grad is None]
        whole = [parameter for parameter in long if id(parameter) not in cut]
        patience = 8
        if before is not None and _are_same(before.alone, alone):
            patience = min(before.patience * 2, 1024)
        return cls(parameters, segments, alone, absent, whole, patience)

    def fits(self, parameters: Sequence[nn.Parameter], state: State) -> bool:
        """Whether the group has the same parameters, and none that is alone has got the gradient or state it lacked."""
        self._uses += 1
        return (
            _are_same(self.parameters, parameters)
            and all(parameter.grad is None for parameter in self.absent)
            and not any(can_be_divided(parameter, state) for parameter in self.whole)
            and (
                len(self.alone) == len(self.absent)
                or self._uses <= self.patience
                # To look again would read from the device.
                or streams_of(self.alone[0].device).is_capturing
            )
        )

    def tensors(self, state: State) -> _Tensors | None:
        """Return the tensors to step in place of each segment; `None` if one of them is not as it was."""
        found = []
        for segment in self.segments:
            tensors = segment.tensors(state)
            if tensors is None:
                return None
            found.append((segment, tensors))
        return found


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _step(optimizer: optim.Optimizer, group: Mapping[str, Any], tensors: _Tensors) -> int:
    """Step `tensors` with the hyper-parameters of `group`, in a twin, so that `optimizer` stays as it is.

    Returns:
        How many tensors have been stepped.
    """
    kind = type(optimizer)
    every = [each for _, some in tensors for each in some]
    twin = object.__new__(kind)
    # A gradient scaler leaves its numbers there.
    vars(twin).update(vars(optimizer))
    del vars(twin)[INIT_GROUP]
    twin.param_groups = [{**group, "params": [each.parameter for each in every]}]
    twin.state = defaultdict(dict, {each.parameter: each.state for each in every})
    try:
        STEPS[kind](twin)
    finally:
        for segment, some in tensors:
            segment.settle(some, optimizer.state)
    return len(every)


def _may_have_segments(group: Mapping[str, Any]) -> bool:
    """Return whether the hyper-parameters of `group` let other tensors be stepped in the parameters' place.

    The padding between parameters has to stay zero, as its gradient is. It does with all these optimizers if no number
    is infinite and none divides by zero. The fused kernels of the CPU do not round the last elements of a tensor as the
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
