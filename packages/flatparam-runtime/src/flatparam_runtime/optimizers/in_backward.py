"""Actions as soon as a gradient is there, instead of after the backward pass: hooks, and optimizers that step."""

from __future__ import annotations

import itertools
import operator
from typing import Final

from flatparam_comm import FlatParamError, FlatParamHandle
from flatparam_runtime.optimizers.torch_optimizers import HOOKS, IN_BACKWARD

_HOOKS_OF: Final = operator.attrgetter(HOOKS)


def acts_in_backward(handle: FlatParamHandle) -> bool:
    """Whether a parameter of `handle` has a hook, or an optimizer, that uses its gradient as soon as it is there."""
    parameters = handle.exposure.listed()
    has_optimizer = any(map(operator.contains, map(vars, parameters), itertools.repeat(IN_BACKWARD)))
    return has_optimizer or any(map(_HOOKS_OF, parameters))


def step_in_backward(handle: FlatParamHandle, arrived: bytes) -> None:
    """Call the hooks of the handle's parameters, and step the optimizers that were attached to them.

    The gradients that optimizers used are dropped.

    Args:
        arrived: for each original parameter whether it got a gradient in this pass.
    """
    if not acts_in_backward(handle):
        return
    parameters = handle.exposure.listed()
    got = arrived if len(arrived) == len(parameters) else bytes([1]) * len(parameters)
    for parameter, is_new in zip(parameters, got, strict=True):
        if parameter.grad is None:
            continue
        hooks = getattr(parameter, HOOKS, None)
        for hook in tuple(hooks.values()) if hooks and is_new else ():
            hook(parameter)
        optimizers = getattr(parameter, IN_BACKWARD, ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None


def check_in_backward_optimizers(handle: FlatParamHandle, *, is_guarded: bool = False) -> None:
    """Refuse optimizers in the backward pass if the originals are not what is trained.

    Args:
        is_guarded: the tree's gradients are looked at when the pass ends, which is too late for such an optimizer.

    Raises:
        FlatParamError: naming the first parameter that has one.
    """
    parameters = handle.exposure.listed()
    has_originals = len(parameters) == len(handle.leaves) and parameters[0] is not handle.flat_param
    if has_originals and not is_guarded:
        return
    for fqn, leaf in zip(handle.layout.fqns, parameters if has_originals else handle.leaves, strict=True):
        if getattr(leaf, IN_BACKWARD, ()):
            if has_originals:
                raise FlatParamError(
                    f"parameter {fqn!r} has an optimizer that steps in the backward pass, before the ranks know "
                    "whether all gradients are finite: step it after backward(), or pass nonfinite='ignore'"
                )
            raise FlatParamError(
                f"parameter {fqn!r} has an optimizer that steps in the backward pass, which needs the original "
                "parameters: shard with use_orig_params=True"
            )
