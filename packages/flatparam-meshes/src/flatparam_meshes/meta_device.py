"""Parameters that are `DTensor`s on the meta device: what gives modules their values sees the `DTensor`s.

torch's functions that draw or set values know the whole of a `DTensor`: its size, by which the values of a linear layer
are scaled, and which part this rank has. Of the local part they would make values as if it were the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import Self

from flatparam_comm import FlatParamError
from flatparam_core import PRESENTER
from flatparam_meshes.form import MeshForm
from flatparam_meshes.unit_meshes import UnitMeshes

if TYPE_CHECKING:
    Initialise = Callable[[nn.Module], None]


class Settings(Protocol):
    """The settings that the wrapper has resolved for a unit."""

    @property
    def asked(self) -> Any:
        """Return the arguments; `param_init_fn` gives values to what is on the meta device."""

    @property
    def device(self) -> torch.device | None:
        """Return the device of the unit."""


R = TypeVar("R", bound=Settings)


def join_forms(module: nn.Module, presenters: Sequence[object], resolved: R) -> R:
    """Have the forms of a unit share what they do, and return its settings.

    If parameters are on the meta device, those of the result give them values as `DTensor`s: `param_init_fn`, or the
    modules' own `reset_parameters()`, is called with these in place.

    Args:
        module: that of the unit, in which plain parameters stand for the `DTensor`s.
        presenters: those of its parameters, of which some are `MeshForm`s.
        resolved: its settings.
    """
    UnitMeshes.join(presenters)
    if not any(isinstance(each, MeshForm) and each.to_come is not None for each in presenters):
        return resolved
    asked: Any = resolved.asked.param_init_fn
    given, held = asked, []
    if hasattr(asked, "function"):
        # It says which values come once the parameters are sharded, and does not know what stands for these.
        given = asked.function
        tensors = (t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()))
        held = [each for each in tensors if each is not None and _original(each) in asked]
    initialise: Any = _Initialise(given, resolved.device or torch.device("cpu"), frozenset(map(id, held)))
    if held:
        initialise = type(asked).of(held, initialise)
    changed: Any = attrs.evolve
    found: R = changed(resolved, asked=changed(resolved.asked, param_init_fn=initialise))
    return found


def _original(tensor: Tensor) -> Tensor:
    """Return the `DTensor` on the meta device that a plain parameter stands for; else the tensor itself."""
    form = vars(tensor).get(PRESENTER) if isinstance(tensor, nn.Parameter) else None
    return form.to_come if isinstance(form, MeshForm) and form.to_come is not None else tensor


def _places(modules: Iterator[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter, MeshForm]]:
    for module in modules:
        for name, parameter in [*module._parameters.items()]:
            form = None if parameter is None else vars(parameter).get(PRESENTER)
            if parameter is not None and parameter.is_meta and isinstance(form, MeshForm):
                yield module, name, parameter, form


@final
@attrs.frozen
class _Initialise:
    """Gives the tensors of a module values, with `DTensor`s in place of what stands for them."""

    given: Initialise | None
    """The user's `param_init_fn`; by default a module's `reset_parameters()`."""
    device: torch.device
    later: frozenset[int]
    """The identities of tensors whose values come once they are sharded."""

    def __call__(self, module: nn.Module) -> None:
        """Give values to what `module` itself has on the meta device; the user's function may do more.

        Raises:
            AttributeError: if nothing says what the values are.
            FlatParamError: if it puts something else than a `DTensor` in the place of one, naming the parameter.
        """
        own: Sequence[Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        to_make = any(each.is_meta and id(each) not in self.later for each in own)
        if self.given is None and not to_make:
            return
        if self.given is None and not callable(getattr(module, "reset_parameters", None)):
            raise AttributeError(
                f"{type(module).__name__} has DTensors on the meta device and no reset_parameters(), so nothing says "
                "what their values are: pass param_init_fn, which calls module.to_empty(device=..., recurse=False) and "
                "changes the DTensors that it finds there in place"
            )
        places = _ShownOnMeta.over(module.modules() if self.given is not None else iter([module]))
        try:
            if self.given is not None:
                self.given(module)
            else:
                module.to_empty(device=self.device, recurse=False)
                module.reset_parameters()  # type: ignore[operator]  # modules have it by convention
        finally:
            places.take_back()


@final
@attrs.frozen(eq=False)
class _ShownOnMeta:
    """The places in which `DTensor`s are shown, and what stood there."""

    places: Sequence[tuple[nn.Module, str, nn.Parameter, MeshForm]]

    @classmethod
    def over(cls, modules: Iterator[nn.Module]) -> Self:
        """Show the `DTensor`s of `modules`; one that several modules share stays one."""
        made: dict[int, nn.Parameter] = {}
        places = [*_places(modules)]
        for module, name, parameter, form in places:
            if id(parameter) not in made:
                assert form.to_come is not None, "it was on the meta device"
                shown = nn.Parameter(form.to_come.detach(), parameter.requires_grad)
                vars(shown).update({key: value for key, value in vars(parameter).items() if key != PRESENTER})
                made[id(parameter)] = shown
            module._parameters[name] = made[id(parameter)]
        return cls(places)

    def take_back(self) -> None:
        """Put plain parameters in the places again: the parts of the `DTensor`s there, or what stood for them."""
        made: dict[int, nn.Parameter] = {}
        for module, name, stood, form in self.places:
            now: Any = module._parameters[name]
            if now.is_meta:
                module._parameters[name] = stood
                continue
            if not isinstance(now, DTensor) or now.shape != form.shape:
                raise FlatParamError(
                    f"param_init_fn put a {type(now).__name__} of shape {tuple(now.shape)} in the place of {name!r} of "
                    f"{type(module).__name__}: expected a DTensor of shape {tuple(form.shape)}, as it found there; "
                    "call to_empty(device=..., recurse=False) and change what is there in place, or put "
                    "distribute_tensor(values, mesh, placements) there"
                )
            if id(now) not in made:
                if tuple(now.placements) != form.placements or now.device_mesh != form.mesh:
                    now = now.redistribute(form.mesh, form.placements)
                made[id(module._parameters[name])] = plain = nn.Parameter(form.part(now.detach()), stood.requires_grad)
                vars(plain).update(vars(stood))
            module._parameters[name] = made[id(module._parameters[name])]
