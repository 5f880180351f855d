"""Saving and loading by transformers' own functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from flatparam_comm import Collectives, run_threads
from integration_tests.models.checks import advance, in_full
from integration_tests.models.described import STEPS
from integration_tests.models.every import named
from integration_tests.models.training import RANKS, Setting, adamw, wrapped
from integration_tests.parity.runs import assert_same_tensors


def check_pretrained(name: str, directory: Path) -> None:
    """`save_pretrained` of a full state on rank 0 is read by `from_pretrained`, with its names and values."""
    model = named(name)

    def of_rank(group: Collectives) -> tuple[type[Any], dict[str, torch.Tensor]]:
        sharded = wrapped(model, Setting(original=True), group)
        optimizer = adamw(sharded)
        for step in range(STEPS):
            advance(group, model, sharded, optimizer, step)
        with in_full(sharded):
            state = sharded.state_dict()
        if group.rank == 0:
            sharded.module.save_pretrained(directory, state_dict=dict(state))
        return type(sharded.module), state

    kind, state = run_threads(RANKS, of_rank, timeout=None)[0]
    assert_same_tensors(kind.from_pretrained(directory).state_dict(), state, "state")
