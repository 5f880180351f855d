"""Parameters that modules see as something else than what is flattened: `PRESENTER`."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

from flatparam_core import PRESENTER, FlatParamError, owner_of
from flatparam_core.testing import check_invariants

from .ranks import flatten_alone, gather, reduce


def negated(tensor: torch.Tensor, factor: float = -1.0) -> torch.Tensor:
    return tensor * factor


def presented_linear() -> nn.Linear:
    module = nn.Linear(3, 2)
    setattr(module.weight, PRESENTER, functools.partial(negated, factor=-2.0))
    return module


def test_modules_see_what_the_presenter_makes(use_orig_params: bool) -> None:
    """The module computes with the presented tensor, also without recording, and the leaf gets its gradient through it."""
    module = presented_linear()
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    with torch.no_grad():
        gather([handle])
    assert torch.equal(module.weight, weight * -2.0)
    assert module.bias is handle.leaves[1]
    out = module(torch.ones(1, 3))
    assert torch.equal(out, nn.functional.linear(torch.ones(1, 3), weight * -2.0, bias))
    out.sum().backward()
    assert torch.equal(handle.leaves[0].grad, torch.full((2, 3), -2.0))
    for index in range(2):
        handle.deposit(index)
    handle.reshard()
    reduce([handle])
    check_invariants(handle)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copied_handle_comes_alive(way: object, use_orig_params: bool) -> None:
    """A handle is copied with its modules; revived, it shows the copied shard, presents alike, and owns its originals."""
    module = presented_linear()
    weight = module.weight.detach().clone()
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    other, twin = way([handle, module])  # type: ignore[operator]
    assert other.revive()
    gather([other])
    assert torch.equal(twin.weight, weight * -2.0)
    other.reshard()
    check_invariants(other)
    with torch.no_grad():
        other.flat_param.zero_()
    assert handle.flat_param.any()
    if use_orig_params:
        assert owner_of(twin.weight) == (other, 0)
        assert owner_of(module.weight) == (handle, 0)


def test_only_a_sharded_handle_is_copied() -> None:
    """While full parameters are in memory a copy is refused."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module)
    gather([handle])
    with pytest.raises(FlatParamError, match="only outside of a pass"):
        copy.deepcopy(handle)


def test_a_flat_parameter_that_is_given_other_data(use_orig_params: bool) -> None:
    """`.data =` on the flat parameter is followed, to a different dtype too; a different shape is refused."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    before = handle.stamp()
    values = torch.arange(float(handle.layout.shard_numel), dtype=torch.float64)
    handle.flat_param.data = values
    assert handle.stamp() > before
    assert handle.layout.dtype == torch.float64
    gather([handle])
    assert module.weight.flatten().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert module.weight.dtype == torch.float64
    handle.reshard()
    check_invariants(handle)
    handle.flat_param.data = torch.zeros(1)
    with pytest.raises(FlatParamError, match=r"expected shape \(\d,\), found \(1,\)"):
        handle.begin_unshard()


def test_a_full_parameter_that_is_given_other_data(use_orig_params: bool) -> None:
    """`.data =` on a full parameter is reported when the shards are shown again, and the leaf is a view again."""
    module = nn.Linear(2, 2)
    handle = flatten_alone(module, use_orig_params=use_orig_params)
    gather([handle])
    module.weight.data = torch.zeros(2, 2)
    with pytest.raises(FlatParamError, match="full parameters of weight were given other data"):
        handle.reshard()
    check_invariants(handle)
    gather([handle])
    assert module.weight.any()
    module.weight.data = torch.zeros(2, 2)
    handle.write_back()
    handle.reshard()
    assert handle.flat_param[:4].tolist() == [0.0] * 4
