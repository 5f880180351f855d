"""Parameters of tensor classes that cannot be flattened: what is flattened instead, and what modules see of it.

Above all `DTensor`: with FSDP over one dimension of a mesh and tensor parallelism over another, a parameter is the part
of a `DTensor` that this rank holds. That part is flattened and sharded; modules see a `DTensor` again.
"""

from __future__ import annotations

import abc
import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from flatparam.resolve import Ignored
from flatparam_core import PRESENTER, discover, owner_of
from flatparam_runtime import unit_of

__all__ = ["DTensorExtensions", "FSDPExtensions", "flatten_extended"]


class FSDPExtensions(abc.ABC):
    """How parameters of some tensor class are flattened. FSDP1's extension point: see `_set_fsdp_extensions`.

    FSDP1's has four more methods, for sharded state dicts, which are not there yet.
    """

    @abc.abstractmethod
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        """The plain tensor to flatten in place of `tensor`, and what it takes to make the like of it again.

        `(tensor, None)` leaves it as it is.
        """

    @abc.abstractmethod
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        """What modules see of `tensor`, a full parameter as flattened; it is made differentiably."""


class DTensorExtensions(FSDPExtensions):
    """For `DTensor` parameters over a mesh of other ranks than those that FSDP shards over."""

    @override
    def pre_flatten_transform(self, tensor: Tensor) -> tuple[Tensor, Any | None]:
        """This rank's local part.

        Raises:
            ValueError: for a `DTensor` that is a sum still to be made.
        """
        from torch.distributed.tensor import DTensor  # imported where a DTensor may be

        if not isinstance(tensor, DTensor):
            return tensor, None
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"a parameter cannot be a partial DTensor, found one with {tensor.placements}")
        facts = (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())
        return tensor.to_local(), facts

    @override
    def post_unflatten_transform(self, tensor: Tensor, param_extension: Any) -> Tensor:
        """The `DTensor` of which `tensor` is the local part; gradients come back to that part."""
        from torch.distributed.tensor import DTensor

        mesh, placements, shape, stride = param_extension
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)


_extensions: FSDPExtensions | None = None


def _set_fsdp_extensions(flattener: FSDPExtensions | None) -> None:
    """Have `flattener` asked for every parameter that is wrapped from now on; `None` for none."""
    global _extensions
    _extensions = flattener


def flatten_extended(module: nn.Module, ignored: Ignored) -> None:
    """Put plain parameters in the place of those that cannot be flattened; they carry how they are to be shown."""
    bound = discover(
        module,
        ignored_parameters=ignored.parameters,
        skip_module=lambda child: child in ignored.modules or unit_of(child) is not None,
    )
    for b in bound:
        if (_extensions is None and type(b.parameter) is nn.Parameter) or owner_of(b.parameter) is not None:
            continue
        for extensions in (_extensions, DTensorExtensions() if dist.is_available() else None):
            if extensions is None:
                continue
            plain, facts = extensions.pre_flatten_transform(b.parameter)
            if plain is b.parameter:
                continue
            parameter = nn.Parameter(plain.detach(), requires_grad=b.parameter.requires_grad)
            vars(parameter).update(vars(b.parameter))
            present = functools.partial(extensions.post_unflatten_transform, param_extension=facts)
            setattr(parameter, PRESENTER, present)
            for info in b.infos:
                setattr(info.module, info.param_name, parameter)
            break
