"""FlatParameter: a parameter like any other to optimizers, files and torch."""

import copy
import io

import torch
from each_row import each_row
from torch import nn

from flatparam_core import (
    FlatLayout,
    FlatParameter,
    FlatParamShardMetadata,
    ParamSpec,
    Precision,
    flatten_module,
    shard_metadata,
)


def flat_parameter(rank: int = 1) -> FlatParameter:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return flatten_module(module, rank=rank, world_size=2)[0].flat_param


def test_is_a_leaf_parameter() -> None:
    """A flat parameter is a parameter, 1-D, a leaf, of its layout's shard length."""
    flat = flat_parameter()
    assert isinstance(flat, nn.Parameter)
    assert flat.is_leaf
    assert flat.requires_grad
    assert flat.shape == (flat.flat_layout.shard_numel,) == (7,)


def test_says_what_it_holds() -> None:
    """A flat parameter knows names, shapes and lengths under the names of FSDP1's flat parameter too."""
    flat = flat_parameter()
    assert flat._fqns == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert flat._shapes == (torch.Size([3, 2]), torch.Size([3]), torch.Size([1, 3]), torch.Size([1]))
    assert flat._numels == (6, 3, 3, 1)
    assert flat._is_flat_param
    assert flat._fsdp_flattened


def test_repr_is_short() -> None:
    """The repr shows rank, sizes and the first names, not the numbers."""
    assert repr(flat_parameter()) == (
        "FlatParameter(rank 1 of 2, 7 of 14 elements, torch.float32, cpu: 0.weight, 0.bias, 1.weight, ...)"
    )


def test_arithmetic_gives_plain_tensors() -> None:
    """A result that is computed from a flat parameter is a plain tensor."""
    assert type(flat_parameter() + 1) is torch.Tensor
    assert type(flat_parameter().detach()) is torch.Tensor


def test_a_state_dict_survives_a_file() -> None:
    """The values of a flat parameter can be saved in a state dict and loaded as plain tensors with ``weights_only=True``."""
    module = nn.Linear(2, 2)
    (handle,) = flatten_module(module, rank=0, world_size=1)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["_flat_param"], handle.flat_param.detach())


def test_deepcopy() -> None:
    """A copy of it is a flat parameter of the same layout with memory of its own; like that of any parameter, it has no grad."""
    flat = flat_parameter()
    flat.grad = torch.ones_like(flat)
    twin = copy.deepcopy(flat)
    assert twin.grad is copy.deepcopy(nn.Parameter(torch.ones(1))).grad is None
    assert isinstance(twin, FlatParameter)
    assert twin.flat_layout == flat.flat_layout
    assert torch.equal(twin, flat)
    assert twin.data_ptr() != flat.data_ptr()


def test_metadata_lists_what_the_shard_holds() -> None:
    """Shard metadata names the parameters of which the rank holds elements, with half-open offsets."""
    layout = FlatLayout.plan(
        [
            ParamSpec("a", (2, 3), torch.float32, True, (1, 2)),
            ParamSpec("none", (0,), torch.float32),
            ParamSpec("b", (4,), torch.float32),
        ],
        world_size=2,
    )
    assert shard_metadata(layout, 0) == FlatParamShardMetadata(("a",), ((2, 3),), ((1, 2),), (6,), ((0, 5),))
    assert shard_metadata(layout, 1) == FlatParamShardMetadata(
        ("a", "b"), ((2, 3), (4,)), ((1, 2), (1,)), (6, 4), ((5, 6), (0, 4))
    )


@each_row(
    ("precision", "storage", "compute", "reduce"),
    [
        (Precision(), torch.float32, torch.float32, torch.float32),
        (Precision(torch.bfloat16), torch.float32, torch.bfloat16, torch.bfloat16),
        (Precision(torch.bfloat16, torch.float32), torch.float64, torch.bfloat16, torch.float32),
        (Precision(None, torch.float64), torch.float32, torch.float32, torch.float64),
        (Precision(torch.bfloat16, torch.float32), torch.int64, torch.int64, torch.int64),
        (Precision(torch.bfloat16, torch.float32), torch.complex64, torch.complex64, torch.complex64),
    ],
)
def test_precision(precision: Precision, storage: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> None:
    """Compute and reduction dtypes apply to floating-point parameters; reduction follows compute by default."""
    assert precision.compute(storage) is compute
    assert precision.reduce(storage) is reduce
