"""The sharded form of an original parameter: its part of the shard, with the parameter's number of dimensions."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flatparam_core import ParamSpec, flatten_module

from .ranks import Ranks, flatten_alone
from .strategies import tensor_for, unit_specs


def module_of(specs: tuple[ParamSpec, ...]) -> nn.Module:
    """A module with one trainable parameter for each spec, of float32."""
    module = nn.Module()
    for number, spec in enumerate(specs):
        module.register_parameter(spec.fqn, nn.Parameter(tensor_for(spec, 100 * number + 1)))
    return module


@given(unit_specs(torch.float32), st.integers(1, 5))
def test_a_fragment_keeps_the_number_of_dimensions(specs: tuple[ParamSpec, ...], world_size: int) -> None:
    """On several ranks an original has shape (n, 1, ..., 1), and over them its elements in memory order, once each."""
    parts: dict[str, list[torch.Tensor]] = {spec.fqn: [] for spec in specs}
    for rank in range(world_size):
        module = module_of(specs)
        flatten_module(module, rank=rank, world_size=world_size, use_orig_params=True)
        for spec in specs:
            shown = getattr(module, spec.fqn)
            if world_size > 1:
                assert tuple(shown.shape[1:]) == (1,) * max(len(spec.shape) - 1, 0)
            assert shown.dim() == max(len(spec.shape), 1)
            parts[spec.fqn].append(shown.detach().flatten())
    for number, spec in enumerate(specs):
        wanted = torch.arange(100 * number + 1, 100 * number + 1 + spec.numel, dtype=torch.float32)
        assert torch.equal(torch.cat(parts[spec.fqn]), wanted)


def test_shapes_by_hand() -> None:
    """Alone, row-major parameters keep their shapes; 0-d reads as (n,), and what a rank does not hold has length 0."""
    module = nn.Module()
    for name, shape in {"scale": (), "bias": (3,), "conv": (2, 2, 1, 3), "nothing": (0, 4)}.items():
        module.register_parameter(name, nn.Parameter(torch.ones(shape)))
    permuted = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    module.register_parameter("permuted", permuted)
    handle = flatten_alone(module, use_orig_params=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == {"scale": (1,), "bias": (3,), "conv": (2, 2, 1, 3), "nothing": (0, 1)} | {
        "permuted": (120, 1, 1, 1)
    }
    assert all(p.untyped_storage().data_ptr() == handle.flat_param.data_ptr() for p in module.parameters() if p.numel())
    last = Ranks(lambda: nn.Linear(4, 4), 4, use_orig_params=True).modules[3]
    assert (tuple(last.weight.shape), tuple(last.bias.shape)) == ((1, 1), (4,))


def test_gradients_have_the_shape_of_the_fragment() -> None:
    """After a reduction each original's gradient has the shape of its sharded form, or is None if the rank has nothing."""
    ranks = Ranks(lambda: nn.Conv2d(2, 3, 2), 3, use_orig_params=True)
    ranks.unshard()
    ranks.backward([module(torch.ones(1, 2, 4, 4)).sum() for module in ranks.modules])
    grads = [[p.grad for p in module.parameters()] for module in ranks.modules]
    shapes = [[None if grad is None else tuple(grad.shape) for grad in of_rank] for of_rank in grads]
    assert shapes == [[(9, 1, 1, 1), None], [(9, 1, 1, 1), None], [(6, 1, 1, 1), (3,)]]


def test_a_rule_about_dimensions_decides_as_on_the_full_parameter() -> None:
    """Parameter groups that are built by the number of dimensions have the same names before and after sharding."""
    module = nn.Sequential(nn.Conv2d(1, 2, 2), nn.LayerNorm(3), nn.Linear(3, 2))
    before = [name for name, parameter in module.named_parameters() if parameter.dim() >= 2]
    flatten_module(module, rank=1, world_size=3, use_orig_params=True)
    assert [name for name, p in module.named_parameters() if p.dim() >= 2] == before == ["0.weight", "2.weight"]
