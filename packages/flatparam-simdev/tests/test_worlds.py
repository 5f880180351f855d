"""Worlds of processes with a device."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist

from flatparam_comm import RankError
from flatparam_simdev import CannotBuild, build
from flatparam_simdev.worlds import World, run_on_device

from .ranks import on_simulated

pytestmark = pytest.mark.processes


@attrs.frozen
class Parcel:
    """A class of this very module, which a rank must find to unpickle it."""

    number: int


def _summed(world: World, parcel: Parcel) -> tuple[Parcel, list[float], list[float], str]:
    on_device = torch.full((2,), float(world.rank + 1), device=world.device)
    dist.all_reduce(on_device, group=world.group)
    on_cpu = torch.full((2,), float(world.rank + 1))
    dist.all_reduce(on_cpu, group=world.cpu_group)
    return Parcel(parcel.number + world.rank), on_device.tolist(), on_cpu.tolist(), world.device.type


def test_ranks_have_a_device_and_two_groups() -> None:
    """Each has the device, a group over it and one over gloo; arguments and results are pickled, of this module too."""
    assert not hasattr(torch, "simulated")
    results = on_simulated(2, _summed, Parcel(5))
    assert results == [(Parcel(5 + rank), [3.0, 3.0], [3.0, 3.0], "simulated") for rank in range(2)]
    assert not hasattr(torch, "simulated")  # the process that runs the tests has none


def _fails(world: World) -> None:
    raise KeyError(f"rank {world.rank} of {world.size}")


def test_a_rank_that_fails_is_named() -> None:
    """Its exception comes out as in any world of processes."""
    with pytest.raises(RankError, match="failed with KeyError: 'rank 0 of 1'"):
        on_simulated(1, _fails)


def test_no_world_without_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device cannot be compiled, no process is started, and the error says why."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotBuild, match=r"needs g\+\+"):
        run_on_device(1, _fails)
