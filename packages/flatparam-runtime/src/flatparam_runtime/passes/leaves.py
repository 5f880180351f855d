"""The leaves whose gradients a backward pass waits for, and how it learns that they are there."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from typing_extensions import Self, final

from flatparam_comm import FlatParamHandle

__all__ = ["LeafWatch", "watches", "will_run"]

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
        nodes = [_accumulation(leaf) for leaf in leaves]
        trained = [index for index, node in enumerate(nodes) if node is not None]
        return cls(leaves, nodes, trained, [], arrived, stream)

    def follow(self, stream: int) -> None:
        """Have the gradients accumulated on `stream`, which is current now, once no graph has the nodes of another."""
        if stream != self.stream:
            self.nodes.clear()  # the leaf makes another node as soon as nobody has this one
            self.nodes.extend(map(_accumulation, self.leaves))
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


def _accumulation(leaf: Tensor) -> Node | None:
    if not (leaf.is_floating_point() or leaf.is_complex()):
        return None
    wanted = leaf.requires_grad
    with torch.inference_mode(False), torch.enable_grad():
        node = get_gradient_edge(leaf.requires_grad_(True)).node
    leaf.requires_grad_(wanted)
    return node


def watches(handles: Iterable[FlatParamHandle]) -> Iterator[tuple[int, FlatParamHandle, LeafWatch]]:
    """The watches over the leaves of `handles`, each with its handle's number: of those that have computed already."""
    for number, handle in enumerate(handles):
        watch = handle.form.watch
        if watch is not None:
            assert isinstance(watch, LeafWatch), "it is this runtime's"
            yield number, handle, watch


def will_run(node: Node) -> bool:
    """Whether the backward pass under way is going to compute what arrives at `node`."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # it has no public name
    except RuntimeError:  # a leaf that autograd.grad() was asked for: it is computed, and its hooks run
        return True
