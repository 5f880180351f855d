"""Whole steps as graphs: what is captured once and replayed. Each function returns what must be the CPU's, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from integration_tests.simulated.programs import Site, build, clip, optimizer_of, parameters_of, unreduced
from integration_tests.simulated.scenarios import side_stream

WARM_UP: Final = 3
"""Steps that are not captured: the first finds the order, the second uses it, the third looks at what both have said."""


def graphed(site: Site) -> dict[str, Tensor]:
    """After a warm-up on a stream of its own a step is captured, and replayed for each of the other batches."""
    return _graphed(site, set_to_none=False)


def graphed_with_new_gradients(site: Site) -> dict[str, Tensor]:
    """The same with gradients that are allocated in the capture, in memory of the graph."""
    return _graphed(site, set_to_none=True)


def graphed_at_once(site: Site) -> dict[str, Tensor]:
    """A first step is captured."""
    return _graphed(site, set_to_none=False, warm_up=0)


def _graphed(site: Site, *, set_to_none: bool, warm_up: int = WARM_UP) -> dict[str, Tensor]:
    model = build(site)
    optimizer = optimizer_of(model, site)
    given = site.batches[0].clone()
    losses = []

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none)
        for number in range(site.program.micro_batches):
            is_last = number == site.program.micro_batches - 1
            with contextlib.nullcontext() if is_last else unreduced(model, site):
                loss: Any = model(given * (number + 1)).float().square().mean()
                loss.backward()
        if site.program.clip:
            clip(model, site)
        optimizer.step()
        result: Tensor = loss
        return result

    with side_stream(site):
        for number in range(warm_up):
            site.mark(f"step {number} warm-up")
            given.copy_(site.batches[number])
            step()
    site.mark("capture")
    again, loss = _captured(site, step)
    for number in range(warm_up, site.program.steps):
        site.mark(f"step {number} replay")
        given.copy_(site.batches[number])
        losses.append(again(loss))
    return {**{f"loss {number}": value for number, value in enumerate(losses)}, **parameters_of(model, site)}


def evaluation_graphed(site: Site) -> dict[str, Tensor]:
    """The same of a forward pass without gradients, whose parameters change between the replays."""
    model = build(site).eval()
    given = site.batches[0].clone()
    outputs = []

    @torch.no_grad()
    def forward() -> Tensor:
        output: Tensor = model(given)
        return output

    with side_stream(site):
        for _ in range(WARM_UP):
            forward()
    again, output = _captured(site, forward)
    for number in range(WARM_UP, site.program.steps):
        given.copy_(site.batches[number])
        outputs.append(again(output))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    return {f"output {number}": value for number, value in enumerate(outputs)}


def _captured(site: Site, work: Callable[[], Tensor]) -> tuple[Callable[[Tensor | None], Tensor], Tensor | None]:
    """How to do the work again, and where it puts what it returns; on the CPU it is only called."""
    if site.is_cpu:
        return (lambda result: work().detach().clone()), None
    from flatparam_simdev import device

    graph = device.Graph()
    with device.capture(graph):
        result = work()

    def replay(result: Tensor | None) -> Tensor:
        graph.replay()
        assert result is not None, "it was captured"
        return result.detach().clone()

    return replay, result.detach()
