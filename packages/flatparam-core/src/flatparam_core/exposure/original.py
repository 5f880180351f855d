"""A sharded module that lists its original parameters, each a view of its part of the shard: `use_orig_params=True`."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, final

import attrs
import torch
from torch import nn

from flatparam_core.errors import FlatParamError
from flatparam_core.exposure.bindings import BoundParameter, ParamInfo
from flatparam_core.exposure.owners import owner_of
from flatparam_core.exposure.protocol import Faces, give_values, new_values
from flatparam_core.exposure.sites import Sites, replaced
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.geometry import ShardPieces
from flatparam_core.storage import add_to_grad, give_data

_GRAD: Final = operator.attrgetter("grad")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
_VERSION: Final = operator.attrgetter("_version")
_NOWHERE: Final = -1
"""The address of an original that is a view of nothing yet."""


@final
@attrs.define(eq=False)
class OriginalExposure:
    """`parameters()` lists the original parameter objects, each a view of its part of the shard."""

    lists_shard: ClassVar[bool] = False
    hides_shard: ClassVar[bool] = False
    flat_param: FlatParameter
    _originals: list[nn.Parameter]
    _sites: Sites
    _addresses: list[int] = attrs.field(factory=list)
    """The address of each original's part of the shard."""
    reading: Callable[[int], torch.Tensor | None] | None = None
    faces: Faces | None = None
    """The maker of the parameters that modules show, and users hold, in the place of the originals, if there is one."""
    _shown: list[nn.Parameter] = attrs.Factory(lambda self: self._originals, takes_self=True)
    """The sharded form: the originals, or a face of each."""
    _changes: int = 0
    """The number of changes of originals that are gone."""
    _tied: set[int] = attrs.field(factory=set)
    """The originals that are another unit's, since a face was put in two places."""
    _pieces: ShardPieces = attrs.field(init=False)
    _is_here: list[bool] = attrs.field(init=False)
    """For each original, whether it gets gradients on this rank: not if other ranks have all of its elements."""

    @_pieces.default
    def _cut(self) -> ShardPieces:
        return ShardPieces.of(self.flat_param.flat_layout, self.flat_param.rank)

    @_is_here.default
    def _look_what_is_here(self) -> list[bool]:
        layout = self.flat_param.flat_layout
        if layout.is_chunked:
            # As with torch's `fully_shard`, an empty chunk has an empty gradient.
            return [True] * len(layout.slots)
        fragments = layout.fragments(self.flat_param.rank)
        return [bool(f.in_shard) or not slot.span for f, slot in zip(fragments, layout.slots, strict=True)]

    @classmethod
    def attach(cls, flat_param: FlatParameter, bound: Sequence[BoundParameter]) -> OriginalExposure:
        """Turn the original parameters into views of the shard, once; optimizers that hold them go on working."""
        exposure = cls(flat_param, [b.parameter for b in bound], Sites.of(bound))
        for parameter in exposure._originals:
            # This gradient is a full one; what is added from now on has the fragment's shape.
            parameter.grad = None
        exposure.refresh()
        exposure.show_shard()
        return exposure

    def wear(self, faces: Faces) -> Sequence[nn.Parameter]:
        """Show a face of each original from now on, and return them; an optimizer that is made later holds faces."""
        specs = [slot.spec for slot in self.flat_param.flat_layout.slots]
        self.faces = faces
        self._shown = [faces.make(each, spec) for each, spec in zip(self._originals, specs, strict=True)]
        self.show_shard()
        return self._shown

    def __getstate__(self) -> tuple[object, ...]:
        """Return the state for a copy."""
        if self._tied:
            raise FlatParamError(
                f"rank {self.flat_param.rank}: expected ties between units from before sharding, found later ones of "
                f"{[self._sites.infos[index][0].fqn for index in self._tied]}: copy the model before it is sharded"
            )
        return self.flat_param, self._originals, self._sites, self.faces

    def __setstate__(self, state: tuple[FlatParameter, list[nn.Parameter], Sites, Faces | None]) -> None:
        """Restore a copy, whose originals are views of nothing yet; see `FlatParamHandle.revive`."""
        flat_param, originals, sites, faces = state
        type(self).__init__(self, flat_param, originals, sites, [_NOWHERE] * len(originals), faces=faces)

    @property
    def infos(self) -> Sequence[tuple[ParamInfo, ...]]:
        """Return, for each parameter, the module attributes that hold it."""
        return self._sites.infos

    @property
    def is_dormant(self) -> bool:
        """Return whether this is a copy whose originals are views of nothing yet; `refresh` ends that."""
        return self._addresses[:1] == [_NOWHERE]

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the originals."""
        return self._originals

    def listed(self) -> Sequence[nn.Parameter]:
        """Return what modules show while they are sharded."""
        return self._shown

    def originals(self) -> Mapping[int, nn.Parameter]:
        """Return all originals, by index."""
        return dict(enumerate(self._originals))

    def follow(self, index: int) -> nn.Parameter:
        """Return the original `index`; it always lives."""
        return self._originals[index]

    def requires_grad(self) -> Sequence[bool]:
        """Ask each original."""
        return list(map(_REQUIRES_GRAD, self._originals))

    @property
    def is_trainable(self) -> bool:
        """Return whether some original is to get a gradient."""
        return any(map(_REQUIRES_GRAD, self._originals))

    def stamp(self) -> int:
        """Count the in-place changes of the flat parameter, and of all originals, also of those that were replaced."""
        versions: int = sum(map(_VERSION, self._originals))
        if self.faces is not None:
            # An operation on a face may count there alone.
            versions += sum(map(_VERSION, self._shown))
        return self.flat_param._version + self._changes + versions

    @property
    def was_given_data(self) -> bool:
        """Return whether an original lies elsewhere than where `refresh` has put it, or a face is none any more."""
        if self._addresses != list(map(torch.Tensor.data_ptr, self._originals)):
            return True
        return self.faces is not None and bool(self._lost())

    def _lost(self) -> Sequence[int]:
        # A copy has no faces yet.
        return () if self.faces is None or self._shown is self._originals else self.faces.lost(self._shown)

    def take_over(self) -> Mapping[int, nn.Parameter]:
        """Copy what originals were given into new memory; an object put in an original's place becomes it."""
        for index in self._tied:
            # In any case: the steps of fused optimizers count no change.
            self._pieces.views(self.flat_param.data)[index].copy_(self._originals[index].data)
            self._addresses[index] = self._originals[index].data_ptr()
        registered = map(operator.is_, self._sites.registered(), self._sites.at_attributes(self._shown))
        if all(registered) and not self.was_given_data:
            return {}
        given, newcomers, lost = dict[int, nn.Parameter](), dict[int, nn.Parameter](), self._lost()
        for index, (parameter, infos) in enumerate(zip(self._originals, self._sites.infos, strict=True)):
            found = infos[0].module._parameters.get(infos[0].param_name)
            for info in infos[1:]:
                if info.module._parameters.get(info.param_name) is not found:
                    raise FlatParamError(
                        f"parameter {infos[0].fqn!r} was replaced after its module was sharded, but not under its "
                        f"other name {info.fqn!r} too: which modules share a parameter cannot change any more"
                    )
            if found is None:
                raise replaced(infos[0])
            if found is not self._shown[index] or index in lost:
                self._refuse_sharded(found, index)
                given[index] = found if self.faces is None else self.faces.own_part(found)
                newcomers[index] = found
            elif parameter.data_ptr() != self._addresses[index]:
                given[index] = parameter
        parts = {index: new_values(self.flat_param, index, found) for index, found in given.items()}
        before = {index: self._originals[index] for index in given}
        if given:
            give_values(self.flat_param, parts)
        if self.faces is not None:
            self._adopt(newcomers, self.faces)
            self._sites.put_back([*given])
            return before
        for index, found in given.items():
            if found.grad is not None and found.grad.shape != self._pieces.shapes[index]:
                # This gradient is a full one, for example from before sharding.
                found.grad = None
            # The new object's own count may be lower.
            self._changes += self._originals[index]._version + 1
            self._originals[index] = self._sites.shown[index] = found
        return before

    def _refuse_sharded(self, found: nn.Parameter, index: int) -> None:
        """Refuse another parameter that is sharded; only a face may be tied, to one of another unit."""
        handle, at = owner_of(found) or (None, index)
        is_own = handle is not None and handle.flat_param is self.flat_param
        if handle is not None and (at != index if is_own else self.faces is None):
            raise FlatParamError(
                f"parameter {self._sites.infos[index][0].fqn!r} was tied to {handle.layout.fqns[at]!r} after its "
                "module was sharded, so both would be trained; tie parameters before sharding, or copy the values "
                "inside summon_full_params()"
            )

    def _adopt(self, newcomers: Mapping[int, nn.Parameter], faces: Faces) -> None:
        """Have what was put in the places of faces be the faces: an optimizer may hold it already."""
        # A copy has no faces yet.
        for index, found in newcomers.items() if self._shown is not self._originals else ():
            is_anew = found is self._shown[index]
            if index in self._tied and owner_of(found) is None:
                is_anew = True
                # It is a parameter of its own again, which nothing here holds any more.
                self._tied.remove(index)
                part = self._pieces.views(self.flat_param.detach())[index]
                self._originals[index] = nn.Parameter(part, requires_grad=found.requires_grad)
            if is_anew:
                self._shown[index] = faces.make(self._originals[index], self.flat_param.flat_layout.slots[index].spec)
            self._shown[index] = self._sites.shown[index] = face = faces.adopt(found, self._shown[index])
            if (original := faces.original(face)) is not self._originals[index]:
                self._changes += self._originals[index]._version + 1
                self._originals[index] = original
                self._tied.add(index)

    def lend(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """Show the original `index` under the names `infos` of another unit's modules too."""
        self._sites.add(index, infos, self._read)

    def refresh(self) -> None:
        """Make the originals views of the flat parameter's memory."""
        parts = self._pieces.views(self.flat_param.detach())
        for index, (parameter, part) in enumerate(zip(self._originals, parts, strict=True)):
            if index not in self._tied:
                give_data(parameter, part)
        self._addresses = [*map(torch.Tensor.data_ptr, self._originals)]
        if self.faces is not None and self._shown is not self._originals:
            for index, (face, parameter) in enumerate(zip(self._shown, self._originals, strict=True)):
                if index not in self._tied:
                    self.faces.follow(face, parameter)

    def show(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Register full tensors (or `None`) under the parameters' names."""
        self._sites.put(tensors)

    def shown(self, index: int) -> torch.Tensor | None:
        """Return the tensor that was registered last for parameter `index`."""
        return self._sites.shown[index]

    def show_shard(self) -> None:
        """Register the originals under their names."""
        self._sites.put(self._shown, self._read)

    def _read(self, index: int, registered: torch.Tensor | None) -> torch.Tensor | None:
        lent = None if self.reading is None else self.reading(index)
        return registered if lent is None else lent

    def put_back(self, indices: Sequence[int] | None = None) -> None:
        """Register again what somebody has replaced since `show`."""
        self._sites.put_back(indices)

    def replacements(self) -> Mapping[int, nn.Parameter]:
        """Return, by index, the parameters that somebody has registered since `show`, and that fit."""
        return self._sites.replacements()

    def list_flat_parameter(self, listed: bool) -> None:
        """Do nothing: the flat parameter is never listed."""

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """Add its part of the gradient to the `.grad` of each original that arrived and has elements here."""
        originals, gradients = self._originals, self._pieces.views(reduced)
        is_here = self._is_here
        if not all(arrived) or not all(is_here):
            wanted = [a and here for a, here in zip(arrived, is_here, strict=True)]
            originals = list(itertools.compress(originals, wanted))
            gradients = list(itertools.compress(gradients, wanted))
        had = map(operator.is_not, map(_GRAD, originals), itertools.repeat(None))
        if reduced.dtype != self.flat_param.dtype or any(had):
            for parameter, gradient in zip(originals, gradients, strict=True):
                add_to_grad(parameter, gradient)
            return
        # What `add_to_grad` does here, without a call for each parameter.
        for parameter, gradient in zip(originals, gradients, strict=True):
            parameter.grad = gradient
