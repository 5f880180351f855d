"""Optimizers that step as soon as a gradient is there, instead of after the backward pass."""

from __future__ import annotations

from flatparam_comm import FlatParamError, FlatParamHandle
from flatparam_runtime.optimizers.torch_optimizers import IN_BACKWARD

__all__ = ["check_in_backward_optimizers", "step_in_backward"]


def step_in_backward(handle: FlatParamHandle) -> None:
    """Step the optimizers that were attached to the handle's original parameters, and drop the gradients they used."""
    for parameter in handle.exposure.parameters():
        optimizers = getattr(parameter, IN_BACKWARD, ())
        if optimizers and parameter.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None


def check_in_backward_optimizers(handle: FlatParamHandle) -> None:
    """Refuse optimizers in the backward pass if the originals are not what is trained.

    Raises:
        FlatParamError: naming the first parameter that has one.
    """
    parameters = handle.exposure.parameters()
    if len(parameters) == len(handle.leaves) and parameters[0] is not handle.flat_param:
        return
    for fqn, leaf in zip(handle.layout.fqns, handle.leaves, strict=True):
        if getattr(leaf, IN_BACKWARD, ()):
            raise FlatParamError(
                f"parameter {fqn!r} has an optimizer that steps in the backward pass, which needs the original "
                "parameters: shard with use_orig_params=True"
            )
