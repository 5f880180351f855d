"""A parameter that is a `DTensor`, as FSDP2's are, over this rank's part, which is a plain tensor in a flat shard."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from flatparam_core import FlatParamError, ParamSpec
from flatparam_meshes import MeshForm

_NONE: Final[Mapping[str, MeshForm]] = MappingProxyType({})
_HELD_HERE: Final = 3
"""The references to a gradient's `DTensor` that are ours: its parameter's, a variable's, the counting call's."""
_NOTHING: Final = torch.empty(0, device="cpu")
_GRAD_OF_FACE: Final[Any] = torch._C.TensorBase.grad
"""The place where autograd puts the gradient of whatever reads a face itself, such as a penalty on its values."""
_HOOKS_OF_FACE: Final[Any] = torch._C.TensorBase._post_accumulate_grad_hooks  # type: ignore[attr-defined]
"""The hooks that autograd calls after that."""


class ShardedParameter(DTensor):
    """A parameter of a module that `fully_shard` has sharded: a `DTensor`, cut along dimension 0.

    Its local part is a view of the flat shard, so that both have the same values at any time. The gradient and
    `requires_grad` are those of `original`, the plain parameter that flatparam trains. Operations give `DTensor`s, as
    with torch's.
    """

    original: nn.Parameter
    _shown_grad: DTensor | None
    _passes_on: _PassesOn

    def stand_for(self, original: nn.Parameter, hooks: Any = None) -> None:
        """Be the face of `original`."""
        self.original, self._shown_grad, self._passes_on = original, None, _PassesOn(hooks)
        # Autograd calls it with the face, so that nothing refers to the face itself.
        _HOOKS_OF_FACE.__set__(self, {0: self._passes_on})

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        return self._passes_on.hooks

    @_post_accumulate_grad_hooks.setter
    def _post_accumulate_grad_hooks(self, hooks: Any) -> None:
        self._passes_on.hooks = hooks

    @property
    def grad(self) -> Tensor | None:
        """Return the gradient, a `DTensor` over that of the plain parameter."""
        local, shown = self.original.grad, self._shown_grad
        if local is None:
            return None
        if shown is not None and shown._local_tensor is local:
            return shown
        if shown is None or shown.dtype != local.dtype or sys.getrefcount(shown) > _HELD_HERE:
            shown = self._shown_grad = presented(local, self)
        else:
            # Nobody else has it: it stands for the gradient of this step now.
            shown._local_tensor = local
        return shown

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD_OF_FACE.__set__(self, None)
        if value is None:
            self.original.grad = None
            self.let_go()
            return
        if not isinstance(value, DTensor) or value.shape != self.shape:
            raise RuntimeError(
                f"a gradient of this parameter is a DTensor of shape {tuple(self.shape)}, found a "
                f"{type(value).__name__} of shape {tuple(value.shape)}; to change what this rank has of it, use "
                "parameter.grad.to_local()"
            )
        if value.placements != self.placements:
            value = value.redistribute(self.device_mesh, self.placements)
        local = value._local_tensor
        if local.dtype != self.original.dtype:
            self.original.grad_dtype = None
        self.original.grad = local
        self._shown_grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def let_go(self) -> None:
        """Refer to no memory of a gradient that is gone; if nobody else has its `DTensor`, that stands for the next."""
        if self._shown_grad is not None:
            shown = self._shown_grad
            if sys.getrefcount(shown) > _HELD_HERE:
                self._shown_grad = None
            else:
                shown._local_tensor = _NOTHING

    @property
    def requires_grad(self) -> bool:
        """Return whether the parameter is trained."""
        return self.original.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:
        """Train the parameter from now on, or do not."""
        self.original.requires_grad_(requires_grad)
        super().requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a parameter with memory of its own, a plain `DTensor`: no module is sharded with it."""
        if id(self) not in memo:
            copy = memo[id(self)] = nn.Parameter(presented(self._local_tensor.clone(), self), self.requires_grad)
            copy.grad = None if self.grad is None else self.grad.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to make the plain `DTensor` parameter with the same values."""
        return nn.Parameter, (self.detach(), self.requires_grad)


@final
@attrs.define(eq=False)
class _PassesOn:
    """The hook of autograd on a face."""

    hooks: Any
    """The hooks of users for the gradient that is reduced; autograd does not see them."""

    def __call__(self, face: ShardedParameter) -> None:
        """Add what autograd has just computed for the face itself to the gradient of the plain parameter."""
        before, face.grad = face.original.grad, _GRAD_OF_FACE.__get__(face)
        found = face.original.grad
        if before is not None and found is not None:
            face.original.grad = before.add_(found)
        for hook in tuple((self.hooks or {}).values()):
            hook(face)


def presented(local: Tensor, like: DTensor) -> DTensor:
    """Return the `DTensor` over `local`, of any dtype, that has the shape and the placements of `like`."""
    spec: Any = like._spec
    if local.dtype != like.dtype:
        meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    made: Any = DTensor
    return made(local, spec, requires_grad=False)  # type: ignore[no-any-return]


def as_presented(value: Any, face: ShardedParameter, before: Any) -> Any:
    """Return what an optimizer's state has for `value` while it holds `face`: a `DTensor` if it has the part's shape.

    Args:
        before: what stood for the value of the last step.
    """
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != face.original.shape:
        return value
    if isinstance(before, DTensor) and before._local_tensor is value:
        return before
    return presented(value, face)


@final
@attrs.frozen(eq=False)
class DTensorFaces:
    """Makes the faces of the parameters that are sharded over one mesh; see `flatparam_core.Faces`."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    forms: Mapping[str, MeshForm] = attrs.field(factory=dict)
    """The forms of parameters that are `DTensor`s of other meshes, by their names in the unit."""

    @classmethod
    def over(cls, mesh: DeviceMesh, forms: Mapping[str, MeshForm] = _NONE) -> DTensorFaces:
        """Shard over the last dimension of `mesh`, and hold copies across those before it."""
        return cls(mesh, (*[Replicate()] * (mesh.ndim - 1), Shard(0)), forms)

    def make(self, original: nn.Parameter, spec: ParamSpec) -> nn.Parameter:
        """Return the `DTensor` whose local part is `original`'s memory."""
        of = self._spec(spec, original.dtype)
        kind: Any = ShardedParameter
        face = kind(original.detach(), of, requires_grad=original.requires_grad)
        face._is_param = True
        face.stand_for(original)
        # A class of its own notes what its bytes mean, and the face is no such object.
        noted = vars(original).items() if type(original) is nn.Parameter else ()
        vars(face).update({name: value for name, value in noted if not name.startswith("_fsdp")})
        return face  # type: ignore[no-any-return]  # nn.Parameter is what it passes for

    def _spec(self, spec: ParamSpec, dtype: torch.dtype) -> DTensorSpec:
        form = self.forms.get(spec.fqn)
        if form is None:
            meta = TensorMeta(torch.Size(spec.shape), spec.stride, dtype)
            return DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return _of_both(self, form, dtype)

    def follow(self, face: nn.Parameter, original: nn.Parameter) -> None:
        """Have the local part of `face` be the memory that `original` has now."""
        assert isinstance(face, ShardedParameter)
        local = original.detach()
        if face.dtype != original.dtype or face.device != original.device:
            other = presented(local, face)
            face.data = other
            face._spec, face._shown_grad = other._spec, None
        face._local_tensor = local

    def own_part(self, given: nn.Parameter) -> nn.Parameter:
        """Return the local part of a `DTensor` that somebody has put in the place of a face; or `given`."""
        found: Any = given
        if not isinstance(given, DTensor):
            return given
        mesh, placements = self._wanted(given)
        if given.placements != placements or given.device_mesh != mesh:
            found = given.redistribute(mesh, placements)
        return found._local_tensor  # type: ignore[no-any-return]  # its values are what counts

    def _wanted(self, given: DTensor) -> tuple[DeviceMesh, Sequence[Placement]]:
        """Return the mesh and the placements of the faces that have the shape of `given`.

        Raises:
            FlatParamError: if there are several, and `given` is like none of them.
        """
        if not self.forms or given.device_mesh == self.mesh:
            return self.mesh, self.placements
        alike = [_of_both(self, form, given.dtype) for form in self.forms.values() if form.shape == given.shape]
        specs = {(each.mesh, each.placements) for each in alike}
        own = (given.device_mesh, tuple(given.placements))
        if own in specs:
            return own
        if len(specs) != 1:
            raise FlatParamError(
                f"expected a DTensor of shape {tuple(given.shape)} that is spread as the parameter that it replaces, "
                f"found {tuple(given.placements)} over {given.device_mesh}; copy its values to the parameter"
            )
        return specs.pop()

    def adopt(self, given: nn.Parameter, face: nn.Parameter) -> nn.Parameter:
        """Make a `DTensor` in the place of `face` the face: an optimizer may hold it already; another unit's is one."""
        assert isinstance(face, ShardedParameter)
        kind: Any = type(given)
        if kind is not DTensor:
            return given if isinstance(given, ShardedParameter) else face
        newcomer: Any = given
        face.original.requires_grad_(given.requires_grad)
        hooks = newcomer._post_accumulate_grad_hooks
        own = (hooks or {}).get(0)
        if isinstance(own, _PassesOn):
            # It was a face before.
            hooks = own.hooks
        newcomer.__class__, newcomer._spec = ShardedParameter, face._spec
        newcomer.stand_for(face.original, hooks)
        gradient = _GRAD_OF_FACE.__get__(newcomer)
        if gradient is not None:
            newcomer.grad = gradient
        return given

    def lost(self, faces: Sequence[nn.Parameter]) -> Sequence[int]:
        """Return the indices of the plain `DTensor`s: torch's `_apply` swaps a parameter for what it has converted."""
        if {ShardedParameter}.issuperset(map(type, faces)):
            return ()
        return [index for index, face in enumerate(faces) if not isinstance(face, ShardedParameter)]

    def original(self, face: nn.Parameter) -> nn.Parameter:
        """Return the plain parameter that flatparam trains."""
        return face.original  # type: ignore[attr-defined, no-any-return]  # it is a face

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensorFaces:
        """Return itself: a copy of a model is sharded over the same ranks."""
        return self


def _of_both(faces: DTensorFaces, form: MeshForm, dtype: torch.dtype) -> DTensorSpec:
    """Return how FSDP2 spreads a parameter that is a `DTensor` already: over both meshes, with its rows strided.

    The rows of each rank of tensor parallelism are cut over the data-parallel ranks: of the whole, a rank has rows that
    do not lie side by side, and of which `_StridedShard` says where they lie.
    """
    *copies, rows = faces.placements
    parts = 1
    for dimension, placement in enumerate(form.placements):
        if getattr(placement, "dim", None) == 0:
            parts *= form.mesh.size(dimension)
    if parts > 1:
        rows = _StridedShard(0, split_factor=parts)
    meta = TensorMeta(form.shape, form.stride, dtype)
    mesh = both_meshes(faces.mesh, form.mesh)
    return DTensorSpec(mesh, (*copies, rows, *form.placements), tensor_meta=meta)


@functools.cache
def have_dtensors_without_address() -> None:
    """Have `DTensor.data_ptr()` be 0, as it is of all that torch's FSDP2 makes; a second call does nothing.

    By this torch tells a tensor that only stands for others, and saves or copies its parts. But where the local part
    lies somewhere inside a storage, as in a shard, torch gives the `DTensor` the same offset, and an address by that.
    """
    kind: Any = DTensor
    kind.data_ptr = lambda self: 0


def both_meshes(mesh: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the dimensions of both.

    Raises:
        ValueError: if they are not dimensions of one mesh.
    """
    made: Any = DeviceMesh
    try:
        return made._concatenate([mesh, inner])  # type: ignore[no-any-return]  # torch's own, which FSDP2 calls
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"expected a mesh and DTensors over different dimensions of one mesh with names, found {mesh} and {inner}; "
            "take both from one init_device_mesh(), or call flatparam.fully_shard"
        ) from error
