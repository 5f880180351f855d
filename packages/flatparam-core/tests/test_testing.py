"""The helpers that ship: check_invariants finds what is broken, and shards_of packs without ranks."""

from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_core import FlatLayout, FlatParamHandle, ParamSpec, flatten_module
from flatparam_core.testing import check_invariants, shards_of


def lose_the_buffer(handle: FlatParamHandle) -> None:
    handle.begin_unshard()
    handle.buffer.free()


def keep_the_buffer(handle: FlatParamHandle) -> None:
    handle.buffer.allocate()


def lose_the_shard(handle: FlatParamHandle) -> None:
    handle.flat_param.untyped_storage().resize_(0)


def cut_the_shard(handle: FlatParamHandle) -> None:
    handle.flat_param.data = handle.flat_param.data[1:]


@each_row(
    ("damage", "promise"),
    [
        (lose_the_buffer, "allocated exactly while"),
        (keep_the_buffer, "allocated exactly while"),
        (lose_the_shard, "always has its memory"),
        (cut_the_shard, "the layout's length"),
    ],
)
def test_check_invariants_names_the_broken_promise(damage: Callable[[FlatParamHandle], None], promise: str) -> None:
    """A handle that was damaged behind its back fails the check, with the promise and the handle."""
    # The handle does not keep the module alive.
    module = nn.Linear(2, 2)
    (handle,) = flatten_module(module, rank=0, world_size=2)
    check_invariants(handle)
    damage(handle)
    with pytest.raises(AssertionError, match=rf"FlatParamHandle\(.*{promise}"):
        check_invariants(handle)


def test_shards_of_packs_any_strides_and_casts() -> None:
    """Tensors whose strides or dtype are not the layout's are packed in its order and dtype."""
    layout = FlatLayout.plan([ParamSpec("w", (2, 3), torch.float64, True, (1, 2))], world_size=4)
    shards = shards_of([torch.arange(6.0).reshape(2, 3)], layout)
    assert [shard.tolist() for shard in shards] == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0], [0.0, 0.0]]
    assert {shard.dtype for shard in shards} == {torch.float64}
