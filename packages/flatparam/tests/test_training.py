"""Training calls of the wrapper: `no_sync`, `clip_grad_norm_`, `summon_full_params`, names."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, clip_grad_norm_
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import Collectives, SingleCollectives
from flatparam_core import FlatParamError

from .models import Batch, mlp, seeded
from .worlds import assert_same_state, on_ranks, train

HERE = SingleCollectives()
LINEAR = ModuleWrapPolicy({nn.Linear})


def inputs(rank: int, count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * n + rank)) for n in range(count)]


def full_gradients(model: nn.Module, ranks: Collectives) -> torch.Tensor:
    """The gradients of all ranks, one after the other."""
    mine = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return torch.cat(ranks.exchange(mine))


@pytest.mark.parametrize("policy", [None, LINEAR], ids=["whole", "policy"])
def test_training_is_that_of_one_process_on_the_mean_loss(policy: Any, use_orig_params: bool) -> None:
    """Three steps of AdamW, each rank on other batches: the bits of the unwrapped model on the mean of the losses."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=policy, use_orig_params=use_orig_params)
        train(model, torch.optim.AdamW(model.parameters()), inputs(ranks.rank))
        return model.state_dict()

    reference = seeded(mlp)
    optimizer = torch.optim.AdamW(reference.parameters())
    for batches in zip(inputs(0), inputs(1), strict=True):
        optimizer.zero_grad()
        (sum(reference(x).square().mean() for x in batches) / 2).backward()
        optimizer.step()
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_no_sync(use_orig_params: bool) -> None:
    """S-069: backward passes inside communicate nothing; the first one outside reduces the sum of all."""

    def rank(ranks: Collectives, within: bool) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        first, second = inputs(ranks.rank, 2)
        if within:
            with model.no_sync():
                model(first).square().mean().backward()
                assert all(p.grad is None for p in model.parameters())
        else:
            model(first).square().mean().backward()
        model(second).square().mean().backward()
        return full_gradients(model, ranks)

    for accumulated, reduced in zip(on_ranks(2, rank, True), on_ranks(2, rank, False), strict=True):
        torch.testing.assert_close(accumulated, reduced, rtol=1e-6, atol=1e-7)


def test_no_sync_ends_with_an_exception() -> None:
    """S-069: after the context, however it is left, backward passes synchronise again."""

    def rank(ranks: Collectives) -> bool:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR)
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        model(inputs(ranks.rank)[0]).sum().backward()
        return all(p.grad is not None for p in model.parameters())

    assert on_ranks(2, rank) == [True, True]


@each_row("norm_type", [2.0, 1.0, 3.0, math.inf, 2, "inf"], ids=str)
@each_row("max_norm", [0.01, 1e6, 1], ids=str)
def test_clip_grad_norm(max_norm: float, norm_type: Any, use_orig_params: bool) -> None:
    """S-070: the norm over all ranks' parts, the same on each, and the factor that torch's function applies."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        model(torch.ones(2, 3)).square().sum().backward()
        norm = model.clip_grad_norm_(max_norm, norm_type)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.step()
        return norm, model.state_dict()

    reference = seeded(mlp)
    reference(torch.ones(2, 3)).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, float(norm_type))
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    first, second = on_ranks(2, rank)
    assert torch.equal(first[0], second[0])
    assert (first[0].dim(), first[0].dtype) == (0, torch.float32)
    torch.testing.assert_close(first[0], expected)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(first[1][name], value)


@pytest.mark.parametrize("clip", ["of the model", "of flatparam", "of torch"])
@each_row("norm_type", [-math.inf, -1.0, 2.0], ids=str)
def test_padding_is_in_no_norm_of_negative_order(norm_type: float, clip: str, use_orig_params: bool) -> None:
    """The smallest element of a gradient is no zero of the padding, whoever is asked, and all is scaled as in torch."""

    def model() -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)))

    def gradients(module: nn.Module) -> Any:
        torch.optim.SGD(module.parameters(), lr=1.0).step()
        return dict(module.state_dict())

    def rank(ranks: Collectives) -> Any:
        sharded = FSDP(model(), use_orig_params=use_orig_params)
        sharded(torch.ones(2, 3)).square().sum().backward()
        if clip == "of the model":
            norm = sharded.clip_grad_norm_(1e-4, norm_type)
        else:
            function = clip_grad_norm_ if clip == "of flatparam" else nn.utils.clip_grad_norm_
            norm = function(sharded.parameters(), 1e-4, norm_type)
        return norm, gradients(sharded)

    reference = model()
    reference(torch.ones(2, 3)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e-4, norm_type)
    assert expected > 1e-4
    clipped = gradients(reference)
    for norm, found in on_ranks(3, rank):
        torch.testing.assert_close(norm, expected)
        torch.testing.assert_close(found, clipped)


def test_clip_counts_ignored_parameters_once() -> None:
    """S-070: gradients that are not sharded count once, not once per rank."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(mlp)
        model = FSDP(module, ignored_modules=[module[2]])
        model(torch.ones(2, 3)).square().sum().backward()
        return model.clip_grad_norm_(0.5)

    reference = seeded(mlp)
    reference(torch.ones(2, 3)).square().sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    for norm in on_ranks(3, rank):
        torch.testing.assert_close(norm, expected)


def test_clip_without_gradients() -> None:
    """S-070: where no parameter has a gradient the norm is zero, and every rank still takes part."""

    def rank(ranks: Collectives) -> float:
        return float(FSDP(mlp(), auto_wrap_policy=LINEAR).clip_grad_norm_(1.0))

    assert on_ranks(2, rank) == [0.0, 0.0]


def test_summoned_parameters_are_full_and_written_back(use_orig_params: bool) -> None:
    """S-066: inside, ordinary parameters in their shapes; what is changed there stays, on every rank its own part."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        held = list(model.parameters())
        with FSDP.summon_full_params(model):
            inside = {name: (type(p), tuple(p.shape)) for name, p in model.named_parameters()}
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
        assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
        return inside, model.state_dict()

    doubled = {name: value * 2 for name, value in seeded(mlp).state_dict().items()}
    for inside, state in on_ranks(3, rank):
        assert inside == {name: (nn.Parameter, tuple(p.shape)) for name, p in mlp().named_parameters()}
        assert_same_state(state, doubled)


def test_summoned_without_writeback(use_orig_params: bool) -> None:
    """S-066: with `writeback=False` changes made inside are dropped."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model.state_dict()

    for state in on_ranks(2, rank):
        assert_same_state(state, seeded(mlp).state_dict())


def test_summoned_without_recursion() -> None:
    """S-066: with `recurse=False` only the wrapper's own parameters are full, and of a plain module none."""

    def rank(ranks: Collectives) -> Any:
        module = seeded(mlp)
        module[2] = FSDP(module[2])
        model = FSDP(module)
        parent = nn.Sequential(model)
        with FSDP.summon_full_params(model, recurse=False):
            own = sorted(name for name, _ in model.named_parameters())
        with FSDP.summon_full_params(parent, recurse=False):
            none = [name for name, _ in parent.named_parameters()]
        return own, none

    for own, none in on_ranks(2, rank):
        assert [name for name in own if "_flat_param" not in name] == [
            "0.bias",
            "0.weight",
            "4.bias",
            "4.weight",
        ]
        assert all(name.endswith("_flat_param") for name in none)
        assert len(none) == 2


def test_summoning_a_plain_parent() -> None:
    """S-066: the module may be any that contains wrappers."""
    parent = nn.ModuleDict({"net": FSDP(seeded(mlp), HERE), "other": nn.Linear(1, 1)})
    with FSDP.summon_full_params(parent):
        assert [tuple(p.shape) for p in parent["net"].parameters()] == [tuple(p.shape) for p in mlp().parameters()]


@pytest.mark.parametrize("writeback", [False, True])
def test_an_exception_inside_summon_restores(use_orig_params: bool, writeback: bool) -> None:
    """S-066: the sharded form is back, and the model trains."""

    def rank(ranks: Collectives) -> Any:
        model = FSDP(seeded(mlp), auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        held = list(model.parameters())
        with pytest.raises(ZeroDivisionError), FSDP.summon_full_params(model, writeback=writeback):
            raise ZeroDivisionError
        assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
        train(model, torch.optim.SGD(held, lr=0.1), inputs(0, 1))
        return model.state_dict()

    reference = seeded(mlp)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), inputs(0, 1))
    for state in on_ranks(2, rank):
        assert_same_state(state, reference.state_dict())


def test_summoning_in_a_pass_is_refused() -> None:
    """S-066: not inside a forward; the error says what is going on, and the model is usable afterwards."""

    class Model(nn.Module):
        wrapper: Any = None

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.wrapper is not None:
                with FSDP.summon_full_params(self.wrapper[0]):
                    pass
            return self.layer(x)

    module = Model()
    model = FSDP(module, HERE)
    module.wrapper = (model,)
    with pytest.raises((FlatParamError, AssertionError, RuntimeError), match=r"(?i)forward"):
        model(torch.ones(1, 2))
    module.wrapper = None
    model(torch.ones(1, 2)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_names_are_clean_only_while_summoned(use_orig_params: bool) -> None:
    """S-067: `named_parameters` and `named_buffers` drop the wrapper's part inside the context, and no earlier."""
    model = FSDP(seeded(Batch), HERE, auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
    prefix = "_fsdp_wrapped_module."
    outside = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    with FSDP.summon_full_params(model):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in Batch().named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in Batch().named_buffers()]
        assert next(name for name, _ in model.named_parameters(prefix="x", recurse=True)) == "x.first.weight"
    assert all(name.startswith(prefix) for name in outside)
    assert [name for name, _ in (*model.named_parameters(), *model.named_buffers())] == outside


def test_evaluation_keeps_nothing_unsharded() -> None:
    """A pass without gradients leaves only shards behind, and gives the unwrapped model's output."""
    model = FSDP(seeded(mlp), HERE, auto_wrap_policy=LINEAR).eval()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 3)), seeded(mlp)(torch.ones(2, 3)))
    assert not any(handle.is_unsharded for each in FSDP.fsdp_modules(model) for handle in each._unit.handles)


@each_row("error", [ValueError, KeyboardInterrupt, SystemExit])
@each_row("where", ["0", "2", ""])
def test_an_interrupted_forward_leaves_shards(error: type[BaseException], where: str, use_orig_params: bool) -> None:
    """Whatever a module raises: afterwards the model is sharded, can be copied, and trains as one process does."""

    def run(world: Collectives) -> dict[str, Any]:
        model = FSDP(seeded(mlp), process_group=world, auto_wrap_policy=LINEAR, use_orig_params=use_orig_params)
        shards = [tuple(parameter.shape) for parameter in model.parameters()]

        def fail(*_: Any) -> None:
            raise error

        hooked = model.module.get_submodule(where).register_forward_pre_hook(fail)
        with pytest.raises(error):
            model(inputs(world.rank)[0])
        hooked.remove()
        assert [tuple(parameter.shape) for parameter in model.parameters()] == shards
        copy.deepcopy(model)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), inputs(0))
        return dict(model.state_dict())

    reference = seeded(mlp)
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), inputs(0))
    for state in on_ranks(2, run):
        assert_same_state(state, reference.state_dict())


@each_row(
    "clip",
    [
        FSDP.clip_grad_norm_,
        lambda model, limit: clip_grad_norm_(model.parameters(), limit),
        lambda model, limit: nn.utils.clip_grad_norm_(model.parameters(), limit),
    ],
    ids=["method", "function", "torch's"],
)
def test_the_norm_of_complex_gradients_is_real(clip: Callable[..., Any], use_orig_params: bool) -> None:
    """As in one process, it can be compared with a number."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 2, dtype=torch.complex64)

    x = torch.ones(3, 4, dtype=torch.complex64)
    local = build()
    local(x).abs().sum().backward()
    expected = nn.utils.clip_grad_norm_(local.parameters(), 0.5)

    def rank(world: Collectives) -> torch.Tensor:
        model = FSDP(build(), world, use_orig_params=use_orig_params)
        model(x).abs().sum().backward()
        norm: torch.Tensor = clip(model, 0.5)
        return norm

    for norm in on_ranks(2, rank):
        assert norm.dtype is torch.float32
        assert norm > 0.5
        torch.testing.assert_close(norm, expected)


def test_models_that_share_a_unit_take_turns(use_orig_params: bool) -> None:
    """Both losses in one backward pass, or one model after the other, train it; two passes at once are refused."""

    def rank(world: Collectives) -> None:
        def wrap(module: nn.Module) -> FSDP:
            return FSDP(module, world, use_orig_params=use_orig_params)

        torch.manual_seed(0)
        trunk = wrap(nn.Linear(3, 3))
        models = [wrap(nn.Sequential(trunk, nn.Linear(3, size))) for size in (2, 1)]
        first, second = (model(inputs(world.rank)[0]).square().mean() for model in models)
        refused = "in the backward pass of a model, and in that of a different model that shares it"
        with pytest.raises(FlatParamError, match=refused):
            (first.backward(), second.backward())
        for model in models:
            model.zero_grad()
        sum((model(inputs(world.rank)[0]).square().mean() for model in models), torch.zeros(())).backward()
        joint = full_gradients(trunk, world)
        trunk.zero_grad()
        for model in models:
            model(inputs(world.rank)[0]).square().mean().backward()
        torch.testing.assert_close(full_gradients(trunk, world), joint)

    on_ranks(2, rank)


def test_a_gradient_in_low_precision_may_be_cast(use_orig_params: bool) -> None:
    """Kept in bfloat16, a gradient can be replaced by one of the parameter's dtype before the optimizer steps."""

    def rank(world: Collectives) -> None:
        precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
        model = FSDP(seeded(mlp), world, mixed_precision=precision, use_orig_params=use_orig_params)
        model(inputs(world.rank)[0]).square().mean().backward()
        held = [parameter for parameter in model.parameters() if parameter.grad is not None]
        assert {parameter.grad.dtype for parameter in held if parameter.grad is not None} == {torch.bfloat16}
        for parameter in held:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to(parameter.dtype)
        before = [parameter.detach().clone() for parameter in held]
        torch.optim.SGD(held, lr=0.5).step()
        for parameter, old in zip(held, before, strict=True):
            torch.testing.assert_close(parameter.detach(), old - 0.5 * parameter.grad)

    on_ranks(2, rank)
