"""Versions over a group of ranks with trainers and receivers in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flatparam_comm import ByteLedger, Collectives, RecordingCollectives
from flatparam_comm.testing import run_processes, run_threads
from flatparam_publish import GroupChannel, Publisher, PublishError, Receiver, Slicing

from .beneath import CASES, shard, shard_case
from .sample import assert_equal, change, expected

VERSIONS = 4


def trained(
    ranks: Collectives, channel: GroupChannel, trainers: Sequence[int], name: str
) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """What a trainer has at each version, and what it said of each."""
    group = ranks.subgroup(trainers)
    assert group is not None
    model = shard_case(CASES[name], group)
    publisher = Publisher(model, channel, dtype=torch.bfloat16)
    states, published = [], []
    for step in range(VERSIONS):
        published.append(publisher.publish())
        states.append(expected(model, torch.bfloat16))
        change(model, step)
    return states, published


def received(
    ranks: Collectives, channel: GroupChannel, trainers: Sequence[int]
) -> tuple[list[dict[str, Tensor]], list[int]]:
    """What a receiver has at each version."""
    ranks.subgroup(trainers)
    tensors: dict[str, Tensor] = {}
    receiver = Receiver(tensors, channel)
    states, versions = [], []
    for _ in range(VERSIONS):
        assert receiver.receive()
        states.append({key: value.clone() for key, value in tensors.items()})
        versions.append(receiver.version)
    return states, versions


def both(ranks: Collectives, receivers: Sequence[int], bucket: int, name: str) -> Any:
    channel = GroupChannel(ranks, receivers, bucket=bucket)
    trainers = [rank for rank in range(ranks.size) if rank not in receivers]
    if ranks.rank in receivers:
        return received(ranks, channel, trainers)
    return trained(ranks, channel, trainers, name)


@pytest.mark.parametrize("bucket", [10, 10**6])
@pytest.mark.parametrize("name", ["every layer a unit", "odd shapes", "dtypes"])
@pytest.mark.parametrize("receivers", [(1,), (3, 0)])
def test_every_version_is_the_model(receivers: Sequence[int], name: str, bucket: int) -> None:
    """Each receiver has the bits of each version, in packets cut into buckets of any size."""
    results = run_threads(4 if len(receivers) > 1 else 3, both, receivers, bucket, name)
    trainer = next(rank for rank in range(len(results)) if rank not in receivers)
    for rank in receivers:
        assert results[rank][1] == [1, 2, 3, 4]
        for found, wanted in zip(results[rank][0], results[trainer][0], strict=True):
            assert_equal(found, wanted)
    assert [each.is_dense for each in results[trainer][1]] == [True, False, False, False]


@pytest.mark.processes
def test_in_processes() -> None:
    """Over a process group of torch it is the same."""
    results = run_processes(3, both, (2,), 100, "every layer a unit")
    for found, wanted in zip(results[2][0], results[0][0], strict=True):
        assert_equal(found, wanted)


def test_bytes_and_slices() -> None:
    """A receiver gets its own slices, and nobody gets what is not for it: the bytes are those of the packets."""
    slicing = Slicing(2, {"*.weight": 1})

    def program(world: Collectives) -> Any:
        ledger = ByteLedger()
        ranks = RecordingCollectives(world, ledger)
        channel = GroupChannel(ranks, [2, 3], slicing=slicing)
        model_group = world.subgroup([0, 1])
        if model_group is None:
            tensors: dict[str, Tensor] = {}
            receiver = Receiver(tensors, channel)
            receiver.receive()
            receiver.receive()
            return tensors, ledger.total.payload_nbytes
        from torch import nn

        model = shard(nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4)), model_group)
        publisher = Publisher(model, channel)
        first = publisher.publish()
        change(model, 1)
        second = publisher.publish()
        return expected(model), ledger.total.payload_nbytes, first.nbytes + second.nbytes

    first, second, *receivers = run_threads(4, program)
    for part, (tensors, _) in enumerate(receivers):
        wanted = {n: v.chunk(2, 1)[part] if "weight" in n else v for n, v in first[0].items()}
        assert_equal(tensors, wanted)
    assert first[1] + second[1] == first[2] == sum(nbytes for _, nbytes in receivers)


def test_a_receiver_that_starts_again() -> None:
    """If the receivers do not have the version before, all values are sent."""

    def program(ranks: Collectives) -> list[bool]:
        channel = GroupChannel(ranks, [1])
        group = ranks.subgroup([0])
        dense = []
        if group is None:
            for _ in range(2):
                receiver = Receiver({}, channel)
                receiver.receive()
                receiver.receive()
            return []
        model = shard_case(CASES["one unit"], group)
        publisher = Publisher(model, channel)
        for step in range(4):
            dense.append(publisher.publish().is_dense)
            change(model, step)
        return dense

    assert run_threads(2, program)[0] == [True, False, True, False]


def test_errors_are_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a receiver cannot take the version, or a trainer fails, everybody raises, and nobody has the version."""

    def program(ranks: Collectives) -> None:
        channel = GroupChannel(ranks, [2, 3], bucket=10)
        group = ranks.subgroup([0, 1])
        if group is None:
            module = CASES["one unit"].build()
            receivers = [Receiver({}, channel), Receiver(module if ranks.rank == 3 else {}, channel)]
            receivers[0].receive()
            with pytest.raises(PublishError, match=r"rank 3: PublishError: .* cannot hold exactly"):
                # bf16 does not hold what is published in fp32
                module.bfloat16()
                receivers[1].receive()
            assert receivers[1].version == 0
            with pytest.raises(PublishError, match="rank 1: RuntimeError: broken"):
                receivers[0].receive()
            assert receivers[0].version == 1
            assert receivers[0].receive()
            with pytest.raises(PublishError, match="is a receiver, and cannot publish"):
                Publisher(CASES["one unit"].build(), channel).publish()
            return
        model = shard_case(CASES["one unit"], group)
        publisher = Publisher(model, channel)
        publisher.publish()
        with pytest.raises(PublishError, match="rank 3"):
            publisher.publish()
        frames = publisher._frames
        if ranks.rank == 1:

            def broken(wants_all: bool) -> Any:
                for number, frame in enumerate(frames(True)):
                    if number == 3:
                        raise RuntimeError("broken")
                    yield frame

            publisher._frames = broken  # type: ignore[method-assign]
        change(model, 1)
        with pytest.raises(PublishError, match="rank 1: RuntimeError: broken"):
            publisher.publish()
        publisher._frames = frames  # type: ignore[method-assign]
        publisher.publish()
        with pytest.raises(PublishError, match="is a trainer, and cannot receive"):
            Receiver({}, channel).receive()

    run_threads(4, program)


def test_arguments() -> None:
    """Receivers that are no ranks, all of the ranks, or too few for the slicing, are refused."""

    def program(ranks: Collectives) -> None:
        for receivers in ([], [0, 1], [5], [1, 1]):
            with pytest.raises(ValueError, match="expected some ranks of a group of 2"):
                GroupChannel(ranks, receivers)
        with pytest.raises(ValueError, match="expected a multiple of 2 receivers"):
            GroupChannel(ranks, [1], slicing=Slicing(2))

    run_threads(2, program)


def test_members_that_differ() -> None:
    """Members that name different receivers, or different numbers of parts, are told what each of them names."""

    def program(world: Collectives) -> None:
        with pytest.raises(ValueError, match=r"rank 2: .*receivers is \[2\] on ranks 0-1, \[1\] on rank 2"):
            GroupChannel(world, receivers=[1] if world.rank == 2 else [2])
        with pytest.raises(ValueError, match="rank 1: .*parts is 1 on ranks .*, 2 on rank 1"):
            GroupChannel(world, receivers=[1, 2], slicing=Slicing(1 + (world.rank == 1)))

    run_threads(3, program)
