"""The gradients of parameters on meshes: how often they are added up, in which dtype, and who agrees on them."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import flatparam
from flatparam_comm import Collectives, FlatParamError
from flatparam_meshes import MeshForm, UnitMeshes, hold_experts
from flatparam_runtime import NonfiniteError, summon_full_params
from flatparam_simdev.worlds import run_processes

from .small import Net, inputs, mesh_of, wrapped

pytestmark = pytest.mark.processes


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def one_process(rank: int = 0) -> Net:
    torch.manual_seed(0)
    net = Net()
    net(inputs(rank)).square().mean().backward()
    return net


def shown_gradients(model: nn.Module) -> dict[str, Tensor]:
    with summon_full_params(model, writeback=False, with_grads=True):
        found = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name.replace("_fsdp_wrapped_module.", ""): value for name, value in found.items()}


def count_sums(ranks: Collectives, passes: int) -> tuple[list[str], int]:
    """Train without synchronisation but for the last pass; return the sums over tensor parallelism."""
    mesh = mesh_of(1, 2)
    model = wrapped(mesh)
    asked = []
    original = UnitMeshes.complete

    def noting(self: UnitMeshes, handle: Any, gradient: Tensor, *, label: str = "") -> None:
        asked.append(label)
        original(self, handle, gradient, label=label)

    UnitMeshes.complete = noting  # type: ignore[method-assign]
    try:
        for number in range(passes):
            with model.no_sync() if number < passes - 1 else contextlib.nullcontext():
                model(inputs(0)).square().mean().backward()
    finally:
        UnitMeshes.complete = original  # type: ignore[method-assign]
    right = one_process()
    wrong = [
        name
        for name, gradient in shown_gradients(model).items()
        if not torch.allclose(gradient, passes * right.get_parameter(name).grad, rtol=1e-4, atol=1e-6)  # type: ignore[operator]
    ]
    return wrong, len(asked)


def test_they_are_added_up_once_for_each_reduction() -> None:
    """Three passes, of which the last synchronises, add up over tensor parallelism once, for the whole unit."""
    assert run_processes(2, count_sums, 3) == [([], 1)] * 2


def sum_in(ranks: Collectives, reduce: torch.dtype) -> Tensor:
    """The gradient of a weight whose summands on the two ranks cancel in all but bits that bf16 does not have."""
    mesh = mesh_of(1, 2)
    module = nn.Module()
    weight = DTensor.from_local(torch.ones(8), mesh["tensor"], [Replicate()], run_check=False)
    module.weight = nn.Parameter(weight)

    def forward(x: Tensor) -> Tensor:
        return (DTensor.from_local(x, mesh["tensor"], [Replicate()], run_check=False) * module.weight).to_local(
            grad_placements=[_partial()]
        )

    module.forward = forward  # type: ignore[method-assign]
    precision = flatparam.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    model = flatparam.FullyShardedDataParallel(
        module, device_mesh=mesh["data"], use_orig_params=True, mixed_precision=precision
    )
    # Two passes: 256 + 1 on the first rank, which bf16 cannot hold in one number.
    with model.no_sync():
        model(torch.full((8,), 256.0 if ranks.rank == 0 else -256.0)).sum().backward()
    model(torch.full((8,), 1.0 if ranks.rank == 0 else 0.0)).sum().backward()
    return shown_gradients(model)["weight"]


def _partial() -> Any:
    from torch.distributed.tensor import Partial

    return Partial()


def test_the_sum_is_in_the_dtype_of_reductions() -> None:
    """With bf16 parameters and `reduce_dtype=torch.float32`, no bit of the sum over tensor parallelism is lost."""
    for gradient in run_processes(2, sum_in, torch.float32):
        assert torch.equal(gradient, torch.ones(8))


def replicated(ranks: Collectives) -> Tensor:
    mesh = mesh_of(1, 2)
    module = nn.Module()
    module.weight = nn.Parameter(DTensor.from_local(torch.ones(3), mesh["tensor"], [Replicate()], run_check=False))
    module.forward = lambda x: (module.weight.to_local() * x).sum()  # type: ignore[method-assign]
    model = flatparam.FullyShardedDataParallel(module, device_mesh=mesh["data"], use_orig_params=True)
    for _ in range(2):
        model(torch.arange(3.0)).backward()
    return shown_gradients(model)["weight"]


def test_a_gradient_that_is_complete_counts_once() -> None:
    """A gradient that all ranks of tensor parallelism know is not added up again, also if `.grad` accumulates."""
    for gradient in run_processes(2, replicated):
        assert torch.equal(gradient, 2 * torch.arange(3.0))


def with_uneven_parts(ranks: Collectives) -> list[str]:
    """A weight of seven rows on two ranks: their shards are cut at different places."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    module, alone = nn.Module(), {"rows": torch.randn(7, 3), "norm": torch.randn(3)}
    module.norm = nn.Parameter(distribute_tensor(alone["norm"], mesh["tensor"], [Replicate()]))
    module.rows = nn.Parameter(distribute_tensor(alone["rows"], mesh["tensor"], [Shard(0)]))

    def forward(x: Tensor) -> Tensor:
        spread = DTensor.from_local(x, mesh["tensor"], [Replicate()], run_check=False)
        return ((spread * module.norm) @ module.rows.t()).redistribute(placements=[Replicate()]).to_local()

    module.forward = forward  # type: ignore[method-assign]
    model = flatparam.FullyShardedDataParallel(module, device_mesh=mesh["data"], use_orig_params=True)
    data = [torch.randn(2, 3), torch.randn(2, 3)]
    model(data[mesh["data"].get_local_rank()]).square().sum().backward()
    leaves = {name: value.clone().requires_grad_() for name, value in alone.items()}
    for x in data:
        (((x * leaves["norm"]) @ leaves["rows"].t()).square().sum() / 2).backward()
    found = shown_gradients(model)
    norm = torch.stack([leaf.grad.norm() for leaf in leaves.values() if leaf.grad is not None]).norm()
    told = [n for n, leaf in leaves.items() if not torch.allclose(found[n], leaf.grad, rtol=1e-4)]  # type: ignore[arg-type]
    return told + ([] if torch.allclose(model.clip_grad_norm_(1.0), norm, rtol=1e-5) else ["norm"])


def test_uneven_parts() -> None:
    """Where ranks of tensor parallelism hold parts of different sizes, gradients and norm are right all the same."""
    assert run_processes(4, with_uneven_parts) == [[]] * 4


def one_rank_overflows(ranks: Collectives, policy: str) -> tuple[Any, ...]:
    mesh = mesh_of(2, 2)
    model = wrapped(mesh, nonfinite=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(inputs(0)).square().mean()
    # Only one part of a weight that is cut over tensor parallelism gets a gradient that is not finite.
    if ranks.rank == 1:
        loss = loss + model.module.body[0].bias.to_local().sum() * float("inf")
    else:
        loss = loss + model.module.body[0].bias.to_local().sum() * 0.0
    try:
        loss.backward()
    except NonfiniteError as error:
        return (str(error).partition(":")[0],)
    optimizer.step()
    unchanged = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    return model.skipped_steps, unchanged


def test_ranks_of_tensor_parallelism_agree_on_overflow() -> None:
    """`nonfinite="skip"` leaves the step out on every rank if one part of one weight has a gradient that is infinite."""
    found = run_processes(4, one_rank_overflows, "skip")
    assert found == [(1, True)] * 4
    assert all(len(each) == 1 for each in run_processes(4, one_rank_overflows, "raise"))


def scaled(ranks: Collectives) -> bool:
    mesh = mesh_of(1, 2)
    model = wrapped(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    factor = float("inf") if ranks.rank else 0.0
    scaler.scale(model(inputs(0)).mean() + model.module.body[0].bias.to_local().sum() * factor).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() == 1.0 and all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_torchs_scaler_skips_on_all_ranks() -> None:
    """If one rank of tensor parallelism finds an overflow, `torch.amp.GradScaler` skips the step on the others, too."""
    assert run_processes(2, scaled) == [True] * 2


def written(ranks: Collectives) -> bool:
    mesh = mesh_of(2, 2)
    model = wrapped(mesh)
    model(inputs(0)).square().mean().backward()
    with summon_full_params(model, with_grads=True):
        for parameter in model.parameters():
            with torch.no_grad():
                parameter.fill_(3.0)
                parameter.grad *= 2.0
    twice = shown_gradients(model)
    with summon_full_params(model, writeback=False):
        filled = all(bool((whole(p.detach()) == 3.0).all()) for p in model.parameters())
    right = one_process()
    return filled and all(
        torch.allclose(value, 2 * right.get_parameter(name).grad, rtol=1e-4, atol=1e-6)  # type: ignore[operator]
        for name, value in twice.items()
    )


def test_summoned_parameters_are_dtensors_and_are_written_back() -> None:
    """Inside `summon_full_params(with_grads=True)` changes of `DTensor`s and their gradients reach the shards."""
    assert run_processes(4, written) == [True] * 4


def refusals(ranks: Collectives) -> list[str]:
    mesh = mesh_of(1, 2)
    told = []

    def told_by(call: Any) -> None:
        try:
            call()
        except (FlatParamError, ValueError) as error:
            told.append(str(error))

    partial = nn.Module()
    partial.weight = nn.Parameter(DTensor.from_local(torch.ones(3), mesh["tensor"], [_partial()], run_check=False))
    told_by(lambda: flatparam.fully_shard(partial, mesh=mesh["data"]))
    told_by(lambda: hold_experts(nn.Linear(1, 1)))
    return told


def test_what_is_refused_is_named() -> None:
    """A sum still to be made, and experts of what is not sharded: each error says the name."""
    for told in run_processes(2, refusals):
        partial, experts = told
        assert "parameter 'weight' is a DTensor with (Partial(sum),)" in partial
        assert "this Linear is not sharded" in experts


def copied(ranks: Collectives) -> bool:
    mesh = mesh_of(1, 2)
    again = copy.deepcopy(wrapped(mesh))
    again(inputs(0)).square().mean().backward()
    right = one_process()
    norm = torch.nn.utils.clip_grad_norm_(right.parameters(), 1e9)
    found = shown_gradients(again)
    near = all(
        torch.allclose(value, right.get_parameter(name).grad, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
        for name, value in found.items()
    )
    flat = wrapped(mesh, use_orig_params=False)
    flat(inputs(0)).square().mean().backward()
    by_torch = torch.nn.utils.clip_grad_norm_(flat.parameters(), 1e9)
    norms = again.clip_grad_norm_(1e9), by_torch, flat.clip_grad_norm_(1e9)
    return near and all(torch.allclose(each, norm, rtol=1e-5) for each in norms)


def test_copies_and_torchs_clipping() -> None:
    """A deep copy trains as the model does, and `torch.nn.utils.clip_grad_norm_` finds the norm of flat parameters."""
    assert run_processes(2, copied) == [True] * 2


def test_where_a_part_lies() -> None:
    """A part that is cut along dimension 1 is an interval in a memory order that has this dimension first."""
    assert run_processes(2, part_of) == [((1, 6), 0), ((1, 6), 12)]


def part_of(ranks: Collectives) -> tuple[tuple[int, ...], int]:
    from torch.distributed.tensor import Shard, distribute_tensor

    full = torch.arange(24.0).view(6, 4)
    spread = distribute_tensor(full, mesh_of(1, 2)["tensor"], [Shard(1)])
    form = MeshForm.of(spread, "weight")
    held, part = form.held("weight"), form.part(spread)
    in_order = full.t().reshape(-1)[held.offset : held.offset + part.numel()]
    assert torch.equal(part.t().reshape(-1), in_order)
    assert torch.equal(form(part).full_tensor(), full)
    return held.stride, held.offset


def exactly(ranks: Collectives) -> list[str]:
    mesh = mesh_of(2, 2)
    model = wrapped(mesh, reduction="exact")
    model(inputs(mesh["data"].get_local_rank())).square().mean().backward()
    models = [one_process(rank) for rank in range(2)]
    right = {
        name: sum(model.get_parameter(name).grad for model in models) / 2  # type: ignore[arg-type, misc]
        for name, _ in models[0].named_parameters()
    }
    norm = torch.stack([value.norm() for value in right.values()]).norm()
    wrong = [n for n, g in shown_gradients(model).items() if not torch.allclose(g, right[n], rtol=1e-4, atol=1e-6)]
    return wrong + ([] if torch.allclose(model.clip_grad_norm_(1e9), norm, rtol=1e-5) else ["norm"])


def test_exact_sums_over_data_parallelism() -> None:
    """With `reduction="exact"` gradients and norm are right under tensor parallelism, too."""
    assert run_processes(4, exactly) == [[]] * 4
