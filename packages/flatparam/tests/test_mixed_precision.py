"""`MixedPrecision`, field by field: which dtype is where, and that nothing else is cast."""

from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import MixedPrecision, ShardingStrategy
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import ByteLedger, Collectives, RecordingCollectives, SingleCollectives

from .models import Batch, mlp, seeded
from .worlds import assert_same_state, inputs, on_ranks

HERE = SingleCollectives()
LINEAR = ModuleWrapPolicy({nn.Linear})
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Probe(nn.Module):
    """Notes the dtypes that it computes with; one weight, one floating-point and one integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((3,), 1.001))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        self.seen = {"input": x.dtype, "weight": self.weight.dtype, "buffer": self.scale.dtype}
        self.seen["integers"] = self.count.dtype
        if index is not None:
            self.seen["index"] = index.dtype
        return x * self.weight * self.scale


def probed(*, inner: bool = False, **asked: Any) -> tuple[FSDP, Probe]:
    """A wrapped probe and the probe; `inner`: in a unit below the root."""
    probe = Probe()
    module: nn.Module = nn.Sequential(probe) if inner else probe
    policy = ModuleWrapPolicy({Probe}) if inner else None
    return FSDP(module, HERE, auto_wrap_policy=policy, mixed_precision=MixedPrecision(**asked)), probe


def test_full_parameters_are_in_the_compute_dtype(use_orig_params: bool) -> None:
    """S-046: full parameters and activations in `param_dtype`; what the optimizer holds, its state and `.grad` in fp32."""

    def rank(world: Collectives) -> Any:
        ledger = ByteLedger(keep=True)
        model = FSDP(
            seeded(mlp),
            RecordingCollectives(world, ledger),
            auto_wrap_policy=LINEAR,
            mixed_precision=MixedPrecision(param_dtype=BF16),
            use_orig_params=use_orig_params,
        )
        optimizer = torch.optim.Adam(model.parameters())
        output = model(torch.ones(2, 3))
        output.float().sum().backward()
        optimizer.step()
        kept = [p for p in model.parameters()] + [p.grad for p in model.parameters() if p.grad is not None]
        kept += [state["exp_avg"] for state in optimizer.state.values()]
        return (
            output.dtype,
            {t.dtype for t in kept},
            {t.dtype for t in ledger.transfers if t.op == "all_gather"},
        )

    assert on_ranks(2, rank) == [(BF16, {FP32}, {BF16})] * 2


def test_checkpoints_and_summoned_parameters_are_in_full_precision(use_orig_params: bool) -> None:
    """S-046: neither the state nor `summon_full_params` loses a bit."""
    made = seeded(mlp)

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), mixed_precision=MixedPrecision(param_dtype=BF16), use_orig_params=use_orig_params)
        with torch.no_grad():
            model(torch.ones(2, 3))
        with FSDP.summon_full_params(model):
            shown = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return shown, model.state_dict()

    for shown, state in on_ranks(2, rank):
        assert_same_state(shown, made.state_dict())
        assert_same_state(state, made.state_dict())


@each_row(
    ("asked", "reduced"),
    [
        ({"param_dtype": BF16}, BF16),
        ({"param_dtype": BF16, "reduce_dtype": FP32}, FP32),
        ({"reduce_dtype": BF16}, BF16),
        ({"reduce_dtype": FP32}, FP32),
        ({}, FP32),
    ],
    ids=str,
)
def test_gradients_travel_in_the_reduction_dtype(asked: dict[str, Any], reduced: torch.dtype) -> None:
    """S-047: sums are in `reduce_dtype`, where it is not given in `param_dtype`; `.grad` is in fp32 in any case."""

    def rank(world: Collectives) -> Any:
        ledger = ByteLedger(keep=True)
        group = RecordingCollectives(world, ledger)
        model = FSDP(seeded(mlp), group, mixed_precision=MixedPrecision(**asked))
        model(torch.ones(2, 3)).float().sum().backward()
        return {t.dtype for t in ledger.transfers if t.op == "reduce_scatter"}, model.params[0].grad.dtype

    assert on_ranks(2, rank) == [({reduced}, FP32)] * 2


def test_the_sum_is_that_of_rounded_gradients() -> None:
    """S-047: with two ranks `.grad` has the bits of rounding each half, adding in bf16, and widening."""

    def rank(world: Collectives) -> Any:
        model = FSDP(seeded(mlp), mixed_precision=MixedPrecision(reduce_dtype=BF16), use_orig_params=True)
        model(inputs(world.rank)[0]).square().mean().backward()
        return [torch.empty(0) if p.grad is None else p.grad.flatten() for p in model.parameters()]

    halves = []
    for number in range(2):
        reference = seeded(mlp)
        reference(inputs(number)[0]).square().mean().backward()
        halves.append([(p.grad / 2).to(BF16) for p in reference.parameters()])
    expected = torch.cat([(one + other).float().flatten() for one, other in zip(*halves, strict=True)])
    parts = [part for both in zip(*on_ranks(2, rank), strict=True) for part in both]
    assert torch.equal(torch.cat(parts), expected)


def test_low_precision_gradients_may_be_kept(use_orig_params: bool) -> None:
    """S-049: with `keep_low_precision_grads` `.grad` has the compute dtype; parameters stay in fp32."""

    def rank(world: Collectives) -> Any:
        model = FSDP(
            seeded(mlp),
            auto_wrap_policy=LINEAR,
            mixed_precision=MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True),
            use_orig_params=use_orig_params,
        )
        for _ in range(2):
            model(torch.ones(2, 3)).float().sum().backward()
        parameters = list(model.parameters())
        return {p.dtype for p in parameters}, {p.grad.dtype for p in parameters if p.grad is not None}

    assert on_ranks(2, rank) == [({FP32}, {BF16})] * 2


@each_row(
    ("at_root", "below", "seen_at_root", "seen_below"),
    [
        (True, False, FP16, FP32),
        (False, False, FP32, FP32),
        (False, True, FP16, FP16),
        (True, True, FP16, FP16),
    ],
)
def test_inputs_are_cast_where_asked(
    at_root: bool, below: bool, seen_at_root: torch.dtype, seen_below: torch.dtype
) -> None:
    """S-036, S-050: `cast_root_forward_inputs` counts at the root, `cast_forward_inputs` there and below."""
    asked = {"cast_root_forward_inputs": at_root, "cast_forward_inputs": below}
    model, probe = probed(param_dtype=FP16, **asked)
    model(torch.ones(3))
    assert probe.seen["input"] == seen_at_root
    inner, probe = probed(inner=True, param_dtype=FP16, **asked)
    inner.module.register_forward_pre_hook(lambda module, args: tuple(x.float() for x in args))
    inner(torch.ones(3))
    assert (probe.seen["input"], probe.seen["weight"]) == (seen_below, FP16)


def test_only_floating_point_inputs_are_cast() -> None:
    """S-050: integers stay integers, by keyword too, and gradients flow back in the input's own dtype."""
    model, probe = probed(param_dtype=FP16)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    model(x, index=torch.arange(3)).sum().backward()
    assert probe.seen["index"] == torch.int64
    assert probe.seen["input"] == FP16
    assert x.grad is not None
    assert x.grad.dtype == torch.float64


def test_inputs_are_not_cast_to_the_reduction_dtype() -> None:
    """S-036: without `param_dtype` there is nothing to cast inputs to."""
    model, probe = probed(reduce_dtype=BF16, cast_forward_inputs=True)
    model(torch.ones(3, dtype=torch.float64))
    assert probe.seen["input"] == torch.float64


@each_row("inner", [False, True], ids=["root", "below"])
def test_buffers_are_cast(inner: bool) -> None:
    """S-048: floating-point buffers have `buffer_dtype` from the first forward on; integers and parameters keep theirs."""
    model, probe = probed(inner=inner, buffer_dtype=FP16)
    assert probe.scale.dtype == FP32
    model(torch.ones(3))
    assert (probe.seen["buffer"], probe.seen["integers"], probe.seen["weight"]) == (FP16, torch.int64, FP32)


@each_row("inner", [False, True], ids=["root", "below"])
def test_buffers_are_saved_as_they_were(inner: bool) -> None:
    """S-048, S-088: the state has buffers in the dtype that they came with."""
    model, _ = probed(inner=inner, buffer_dtype=FP16)
    model(torch.ones(3))
    name = "0.scale" if inner else "scale"
    assert model.state_dict()[name].dtype == FP32
    assert model.state_dict()[name.replace("scale", "count")].dtype == torch.int64


def test_the_units_own_buffer_dtype_wins() -> None:
    """S-048: a buffer has the dtype that its own unit's wrapper asks for, not that of the wrapper around it."""
    inner = FSDP(Probe(), HERE, mixed_precision=MixedPrecision(buffer_dtype=FP16))
    outer = FSDP(nn.Sequential(inner, Probe()), HERE, mixed_precision=MixedPrecision(buffer_dtype=BF16))
    outer(torch.ones(3))
    assert [module.seen["buffer"] for module in outer.modules() if isinstance(module, Probe)] == [FP16, BF16]


def test_batch_norm_is_left_out() -> None:
    """S-016, S-051: with a policy BatchNorm becomes a unit that computes in fp32 and hands its input's dtype on."""
    seen: dict[str, Any] = {}
    module = seeded(Batch)

    def note(norm: nn.Module, args: Any, output: Tensor) -> None:
        seen.update(weight=norm.weight.dtype, input=args[0].dtype)

    module.norm.register_forward_hook(note)
    module.second.register_forward_pre_hook(lambda _, args: seen.update(after=args[0].dtype))
    asked = MixedPrecision(param_dtype=BF16)
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        model = FSDP(module, HERE, mixed_precision=asked, auto_wrap_policy=LINEAR)
    model(torch.randn(4, 3)).float().sum().backward()
    assert seen == {"weight": FP32, "input": FP32, "after": BF16}
    kinds = {type(m.module).__name__: m.mixed_precision.param_dtype for m in FSDP.fsdp_modules(model)}
    assert kinds == {"Batch": BF16, "Linear": BF16, "BatchNorm1d": None}


def test_other_classes_may_be_left_out() -> None:
    """S-051: `_module_classes_to_ignore` names the classes; an empty one leaves out none."""
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.BatchNorm1d(3))
    asked = MixedPrecision(param_dtype=BF16, _module_classes_to_ignore=(nn.LayerNorm,))
    with pytest.warns(UserWarning, match="LayerNorm"):
        model = FSDP(module, HERE, mixed_precision=asked, auto_wrap_policy=LINEAR)
    assert {type(m.module) for m in FSDP.fsdp_modules(model)} == {nn.Sequential, nn.Linear, nn.LayerNorm}
    none = MixedPrecision(param_dtype=BF16, _module_classes_to_ignore=())
    plain = FSDP(nn.Sequential(nn.BatchNorm1d(3)), HERE, mixed_precision=none, auto_wrap_policy=LINEAR)
    assert len(FSDP.fsdp_modules(plain)) == 1


def test_full_precision_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-052: with the environment's switch `eval()` computes in fp32, buffers too, and training in low precision again."""
    low = {"input": FP16, "weight": FP16, "buffer": FP16, "integers": torch.int64}
    asked = {"param_dtype": FP16, "buffer_dtype": FP16}
    model, probe = probed(**asked)
    model.eval()(torch.ones(3))
    assert probe.seen == low
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    model, probe = probed(**asked)
    model(torch.ones(3)).float().sum().backward()
    assert probe.seen == low
    with torch.no_grad():
        model.eval()(torch.ones(3))
    assert {dtype for dtype in probe.seen.values() if dtype.is_floating_point} == {FP32}
    model.train()(torch.ones(3)).float().sum().backward()
    assert probe.seen == low


@pytest.mark.parametrize("before", ["forward", "unsynchronised backward", "evaluation"])
def test_full_precision_after_what_was_kept(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-052: full parameters that SHARD_GRAD_OP kept in low precision are not evaluated with, nor the other way round."""
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")

    def rank(world: Collectives) -> Any:
        probe = Probe()
        model = FSDP(
            nn.Sequential(probe),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            auto_wrap_policy=ModuleWrapPolicy({Probe}),
            mixed_precision=MixedPrecision(param_dtype=FP16),
        )
        if before == "unsynchronised backward":
            with model.no_sync():
                model(torch.ones(3)).float().sum().backward()
        elif before == "evaluation":
            model.eval()(torch.ones(3))
            model.train()(torch.ones(3))
        else:
            model(torch.ones(3))
        training = probe.seen["weight"]
        model.eval()(torch.ones(3)).sum()
        evaluation = probe.seen["weight"]
        model.train()(torch.ones(3)).float().sum().backward()
        return training, evaluation, probe.seen["weight"]

    assert on_ranks(2, rank) == [(FP16, FP32, FP16)] * 2


@each_row("inner", [False, True], ids=["root", "below"])
def test_a_cast_between_wrapping_and_the_first_forward(inner: bool) -> None:
    """S-053: after `model.half()` it computes in half precision, unless the mixed precision says otherwise."""
    model, probe = probed(inner=inner)
    model.half()
    with torch.no_grad():
        model(torch.ones(3, dtype=FP16))
    assert (probe.seen["weight"], probe.seen["buffer"]) == (FP16, FP16)
    assert {p.dtype for p in model.parameters()} == {FP16}
    model, probe = probed(inner=inner, param_dtype=BF16)
    model.half()
    with torch.no_grad():
        model(torch.ones(3))
    assert probe.seen["weight"] == BF16
    assert {p.dtype for p in model.parameters()} == {FP16}


class Patches(nn.Module):
    """As transformers' CLIP: casts its input to the dtype of a layer's weight, which may be in a unit of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.layer.weight.dtype)
        return self.head(self.layer(x).flatten(1)[:, :6])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(4, 6), (2, 4)),
        (lambda: nn.Conv1d(3, 2, 2), (2, 3, 4)),
        (lambda: nn.Conv2d(3, 2, 2), (2, 3, 4, 4)),
        (lambda: nn.ConvTranspose2d(3, 2, 2), (2, 3, 4, 4)),
    ],
)
def test_layers_of_one_dtype_cast_their_inputs(
    layer: Any, shape: tuple[int, ...], use_orig_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that takes its weight's dtype alone computes in a unit of its own what it computes in the unit around it."""

    def rank(world: Collectives) -> None:
        made = seeded(lambda: Patches(layer()))
        asked = MixedPrecision(param_dtype=BF16)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(world.rank))
        found = []
        for policy in (None, ModuleWrapPolicy({type(made.layer)})):
            model = FSDP(
                seeded(lambda: Patches(layer())),
                auto_wrap_policy=policy,
                mixed_precision=asked,
                use_orig_params=use_orig_params,
            )
            output = model(x)
            output.float().sum().backward()
            with FSDP.summon_full_params(model, with_grads=True):
                found.append([output, *(parameter.grad for parameter in model.parameters())])
        for mine, other in zip(*found, strict=True):
            assert (mine.dtype, mine.tolist()) == (other.dtype, other.tolist())
        monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        model = FSDP(made, auto_wrap_policy=policy, mixed_precision=asked, use_orig_params=use_orig_params)
        with torch.no_grad():
            assert model.eval()(x).dtype is FP32

    on_ranks(2, rank)
