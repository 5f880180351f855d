"""Programs with tied weights."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from .rows import FSDP1, row
from .shared import CPU, Model, Off, off, seeded, shard, train, wrap


@row(
    "pytorch#176076",
    "A weight of two units: one part of its rows is never updated, and nobody says so.",
    own=True,
)
def tied_across_units(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Model, tied=True), seeded(Model, tied=True)
    fsdp.fully_shard(model.embedding)
    fsdp.fully_shard(model.head)
    shard(fsdp, model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Model, tied=True))


@row("titan#2495", "A head that is tied after sharding becomes a second weight.")
def tied_later(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(), seeded(Model, tied=True)
    shard(fsdp, model)
    model.head.weight = model.embedding.weight
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Model, tied=True))


@row("accelerate#4171", "A tied embedding and its head, sharded as one group by a list of modules.")
def tied_in_a_list(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Model, tied=True), seeded(Model, tied=True)
    fsdp.fully_shard([model.embedding, model.head], reshard_after_forward=False)
    shard(fsdp, model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Model, tied=True))


@row("Model-Optimizer#2059", "Only the embedding of a tied pair is a unit of its own; its head is the root's.")
def tied_to_the_root(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Model, tied=True), seeded(Model, tied=True)
    fsdp.fully_shard(model.embedding)
    shard(fsdp, model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Model, tied=True))


@row("ezpz#237", "A tied model is built on the meta device, and then loaded: is it still tied?")
def tied_on_meta(fsdp: Any, rank: int) -> Off:
    plain = seeded(Model, tied=True)
    with torch.device("meta"):
        model = shard(fsdp, Model(tied=True))
    model.to_empty(device="cpu")
    set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Model, tied=True))


@row("verl#7834", "A tied embedding and its head are wrapped apart: two weights, silently.", FSDP1)
def tied_and_wrapped_apart(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Model, tied=True), seeded(Model, tied=True)
    model.embedding = fsdp.FullyShardedDataParallel(model.embedding, device_id=CPU)
    model.head = fsdp.FullyShardedDataParallel(model.head, device_id=CPU)
    model = wrap(fsdp, model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Model, tied=True))


@row("verl#7835", "The head of a tied pair is wrapped, with original parameters.", FSDP1)
def tied_and_head_wrapped(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Model, tied=True), seeded(Model, tied=True)
    model.head = fsdp.FullyShardedDataParallel(model.head, device_id=CPU, use_orig_params=True)
    model = wrap(fsdp, model, use_orig_params=True)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Model, tied=True))


class Repeating(Model):
    """A model whose first block is its last one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.layers[0])


@row("Automodel#2213", "A block that runs twice in a pass.")
def repeated_block(fsdp: Any, rank: int) -> Off:
    model, plain = seeded(Repeating), seeded(Repeating)
    fsdp.fully_shard(model.layers[0])
    fsdp.fully_shard(model.layers[1])
    fsdp.fully_shard(model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, seeded(Repeating))


@row("Megatron#1447", "Two blocks, each a unit, have one layer's weight in common.")
def tied_blocks(fsdp: Any, rank: int) -> Off:
    model, plain, start = seeded(), seeded(), seeded()
    for each in (model, plain, start):
        each.layers[1].up.weight = each.layers[0].up.weight
    shard(fsdp, model)
    train(model, [rank])
    train(plain, [0, 1])
    return off(model, plain, start)
