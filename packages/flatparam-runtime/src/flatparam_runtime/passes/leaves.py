"""The leaves whose gradients a backward pass waits for, and how it learns that they are there."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

import attrs
from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import Self, final

from flatparam_comm import FlatParamHandle, FullForm
from flatparam_runtime.autograd import accumulation_node, will_run

__all__ = ["LeafWatch", "watch_of", "watches"]

_GRAD: Final = operator.attrgetter("grad")


@final
@attrs.define(eq=False)
class LeafWatch:
    """How a pass learns of the gradients of one form of a flat parameter.

    A leaf has no hook at first: when the gradients of the unit's inputs are there, so are those of its leaves, and all
    are collected at once. Where that cannot be counted on, because the unit has no such inputs, hides its outputs, or a
    gradient was missing then, leaves get a hook, for ever.
    """

    leaves: tuple[Tensor, ...]
    nodes: list[Node | None]
    """For each leaf the node of autograd that accumulates its gradient; `None` where it never gets one."""
    unhooked: list[int]
    """The leaves without a hook, in order."""
    hooked: list[int]
    _arrived: Callable[[int], Callable[[Tensor], Any]]
    """Makes the hook of a leaf."""
    stream: int
    """The stream that was current when `nodes` were made, on which they accumulate."""

    @classmethod
    def begin(
        cls, handle: FlatParamHandle, arrived: Callable[[int], Callable[[Tensor], Any]], stream: int = 0
    ) -> Self:
        """Watch the leaves of `handle`; `arrived` makes the hook of a leaf, by its index."""
        leaves = handle.leaves
        nodes = [accumulation_node(leaf) for leaf in leaves]
        trained = [index for index, node in enumerate(nodes) if node is not None]
        watch = _WATCHES[handle.form] = cls(leaves, nodes, trained, [], arrived, stream)
        return watch

    def follow(self, stream: int) -> None:
        """Have the gradients accumulated on `stream`, which is current now, once no graph has the nodes of another."""
        if stream != self.stream:
            self.nodes.clear()  # the leaf makes another node as soon as nobody has this one
            self.nodes.extend(map(accumulation_node, self.leaves))
            self.stream = stream

    def hook(self, indices: Collection[int]) -> None:
        """Be told of the gradients of the leaves `indices`, from now on."""
        for index in indices:
            leaf = self.leaves[index]
            wanted = leaf.requires_grad
            leaf.requires_grad_(True)  # a frozen one may be trained later, and takes a hook only so
            leaf.register_post_accumulate_grad_hook(self._arrived(index))  # type: ignore[no-untyped-call]
            leaf.requires_grad_(wanted)
        self.hooked = sorted({*self.hooked, *indices})
        self.unhooked = [index for index in self.unhooked if index not in indices]

    def missing(self) -> list[int]:
        """The leaves without a hook whose gradient the backward pass under way has still to compute."""
        if not any(map(operator.is_, map(_GRAD, self.leaves), itertools.repeat(None))):
            return []
        return [
            index for index in self.unhooked if self.leaves[index].grad is None and self.will_arrive(index)
        ]

    def will_arrive(self, index: int) -> bool:
        """Whether the backward pass under way computes the gradient of leaf `index`, or has."""
        node = self.nodes[index]
        return node is not None and self.leaves[index].requires_grad and will_run(node)


_WATCHES: Final[weakref.WeakKeyDictionary[FullForm, LeafWatch]] = weakref.WeakKeyDictionary()


def watch_of(handle: FlatParamHandle) -> LeafWatch | None:
    """The watch over the leaves that `handle` has now, or had last; `None` before they computed for the first time."""
    return _WATCHES.get(handle.form)


def watches(handles: Iterable[FlatParamHandle]) -> Iterator[tuple[int, FlatParamHandle, LeafWatch]]:
    """The watches over the leaves of `handles`, each with its handle's number: of those that have computed already."""
    for number, handle in enumerate(handles):
        watch = _WATCHES.get(handle.form)
        if watch is not None:
            yield number, handle, watch
