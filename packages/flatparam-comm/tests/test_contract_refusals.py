"""The calls that every engine refuses, with the same message (see conftest.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from flatparam_comm import Collectives, Pending, ReduceOp
from flatparam_comm.testing import run_processes, run_threads

BAD_CALLS: dict[str, tuple[Any, str]] = {
    "gather into too little": (
        lambda comm, device: comm.all_gather(
            torch.zeros(2 * comm.size + 1, device=device), torch.zeros(2, device=device), label="L"
        ),
        r"rank {rank} of {size}: all_gather 'L': expected output\.numel\(\) == {size} ranks \* shard\.numel\(\) "
        r"== {two}, found {three} \(shard\.numel\(\) is 2\); pad",
    ),
    "scatter into too little": (
        lambda comm, device: comm.reduce_scatter(
            torch.zeros(2, device=device), torch.zeros(2 * comm.size + 1, device=device)
        ),
        r"rank {rank} of {size}: reduce_scatter: expected full\.numel\(\) == {size} ranks \* output\.numel\(\) "
        r"== {two}, found {three}",
    ),
    "dtypes differ": (
        lambda comm, device: comm.all_gather(
            torch.zeros(comm.size, device=device),
            torch.zeros(1, device=device, dtype=torch.float16),
            label="L",
        ),
        r"expected output and shard of one dtype, found torch\.float32 and torch\.float16; cast",
    ),
    "not 1-D": (
        lambda comm, device: comm.all_gather(torch.zeros(comm.size, device=device), torch.zeros(1, 1, device=device)),
        r"expected shard to be 1-D, found shape \(1, 1\); pass shard\.view\(-1\)",
    ),
    "strided gather": (
        lambda comm, device: comm.all_gather(
            torch.zeros(2 * comm.size, device=device), torch.zeros(4, device=device)[::2]
        ),
        r"expected shard to be contiguous, found strides \(2,\); pass",
    ),
    "strided reduction": (
        lambda comm, device: comm.all_reduce(torch.zeros(2, 3, device=device).t(), label="L"),
        r"rank {rank} of {size}: all_reduce 'L': expected tensor to be contiguous, found strides \(1, 3\)",
    ),
    "sparse": (
        lambda comm, device: comm.broadcast(torch.zeros(2, device=device).to_sparse()),
        r"expected tensor to be contiguous, found layout torch\.sparse_coo",
    ),
    "lazy conjugate": (
        lambda comm, device: comm.broadcast(torch.zeros(2, device=device, dtype=torch.complex64).conj()),
        r"expected tensor without a lazy conjugate or negation, found one",
    ),
    "meta": (
        lambda comm, device: comm.broadcast(torch.zeros(2, device="meta")),
        r"expected tensor to hold bytes, found a meta tensor; materialise",
    ),
    "one of them meta": (
        lambda comm, device: comm.all_gather(torch.zeros(comm.size, device=device), torch.zeros(1, device="meta")),
        r"expected shard to hold bytes, found a meta tensor",
    ),
    "foreign slice": (
        lambda comm, device: _overlapping(comm, device),
        r"expected shard to be apart from output, or exactly its slice number {rank}, found an overlap that begins",
    ),
    "booleans": (
        lambda comm, device: comm.all_reduce(torch.zeros(2, device=device, dtype=torch.bool)),
        r"expected a dtype that can be reduced \(bfloat16, .*uint8\), found torch\.bool; cast",
    ),
    "complex maximum": (
        lambda comm, device: comm.all_reduce(torch.zeros(2, device=device, dtype=torch.complex64), op=ReduceOp.MAX),
        r"expected ReduceOp\.SUM for complex numbers, found ReduceOp\.MAX",
    ),
    "numbers for other ranks": (
        lambda comm, device: comm.all_to_all(
            torch.zeros(comm.size, device=device),
            torch.zeros(1, device=device),
            output_numels=[1] * comm.size,
            given_numels=[1] * (comm.size + 1),
        ),
        r"all_to_all: expected given_numels to have {size} numbers, none negative, that add up to 1, found ",
    ),
    "numbers for other elements": (
        lambda comm, device: comm.all_to_all(
            torch.zeros(3 * comm.size, device=device),
            torch.zeros(0, device=device),
            output_numels=[2] * comm.size,
            given_numels=[0] * comm.size,
        ),
        r"all_to_all: expected output_numels to have {size} numbers, none negative, .*, the least 2",
    ),
    "dealt in place": (lambda comm, device: _dealt_in_place(comm, device), r"output to be apart from given"),
    "root outside": (
        lambda comm, device: comm.broadcast(torch.zeros(2, device=device), root=comm.size),
        r"broadcast: expected a root in \[0, {size}\), found root={size}; give the rank within this group",
    ),
    "no tensor": (
        lambda comm, device: comm.all_gather(torch.zeros(comm.size, device=device), None),
        r"all_gather: expected shard to be a tensor, found a NoneType",
    ),
    "lists": (
        lambda comm, device: comm.reduce_scatter([0.0], [0.0] * comm.size),
        r"reduce_scatter: expected output to be a tensor, found a list",
    ),
    "an array": (
        lambda comm, device: comm.all_reduce(np.zeros(2)),
        r"all_reduce: expected tensor to be a tensor, found a ndarray",
    ),
    "a reduction of torch": (
        lambda comm, device: comm.all_reduce(torch.zeros(2, device=device), op=dist.ReduceOp.SUM),
        r"all_reduce: expected op to be one of ReduceOp.SUM, .*, found <RedOpType.SUM: 0>; take it from flatparam_comm",
    ),
    "a scattered reduction of torch": (
        lambda comm, device: comm.reduce_scatter(
            torch.zeros(2, device=device), torch.zeros(2 * comm.size, device=device), op=dist.ReduceOp.MAX
        ),
        r"reduce_scatter: expected op to be one of ReduceOp.SUM, .*, found <RedOpType.MAX",
    ),
    "a root as text": (
        lambda comm, device: comm.broadcast(torch.zeros(2, device=device), root="0"),
        r"broadcast: expected a root in \[0, {size}\), found root='0'",
    ),
    "ranks as text": (
        lambda comm, device: comm.subgroup("01"),
        r"subgroup: expected a sequence of ranks, which are whole numbers, found '01'",
    ),
    "a number of ranks": (
        lambda comm, device: comm.subgroup(1),
        r"subgroup: expected a sequence of ranks, which are whole numbers, found 1",
    ),
    "broken numbers": (
        lambda comm, device: comm.all_to_all(
            torch.zeros(comm.size, device=device),
            torch.zeros(comm.size, device=device),
            output_numels=[1.0] * comm.size,
            given_numels=[1] * comm.size,
        ),
        r"all_to_all: expected output_numels to be a sequence of whole numbers, found \[1.0",
    ),
    "no ranks": (
        lambda comm, device: comm.subgroup([]),
        r"subgroup: expected one or more increasing ranks in \[0, {size}\), found \[\]",
    ),
    "rank twice": (lambda comm, device: comm.subgroup([0, 0]), r"subgroup: .*found \[0, 0\]"),
    "rank outside": (lambda comm, device: comm.subgroup([0, comm.size]), r"subgroup: .*found \[0, {size}\]"),
}


def _overlapping(comm: Collectives, device: str) -> Pending:
    output = torch.zeros(2 * comm.size + 1, device=device)
    return comm.all_gather(output[: 2 * comm.size], output[2 * comm.rank + 1 : 2 * comm.rank + 3])


def _dealt_in_place(comm: Collectives, device: str) -> Pending:
    whole, numels = torch.zeros(comm.size, device=device), [1] * comm.size
    return comm.all_to_all(whole, whole, output_numels=numels, given_numels=numels)


def _refusals(comm: Collectives, device: str) -> dict[str, str]:
    messages = {}
    for name, (call, pattern) in BAD_CALLS.items():
        facts = {"rank": comm.rank, "size": comm.size, "two": 2 * comm.size, "three": 2 * comm.size + 1}
        for key, value in facts.items():
            pattern = pattern.replace("{" + key + "}", str(value))
        with pytest.raises(ValueError, match=pattern) as raised:
            call(comm, device)
        messages[name] = str(raised.value)
    comm.barrier()
    return messages


def test_bad_calls_are_refused_and_leave_the_group_usable(world: Any) -> None:
    """Arguments that cannot work are a ValueError: rank, call, label, what was expected, found, and what to do."""
    for messages in world.run(_refusals):
        assert set(messages) == set(BAD_CALLS)


@pytest.mark.processes
def test_engines_refuse_in_the_same_words() -> None:
    """A bad call has the same text on threads as on processes, so what is tested on one holds on the other."""
    assert run_threads(2, _refusals, "cpu") == run_processes(2, _refusals, "cpu")
