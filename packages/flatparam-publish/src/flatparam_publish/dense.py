"""`publish`: the full tensors of a sharded model, one bucket at a time, to whoever wants them."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import nn

from flatparam_publish.gathering import PUBLISH_NBYTES
from flatparam_publish.giving import Giving, Sink
from flatparam_publish.publisher import Publisher
from flatparam_publish.versions import (
    Catalogue,
    Channel,
    ReceiverNames,
    agree_to_publish,
    all_or_error,
    published_tensors,
)
from flatparam_runtime import telling
from flatparam_state.at_rest import bring_to_rest
from flatparam_state.ranks import topology_of

__all__ = ["Sink", "publish"]


@torch.no_grad()
def publish(
    model: nn.Module,
    sink: Sink | str | os.PathLike[str] | Channel,
    *,
    names: ReceiverNames | None = None,
    dtype: torch.dtype | None = None,
    bucket: int | None = None,
    every_rank: bool = False,
    only: Callable[[str], bool] | None = None,
) -> Catalogue:
    """Pass the full tensors of `model` to `sink`, one after the other; every rank calls it, outside of passes.

    Each flat parameter is gathered once, in the dtype in which it is published. While the sink has the tensors of one
    bucket, the next is gathered. Ranks that hold copies of shards take no part, unless they call the sink as well.

    Args:
        sink: a function of a name and a tensor, a path, or a channel. The tensor is on the model's device, and may be
            kept: its memory is not used again. At a path, a safetensors file is written if the name ends with
            `.safetensors`, else a directory of them for `from_pretrained`. It appears when it is whole. Through a
            channel (`Mailbox`, `GroupChannel`) every rank sends its own shards, and nothing is gathered; to publish
            again and again, make a `Publisher`.
        names: what tensors are called there, by their name in the model: a mapping, for those whose name differs, or a
            function, which returns None for a name that stays. A tied parameter is given once, under its first name.
        dtype: of floating-point tensors there; None keeps that of each.
        bucket: the bytes that full tensors take on a rank at most, unless one tensor is larger than half of it; by
            default 256 MiB (`state.publish_nbytes`).
        every_rank: call the sink on every rank, not on the first alone.
        only: which tensors are published, by their name in the model; None publishes all.

    Returns:
        What was published: names, shapes and dtypes, in order.

    Raises:
        PublishError: on every rank, naming the first rank whose sink has failed, and why.
        ValueError: on every rank, if names collide, or the dtype cannot be published.
        FlatParamError: inside a forward or backward pass, or while full parameters are summoned.
    """
    if isinstance(sink, Channel):
        if every_rank:
            raise ValueError(
                "publish: every_rank takes a function as the sink; a channel is used by every rank"
            )
        publisher = Publisher(model, sink, names=names, dtype=dtype, bucket=bucket, only=only)
        publisher.publish()
        return publisher.catalogue
    bring_to_rest(model)
    # Functions of the caller run here, maybe with an error on this rank alone.
    with telling("publish()"):
        pairs = published_tensors(model, names, dtype, only)
    catalogue = Catalogue(tuple(published for _, published in pairs))
    topology = topology_of(model)
    if every_rank and not callable(sink):
        raise ValueError(
            "publish: every_rank takes a function as the sink; a path is written by the first rank"
        )
    calls = every_rank or topology.is_first
    nbytes = PUBLISH_NBYTES.value if bucket is None else bucket
    asked = {"every_rank": every_rank, "bucket": nbytes}
    agree_to_publish(topology, "publish", catalogue.digest, asked)
    giving = Giving(sink if calls else None, catalogue)
    with giving:
        if every_rank or topology.replicate is None or topology.replicate.rank == 0:
            giving.all_of(pairs, topology, nbytes)
    all_or_error(lambda said: topology.exchange(said, label="publish"), None, giving.error)
    return catalogue
