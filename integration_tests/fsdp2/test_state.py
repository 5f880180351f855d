"""State that torch's FSDP2 saved loads into flatparam's `fully_shard`, and the other way round."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import flatparam
from flatparam.checkpoint import state_dict as our_functions
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from flatparam_core import FlatParamError
from flatparam_state import Checkpointer

from .both import Side, adamw, full, seeded, state_of, trained

pytestmark = pytest.mark.processes


def functions_of(side: Side) -> Any:
    """The functions for distributed state that belong to the library."""
    return side.states


def saved_by(side: Side, directory: str) -> Any:
    """Train, save with `torch.distributed.checkpoint`, and train on."""
    model = side.shard(seeded())
    optimizer = adamw(model)
    trained(side, model, optimizer, steps=2)
    of_model, of_optimizer = functions_of(side).get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory)
    return trained(side, model, optimizer, steps=2, first=2), state_of(model)


def loaded_by(side: Side, directory: str) -> Any:
    """Make a different model, load what was saved, and train on."""
    torch.manual_seed(5)
    model = side.shard(type(seeded())())
    optimizer = adamw(model)
    functions = functions_of(side)
    of_model, of_optimizer = functions.get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=directory)
    functions.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return trained(side, model, optimizer, steps=2, first=2), state_of(model)


def crossing(ranks: Collectives, directory: str) -> list[Any]:
    theirs, ours, door = (Side(name, ranks.rank) for name in ("torch", "ours", "door"))
    return [
        saved_by(theirs, f"{directory}/theirs"),
        saved_by(ours, f"{directory}/ours"),
        saved_by(door, f"{directory}/door"),
        *(loaded_by(side, f"{directory}/theirs") for side in (ours, door)),
        *(loaded_by(side, f"{directory}/ours") for side in (theirs, ours, door)),
        *(loaded_by(side, f"{directory}/door") for side in (theirs, ours)),
    ]


def assert_equal_runs(found: Any, expected: Any) -> None:
    """Demand the same losses and the same state."""
    assert all(map(torch.equal, found[0], expected[0]))
    assert list(found[1]) == list(expected[1])
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())


def test_a_checkpoint_crosses_over() -> None:
    """With the functions of `torch.distributed.checkpoint`, a run saved by one library goes on in the other, to the bit."""
    with tempfile.TemporaryDirectory() as directory:
        for uninterrupted, *others in run_processes(2, crossing, directory):
            for other in others:
                assert_equal_runs(other, uninterrupted)


def forms(ranks: Collectives) -> Any:
    side = Side("ours", ranks.rank)
    model, expected = side.shard(seeded()), seeded().state_dict()
    found: dict[str, Any] = {}
    sharded = model.state_dict()
    found["sharded"] = {name: full(value) for name, value in sharded.items()}
    found["versions"] = sharded._metadata == expected._metadata
    options = our_functions.StateDictOptions(full_state_dict=True)
    found["full"] = our_functions.get_model_state_dict(model, options=options)
    other: Any = side.shard(type(seeded())())
    for state in (sharded, found["full"], expected):
        torch.manual_seed(9)
        other.apply(lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None)
        assert not torch.equal(full(other.state_dict()["head.weight"]), expected["head.weight"])
        other.load_state_dict(state)
        assert all(torch.equal(value, expected[name]) for name, value in state_of(other).items())
    only_first = our_functions.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    torch.manual_seed(3)
    last: Any = side.shard(type(seeded())())
    our_functions.set_model_state_dict(last, expected if ranks.rank == 0 else {}, options=only_first)
    found["sent"] = state_of(last)
    on_first = our_functions.StateDictOptions(full_state_dict=True, cpu_offload=True)
    found["on first"] = our_functions.get_model_state_dict(model, options=on_first)
    return found, expected


def test_forms_of_a_models_state() -> None:
    """`state_dict()` is sharded, with the names of the model; any form loads; a full state may be on rank 0 only."""
    for rank, (found, expected) in enumerate(run_processes(2, forms)):
        assert found.pop("versions")
        on_first = found.pop("on first")
        assert list(on_first) == (list(expected) if rank == 0 else [])
        for how, state in found.items():
            assert list(state) == list(expected), how
            assert all(torch.equal(state[name], value) for name, value in expected.items()), how


def misfits(ranks: Collectives) -> list[str]:
    side, told = Side("ours", ranks.rank), []
    model = side.shard(seeded())
    before = state_of(model)
    state: dict[str, Tensor] = dict(seeded().state_dict())
    state["head.weight"] = torch.zeros(3, 3) if ranks.rank == 1 else torch.zeros_like(state["head.weight"])
    state["norm.weight"] = torch.full_like(state["norm.weight"], 7.0)
    attempts: list[Any] = [lambda: model.load_state_dict(state)]
    root = nn.Sequential(nn.Linear(3, 3))
    side.fully_shard(root[0])
    attempts.append(lambda: root.load_state_dict(nn.Sequential(nn.Linear(3, 3)).state_dict()))
    given_away = side.fully_shard(nn.Linear(3, 3))
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    attempts.append(lambda: get_model_state_dict(model))
    attempts.append(lambda: get_optimizer_state_dict(model, adamw(model)))
    attempts.append(lambda: nn.parallel.DistributedDataParallel(model))
    attempts.append(lambda: Side("torch", ranks.rank).fully_shard(nn.Sequential(given_away)))
    theirs = nn.Sequential(Side("torch", ranks.rank).fully_shard(nn.Linear(2, 2)))
    attempts.append(lambda: side.fully_shard(theirs))
    attempts.append(lambda: torch.nn.utils.get_total_norm([p.grad for p in root.parameters() if p.grad is not None]))
    root(torch.ones(1, 3)).sum().backward()
    for attempt in attempts:
        try:
            attempt()
        except (RuntimeError, FlatParamError) as error:
            told.append(str(error))
        else:
            told.append("nothing")
        dist.barrier()
    assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
    our_functions.set_model_state_dict(
        root, {name: torch.ones_like(v) for name, v in nn.Sequential(nn.Linear(3, 3)).state_dict().items()}
    )
    assert all(full(value).eq(1).all() for value in root.state_dict().values())
    return told


def test_refusals() -> None:
    """What would be wrong in silence is refused on every rank, by the name of what to call; no parameter changes."""
    expected = [
        "head.weight",
        "set_model_state_dict(model, state)",
        "flatparam.checkpoint.state_dict",
        "flatparam.checkpoint.state_dict",
        "DistributedDataParallel was given a model that flatparam shards",
        "fully_shard was given a model that flatparam shards already",
        "is sharded by torch's FSDP already",
        "call flatparam.clip_grad_norm_",
    ]
    for told in run_processes(2, misfits):
        for text, part in zip(told, expected, strict=True):
            assert part in text


def with_our_checkpoints(ranks: Collectives, directory: str, name: str) -> Any:
    side = Side(name, ranks.rank)
    model = side.shard(seeded())
    optimizer = adamw(model)
    trained(side, model, optimizer, steps=2)
    Checkpointer(directory, model, optimizer).save(2)
    expected = trained(side, model, optimizer, steps=2, first=2), state_of(model)
    torch.manual_seed(5)
    again = side.shard(type(seeded())())
    other = adamw(again)
    Checkpointer(directory, again, other).load()
    wrapped = flatparam.FullyShardedDataParallel(type(seeded())(), use_orig_params=True)
    third = adamw(wrapped)
    Checkpointer(directory, wrapped, third).load()
    return [
        expected,
        (trained(side, again, other, steps=2, first=2), state_of(again)),
        (trained(side, wrapped, third, steps=2, first=2), dict(wrapped.state_dict())),
    ]


@pytest.mark.parametrize("name", ["ours", "door"])
def test_our_checkpoints(name: str) -> None:
    """`Checkpointer` saves and resumes a model that is sharded in place; the wrapper reads the same checkpoint."""
    with tempfile.TemporaryDirectory() as directory:
        for expected, *others in run_processes(2, with_our_checkpoints, str(Path(directory) / "run"), name):
            for other in others:
                assert_equal_runs(other, expected)
