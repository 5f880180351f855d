"""Original parameters that outlived sharding, because somebody holds them: an optimizer that was made before, say."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import final

import attrs
import torch
from torch import nn

from flatparam_core.exposure.protocol import fragment_view, give_values, memory_of, new_values
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.geometry import Fragment, ShardPieces
from flatparam_core.storage import add_to_grad, give_data

__all__ = ["Followers"]


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
        return any(
            memory_of(each.parameter) != memory_of(views[index]) for index, each in self._find().items()
        )

    def take_over(self, views: Sequence[torch.Tensor]) -> dict[int, nn.Parameter]:
        """Take over the data that users gave to followers, which are none of the `views` any more; see `Exposure`."""
        followers = self._find()
        moved = {i: f for i, f in followers.items() if memory_of(f.parameter) != memory_of(views[i])}
        parts = {
            index: new_values(self.flat_param, index, follower.parameter) for index, follower in moved.items()
        }
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
