"""kill -9 of the publisher and of the receiver at random calls: what is there is always one version, whole."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import torch
from torch import Tensor, nn

from flatparam_comm import Collectives
from flatparam_comm.testing import run_threads
from flatparam_publish import Mailbox, Publisher, Receiver
from flatparam_state.model_tensors import model_tensors
from flatparam_state.ranks import topology_of

from .beneath import KillAtCall, end_of, fork, shard
from .sample import digest

KILLS = int(os.environ.get("FLATPARAM_PUBLISH_KILLS", "5"))
"""Of the publisher, and as many of the receiver."""

CALLS_OF_A_VERSION = 10_000
"""Roughly, of publishing one on two ranks."""
ENOUGH = 10**6
"""Versions: a kill comes long before."""


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 8), nn.Linear(8, 3))


def fill(model: nn.Module, version: int) -> None:
    """Give `model` the values of a version, about a tenth of which differ from the version before."""
    with torch.no_grad():
        for tensor in model_tensors(model):
            at = torch.arange(tensor.span.start, tensor.span.stop)
            values = 1 + 2.0**-7 * ((version + at * 7919) // 10 % 64)
            tensor.local.copy_(values.view(tensor.local.shape))


def digest_of(version: int) -> str:
    """The digest of what a receiver has of a version."""
    model = made()
    fill(model, version)
    return digest({name: value.bfloat16() for name, value in model.state_dict().items()})


def publish_on(ranks: Collectives, folder: Path, versions: int) -> None:
    """Publish one version after the other, each with its own values, from the newest in the folder on."""
    model = shard(made(), ranks, ("0", "1", "2"))
    box = Mailbox(folder)
    publisher = Publisher(model, box, dtype=torch.bfloat16)
    found = box.held(topology_of(model))
    number = found.number if found else 0
    for version in range(number + 1, number + 1 + versions):
        fill(model, version)
        assert publisher.publish().version == version


def test_the_publisher_is_killed(tmp_path: Path) -> None:
    """A receiver that goes on all the time has whole versions only, in their order, also after the next publisher."""
    generator = random.Random(5)
    received: dict[str, Tensor] = {}
    receiver = Receiver(received, Mailbox(tmp_path))
    run_threads(2, publish_on, tmp_path, 2)
    seen = 0
    for number in range(KILLS):
        world_size = 1 + number % 2
        kill = KillAtCall(generator.randrange(1, 6 * CALLS_OF_A_VERSION))

        def work(kill: KillAtCall = kill, world_size: int = world_size) -> None:
            kill.start()
            run_threads(world_size, publish_on, tmp_path, ENOUGH)

        pid = fork(work)
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if receiver.receive():
                assert receiver.version > seen
                seen = receiver.version
                assert digest(received) == digest_of(seen)
        assert end_of(pid) == -signal.SIGKILL
        receiver.receive()
        assert receiver.version >= seen
        newcomer: dict[str, Tensor] = {}
        late = Receiver(newcomer, Mailbox(tmp_path))
        late.receive()
        assert late.version_id == receiver.version_id
        assert digest(newcomer) == digest(received) == digest_of(receiver.version)
    assert receiver.version > 2


def test_the_receiver_is_killed(tmp_path: Path) -> None:
    """Each receiver that is started anew has the newest version, and reports whole versions only, until it is killed."""
    generator = random.Random(6)
    folder = tmp_path / "box"
    run_threads(2, publish_on, folder, 1)
    stop = fork(lambda: run_threads(2, publish_on, folder, ENOUGH) and None)
    reports = 0
    try:
        for number in range(KILLS):
            log = tmp_path / f"log-{number}"
            kill = KillAtCall(generator.randrange(1, 6 * CALLS_OF_A_VERSION))

            def work(kill: KillAtCall = kill, log: Path = log) -> None:
                received: dict[str, Tensor] = {}
                receiver = Receiver(received, Mailbox(folder))
                kill.start()
                with log.open("w", buffering=1, encoding="utf-8") as file:
                    while True:
                        if receiver.receive():
                            file.write(f"{receiver.version} {digest(received)}\n")

            assert end_of(fork(work)) == -signal.SIGKILL
            lines = [line.split() for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if "\n" in line]
            versions = [int(version) for version, _ in lines]
            assert versions == sorted(set(versions))
            assert all(found == digest_of(int(version)) for version, found in lines)
            reports += len(lines)
    finally:
        os.kill(stop, signal.SIGKILL)
        end_of(stop)
    assert reports
