"""One step of training in many shapes: what a loop may do between two steps of the optimizer.

A program is a generator that takes the model, the rank, the case's loss and a context in which gradients are not to be
synchronised (nothing on one process). It yields wherever the gradients collected so far have been reduced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch
from torch import Tensor, nn

Quiet: TypeAlias = Callable[[], AbstractContextManager[object]]
Loss: TypeAlias = Callable[[int], Tensor]
"""Of micro-batch 0, 1, ... of this step on this rank."""
Program: TypeAlias = Callable[[nn.Module, Loss, Quiet], Iterator[None]]


def no_sync_then_sync(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """Three micro-batches collected in silence; the fourth reduces the sum of all."""
    for number in range(3):
        with quiet():
            loss(number).backward()
    loss(3).backward()
    yield


def sync_then_no_sync_then_sync(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """What is in ``.grad`` already stays, and what is collected in silence comes on top of it."""
    loss(0).backward()
    yield
    with quiet():
        loss(1).backward()
        loss(2).backward()
    loss(3).backward()
    yield


def forward_in_silence(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """The backward pass decides: a forward pass inside of no_sync and its backward pass outside is a synchronised one."""
    with quiet():
        value = loss(0)
    value.backward()
    yield


def backward_in_silence(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """The other way round: only the backward pass is inside of no_sync."""
    value = loss(0)
    with quiet():
        value.backward()
    loss(1).backward()
    yield


def every_micro_batch_reduced(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """Accumulation without no_sync: each backward pass adds its reduced gradient to ``.grad``."""
    for number in range(3):
        loss(number).backward()
        yield


def two_forwards_one_backward(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """Two forward passes, and one backward pass through both."""
    (loss(0) + loss(1)).backward()
    yield


def two_forwards_two_backwards(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """Two forward passes, then the backward pass of each, the first one's first."""
    first, second = loss(0), loss(1)
    first.backward()
    yield
    second.backward()
    yield


def two_backwards_of_one_graph(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """Two losses of one forward pass, backward one after the other: the second finds the parameters freed."""
    value = loss(0)
    value.backward(retain_graph=True)
    yield
    (2 * value).backward()
    yield


def evaluation_between(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """Evaluation of every kind: before the first training step's forward, between it and its backward, and after."""
    with torch.inference_mode():
        loss(1)
    value = loss(0)
    with torch.no_grad():
        loss(1)
    model.eval()
    with torch.inference_mode():
        loss(1)
    loss(2)  # recorded, and dropped
    model.train()
    value.backward()
    yield
    with torch.no_grad():
        loss(1)


def evaluation_between_micro_batches(model: nn.Module, loss: Loss, quiet: Quiet) -> Iterator[None]:
    """Evaluation while gradients are being collected, inside and outside of no_sync."""
    with quiet():
        loss(0).backward()
        with torch.no_grad():
            loss(2)
    with torch.inference_mode():
        loss(2)
    loss(1).backward()
    yield


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        no_sync_then_sync,
        sync_then_no_sync_then_sync,
        forward_in_silence,
        backward_in_silence,
        every_micro_batch_reduced,
        two_forwards_one_backward,
        two_forwards_two_backwards,
        two_backwards_of_one_graph,
        evaluation_between,
        evaluation_between_micro_batches,
    )
}

at_once: Quiet = contextlib.nullcontext
"""For one process, which synchronises with nobody."""
