"""Steps of neighbours in a shard as one tensor, and of long parameters in pieces."""

from flatparam_optim.segments.flat_steps import (
    prepare_step,
    set_flat_steps,
    step_in_segments,
    tensors_stepped,
)

__all__ = ["prepare_step", "set_flat_steps", "step_in_segments", "tensors_stepped"]
