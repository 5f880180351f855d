"""The leaves whose gradients a backward pass waits for, and the hooks that report these gradients."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection
from typing import Any, Final, final

import attrs
from torch import Tensor
from torch.autograd.graph import Node
from typing_extensions import Self

from flatparam_comm import FlatParamHandle
from flatparam_runtime.autograd import accumulation_node, will_run

__all__ = ["LeafWatch"]

_GRAD: Final = operator.attrgetter("grad")


@final
@attrs.define(eq=False)
class LeafWatch:
    """A watch over the gradients of the leaves of one form of a flat parameter.

    A leaf has no hook at first: when the gradients of the unit's inputs are computed, those of its leaves are too, and
    all are collected at once. If this is not certain, because the unit has no inputs with a gradient, hides its
    outputs, or a gradient was missing then, leaves get a hook, permanently.
    """

    leaves: tuple[Tensor, ...]
    nodes: list[Node | None]
    """For each leaf the node of autograd that accumulates its gradient; `None` if it never gets a gradient."""
    unhooked: list[int]
    """The leaves without a hook, in order."""
    hooked: list[int]
    _arrived: Callable[[int], Callable[[Tensor], Any]]
    """A function that makes the hook of a leaf, by its index."""
    stream: int
    """The stream that was current when `nodes` were made; they accumulate on it."""

    @classmethod
    def over(
        cls, handle: FlatParamHandle, arrived: Callable[[int], Callable[[Tensor], Any]], stream: int = 0
    ) -> Self:
        """A watch over the present leaves of `handle`; `arrived` makes the hook of a leaf, by its index."""
        leaves = handle.leaves
        nodes = [accumulation_node(leaf) for leaf in leaves]
        trained = [index for index, node in enumerate(nodes) if node is not None]
        return cls(leaves, nodes, trained, [], arrived, stream)

    def follow(self, stream: int) -> None:
        """Accumulate gradients on `stream`, the current one, once no graph holds the nodes of a different stream."""
        if stream != self.stream:
            # A leaf makes a new node once its old one is freed.
            self.nodes.clear()
            self.nodes.extend(map(accumulation_node, self.leaves))
            self.stream = stream

    def hook(self, indices: Collection[int]) -> None:
        """Put a hook on the leaves `indices`, which reports their gradients from now on."""
        for index in indices:
            leaf = self.leaves[index]
            wanted = leaf.requires_grad
            # A frozen leaf may be trained later, and takes a hook only if it requires a gradient.
            leaf.requires_grad_(True)
            leaf.register_post_accumulate_grad_hook(self._arrived(index))  # type: ignore[no-untyped-call]
            leaf.requires_grad_(wanted)
        self.hooked = sorted({*self.hooked, *indices})
        self.unhooked = [index for index in self.unhooked if index not in indices]

    def missing(self) -> list[int]:
        """The leaves without a hook whose gradient the running backward pass has yet to compute."""
        if not any(map(operator.is_, map(_GRAD, self.leaves), itertools.repeat(None))):
            return []
        return [
            index for index in self.unhooked if self.leaves[index].grad is None and self.will_arrive(index)
        ]

    def will_arrive(self, index: int) -> bool:
        """Whether the running backward pass computes, or has computed, the gradient of leaf `index`."""
        node = self.nodes[index]
        return node is not None and self.leaves[index].requires_grad and will_run(node)
