"""Weights for generators: a fine-tuning run of a GPT, receivers beside the wrapper and fully_shard, the tool's parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pages import between
from publishing import costs
from publishing.loop import Loop, run_loop
from publishing.syncs import synced
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flatparam import (
    FullyShardedDataParallel,
    GroupChannel,
    Mailbox,
    Publisher,
    Receiver,
    ShardedEMA,
    ShardingStrategy,
    fully_shard,
    offload,
    onload,
    publish,
)
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, process_group_of
from flatparam_comm.testing import run_processes, run_threads


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module) -> dict[str, Tensor]:
    """All full tensors, on every rank."""
    found: dict[str, Tensor] = {}
    publish(model, found.__setitem__, every_rank=True)
    return found


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_fine_tuning_run_of_a_gpt() -> None:
    """On two ranks, at each of some versions, the receiver's sha256 is that of all full tensors."""
    found = synced("tiny", 6, 1e-6)
    assert found.equal == found.versions == 6
    assert found.nbytes < found.dense_nbytes


@pytest.mark.filterwarnings("ignore:NO_SHARD is deprecated:FutureWarning")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_while_training(strategy: str, use_orig_params: bool, tmp_path: Path) -> None:
    """The wrapper's model is published between steps, offloaded, and with its averages; it trains as if nothing was."""

    def program(world: Collectives, publishes: bool) -> dict[str, Tensor]:
        model = FullyShardedDataParallel(
            make(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
            sharding_strategy=ShardingStrategy[strategy],
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        ema = ShardedEMA(model, 0.5)
        publisher = Publisher(model, Mailbox(tmp_path))
        tensors: dict[str, Tensor] = {}
        receiver = Receiver(tensors, Mailbox(tmp_path))
        for number in range(4):
            step(model, optimizer, number)
            ema.update()
            if not publishes:
                continue
            publisher.publish()
            receiver.receive()
            assert_equal(tensors, model.state_dict())
            with ema.applied(model):
                assert_equal(full(model), model.state_dict())
                publisher.publish()
                receiver.receive()
                assert_equal(tensors, model.state_dict())
            if number == 2:
                offload(model, folder=tmp_path.parent, optimizer=optimizer)
                publisher.publish()
                receiver.receive()
                onload(model, optimizer=optimizer)
                assert_equal(tensors, model.state_dict())
        return full(model)

    with_them, without = (run_threads(2, program, publishes)[0] for publishes in (True, False))
    assert_equal(with_them, without)


def in_place(world: Collectives, folder: Path) -> tuple[Any, Any]:
    """Publish a model of `fully_shard`, over gloo, to a process that is a rank, and through a folder."""
    channel = GroupChannel(world, [2])
    trainers = world.subgroup([0, 1])
    if trainers is None:
        tensors: dict[str, Tensor] = {}
        receiver = Receiver(tensors, channel)
        for _ in range(3):
            receiver.receive()
        return tensors, None
    model = make()
    mesh = DeviceMesh.from_group(process_group_of(trainers), "cpu")
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    publishers = Publisher(model, channel), Publisher(model, Mailbox(folder))
    for number in range(3):
        step(model, optimizer, number)
        for publisher in publishers:
            publisher.publish()
    beside: dict[str, Tensor] = {}
    Receiver(beside, Mailbox(folder)).receive()
    return beside, full(model)


@pytest.mark.processes
def test_in_processes(tmp_path: Path) -> None:
    """A model of `fully_shard` in processes is received over their group and through a folder, bit for bit."""
    first, second, receiver = run_processes(3, in_place, tmp_path)
    for found in (first[0], second[0], receiver[0]):
        assert_equal(found, first[1])


def test_encodings_are_measured() -> None:
    """The tool's table has a row for each learning rate, and what is sent is what its first encoding gives."""
    (row,) = costs.measured("tiny", 1, 2, [1e-6])
    assert len(row.times) == len(costs.ENCODINGS)
    assert row.times[0] > row.times[1]
    assert "| 1e-06 |" in costs.table([row])
    page = costs.PAGE.read_text(encoding="utf-8")
    assert "new" in between(page, costs.PART, "new")


@pytest.mark.processes
@pytest.mark.long
def test_the_loop() -> None:
    """A trainer and a generator: every version is published and used, and the generator answers all the time."""
    found = run_loop(Loop(rounds=4, pretraining=1))
    assert found.syncs == 5
    assert found.versions_answered_with >= 4
    assert found.answers >= found.versions_answered_with
    assert found.nbytes < found.dense_nbytes
