"""FSDP1's extension point makes the sharded tensors of a state, and takes them apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam_clients.private._fsdp_extensions import FSDPExtensions, _set_fsdp_extensions
from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes


class Noting(FSDPExtensions):
    """Flattens parameters as they are, and notes what it is asked for sharded states."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Any) -> torch.Tensor:
        return tensor

    def chunk_tensor(self, *arguments: Any) -> torch.Tensor:
        self.asked.append("chunk_tensor")
        return super().chunk_tensor(*arguments)

    def chunk_dtensor(self, *arguments: Any) -> torch.Tensor:
        self.asked.append("chunk_dtensor")
        return super().chunk_dtensor(*arguments)

    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        self.asked.append("pre_load_state_dict_transform")
        return super().pre_load_state_dict_transform(tensor)

    def all_gather_dtensor(self, tensor: torch.Tensor, parent_mesh: Any) -> torch.Tensor:
        self.asked.append("all_gather_dtensor")
        return super().all_gather_dtensor(tensor, parent_mesh)


def with_extensions(ranks: Collectives, use_mesh: bool) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    wrapper = flatparam.FullyShardedDataParallel
    arguments = {"device_mesh": init_device_mesh("cpu", (2,))} if use_mesh else {}
    extensions = Noting()
    _set_fsdp_extensions(extensions)
    try:
        torch.manual_seed(0)
        model, expected = wrapper(nn.Linear(3, 5), **arguments), nn.Linear(3, 5)
        expected.load_state_dict(model.state_dict())
        with wrapper.state_dict_type(model, flatparam.StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(state)
    finally:
        _set_fsdp_extensions(None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])
    return sorted(set(extensions.asked))


def test_they_are_asked() -> None:
    """S-105: each of the four methods is asked where FSDP1 would ask it, and the state loads back."""
    assert run_processes(2, with_extensions, False) == [["chunk_tensor", "pre_load_state_dict_transform"]] * 2
    assert run_processes(2, with_extensions, True) == [["all_gather_dtensor", "chunk_dtensor"]] * 2
