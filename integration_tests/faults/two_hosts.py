"""Two hosts in one machine: two network namespaces that a virtual cable joins, with two ranks in each.

    unshare --user --map-root-user --net python -m integration_tests.faults.two_hosts FAULT

Ranks 0 and 1 are on the one host, 2 and 3 on the other. Each host shares memory, and gloo goes through the cable; each
shard has a copy on the other host. Prints what every rank said, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from integration_tests.faults.cable import Cable

__all__ = ["FAULTS", "main", "train"]

#: What happens to the cable after some steps.
FAULTS: Final = ("cut", "slow", "lossy")
#: A cable that is bad from the beginning: seconds of delay, and the fraction of the packets that is lost.
_BAD: Final = {"slow": (0.1, 0.0), "lossy": (0.0, 0.05)}
_WORLD_SIZE: Final = 4
_STEPS: Final = 12
#: The step at which the cable is cut.
_CUT: Final = 5
_NEAR, _FAR = "10.77.0.1", "10.77.0.2"
#: Seconds: the time limit of the process groups, and of everything.
_LIMIT, _LONGEST = 60.0, 150.0
#: Seconds between two looks at who else has written what it says.
_PAUSE: Final = 0.05


def main(fault: str) -> int:
    """Lay the cable, start the ranks, and print what they said."""
    other = subprocess.Popen(["unshare", "--net", "--uts", "sh", "-c", "hostname far && exec sleep 1000"])
    try:
        Cable(("cable0", "cable1"), *_BAD.get(fault, (0.0, 0.0))).lay()
        time.sleep(0.5)
        there = ["nsenter", f"--target={other.pid}", "--net", "--uts"]
        for command in (
            ["ip", "link", "set", "lo", "up"],
            ["ip", "link", "set", "cable1", "netns", str(other.pid)],
            ["ip", "address", "add", f"{_NEAR}/24", "dev", "cable0"],
            ["ip", "link", "set", "cable0", "up"],
            [*there, "ip", "link", "set", "lo", "up"],
            [*there, "ip", "address", "add", f"{_FAR}/24", "dev", "cable1"],
            [*there, "ip", "link", "set", "cable1", "up"],
        ):
            subprocess.run(command, check=True, capture_output=True)
        return _run(fault, there)
    finally:
        other.kill()
        other.wait()


def _run(fault: str, there: list[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        hosts = []
        for first, where, device in ((0, [], "cable0"), (2, there, "cable1")):
            environment = {
                **os.environ,
                "WORLD_SIZE": str(_WORLD_SIZE),
                "MASTER_ADDR": _NEAR,
                "MASTER_PORT": "29571",
                "GLOO_SOCKET_IFNAME": device,
                # The system asks every second, not every five.
                "FLATPARAM_RELAY_SILENCE": "1",
            }
            program = [sys.executable, "-m", "integration_tests.faults.two_hosts"]
            command = [*where, *program, "--host", str(first), fault, directory]
            hosts.append(subprocess.Popen(command, env=environment, start_new_session=True))
        deadline = time.monotonic() + _LONGEST
        for each in hosts:
            try:
                each.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
        said = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("rank-*"))]
        print(json.dumps({"said": said, "exits": [each.returncode for each in hosts]}))
    return 0


def _host(first: str, fault: str, directory: str) -> int:
    """One host's program: two ranks, forked once everything is imported; 0 if both end with 0."""
    import torch._dynamo  # noqa: F401  an optimizer imports it

    import flatparam.fully_sharded_data_parallel  # noqa: F401

    children = []
    for rank in (int(first), int(first) + 1):
        child = os.fork()
        if child == 0:
            os.environ["RANK"] = str(rank)
            _rank(fault, directory)
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children)


def _rank(fault: str, directory: str) -> None:
    """One rank's program."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=_LIMIT))
    facts = train(fault)
    Path(directory, f"rank-{facts['rank']}").write_text(json.dumps(facts))
    # This end is one without a word, which is a failure to a rank that still waits for its last collective.
    while len(list(Path(directory).glob("rank-*"))) < _WORLD_SIZE:
        time.sleep(_PAUSE)
    # What is left of the groups waits for nobody.
    os._exit(0)


def train(fault: str) -> dict[str, Any]:
    """Train on four ranks of torch's default group, wherever they are, and return what this one has to say."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from flatparam import FullyShardedDataParallel, ShardingStrategy
    from flatparam_comm import SharedMemoryCollectives, shared_memory

    rank = dist.get_rank()
    limit = timedelta(seconds=_LIMIT)
    rows = [dist.new_group(each, timeout=limit) for each in ([0, 1], [2, 3])]
    columns = [dist.new_group(each, timeout=limit) for each in ([0, 2], [1, 3])]
    facts: dict[str, Any] = {"rank": rank, "losses": [], "kind": "", "text": ""}
    try:
        near = shared_memory(rows[rank // 2])
        facts["shares"] = isinstance(near, SharedMemoryCollectives)
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
            (near, columns[rank % 2]),
            ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(_STEPS):
            if fault == "cut" and step == _CUT and rank == 0:
                subprocess.run(["ip", "link", "set", "cable0", "down"], check=True)
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            facts["losses"].append(loss.item())
    except Exception as error:
        facts.update(kind=type(error).__name__, text=str(error))
    return facts


if __name__ == "__main__":
    if sys.argv[1] == "--host":
        sys.exit(_host(*sys.argv[2:]))
    sys.exit(main(sys.argv[1]))
