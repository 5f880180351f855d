"""FSDP1's names become ours, everywhere that programs take them from, and torch's again."""

from __future__ import annotations

import importlib
import inspect
import logging
import multiprocessing.spawn
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as checkpointing
import torch.distributed.checkpoint.state_dict as state_functions
import torch.distributed.fsdp as package
import torch.distributed.fsdp.fully_sharded_data_parallel as home
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.fsdp.wrap
from each_row import each_row
from torch import Tensor, nn

import flatparam
from flatparam_clients.names import FSDP as TORCHS
from flatparam_clients.names import fsdp1_names, lacking
from flatparam_comm import Collectives, SingleCollectives
from packages.flatparam.tests.models import mlp, seeded
from packages.flatparam.tests.worlds import on_ranks

THEIRS = package.FullyShardedDataParallel
OURS = flatparam.FullyShardedDataParallel
ALONE = SingleCollectives()

pytestmark = pytest.mark.usefixtures("leftovers_do_not_count", "names_are_in_place")


@pytest.fixture
def installed() -> Iterator[flatparam.Installation]:
    """FSDP1's names are ours inside the test."""
    with flatparam.install() as installation:
        yield installation
    assert package.FullyShardedDataParallel is THEIRS


def everything() -> dict[tuple[str, str], int]:
    """What every attribute of every module and of torch's class is now; clocks and counters, which run on, are left out."""
    modules = {name: module for name, module in sys.modules.items() if isinstance(module, types.ModuleType)}
    found = {
        (name, attr): id(value)
        for name, module in modules.items()
        for attr, value in vars(module).items()
        if not isinstance(value, int | float)
    }
    return {**found, **{(str(THEIRS), attr): id(value) for attr, value in vars(THEIRS).items()}}


def test_we_lack_no_name() -> None:
    """Of FSDP1's public names in this torch, and of the private ones that programs reach for, we lack none."""
    assert lacking() == []
    assert {name.name for name in fsdp1_names()} >= {
        "FullyShardedDataParallel",
        "StateDictType",
        "FlatParameter",
        "ShardedGradScaler",
        "size_based_auto_wrap_policy",
        "_or_policy",
        "set_state_dict",
    }


def test_a_name_that_we_lack_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that torch adds to FSDP1's, and we do not have, would be in the list."""
    monkeypatch.setattr(torch.distributed.fsdp.api, "__all__", ["ShardingStrategy", "Newer"])
    assert lacking() == [f"{TORCHS}.api.Newer"]


def test_no_name_of_fsdp2_is_taken() -> None:
    """FSDP2's names, which share torch's package, are not FSDP1's."""
    names = {name.name for name in fsdp1_names()}
    assert not names & {
        "fully_shard",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "UnshardHandle",
        "CPUOffloadPolicy",
    }


def test_each_name_is_ours(installed: flatparam.Installation) -> None:
    """Each name of FSDP1's, where programs take it from, is the object of ours."""
    names = fsdp1_names()
    assert [str(each) for each in names if inspect.unwrap(_found(each)) is not inspect.unwrap(each.ours)] == []
    assert len(names) > 60


def _found(name: Any) -> Any:
    return getattr(importlib.import_module(name.module), name.name)


def test_installing_needs_no_process_group() -> None:
    """Nothing is started, and no random number is drawn."""
    seed = torch.get_rng_state()
    with flatparam.install():
        assert not torch.distributed.is_initialized()
    assert torch.equal(seed, torch.get_rng_state())


def test_uninstalling_restores_every_attribute() -> None:
    """After the context every attribute of every module is the object that it was."""
    flatparam.install()
    flatparam.uninstall()
    before = everything()
    flatparam.install()
    assert everything() != before
    flatparam.uninstall()
    assert everything() == before
    flatparam.uninstall()
    assert everything() == before


def test_installing_twice() -> None:
    """A second call changes nothing, and its context does not undo the first one's."""
    try:
        assert "attributes" in repr(flatparam.install())
        before = everything()
        with flatparam.install() as second:
            assert everything() == before
            assert repr(second) == "Installation(before)"
        assert package.FullyShardedDataParallel is OURS
    finally:
        flatparam.uninstall()
    assert package.FullyShardedDataParallel is THEIRS


def test_installing_in_threads() -> None:
    """Of threads that install at the same time, each returns when everything is in place; one undoes it."""
    seen: list[Any] = []
    start = threading.Barrier(4)

    def install() -> None:
        start.wait()
        flatparam.install()
        seen.append(package.FullyShardedDataParallel)

    threads = [threading.Thread(target=install) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flatparam.uninstall()
    assert seen == [OURS] * 4
    assert package.FullyShardedDataParallel is THEIRS


def test_an_exception_undoes_it() -> None:
    """The context ends with an exception, too."""
    with pytest.raises(ValueError, match="mine"), flatparam.install():
        raise ValueError("mine")
    assert package.FullyShardedDataParallel is THEIRS


def test_what_somebody_else_patched_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program has put in a name's place since is left there."""
    monkeypatch.setattr(package, "CPUOffload", package.CPUOffload)
    with flatparam.install():
        package.CPUOffload = mine = type("Mine", (), {})
    assert package.CPUOffload is mine


def test_a_failure_halfway_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one attribute cannot be patched, none is."""
    monkeypatch.setattr("flatparam_clients.installing.patch_of_children", lambda install: 1 / 0)
    before = everything()
    with pytest.raises(ZeroDivisionError):
        flatparam.install()
    assert everything() == before


def test_modules_that_imported_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that took the names before, under whatever names, has ours; what else it holds stays."""
    early = types.ModuleType("a_client")
    exec("from torch.distributed.fsdp import *; from torch.distributed import fsdp as F", vars(early))
    exec("from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType as T", vars(early))
    client: Any = early
    monkeypatch.setitem(sys.modules, "a_client", early)
    monkeypatch.setitem(sys.modules, "no_module", 3)
    with flatparam.install():
        assert client.FSDP is client.FullyShardedDataParallel is client.F.FullyShardedDataParallel is OURS
        assert client.T is flatparam.StateDictType
        assert client.fully_shard is package.fully_shard
        assert client.FSDPModule is package.FSDPModule is flatparam.FSDPModule
        model = OURS(nn.Linear(2, 2), ALONE)
        assert isinstance(model, client.FSDP)
        assert type(model) is client.FSDP
    assert client.FSDP is THEIRS


def test_torchs_own_implementation_is_left_alone(installed: flatparam.Installation) -> None:
    """The compiler's modules, and those inside FSDP1 and FSDP2, keep what they hold."""
    ours = {id(name.ours) for name in fsdp1_names() if not isinstance(name.ours, (str, int))}
    for name, module in list(sys.modules.items()):
        if name.startswith((f"{TORCHS}._fully_shard", "torch._dynamo", "torch.distributed._composable")):
            assert [attr for attr, value in vars(module).items() if id(value) in ours] == [], name
    assert torch.distributed.fsdp is package
    assert sys.modules[TORCHS] is package


def test_the_log_says_what_was_patched(caplog: pytest.LogCaptureFixture) -> None:
    """One line lists the names, by module; a second call is silent."""
    with caplog.at_level(logging.INFO, logger="flatparam"), flatparam.install():
        flatparam.install()
    (record,) = caplog.records
    assert "torch.distributed.fsdp.api: BackwardPrefetch, CPUOffload," in record.getMessage()
    assert "\n" not in record.getMessage()


# Holders that no walk over modules finds


def test_torchs_class_held_elsewhere_makes_ours(installed: flatparam.Installation) -> None:
    """Whoever holds torch's class in a closure gets a wrapper of ours from it, and its static methods see ours."""
    model = THEIRS(seeded(mlp), ALONE, auto_wrap_policy=flatparam.wrap.ModuleWrapPolicy({nn.Linear}))
    assert type(model) is OURS
    assert THEIRS.fsdp_modules(model) == OURS.fsdp_modules(model)
    with THEIRS.summon_full_params(model):
        assert sorted(model.state_dict()) == sorted(seeded(mlp).state_dict())
    with THEIRS.state_dict_type(model, flatparam.StateDictType.SHARDED_STATE_DICT):
        assert OURS.get_state_dict_type(model).state_dict_type.name == "SHARDED_STATE_DICT"


class Early(home.FullyShardedDataParallel):
    """A subclass of torch's class that was made before."""


def test_a_subclass_of_torchs_class(installed: flatparam.Installation) -> None:
    """One that was made before is refused by name; one that is made after is one of ours, and trains."""
    with pytest.raises(RuntimeError, match=r"Early is a subclass of torch's FSDP1.*before the module"):
        Early(nn.Linear(2, 2), ALONE)

    class Late(package.FullyShardedDataParallel):
        pass

    def rank(world: Collectives) -> None:
        model = Late(seeded(mlp), auto_wrap_policy=package.wrap.ModuleWrapPolicy({nn.Linear}))
        model(torch.ones(2, 3)).sum().backward()
        assert all(type(wrapper) is Late for wrapper in package.FullyShardedDataParallel.fsdp_modules(model))
        assert isinstance(model, home.FullyShardedDataParallel)

    on_ranks(2, rank)


def test_classes_are_pickled_as_ours(installed: flatparam.Installation) -> None:
    """What programs pickle under torch's names is found again, installed or not."""
    kept = pickle.dumps(
        [package.FullyShardedDataParallel, package.StateDictType.SHARDED_STATE_DICT, package.CPUOffload(True)]
    )
    flatparam.uninstall()
    kind, form, offload = pickle.loads(kept)
    assert kind is OURS
    assert form is flatparam.StateDictType.SHARDED_STATE_DICT
    assert offload == flatparam.CPUOffload(True)


# Too late


def test_after_torch_has_wrapped(torch_world: None) -> None:
    """While a module that torch's FSDP1 has wrapped is alive it is too late, and nothing is changed; then it is not."""
    model = THEIRS(nn.Linear(2, 2), device_id=torch.device("cpu"))
    before = everything()
    with pytest.raises(RuntimeError, match=r"torch's FSDP1 has sharded, found 1, such as Linear; call"):
        flatparam.install()
    assert everything() == before
    del model
    with flatparam.install():
        assert package.FullyShardedDataParallel is OURS


def test_after_accelerate_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If accelerate's state exists it is too late, and nothing is changed; an empty one is none."""
    state: dict[str, Any] = {}
    module = types.ModuleType("accelerate.state")
    module.AcceleratorState = type("AcceleratorState", (), {"_shared_state": state})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate.state", module)
    with flatparam.install():
        pass
    state["distributed_type"] = "FSDP"
    with pytest.raises(RuntimeError, match=r"found one.*before Accelerator\(\)\. Nothing was changed"):
        flatparam.install()
    assert package.FullyShardedDataParallel is THEIRS


# Torch's own users of the names


def test_torchs_functions_for_state(installed: flatparam.Installation) -> None:
    """Torch's functions know our wrappers; of a module without them they do what they did."""

    def rank(world: Collectives) -> None:
        model = OURS(seeded(mlp), auto_wrap_policy=flatparam.wrap.ModuleWrapPolicy({nn.Linear}))
        options = state_functions.StateDictOptions(full_state_dict=True)
        state = state_functions.get_model_state_dict(model, options=options)
        expected = seeded(mlp).state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], expected[name]) for name in expected)

    on_ranks(2, rank)
    plain = nn.Linear(2, 2)
    assert list(state_functions.get_model_state_dict(plain)) == ["weight", "bias"]
    optimizer = torch.optim.SGD(plain.parameters())
    model_state, _ = state_functions.get_state_dict(plain, optimizer)
    assert list(model_state) == ["weight", "bias"]


def test_activation_checkpointing_takes_policies(installed: flatparam.Installation) -> None:
    """Torch's `apply_activation_checkpointing` takes our policies, and those that were made of torch's classes."""
    for policy in (
        package.wrap.ModuleWrapPolicy({nn.Linear}),
        package.wrap.CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        EARLY_POLICY,
    ):
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        checkpointing.apply_activation_checkpointing(model, auto_wrap_policy=policy)
        assert [type(child).__name__ for child in model] == ["CheckpointWrapper", "ReLU"]


EARLY_POLICY: Any = package.wrap.CustomPolicy(lambda module: isinstance(module, nn.Linear))
EARLY = {name: getattr(package, name) for name in package.__all__}


def test_new_processes_install_it() -> None:
    """What `multiprocessing` sends a process that it starts afresh installs it there; after the end it sends nothing."""
    with flatparam.install():
        sent = multiprocessing.spawn.get_preparation_data("rank 1")
    assert sorted(sent) == sorted([*multiprocessing.spawn.get_preparation_data("rank 1"), "flatparam"])
    for_child = pickle.dumps(sent["flatparam"])
    try:
        pickle.loads(for_child)
        assert package.FullyShardedDataParallel is OURS
    finally:
        flatparam.uninstall()


# Torch's objects are taken, installed or not


@each_row("when", ["never", "before"])
def test_torchs_objects_are_taken(when: str) -> None:
    """Enums, configurations, policies and settings of torch's classes mean what ours mean, installed or not."""
    if when == "before":
        flatparam.install()

    def rank(world: Collectives) -> Any:
        policy = EARLY_POLICY
        model = OURS(
            seeded(mlp),
            sharding_strategy=EARLY["ShardingStrategy"].SHARD_GRAD_OP,
            backward_prefetch=EARLY["BackwardPrefetch"].BACKWARD_POST,
            mixed_precision=EARLY["MixedPrecision"](param_dtype=torch.bfloat16),
            cpu_offload=EARLY["CPUOffload"](False),
            auto_wrap_policy=policy,
        )
        assert len(OURS.fsdp_modules(model)) > 1
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with OURS.state_dict_type(
            model,
            EARLY["StateDictType"].FULL_STATE_DICT,
            EARLY["FullStateDictConfig"](offload_to_cpu=True, rank0_only=True),
            EARLY["FullOptimStateDictConfig"](rank0_only=True),
        ):
            state, optim = model.state_dict(), OURS.optim_state_dict(model, optimizer)
        assert model.sharding_strategy == EARLY["ShardingStrategy"].SHARD_GRAD_OP
        assert model.backward_prefetch == EARLY["BackwardPrefetch"].BACKWARD_POST
        return len(state), len(optim)

    try:
        (first, second) = on_ranks(2, rank)
    finally:
        flatparam.uninstall()
    assert first[0] == len(seeded(mlp).state_dict())
    assert second[0] == 0


@each_row("kind", ["ShardingStrategy", "BackwardPrefetch", "StateDictType", "OptimStateKeyType"])
def test_members_equal_torchs(kind: str) -> None:
    """A member equals torch's of the same name from both sides, also as a key; others differ."""
    ours, theirs = getattr(flatparam, kind), EARLY[kind]
    for mine in ours:
        assert mine == theirs[mine.name]
        assert theirs[mine.name] == mine
        assert {theirs[mine.name]: 1}[mine] == 1
        assert (str(mine), repr(mine), mine.value) == tuple(
            f(theirs[mine.name]) for f in (str, repr, lambda m: m.value)
        )
        assert [other for other in theirs if other == mine] == [theirs[mine.name]]
        assert mine != mine.name
    assert flatparam.BackwardPrefetch.BACKWARD_PRE != flatparam.ShardingStrategy.FULL_SHARD


# Without installing


def test_other_wrappers_refuse_ours(torch_world: None) -> None:
    """DDP, torch's FSDP1 and `fully_shard` refuse a model of ours by name; the first two leave it as it was.

    `fully_shard` has put a parameter of its own in the flat one's place by then, which the next pass refuses.
    """
    model = OURS(nn.Sequential(nn.Linear(2, 2)), ALONE, auto_wrap_policy=flatparam.wrap.ModuleWrapPolicy({nn.Linear}))
    before: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"rank 0: DistributedDataParallel was given.*flatparam\.install\(\) before"):
        nn.parallel.DistributedDataParallel(model)
    refused = r"torch's FSDP1 or fully_shard was given.*flatparam\.install\(\) before"
    with pytest.raises(RuntimeError, match=refused):
        THEIRS(model, device_id=torch.device("cpu"))
    model(torch.ones(1, 2)).sum().backward()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match=refused):
        package.fully_shard(model)
    with pytest.raises(RuntimeError, match="the flat parameter '_flat_param'.*was replaced by another object"):
        model(torch.ones(1, 2))
    assert hasattr(model, "_ddp_params_and_buffers_to_ignore")
