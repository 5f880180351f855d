"""A fine-tuning run on two ranks, after each step of which a receiver is compared with all full tensors."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping

import attrs
import torch
from gpt.model import Block
from torch import Tensor

from flatparam import FullyShardedDataParallel, Mailbox, Publisher, Receiver, publish
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives
from flatparam_comm.testing import run_threads

from .job import batches, make, pretrained, train

__all__ = ["Syncs", "synced"]

HALF = torch.bfloat16


@attrs.frozen
class Syncs:
    """What a number of versions came to."""

    versions: int
    equal: int
    """Those at which the receiver's sha256 was that of all full tensors."""
    dense_nbytes: int
    """The bytes of all values, at each version."""
    nbytes: int
    """The bytes that were sent."""


def digest(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of all names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def synced(size: str, versions: int, rate: float, pretraining: int = 0, batch: int = 2) -> Syncs:
    """Fine-tune on two ranks, and compare `versions` times."""
    state = pretrained(size, pretraining).state_dict()
    with tempfile.TemporaryDirectory() as folder:
        results = run_threads(2, _rank, folder, state, (size, versions, rate, batch), timeout=None)
    return results[0]


def _rank(world: Collectives, folder: str, state: dict[str, Tensor], options: tuple[str, int, float, int]) -> Syncs:
    size, versions, rate, batch = options
    plain = make(size)
    plain.load_state_dict(state)
    model = FullyShardedDataParallel(plain, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95))
    publisher = Publisher(model, Mailbox(folder), dtype=HALF)
    tensors: dict[str, Tensor] = {}
    receiver = Receiver(tensors, Mailbox(folder))
    equal = nbytes = dense_nbytes = 0

    def each() -> None:
        nonlocal equal, nbytes, dense_nbytes
        published = publisher.publish()
        full: dict[str, Tensor] = {}
        publish(model, full.__setitem__, dtype=HALF)
        if world.rank == 0:
            receiver.receive()
            equal += digest(tensors) == digest(full)
        nbytes += published.nbytes
        dense_nbytes += published.dense_nbytes

    train(model, optimizer, batches(size, batch), range(1, versions + 1), each, (world.rank, 2))
    return Syncs(versions, equal, dense_nbytes, nbytes)
