"""Optimizers that step as soon as a gradient is there, instead of after the backward pass."""

from __future__ import annotations

from flatparam_comm import FlatParamError, FlatParamHandle

__all__ = ["check_in_backward_optimizers", "step_in_backward"]

_OPTIMIZERS = "_in_backward_optimizers"
"""Where torch's `_apply_optimizer_in_backward` notes them, on each parameter."""


def step_in_backward(handle: FlatParamHandle) -> None:
    """Step the optimizers that were attached to the handle's original parameters, and drop the gradients they used."""
    for parameter in handle.exposure.parameters():
        optimizers = getattr(parameter, _OPTIMIZERS, ())
        if optimizers and parameter.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
            parameter.grad = None


def check_in_backward_optimizers(handle: FlatParamHandle) -> None:
    """Refuse them where the originals are not what is trained.

    Raises:
        FlatParamError: naming the first parameter that has one.
    """
    parameters = handle.exposure.parameters()
    if len(parameters) == len(handle.leaves) and parameters[0] is not handle.flat_param:
        return
    for fqn, leaf in zip(handle.layout.fqns, handle.leaves, strict=True):
        if getattr(leaf, _OPTIMIZERS, ()):
            raise FlatParamError(
                f"parameter {fqn!r} has an optimizer that steps in the backward pass, which needs the original "
                "parameters: shard with use_orig_params=True"
            )
