"""A sharded module that lists its flat parameter: `use_orig_params=False`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, final

import attrs
import torch
from torch import nn

from flatparam_core.errors import FlatParamError
from flatparam_core.exposure.bindings import BoundParameter, ParamInfo
from flatparam_core.exposure.protocol import fragment_view, give_values, memory_of, new_values
from flatparam_core.exposure.sites import PART, Sites
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.geometry import Fragment, ShardPieces
from flatparam_core.storage import add_to_grad, give_data


@final
@attrs.define(eq=False)
class _Follower:
    """An original parameter that is a view of the shard; its `.grad` is a view of the flat parameter's."""

    parameter: nn.Parameter
    fragment: Fragment
    given: bool = False
    """Whether the parameter was given a gradient since its `.grad` was None."""


@final
@attrs.define(eq=False)
class Followers:
    """The followers of one flat parameter, which are looked for at the first gather."""

    flat_param: FlatParameter
    are_none: bool = False
    """Whether it is known that nobody holds an original."""
    _originals: list[weakref.ReferenceType[nn.Parameter]] = attrs.field(factory=list)
    _versions: list[int] = attrs.field(factory=list)
    """The version of each original when it was sharded."""
    _found: dict[int, _Follower] | None = None

    def note(self, originals: Sequence[nn.Parameter]) -> None:
        """Note the originals, which show the shard already."""
        self._originals = [weakref.ref(each) for each in originals]
        self._versions = [each._version for each in originals]

    def originals(self) -> dict[int, nn.Parameter]:
        """Return the originals that somebody still holds, by index."""
        alive = ((index, reference()) for index, reference in enumerate(self._originals))
        return {index: parameter for index, parameter in alive if parameter is not None}

    def stamp(self) -> int:
        """Return the number of in-place changes of the originals since they were sharded."""
        held = self.originals() if self._found is None else {i: f.parameter for i, f in self._found.items()}
        return sum(parameter._version - self._versions[index] for index, parameter in held.items())

    def follow(self, index: int, view: torch.Tensor) -> nn.Parameter:
        """The original `index`; one that is made now is a `view` of the shard, and has the gradient that it has."""
        found = self._originals[index]()
        if found is not None:
            return found
        layout, rank = self.flat_param.flat_layout, self.flat_param.rank
        parameter = nn.Parameter(torch.empty_like(view), self.flat_param.requires_grad)
        give_data(parameter, view.view(ShardPieces.of(layout, rank).shapes[index]))
        followers = self._find()
        followers[index] = _Follower(parameter, layout.fragment(index, rank))
        self.are_none = False
        self._originals[index], self._versions[index] = weakref.ref(parameter), parameter._version
        self._share_grad(followers[index])
        return parameter

    def were_given_data(self, views: Sequence[torch.Tensor]) -> bool:
        """Return whether users gave data to a follower, so that it is none of the `views` of the shard any more."""
        return any(memory_of(each.parameter) != memory_of(views[index]) for index, each in self._find().items())

    def take_over(self, views: Sequence[torch.Tensor]) -> dict[int, nn.Parameter]:
        """Take over the data that users gave to followers, which are none of the `views` any more; see `Exposure`."""
        followers = self._find()
        moved = {i: f for i, f in followers.items() if memory_of(f.parameter) != memory_of(views[i])}
        parts = {index: new_values(self.flat_param, index, follower.parameter) for index, follower in moved.items()}
        if moved:
            give_values(self.flat_param, parts)
        return {index: follower.parameter for index, follower in moved.items()}

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """Add `reduced` to the flat parameter's `.grad`, of which those of the followers are views; see `Exposure`."""
        followers: Mapping[int, _Follower] = self._find()
        grad = self.flat_param.grad
        for follower in followers.values():
            # The module's zero_grad() was called.
            if grad is None:
                follower.parameter.grad = None
            # The zero_grad() of the follower's optimizer was called.
            elif follower.given and follower.parameter.grad is None:
                grad[follower.fragment.in_shard.as_slice()].zero_()
        add_to_grad(self.flat_param, reduced)
        for index, follower in followers.items():
            follower.given = follower.given and follower.parameter.grad is not None
            if arrived[index]:
                self._share_grad(follower)

    def _find(self) -> dict[int, _Follower]:
        if self._found is None:
            layout, rank = self.flat_param.flat_layout, self.flat_param.rank
            self._found = {
                index: _Follower(parameter, layout.fragment(index, rank))
                for index, parameter in self.originals().items()
            }
            self.are_none = not self._found
        return self._found

    def _share_grad(self, follower: _Follower) -> None:
        grad, parameter = self.flat_param.grad, follower.parameter
        if grad is not None:
            if parameter.grad_dtype not in (None, grad.dtype):
                parameter.grad_dtype = None
            parameter.grad = fragment_view(grad, self.flat_param.flat_layout, follower.fragment)
            follower.given = True


@final
@attrs.define(eq=False)
class FlatExposure:
    """`parameters()` lists the flat parameter; the original names show this rank's parts, 1-D."""

    lists_shard: ClassVar[bool] = True
    flat_param: FlatParameter
    owner: weakref.ReferenceType[nn.Module]
    attribute: str
    """The name under which the owner registers the flat parameter."""
    _sites: Sites
    _views: tuple[torch.Tensor, ...] = ()
    reading: Callable[[int], torch.Tensor | None] | None = None
    _parts: weakref.WeakValueDictionary[int, torch.Tensor] = attrs.field(factory=weakref.WeakValueDictionary)
    """By index, the parts with a gradient that somebody has read and still has."""
    hides_shard: bool = False
    """Whether the owner does not register the flat parameter now."""
    _followers: Followers = attrs.Factory(lambda self: Followers(self.flat_param), takes_self=True)
    """The originals that outlived sharding."""

    @classmethod
    def attach(
        cls, owner: nn.Module, attribute: str, flat_param: FlatParameter, bound: Sequence[BoundParameter]
    ) -> FlatExposure:
        """Register `flat_param` in `owner` and take the original parameters out of their modules."""
        exposure = cls(flat_param, weakref.ref(owner), attribute, Sites.of(bound))
        for b in bound:
            # This gradient is a full one; what is added from now on has the fragment's shape.
            b.parameter.grad = None
        exposure._make_views({index: b.parameter for index, b in enumerate(bound)})
        exposure._followers.note([b.parameter for b in bound])
        owner.register_parameter(attribute, flat_param)
        exposure.show_shard()
        return exposure

    def __getstate__(self) -> tuple[object, ...]:
        """Return the state for a copy; nobody holds the originals of a copy."""
        return self.flat_param, self.owner(), self.attribute, self._sites

    def __setstate__(self, state: tuple[FlatParameter, nn.Module, str, Sites]) -> None:
        """Restore a copy, which shows nothing yet; see `FlatParamHandle.revive`."""
        flat_param, owner, attribute, sites = state
        type(self).__init__(self, flat_param, weakref.ref(owner), attribute, sites)

    def _make_views(self, originals: Mapping[int, nn.Parameter]) -> None:
        layout, rank = self.flat_param.flat_layout, self.flat_param.rank
        pieces = ShardPieces.of(layout, rank)
        self._views = tuple(pieces.lines(self.flat_param.detach()))
        for index, original in originals.items():
            view, grad = self._views[index].view(pieces.shapes[index]), original.grad
            # The flat parameter's gradient, of which it was a view, may have been moved or cast.
            if grad is not None and not _is_part(grad, self.flat_param.grad):
                original.grad = None
            give_data(original, view)

    @property
    def infos(self) -> Sequence[tuple[ParamInfo, ...]]:
        """Return, for each parameter, the module attributes that hold it."""
        return self._sites.infos

    @property
    def is_dormant(self) -> bool:
        """Return whether this is a copy whose modules show nothing yet; `refresh` ends that."""
        return not self._views

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the flat parameter alone."""
        return (self.flat_param,)

    def listed(self) -> Sequence[nn.Parameter]:
        """Return the flat parameter."""
        return self.parameters()

    def originals(self) -> Mapping[int, nn.Parameter]:
        """Return the originals that outlived sharding and that somebody still holds, by index."""
        return self._followers.originals()

    def follow(self, index: int) -> nn.Parameter:
        """Return the original `index`; one that is made now has its part of the flat parameter's gradient."""
        return self._followers.follow(index, self._views[index])

    def requires_grad(self) -> Sequence[bool]:
        """Say of each parameter what the flat parameter says of all."""
        return [self.flat_param.requires_grad] * len(self._views)

    @property
    def is_trainable(self) -> bool:
        """Return whether the flat parameter is to get a gradient."""
        return self.flat_param.requires_grad

    def stamp(self) -> int:
        """Count the in-place changes of the flat parameter, and of the originals that are left."""
        own = self.flat_param._version
        return own if self._followers.are_none else own + self._followers.stamp()

    @property
    def was_given_data(self) -> bool:
        """Return whether an original that is left has other data than its view of the shard."""
        return not self._followers.are_none and self._followers.were_given_data(self._views)

    def take_over(self) -> Mapping[int, nn.Parameter]:
        """Take over what originals were given; replacements in a module are refused when full parameters are shown.

        Raises:
            FlatParamError: if the owner has registered something in the flat parameter's place; its values would be
                ignored.
        """
        owner = self.owner()
        if owner is not None and self._is_replaced(owner):
            raise FlatParamError(
                f"rank {self.flat_param.rank}: the flat parameter {self.attribute!r} "
                f"(of {', '.join(self.flat_param.flat_layout.fqns[:3])}) was replaced by another object after its "
                "module was sharded, as torch.func.functional_call does, and its values would be ignored; pass "
                "use_orig_params=True and replace the original parameters, or change values inside "
                "summon_full_params()"
            )
        if self._followers.are_none:
            return {}
        return self._followers.take_over(self._views)

    def lend(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """Show the part `index` under the names `infos` of another unit's modules too."""
        self._sites.add(index, infos, self._read)

    def refresh(self) -> None:
        """Make the views anew of the flat parameter's memory, and show them."""
        self._make_views(self.originals())
        self.show_shard()

    def show(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Register full tensors (or `None`) under the parameters' names."""
        self._sites.put(tensors)

    def shown(self, index: int) -> torch.Tensor | None:
        """Return the tensor that `show` was given for parameter `index`."""
        return self._sites.shown[index]

    def show_shard(self) -> None:
        """Register nothing under the parameters' names, so that their attributes show this rank's parts."""
        # The registered entry becomes None, which parameters() passes over and which keeps its place in the order.
        self._sites.put((None,) * len(self._views), self._read)

    def _read(self, index: int, registered: torch.Tensor | None) -> torch.Tensor | None:
        """Return what an attribute shows: if nothing is registered, the rank's part, 1-D, with a gradient."""
        if registered is not None:
            return registered
        lent = None if self.reading is None else self.reading(index)
        if lent is not None:
            return lent
        if not (self.flat_param.requires_grad and torch.is_grad_enabled()):
            return self._views[index]
        # The same object under all names, as long as somebody has it.
        part = self._parts.get(index)
        if part is None or part._base is not self.flat_param or part.data_ptr() != self._views[index].data_ptr():
            layout = self.flat_param.flat_layout
            part = self.flat_param[layout.fragment(index, self.flat_param.rank).in_shard.as_slice()]
            setattr(part, PART, True)
            self._parts[index] = part
        return part

    def put_back(self, indices: Sequence[int] | None = None) -> None:
        """Register again what somebody has replaced since `show`."""
        self._sites.put_back(indices)

    def replacements(self) -> Mapping[int, nn.Parameter]:
        """Return, by index, the parameters that somebody has registered since `show`, and that fit."""
        return self._sites.replacements()

    def list_flat_parameter(self, listed: bool) -> None:
        """Register the flat parameter in its owner, or take it out."""
        owner = self.owner()
        # What the user has registered there is refused by `take_over`.
        if owner is not None and not self._is_replaced(owner):
            owner._parameters[self.attribute] = self.flat_param if listed else None
            self.hides_shard = not listed

    def _is_replaced(self, owner: nn.Module) -> bool:
        """Whether `owner` registers something other than the flat parameter, or nothing, where it is to be listed."""
        return owner._parameters.get(self.attribute) is not (None if self.hides_shard else self.flat_param)

    def add_gradient(self, reduced: torch.Tensor, arrived: Sequence[int]) -> None:
        """Add to the flat parameter's `.grad`, and to what the originals that are left see of it."""
        if not any(arrived):
            return
        if self._followers.are_none:
            add_to_grad(self.flat_param, reduced)
        else:
            self._followers.add_gradient(reduced, arrived)


def _is_part(view: torch.Tensor, whole: torch.Tensor | None) -> bool:
    return whole is not None and view.untyped_storage()._cdata == whole.untyped_storage()._cdata
