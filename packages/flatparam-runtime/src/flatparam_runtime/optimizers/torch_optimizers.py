"""The seam to the optimizers of torch: each name that reaches into them, or that is left on them, is here.

* The classes of `torch.optim` collect the tensors of a parameter group in `_init_group`. If it is gone, they step each
  parameter by itself.
* torch's `_apply_optimizer_in_backward` lists what it attaches to a parameter in `_in_backward_optimizers`. If the list
  is gone, nothing steps in the backward pass.
* A parameter has what `register_post_accumulate_grad_hook` was given in `_post_accumulate_grad_hooks`. If that is gone,
  these hooks are not called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import optim

INIT_GROUP: Final = "_init_group"
"""The method of an optimizer that collects the tensors of a group."""
IN_BACKWARD: Final = "_in_backward_optimizers"
"""The attribute of a parameter that lists the optimizers that step it in the backward pass."""

HOOKS: Final = "_post_accumulate_grad_hooks"
"""The attribute of a parameter that has the hooks to call once its gradient is there; `None` if there are none."""

KEEPS_OWN_PART: Final = "_flatparam_keeps_own_part"
"""Our mark on an optimizer whose state has been cut as its parameters were."""


def steps_of(kinds: Iterable[type[optim.Optimizer]]) -> dict[type[optim.Optimizer], Callable[[Any], Any]]:
    """Return the `step` of each of `kinds` that has an `_init_group`, without the hooks that torch wraps around it."""
    # The name is spelled out for tools/matrix, which reads the sources for the names of torch.
    return {kind: inspect.unwrap(kind.step) for kind in kinds if hasattr(kind, "_init_group")}


STEPS: Final[Mapping[type[optim.Optimizer], Callable[[Any], Any]]] = steps_of(
    (
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
)
"""The optimizers that treat each element alone, and can therefore step segments."""
