"""Random numbers as processes have them: each rank of a world of threads has default generators of its own.

torch's default generators belong to the process. With all ranks in one process, `torch.manual_seed(rank)` on one rank
would change what the others draw; so the states are exchanged whenever the baton changes hands. (CUDA's from the moment
that CUDA is in use: initialise it before the world, if the ranks are to draw there.)
"""

from __future__ import annotations

from typing import Any, Final

import attrs
import torch
from torch import Tensor

__all__ = ["CUDA", "GeneratorStates"]

#: `torch.cuda`, several functions of which have no types.
CUDA: Final[Any] = torch.cuda


@attrs.frozen
class GeneratorStates:
    """What the default generators (CPU, and the current CUDA device's if it is in use) will draw next."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def capture(cls) -> GeneratorStates:
        """The states as they are now."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if CUDA.is_initialized() else None)

    def install(self) -> None:
        """Make the default generators draw from here on what they would have drawn after `capture`."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
