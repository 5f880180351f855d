"""Random numbers as processes have them: each rank of a world of threads has default generators of its own.

torch's default generators belong to the process. With all ranks in one process, `torch.manual_seed(rank)` on one rank
would change what the others draw; so the states are swapped whenever the baton changes hands. (Those of an accelerator
only once it is in use: initialise it before the world if the ranks are to draw there.)
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor


def accelerator_in_use() -> Any | None:
    """Return the module of the accelerator (`torch.cuda`, `torch.xpu`, ...) if there is one and it is initialised."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module: Any = torch.get_device_module(accelerator)
    return module if module.is_initialized() else None


@attrs.frozen
class GeneratorStates:
    """The states of the default generators (CPU, and the current accelerator's if it is in use)."""

    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def capture(cls) -> GeneratorStates:
        """Return the states as they are now."""
        module = accelerator_in_use()
        return cls(torch.get_rng_state(), None if module is None else module.get_rng_state())

    def install(self) -> None:
        """Make the default generators draw from here on what they would have drawn after `capture`."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            module = accelerator_in_use()
            assert module is not None, "the accelerator was in use before"
            module.set_rng_state(self.accelerator)
