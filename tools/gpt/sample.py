"""Text that the model writes."""

from __future__ import annotations

import torch

from .learner import Learner
from .options import Options
from .ranks import Ranks
from .stop import StopRequests


def generate(learner: Learner, options: Options, ranks: Ranks, requests: StopRequests) -> str:
    """Go on from the prompt, byte by byte; a collective, because every forward gathers the sharded model.

    All ranks compute the same scores and draw with the same seed; the first rank's text counts. It ends early, on
    every rank at the same byte, when someone asks to stop.
    """
    generator = torch.Generator().manual_seed(options.seed)
    written = list(options.prompt.encode())
    prompt_length = len(written)
    learner.model.eval()
    with torch.no_grad():
        while len(written) < prompt_length + options.sample_bytes:
            if ranks.largest([requests.pending()])[0]:
                break
            seen = torch.tensor([written[-options.shape.context :]], device=ranks.device)
            scores = learner.model(seen)[0, -1].float().cpu()
            chances = torch.softmax(scores / options.temperature, dim=0)
            written.append(int(torch.multinomial(chances, 1, generator=generator)))
    learner.model.train()
    return bytes(written).decode(errors="replace")
