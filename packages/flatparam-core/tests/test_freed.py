"""A full parameter that somebody keeps while its memory is free."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn

from flatparam_core import FlatParamError, flatten_module

USES: list[Callable[[Tensor], Any]] = [
    lambda w: w + 1,
    lambda w: w.T,
    lambda w: w.data,
    lambda w: w[0],
    lambda w: torch.cat([torch.ones(1, 3), w]),
    copy.deepcopy,
    torch.Tensor.numpy,
]


@each_row("use", USES)
def test_a_use_of_it_is_an_error(use: Callable[[Tensor], Any]) -> None:
    """It names the parameter and the rank; in the next pass it is an ordinary parameter again."""
    module = nn.Linear(3, 2, dtype=torch.float32)
    (handle,) = flatten_module(module, rank=1, world_size=2)
    for _ in range(2):
        handle.begin_unshard()[0].fill_(3.0)
        handle.finish_unshard()
        kept = module.weight
        assert type(kept) is nn.Parameter
        assert torch.equal(kept.detach(), torch.full((2, 3), 3.0))
        handle.reshard()
        with pytest.raises(FlatParamError, match=r"rank 1: the full parameter 'weight' was kept"):
            use(kept)


def test_what_needs_no_memory_is_as_ever() -> None:
    """Its shape, its gradient and its hooks are there, and its text says what it is."""
    module = nn.Linear(3, 2)
    (handle,) = flatten_module(module, rank=0, world_size=2)
    handle.begin_unshard()[0].fill_(3.0)
    handle.finish_unshard()
    kept = module.weight
    (kept * 2).sum().backward()
    handle.reshard()
    assert (kept.shape, kept.size(), kept.dim(), kept.numel()) == ((2, 3), (2, 3), 2, 6)
    assert (kept.dtype, kept.device.type, kept.requires_grad) == (torch.float32, "cpu", True)
    assert kept.grad is not None
    assert torch.equal(kept.grad, torch.full((2, 3), 2.0))
    kept.grad = None
    assert "'weight'" in repr(kept)
    assert f"{kept}" == repr(kept)
    assert (len(kept), kept.stride(), kept.element_size(), kept.is_contiguous()) == (2, (3, 1), 4, True)
    assert torch.equal(torch.zeros_like(kept), torch.zeros(2, 3))
    assert kept.new_empty(1).shape == (1,)
    assert isinstance(kept, nn.Parameter)


def test_what_nobody_keeps_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass whose full parameters nobody keeps changes no class."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3, bias=False))
    (handle,) = flatten_module(module, rank=0, world_size=2)
    for _ in range(3):
        handle.begin_unshard()[0].fill_(3.0)
        handle.finish_unshard()
        (module(torch.ones(1, 3))).sum().backward()
        handle.reshard()
        assert handle.form.kept == []
        handle.drop_gradients()


def test_memory_that_is_left_to_somebody_is_not_a_parameter_that_is_kept() -> None:
    """Who has the memory alone, as a backend's thread may for an instant, has no parameter: no class is changed."""
    module = nn.Linear(3, 2)
    (handle,) = flatten_module(module, rank=0, world_size=2)
    handle.begin_unshard()[0].fill_(3.0)
    handle.finish_unshard()
    handle.form.leave_to_holders()
    memory = module.weight.data.numpy()
    handle.reshard()
    assert handle.form.kept == []
    assert memory.tolist() == [[3.0] * 3] * 2
