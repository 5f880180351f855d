"""flatten_module: what is taken, how it is grouped, and what is refused."""

import attrs
import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_core import (
    ALIGNMENT_NBYTES,
    CPU_ALIGNMENT_NBYTES,
    FLAT_PARAM,
    FlatLayout,
    FlatParamError,
    Flattening,
    IllegalStepError,
    LayoutError,
    Precision,
    discover,
    flatten_module,
)

from .ranks import flatten_alone, gather


def test_a_module_without_parameters_makes_no_handle(use_orig_params: bool) -> None:
    """A module that has nothing to shard gives no handles, and stays as it is."""
    module = nn.Sequential(nn.ReLU(), nn.Dropout())
    assert flatten_module(module, rank=0, world_size=2, use_orig_params=use_orig_params) == ()
    assert list(module.parameters()) == []


def test_one_flat_parameter_per_dtype_and_training() -> None:
    """Handles come one per dtype and per trainable or frozen, trainable ones first."""
    module = nn.Sequential(
        nn.Linear(2, 2).requires_grad_(False),
        nn.Linear(2, 2),
        nn.Linear(2, 2).bfloat16(),
        nn.Linear(2, 2),
    )
    handles = flatten_module(module, rank=0, world_size=2)
    assert [(h.layout.dtype, h.flat_param.requires_grad, h.layout.fqns) for h in handles] == [
        (torch.float32, True, ("1.weight", "1.bias", "3.weight", "3.bias")),
        (torch.bfloat16, True, ("2.weight", "2.bias")),
        (torch.float32, False, ("0.weight", "0.bias")),
    ]


def test_frozen_integers_are_sharded_too(use_orig_params: bool) -> None:
    """A frozen parameter of integers (quantised weights) is gathered bit for bit."""
    module = nn.Module()
    module.register_parameter("q", nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False))
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    assert module.q.tolist() == [0, 1, 2, 3, 4]
    assert handle.leaves[0].dtype is torch.uint8


@each_row("device", ["cpu", "cuda"])
@each_row("dtypes", [(), (torch.bfloat16,), (None, torch.bfloat16), (torch.float8_e4m3fn,)])
def test_alignment_follows_exposure_and_device(
    device: str, dtypes: tuple[torch.dtype | None, ...], use_orig_params: bool
) -> None:
    """On an accelerator parameters and shards begin at multiples of 16 bytes in each dtype; on a CPU originals alone do.

    A flat parameter on the CPU is packed without gaps, and padded for the ranks alone.
    """
    module = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))
    layout = begin(module, device, Precision(*dtypes), use_orig_params)
    starts, end = [slot.span.start for slot in layout.slots], layout.slots[-1].span.stop
    step = 16 // min((dtype.itemsize for dtype in dtypes if dtype), default=4)
    if device == "cpu" and not use_orig_params:
        assert starts == [0, 3, 4, 7]
    else:
        assert starts == [0, step, 2 * step, 3 * step]
    pace = 1 if device == "cpu" else step
    assert layout.shard_numel == -(-end // (2 * pace)) * pace


def begin(module: nn.Module, device: str, precision: Precision, use_orig_params: bool) -> FlatLayout:
    """The layout for two ranks; the shards have no memory, so nothing has to be on the device."""
    (layout,) = Flattening.begin(
        module,
        discover(module),
        rank=0,
        world_size=2,
        precision=precision,
        device=torch.device(device),
        storage_device=torch.device("meta"),
        use_orig_params=use_orig_params,
    ).layouts
    return layout


def test_alignments_are_settings() -> None:
    """Both thresholds set what begins where; with 0 a flat parameter on an accelerator is FSDP1's."""
    module = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 3))
    for threshold, device in ((ALIGNMENT_NBYTES, "cuda"), (CPU_ALIGNMENT_NBYTES, "cpu")):
        with threshold.set_to(64):
            assert begin(module, device, Precision(), False).shard_numel == 32
        with threshold.set_to(0):
            assert begin(module, device, Precision(), False).shard_numel == 5


def test_every_rank_has_the_same_layout(use_orig_params: bool) -> None:
    """Equal modules give equal layouts on every rank, which is all that the ranks must agree on."""
    layouts = {
        flatten_module(nn.Linear(3, 5), rank=rank, world_size=4, use_orig_params=use_orig_params)[0].layout
        for rank in range(4)
    }
    assert len(layouts) == 1


@each_row("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    """A rank that does not exist is refused, and the module keeps its parameters."""
    module = nn.Linear(2, 2)
    with pytest.raises(LayoutError, match=f"rank {rank}"):
        flatten_module(module, rank=rank, world_size=2)
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
    assert len(flatten_module(module, rank=0, world_size=2)) == 1


def test_a_second_claim_is_refused(use_orig_params: bool) -> None:
    """A module cannot be flattened twice, in any state."""
    module = nn.Linear(2, 2)
    flatten_alone(module, use_orig_params=use_orig_params)
    with pytest.raises(FlatParamError, match="already belongs to another unit"):
        flatten_module(module, rank=0, world_size=1)


def test_a_second_claim_is_refused_while_unsharded() -> None:
    """A module cannot be flattened again while it shows its full parameters."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module)
    gather([handle])
    found = [bound for bound in discover(module) if bound.infos[0].fqn != FLAT_PARAM]
    with pytest.raises(FlatParamError, match="already belongs to another unit"):
        flatten_module(module, rank=0, world_size=1, parameters=found)


@each_row("first", [False, True], ids=["flat-first", "originals-first"])
def test_a_parameter_of_two_units_is_refused(first: bool) -> None:
    """A parameter that is tied across two units is refused by name when the second unit claims it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    flatten_module(model[0], rank=0, world_size=1, use_orig_params=first)
    with pytest.raises(FlatParamError, match="'weight' already belongs"):
        flatten_module(model[1], rank=0, world_size=1, use_orig_params=first)


def test_a_refused_claim_takes_nothing() -> None:
    """If one parameter of a module is claimed already, the others stay where they are and can be claimed again."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3, bias=True))
    model[1].weight = model[0].weight
    flatten_module(model[0], rank=0, world_size=1)
    with pytest.raises(FlatParamError):
        flatten_module(model[1], rank=0, world_size=1)
    assert isinstance(model[1].bias, nn.Parameter)
    rest = discover(model[1], ignored_parameters=[model[1].weight])
    assert flatten_module(model[1], rank=0, world_size=1, parameters=rest)[0].layout.fqns == ("bias",)


def test_mixed_devices_are_refused() -> None:
    """Parameters on two devices are refused, with both names and devices."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(FlatParamError, match=r"'1\.weight' is on meta, '0\.weight' on cpu"):
        flatten_module(module, rank=0, world_size=1)


def test_a_chosen_part_of_a_module() -> None:
    """Only the parameters that are given are taken; the others stay the module's own."""
    module = nn.Linear(2, 3)
    (bias,) = discover(module, ignored_parameters=[module.weight])
    (handle,) = flatten_module(module, rank=0, world_size=1, parameters=[bias])
    assert [name for name, _ in module.named_parameters()] == ["weight", FLAT_PARAM]
    assert handle.layout.fqns == ("bias",)
    assert module(torch.zeros(1, 2)).shape == (1, 3)


def test_two_parts_of_a_module_one_after_the_other() -> None:
    """Flattening the parameters of one module in two calls lists both flat parameters, so both are trained."""
    module = nn.Linear(2, 3)
    weight, bias = discover(module)
    (one,) = flatten_module(module, rank=0, world_size=1, parameters=[weight])
    (other,) = flatten_module(module, rank=0, world_size=1, parameters=[bias])
    listed = list(module.parameters())
    assert [any(p is h.flat_param for p in listed) for h in (one, other)] == [True, True]


def test_an_inner_unit_is_left_alone() -> None:
    """A unit around a unit takes what the inner one has not, when it is told to skip it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    inner = flatten_alone(model[1])
    outer = flatten_alone_with(model, skip=model[1])
    assert inner.layout.fqns == ("0.weight", "0.bias")
    assert outer.layout.fqns == ("0.weight", "0.bias")
    assert [name for name, _ in model.named_parameters()] == [FLAT_PARAM, f"1.{FLAT_PARAM}"]


def flatten_alone_with(model: nn.Module, *, skip: nn.Module):  # type: ignore[no-untyped-def]  # local helper
    found = discover(model, skip_module=lambda module: module is skip)
    return flatten_module(model, rank=0, world_size=1, parameters=found)[0]


def test_a_chosen_device() -> None:
    """With ``device`` the shards, full parameters and gradients live there, wherever the parameters are."""
    (handle,) = flatten_module(nn.Linear(2, 2), rank=0, world_size=2, device=torch.device("cpu"))
    assert handle.flat_param.device == handle.buffer.tensor.device == torch.device("cpu")
    assert handle.gradients.buffer.tensor.device == torch.device("cpu")


def test_handles_are_closed_to_strangers() -> None:
    """A field that a handle does not have cannot be set."""
    handle = flatten_alone(nn.Linear(2, 2))
    assert attrs.has(type(handle))
    with pytest.raises(AttributeError):
        handle.is_prefetched = True  # type: ignore[attr-defined]  # the point of the test


def test_all_errors_are_one_family() -> None:
    """Whatever the library refuses can be caught as FlatParamError, and as RuntimeError."""
    assert issubclass(IllegalStepError, FlatParamError)
    assert issubclass(LayoutError, (FlatParamError, ValueError))
    assert issubclass(FlatParamError, RuntimeError)


@each_row("wrong", ["bfloat16", 3, torch.int32, torch.bool], ids=str)
@each_row("name", ["param_dtype", "reduce_dtype"])
def test_a_precision_has_floating_point_dtypes(name: str, wrong: object) -> None:
    """Names, numbers and dtypes of integers are refused when the precision is made."""
    with pytest.raises(FlatParamError, match=f"{name}: expected a floating-point dtype"):
        Precision(**{name: wrong})  # type: ignore[arg-type]


@each_row("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_gradients_are_not_added_up_in_8_bits(dtype: torch.dtype) -> None:
    """A reduction in 8 bits, in which no backend adds, is refused at once, and not in the first backward pass."""
    with pytest.raises(FlatParamError, match=f"reduce_dtype: expected a dtype .* of 16 bits or more.* found {dtype}"):
        Precision(torch.bfloat16, dtype)
    assert Precision(dtype).reduce_dtype is None
