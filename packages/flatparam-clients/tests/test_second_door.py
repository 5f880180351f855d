"""`install()` at FSDP2's door: the names of `fully_shard`, and what its parameters are; the numbers are elsewhere.

`integration_tests/fsdp2` runs programs with torch's function and with ours, and demands the same bits.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as package
from each_row import each_row
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import flatparam
from flatparam_clients.second_door.faces import ShardedParameter
from flatparam_comm import Collectives
from flatparam_core import FlatParamError
from flatparam_runtime import unit_of
from flatparam_simdev.worlds import run_processes

#: In a list, where `install()` does not find it.
THEIRS = [package.fully_shard]


def test_programs_find_ours(torch_world: None) -> None:
    """In each place that they take the names from, early imports too; the policies stay torch's, and all is undone."""
    early = ModuleType("early")
    exec("from torch.distributed.fsdp import fully_shard, FSDPModule as M, MixedPrecisionPolicy", vars(early))
    sys.modules["early"] = early
    theirs = dict(vars(early))
    try:
        with flatparam.install():
            from torch.distributed._composable.fsdp import fully_shard as composable

            assert package.fully_shard is composable is vars(early)["fully_shard"] is not THEIRS[0]
            assert package.FSDPModule is vars(early)["M"] is flatparam.FSDPModule
            assert package.UnshardHandle is flatparam.UnshardHandle
            assert vars(early)["MixedPrecisionPolicy"] is theirs["MixedPrecisionPolicy"]
            module = package.fully_shard(nn.Linear(2, 2))
            assert isinstance(module, package.FSDPModule)
            assert isinstance(module, nn.Linear)
            package.share_comm_ctx([module])
            with pytest.raises(ValueError, match="expected sharded modules, found a Linear"):
                package.share_comm_ctx([nn.Linear(2, 2)])
        assert package.fully_shard is THEIRS[0]
        assert dict(vars(early)) == theirs
    finally:
        del sys.modules["early"]


def test_every_method_of_fsdp2_is_there(torch_world: None) -> None:
    """What tunes torch's collectives has no effect because it is so anyway, or is refused by name with the reason."""
    theirs = [name for name in vars(package.FSDPModule) if not name.startswith("_")]
    with flatparam.install():
        module: Any = package.fully_shard(nn.Linear(2, 2))
        assert [name for name in theirs if not hasattr(module, name)] == []
        for name in ("set_force_sum_reduction_for_comms", "set_reduce_scatter_unused_params"):
            getattr(module, name)(True)
        module.reset_iter_state()
        for name in (
            "set_custom_all_gather",
            "set_all_reduce_hook",
            "set_symm_mem_for_comm",
            "finalize_backward",
        ):
            with pytest.raises(FlatParamError, match=rf"rank 0: {name}\(\) of torch's FSDPModule.*fsdp2=False"):
                getattr(module, name)()


@pytest.mark.parametrize("fsdp2", [False, True])
def test_one_door_alone(torch_world: None, fsdp2: bool) -> None:
    """Each of the two can be left to torch."""
    wrapper = [package.FullyShardedDataParallel]
    with flatparam.install(fsdp1=not fsdp2, fsdp2=fsdp2):
        assert (package.fully_shard is THEIRS[0]) is not fsdp2
        assert (package.FullyShardedDataParallel is wrapper[0]) is fsdp2


def test_too_late(torch_world: None) -> None:
    """A module that torch has sharded is named, and nothing is changed."""
    module = THEIRS[0](nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="torch's FSDP2 has sharded, found 1, such as FSDPLinear"):
        flatparam.install()
    assert package.fully_shard is THEIRS[0]
    with flatparam.install(fsdp2=False):
        pass
    del module


def at_the_door(ranks: Collectives) -> None:
    flatparam.install()
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    package.fully_shard(module)
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter, nn.Parameter)
        assert torch.equal(parameter.full_tensor(), whole[name])
        assert parameter.to_local().shape[0] == len(whole[name].chunk(2)[ranks.rank])
    weight = module[0].weight
    # What is written to the local part is what is gathered.
    with torch.no_grad():
        weight.to_local().mul_(2.0)
    module.unshard()
    assert torch.equal(module[0].weight.detach(), 2 * whole["0.weight"])
    module.reshard()
    assert module[0].weight is weight
    # A gradient that is set is the one that is stepped, and a wrong one is refused.
    weight.grad = distribute_tensor(torch.ones(5, 3), weight.device_mesh, weight.placements)
    torch.optim.SGD([weight], lr=1.0).step()
    assert torch.equal(weight.full_tensor(), 2 * whole["0.weight"] - 1)
    with pytest.raises(RuntimeError, match=r"DTensor of shape \(5, 3\), found a Tensor of shape \(3, 3\)"):
        weight.grad = torch.ones(3, 3)
    del weight.grad
    assert weight.grad is None
    # An optimizer that fails on its way holds the same parameters and states at its next step.
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        module(torch.ones(1, 3)).sum().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        optimizer.step()
        assert optimizer.param_groups[0]["params"][0] is weight
        assert isinstance(optimizer.state[weight]["exp_avg"], DTensor)
        optimizer.zero_grad()
    # What is offloaded comes back, and is stepped.
    flatparam.offload(module, optimizer=optimizer)
    flatparam.onload(module, optimizer=optimizer)
    before = optimizer.state[weight]["exp_avg"].full_tensor()
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(optimizer.state[weight]["exp_avg"].full_tensor(), before)
    optimizer.zero_grad()
    # Parameters that somebody has put in their places give their values, and the faces come back.
    module[1].weight = nn.Parameter(distribute_tensor(torch.full((2, 5), 3.0), weight.device_mesh, weight.placements))
    first = torch.ones(1, 3) @ weight.full_tensor().t() + module[0].bias.full_tensor()
    torch.testing.assert_close(module(torch.ones(1, 3)), 3 * first.sum().expand(1, 2))
    # Copies.
    alone = copy.deepcopy(weight)
    assert type(alone) is DTensor
    assert isinstance(alone, nn.Parameter)
    again = copy.deepcopy(module)
    assert isinstance(again[0].weight, ShardedParameter)
    assert torch.equal(again[0].weight.full_tensor(), weight.full_tensor())
    assert again[0].weight.to_local().data_ptr() != weight.to_local().data_ptr()
    assert torch.equal(pickle.loads(pickle.dumps(weight.detach().to_local())), weight.to_local())
    # Casts and frozen parameters.
    module.double()
    assert module[0].weight.dtype == torch.float64 == module[0].weight.to_local().dtype
    weight.requires_grad = False
    assert [p.requires_grad for p in module.parameters()] == [False, True, True]
    module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert [p.grad is None for p in module.parameters()] == [True, False, False]
    with pytest.raises(ValueError, match="'scale' has no dimension to cut"):
        scalar = nn.Linear(2, 2)
        scalar.scale = nn.Parameter(torch.ones(()))
        package.fully_shard(scalar)
    package.fully_shard(scalar, ignored_params=(each for each in [scalar.scale]))
    assert not isinstance(scalar.scale, DTensor)
    with pytest.raises(FlatParamError, match="is sharded already"):
        package.fully_shard(module)


def test_parameters_are_dtensors() -> None:
    """They show the whole, share memory with the shard, take gradients, and survive copies, casts and replacements."""
    run_processes(2, at_the_door)


def stepping(ranks: Collectives) -> tuple[int, int]:
    flatparam.install()
    module: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    for child in module:
        package.fully_shard(child)
    package.fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters())

    def train(steps: int) -> int:
        for _ in range(steps):
            module(torch.ones(1, 3)).sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return len(gc.get_objects())

    return train(20), train(200)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 keeps something of each operation of DTensors")
def test_steps_keep_nothing() -> None:
    """Two hundred steps leave as many objects as there were: a few, of caches, come and go."""
    for before, after in run_processes(2, stepping):
        assert after - before < 50


def on_meta(ranks: Collectives) -> None:
    flatparam.install()

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 3), Scale()).state_dict()
    with torch.device("meta"):
        module: Any = nn.Sequential(nn.Linear(3, 3), Scale())
    package.fully_shard(module)
    shown = module.state_dict()
    assert torch.equal(shown["1.weight"].full_tensor(), torch.zeros(3))
    state = {
        name: distribute_tensor(value, shown[name].device_mesh, shown[name].placements) for name, value in whole.items()
    }
    module.load_state_dict(state, assign=True)
    assert all(torch.equal(p.full_tensor(), whole[name]) for name, p in module.named_parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(module[1].weight.full_tensor(), whole["1.weight"])


def test_a_module_on_the_meta_device_gets_its_values_from_a_load() -> None:
    """As accelerate loads a model that rank 0 alone has: sharded on the meta device, then `load_state_dict(assign=True)`."""
    run_processes(2, on_meta)


def test_a_tie_after_sharding_inside_a_unit_is_refused(torch_world: None) -> None:
    """A head that gets the embedding's parameter afterwards is refused by name; in another unit, both train one."""
    with flatparam.install():
        module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
        package.fully_shard(module)
        module[1].weight = module[0].weight
        with pytest.raises(FlatParamError, match=r"'1\.weight' was tied to '0\.weight' after"):
            module(torch.tensor([1]))


def tied_afterwards(ranks: Collectives) -> None:
    flatparam.install()
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    twin = copy.deepcopy(module)
    twin[1].weight = twin[0].weight
    for child in module:
        package.fully_shard(child)
    package.fully_shard(module)
    module[1].weight = module[0].weight
    for model in (module, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            model(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for child in module:
        torch.testing.assert_close(child.weight.full_tensor(), twin[0].weight.detach())


def test_a_tie_of_two_units_after_sharding_is_trained_as_one() -> None:
    """The gradients of both are added up, and both have the values that were stepped."""
    run_processes(2, tied_afterwards)


def untied_afterwards(ranks: Collectives, gives_plain: bool) -> None:
    flatparam.install()
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    twin = copy.deepcopy(module)
    for child in module:
        package.fully_shard(child)
    package.fully_shard(module)
    mesh, whole = module[0].weight.device_mesh, torch.arange(12.0).view(4, 3) / 12
    module[1].weight = module[0].weight
    module(torch.tensor([1, 2]))
    given: Any = distribute_tensor(whole, mesh, [Shard(0)])
    module[1].weight = nn.Parameter(given.to_local().clone() if gives_plain else given)
    module(torch.tensor([1, 2]))
    twin[1].weight = nn.Parameter(whole.clone())
    for model in (module, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            model(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for child, expected in zip(module, twin, strict=True):
        torch.testing.assert_close(child.weight.full_tensor(), expected.weight.detach())


@each_row("gives_plain", [False, True])
def test_a_tie_ends_when_one_place_gets_a_parameter_of_its_own(gives_plain: bool) -> None:
    """Each then has its own values and gradients, as in one process."""
    run_processes(2, untied_afterwards, gives_plain)


def _clipped_beside_plain(world: Collectives, norm_type: float, is_frozen: bool) -> list[torch.Tensor]:
    """Clip sharded parameters beside one that is not; each rank has the same loss. Return norms and gradients."""
    found = []
    with flatparam.install():
        for shards in (True, False):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
            module[0].bias.requires_grad_(not is_frozen)
            if shards:
                package.fully_shard(module[0])
            module(torch.ones(2, 3)).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1, norm_type)
            grads = [each.grad for each in module.parameters() if each.grad is not None]
            found.append([norm, *(each.full_tensor() if isinstance(each, DTensor) else each for each in grads)])
    torch.testing.assert_close(*found)
    return found[0]


@pytest.mark.processes
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_are_clipped_beside_plain_ones(norm_type: float, is_frozen: bool) -> None:
    """The norm of `DTensor`s and plain gradients together is that of one process, where torch's function raises."""
    one, other = run_processes(2, _clipped_beside_plain, norm_type, is_frozen)
    assert all(map(torch.equal, one, other))


@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """A policy as torch has them from 2.15 on, where `reduce_dtype=None` is the parameters' own dtype."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Any = None


def reducing(ranks: Collectives) -> list[Any]:
    flatparam.install()
    policies = (
        package.MixedPrecisionPolicy(torch.bfloat16),
        MixedPrecisionPolicy(torch.bfloat16),
        MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
        MixedPrecisionPolicy(),
    )
    found = []
    for policy in policies:
        (handle,) = unit_of(package.fully_shard(nn.Linear(2, 2), mp_policy=policy)).handles  # type: ignore[union-attr]
        found.append(handle.gradients.dtype)
    return found


def test_a_policy_has_the_default_of_its_own_torch() -> None:
    """Gradients are reduced in the dtype that the installed torch would take if a policy names none."""
    is_later = "param_dtype_override_fn" in package.MixedPrecisionPolicy.__dataclass_fields__
    of_torch = torch.float32 if is_later else torch.bfloat16
    expected = [of_torch, torch.float32, torch.bfloat16, torch.float32]
    assert run_processes(2, reducing) == [expected] * 2


def given_parameters(ranks: Collectives) -> None:
    flatparam.install()
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    for child in module:
        package.fully_shard(child)
    package.fully_shard(module)
    mesh = module[0].weight.device_mesh
    whole = torch.arange(16.0).view(4, 4) / 16

    # One for two units, and one that is frozen after it was put in its place.
    module[0].weight = module[1].weight = tied = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    module[2].weight = last = nn.Parameter(distribute_tensor(whole[:2], mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([tied, last, module[2].bias], lr=0.5, fused=True)
    module[2].bias.requires_grad_(False)
    last.requires_grad_(False)
    # The same by one process.
    twin = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    twin[0].weight = twin[1].weight = nn.Parameter(whole.clone())
    twin[2].load_state_dict({"weight": whole[:2], "bias": module[2].bias.full_tensor()})
    alone = torch.optim.AdamW([twin[0].weight], lr=0.5, fused=True)
    for _ in range(3):
        for model, stepped in ((module, optimizer), (twin, alone)):
            loss = model(torch.ones(1, 4)).square().sum()
            loss.backward()
            stepped.step()
            stepped.zero_grad()
        assert module[0].weight is module[1].weight is tied
        assert isinstance(tied, ShardedParameter)
        torch.testing.assert_close(tied.full_tensor(), twin[0].weight.detach())
        # Both units gather it.
        for child in module[:2]:
            child.unshard()
            torch.testing.assert_close(child.weight.detach(), twin[0].weight.detach())
            child.reshard()
        assert torch.equal(module[2].weight.full_tensor(), whole[:2])
        assert module[2].weight.grad is None


def test_a_parameter_that_is_put_in_a_place_is_the_one_that_is_trained() -> None:
    """An optimizer that was made of it before the first pass steps it, frozen or not, in the places of two units, too.

    So loads transformers: it puts new parameters into a model that is sharded on the meta device, and ties some.
    """
    run_processes(2, given_parameters)


class Kind(nn.Parameter):
    """A class of its own, as of quantised weights, whose objects note what their bytes mean."""


def of_its_own_class(ranks: Collectives) -> None:
    flatparam.install()
    module: Any = nn.Linear(3, 4)
    module.weight = Kind(module.weight.detach(), requires_grad=False)
    module.weight.meaning = "scales"
    module.bias.note = "of a user"
    package.fully_shard(module)
    assert (type(module.weight), hasattr(module.weight, "meaning")) == (ShardedParameter, False)
    assert module.bias.note == "of a user"
    module.unshard()
    assert (type(module.weight), module.weight.meaning) == (Kind, "scales")
    module.reshard()
    # Libraries that shard say so.
    module._is_fsdp_managed_module = True


def test_a_class_of_its_own_is_seen_while_the_parameter_is_full() -> None:
    """A `DTensor` is no such object, with torch's FSDP2 neither: bitsandbytes would save what it notes beside the bytes."""
    run_processes(2, of_its_own_class)


def numbers_drawn(ranks: Collectives) -> None:
    flatparam.install()
    torch.manual_seed(0)
    with torch.device("meta"):
        module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = torch.get_rng_state()
    for child in module:
        package.fully_shard(child)
    package.fully_shard(module)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (child.weight.full_tensor() for child in module)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:2], first[1:])


def test_sharding_draws_no_numbers() -> None:
    """What a program draws after it has sharded a module on the meta device is what it draws with torch's function."""
    run_processes(2, numbers_drawn)


def loaded_by_a_checkpointer(ranks: Collectives, folder: str) -> list[tuple[str, ...]]:
    def made() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = package.fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
        return model, torch.optim.AdamW(model.parameters(), amsgrad=True)

    def facts(optimizer: torch.optim.Optimizer) -> list[tuple[str, ...]]:
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        entries = [(each, name, value) for each in parameters for name, value in optimizer.state[each].items()]
        local = [value.to_local() if isinstance(value, DTensor) else value for _, _, value in entries]
        return [
            (name, type(value).__name__, str(tuple(value.shape)), str(part.tolist()))
            for (_, name, value), part in zip(entries, local, strict=True)
        ]

    with flatparam.install():
        model, optimizer = made()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((2, 4), ranks.rank + 1.0)).square().sum().backward()
            optimizer.step()
        saving = flatparam.Checkpointer(folder, model, optimizer)
        saving.save(1)
        saving.close()
        model, again = made()
        flatparam.Checkpointer(folder, model, again).load()
        assert facts(again) == facts(optimizer)
        return facts(again)


def test_a_rank_without_rows_gets_a_state_of_a_checkpoint(tmp_path: Path) -> None:
    """As it had one: torch's functions of state take a parameter for one that was never stepped if a rank has none."""
    first, second = run_processes(2, loaded_by_a_checkpointer, str(tmp_path))
    assert [fact[:3] for fact in first] == [fact[:3] for fact in second]
    assert len(first) == 4 * 4


def _made_before(ranks: Collectives, settings: dict[str, Any], is_compiled: bool) -> float:
    """Step, shard, exchange the parameters, and step on; return the largest difference to a model that is whole."""
    flatparam.install()
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    module = copy.deepcopy(whole)
    models = (whole, module)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, **settings) for each in models]

    def train(number: int) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.full((2, 3), 1.0 + number)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(0)
    package.fully_shard(module)
    parameters = iter(module.parameters())
    for group in optimizers[1].param_groups:
        group["params"] = [next(parameters) for _ in group["params"]]
    if is_compiled:
        optimizers[1].step = torch.compile(optimizers[1].step, backend="eager")  # type: ignore[method-assign]
    for number in range(1, 5):
        train(number)
    assert set(optimizers[1].state) == set(module.parameters())
    pairs = zip(whole.parameters(), module.parameters(), strict=True)
    return max(float((one - other.full_tensor()).abs().max()) for one, other in pairs)  # type: ignore[operator]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "is_compiled"), [({"foreach": True}, False), ({"fused": True}, False), ({"foreach": True}, True)]
)
def test_states_from_before_sharding_go_on(settings: dict[str, Any], is_compiled: bool) -> None:
    """Each rank goes on with its part of them in every later step, also if the state is changed in place (fused)."""
    assert max(run_processes(2, _made_before, settings, is_compiled)) < 1e-5
