"""What programs do with a model. Each function trains it and returns values that must be the CPU's, bit for bit."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from integration_tests.simulated.programs import Site, build, clip, optimizer_of, parameters_of, unreduced


def train(site: Site) -> dict[str, Tensor]:
    """Some steps, each of which may accumulate, clip and evaluate."""
    program = site.program
    model = build(site)
    optimizer = optimizer_of(model, site)
    for step in range(program.steps):
        for number in range(program.micro_batches):
            is_last = number == program.micro_batches - 1
            with unreduced(model, site) if program.no_sync and not is_last else contextlib.nullcontext():
                site.mark(f"step {step} forward {number}")
                loss = model(site.batches[step + number]).float().square().mean()
                site.mark(f"step {step} backward {number}")
                loss.backward()
        if program.clip:
            site.mark(f"step {step} clip")
            clip(model, site)
        if program.evaluate:
            site.mark(f"step {step} evaluation")
            with torch.no_grad():
                model(site.batches[0])
        site.mark(f"step {step} optimizer")
        optimizer.step()
        optimizer.zero_grad()
    site.mark("the end")
    return parameters_of(model, site)
