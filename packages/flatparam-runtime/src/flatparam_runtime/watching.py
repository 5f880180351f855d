"""The leaves whose gradients a backward pass waits for, and how it learns that they are there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from typing_extensions import Self, final

from flatparam_comm import FlatParamHandle

__all__ = ["LeafWatch", "watch_of", "will_run"]

SMALL_NBYTES: Final = 2**16
"""A gradient of at most this many bytes may wait for the others of its unit, to be copied with them."""

SMALL_NBYTES_OF_ALL: Final = 2**22
"""That many bytes of small gradients wait at most in one flat parameter; what is more is copied one by one."""


@final
@attrs.define(eq=False)
class LeafWatch:
    """How a pass learns of the gradients of one form of a flat parameter.

    A hook costs more than the copy of a small gradient. So small leaves have none at first: when the gradients of the
    unit's inputs are there, so are theirs, and one call copies them all. Where that cannot be counted on, because the
    unit has no such inputs, hides its outputs, or a gradient was missing then, they get one too.
    """

    leaves: tuple[Tensor, ...]
    nodes: list[Node | None]
    """For each leaf the node of autograd that accumulates its gradient; `None` where it never gets one."""
    unhooked: list[int]
    """The leaves without a hook, in order."""
    hooked: list[int]
    _arrived: Callable[[int], Callable[[Tensor], Any]]
    """Makes the hook of a leaf."""

    @classmethod
    def begin(cls, handle: FlatParamHandle, arrived: Callable[[int], Callable[[Tensor], Any]]) -> Self:
        """Watch the leaves of `handle`; `arrived` makes the hook of a leaf, by its index."""
        leaves = handle.leaves
        nodes = [_accumulation(leaf) for leaf in leaves]
        trained = [index for index, node in enumerate(nodes) if node is not None]
        watch = cls(leaves, nodes, trained, [], arrived)
        small, room = set(), SMALL_NBYTES_OF_ALL
        for index in sorted(trained, key=lambda i: leaves[i].nbytes):
            room -= leaves[index].nbytes
            if leaves[index].nbytes <= SMALL_NBYTES and room >= 0:
                small.add(index)
        watch.hook([index for index in trained if index not in small])
        return watch

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


def watch_of(handle: FlatParamHandle) -> LeafWatch | None:
    """The watch over the leaves of `handle`, where its unit has computed in their present form."""
    watch = handle.form.watch
    assert watch is None or isinstance(watch, LeafWatch), "it is this runtime's"
    return watch


def will_run(node: Node) -> bool:
    """Whether the backward pass under way is going to compute what arrives at `node`."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # it has no public name
    except RuntimeError:  # a leaf that autograd.grad() was asked for: it is computed, and its hooks run
        return True
