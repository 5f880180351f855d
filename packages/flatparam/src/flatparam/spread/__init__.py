"""Parameters that are spread over ranks, and torch's functions that would take a rank's part for the whole."""

from flatparam.spread.clipping import clip_grad_norm_
from flatparam.spread.routing import route_torchs_functions

__all__ = ["clip_grad_norm_", "route_torchs_functions"]
