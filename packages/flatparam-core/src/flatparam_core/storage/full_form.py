"""The full parameters of a flat parameter, in the dtypes that they are gathered in."""

from __future__ import annotations

import functools
import itertools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from typing_extensions import Self

from flatparam_core.geometry import FlatLayout
from flatparam_core.names import PRESENTER
from flatparam_core.storage.buffer import BufferPool, FlatBuffer, slot_view
from flatparam_core.storage.precision import Precision

_GRAD: Final = operator.attrgetter("grad")
_MEMORY: Final = operator.attrgetter("layout")


def kind_of(parameter: nn.Parameter) -> type[nn.Parameter]:
    """The class of the full parameter that modules show for `parameter`: its own, if that derives from `nn.Parameter`.

    Libraries tell their parameters by the class, for example quantised weights. A tensor of a different class that is
    only marked as a parameter, such as a `DTensor`, cannot be a view of a buffer.
    """
    kind = type(parameter)
    return kind if nn.Parameter in kind.__mro__ else nn.Parameter


@final
@attrs.define(eq=False)
class FullForm:
    """The buffer of the full parameters in one dtype, and an autograd leaf for each, a view of it that is made once.

    The leaves share a version counter, so that a look at one tells whether any was changed in place.
    """

    buffer: FlatBuffer
    leaves: tuple[nn.Parameter, ...] = ()
    """The leaves; empty until the buffer is filled for the first time."""
    trained: Sequence[bool] = attrs.field(factory=list)
    """For each leaf, whether it was last told to require a gradient."""
    _solid: dict[int, nn.Parameter] = attrs.field(factory=dict)
    """The leaves that have elements, by index."""
    _offsets: list[int] = attrs.field(factory=list)
    """The offset of each of these leaves in the buffer, in bytes."""
    _version: int = 0
    """The version of the leaves, which they share, when the buffer was last filled."""
    _holders: int = 0
    """The references to the memory when they were counted; 0 if they were not."""
    _own_holders: int = 0
    """The references to the memory while nobody else has any: the least, since a backend's thread has some at times."""
    _references: list[int] = attrs.field(factory=list)
    """For each leaf, the references to it, from Python, while it is not shown and nobody else has any."""
    _has_nodes: bool = False
    kept: list[int] = attrs.field(factory=list)
    """The leaves that somebody else has now, though the memory is free."""
    watch: Any = None
    """The notes of a runtime on the leaves, kept for as long as there are these."""
    _staged: FlatBuffer | None = None
    """The shards of all ranks, end to end, until the buffer is filled with them, if each rank has chunks."""

    @classmethod
    def create(
        cls, layout: FlatLayout, *, dtype: torch.dtype, device: torch.device, pool: BufferPool | None = None
    ) -> Self:
        """Return a form without memory and without leaves."""
        form = cls(FlatBuffer.create(layout, dtype=dtype, device=device, pool=pool))
        if layout.is_chunked:
            form._staged = FlatBuffer.create(layout, dtype=dtype, device=device, pool=pool)
        return form

    @classmethod
    def over(cls, layout: FlatLayout, values: torch.Tensor) -> Self:
        """Return a form in the memory of `values`, a flat parameter that is not sharded."""
        return cls(FlatBuffer.over(layout, values))

    def use_pool(self, pool: BufferPool) -> None:
        """From now on, take memory from `pool`, and return it there."""
        self.buffer.pool = pool
        if self._staged is not None:
            self._staged.pool = pool

    def follow(self, values: torch.Tensor) -> None:
        """Move to the memory of `values`, if the form is in other memory."""
        if self.buffer.borrow(values):
            for index, leaf in enumerate(self.leaves):
                leaf.data = self.buffer.view(index)

    def make_leaves(
        self,
        attributes: Sequence[Mapping[str, object]],
        wanted: Sequence[bool],
        kinds: Sequence[type[nn.Parameter]] = (),
    ) -> None:
        """Make the leaves if there are none yet; the buffer has to be allocated.

        Args:
            attributes: for each parameter, the attributes that users and libraries set on the original.
            wanted: for each parameter, whether it requires a gradient.
            kinds: for each parameter, the class of its leaf (see `kind_of`); by default `nn.Parameter` for all.
        """
        if self.leaves:
            return
        leaves, slots = [], self.buffer.layout.slots
        kinds = kinds or [nn.Parameter] * len(attributes)
        # Leaves that are made in inference mode could never be trained.
        with torch.inference_mode(False):
            alias = self.buffer.tensor.data
            # In memory that is the flat parameter's, changes are kept, and are nothing to the neighbours.
            views = self.buffer.views() if self.buffer.is_borrowed else [slot_view(alias, s) for s in slots]
            for view, noted, wants, kind in zip(views, attributes, wanted, kinds, strict=True):
                leaf: nn.Parameter = torch.Tensor._make_subclass(kind, view, wants)
                vars(leaf).update(noted, _fsdp_flattened=True)
                leaves.append(leaf)
        self.leaves, self.trained = tuple(leaves), wanted
        start = self.buffer.tensor.data_ptr()
        self._solid = {index: leaf for index, leaf in enumerate(leaves) if leaf.numel()}
        self._offsets = [leaf.data_ptr() - start for leaf in self._solid.values()]

    def allocate(self) -> torch.Tensor:
        """Allocate the memory, and return the tensor that the shards of all ranks are gathered in, end to end."""
        self.buffer.allocate()
        if self._staged is None:
            return self.buffer.tensor
        self._staged.allocate()
        return self._staged.tensor

    def fill(self) -> None:
        """Fill the buffer with what was gathered, if that is not there already."""
        if self._staged is not None:
            self.buffer.layout.chunks.spread(self.buffer.tensor, self._staged.tensor)
            self._staged.free()

    def count_holders(self) -> None:
        """Have whoever gets a view of the memory from now on keep it, and its values, when it is freed next."""
        self._holders = self.buffer.holders

    def count_own(self) -> None:
        """Count the references that there are before anybody has seen the new leaves, while they are not shown."""
        self._own_holders = self.buffer.holders
        self._references = [*map(sys.getrefcount, self.leaves)]

    def note_nodes(self, nodes: Sequence[object]) -> None:
        """Note that somebody has nodes of autograd, for good: for each leaf the one that has it, or None."""
        if not self._has_nodes:
            self._has_nodes = True
            by_node = [0 if node is None else _by_a_node() for node in nodes]
            self._references = [*map(operator.add, self._references, by_node)]

    def leave_to_holders(self) -> None:
        """Have whoever has a view of the memory keep it when it is freed next: no graph has one.

        On an accelerator streams would have to agree on the memory, so it is freed.
        """
        if not self._holders and self.buffer.tensor.is_cpu:
            self._own_holders = self._holders = min(self._own_holders, self.buffer.holders)

    def free(self) -> None:
        """Free the memory; the leaves stay, and `kept` has those that somebody else has.

        What somebody has by its address alone, such as the array of `Tensor.numpy()`, keeps the memory and its values.
        """
        buffer, holders = self.buffer, self._holders
        if self._staged is not None:
            self._staged.free()
        if self.leaves and not buffer.is_borrowed:
            if not buffer.is_resizable or 0 < holders < buffer.holders:
                buffer.leave()
                for index, leaf in enumerate(self.leaves):
                    leaf.data = buffer.view(index)
                    del leaf  # or it counts as a reference of somebody else
            self._holders = 0
            found = [*map(sys.getrefcount, self.leaves)]
            if found != self._references:
                pairs = zip(found, self._references, strict=False)
                self.kept = [index for index, (now, own) in enumerate(pairs) if now > own]
        buffer.free()

    def note_filled(self) -> None:
        """Note that the leaves have the values of the shards."""
        self._version = self.leaves[0]._version

    @property
    def is_edited(self) -> bool:
        """Whether somebody has changed a leaf in place since, and the shards do not see it."""
        return not self.buffer.is_borrowed and self.leaves[0]._version != self._version

    def reclaim(self, *, keep: bool = False) -> list[int]:
        """Turn the leaves that somebody gave other memory (`.data =`) into views of the allocated buffer again.

        Args:
            keep: copy the values that the leaves were given to the buffer; else these values are lost.

        Returns:
            The indices of these leaves.
        """
        start = self.buffer.tensor.data_ptr()
        if [*map(torch.Tensor.data_ptr, self._solid.values())] == [*map(start.__add__, self._offsets)]:
            return []
        places = zip(self._solid.items(), self._offsets, strict=True)
        moved = [index for (index, leaf), offset in places if leaf.data_ptr() != start + offset]
        for index in moved:
            leaf, view = self.leaves[index], self.buffer.view(index)
            if keep:
                view.copy_(leaf.detach())
            leaf.data = view
        return moved

    def take_gradients(self, indices: Sequence[int]) -> tuple[Sequence[int], list[torch.Tensor]]:
        """Take `.grad` from the leaves `indices`; return the indices and the gradients of those that had one.

        A sparse gradient, as of `nn.Embedding(sparse=True)`, is returned dense, since slots are.
        """
        leaves = [*map(self.leaves.__getitem__, indices)]
        gradients = [*map(_GRAD, leaves)]
        is_there = [*map(operator.is_not, gradients, itertools.repeat(None))]
        if not all(is_there):
            chosen = (list(itertools.compress(each, is_there)) for each in (indices, leaves, gradients))
            indices, leaves, gradients = chosen
        for leaf in leaves:
            leaf.grad = None
        if {torch.strided}.issuperset(map(_MEMORY, gradients)):
            return indices, gradients
        return indices, [each if each.layout is torch.strided else each.to_dense() for each in gradients]


@functools.cache
def _by_a_node() -> int:
    """The references from Python that a leaf has, in this version of torch, because a node of autograd has it."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = nn.Parameter(torch.empty(0, device="cpu"))
        before = sys.getrefcount(leaf)
        nodes = [get_gradient_edge(leaf).node]
        return (sys.getrefcount(leaf) - before) * len(nodes)


@final
@attrs.define(eq=False)
class FullForms:
    """The forms of one flat parameter: in its compute dtype and, if that is different and asked for, in its own."""

    layout: FlatLayout
    precision: Precision
    device: torch.device
    attributes: tuple[dict[str, object], ...] = ()
    """For each parameter, the attributes that users and libraries set on the original."""
    pool: BufferPool | None = None
    """The pool that the memory of full parameters comes from, if a runtime sets one."""
    kinds: tuple[type[nn.Parameter], ...] = ()
    """For each parameter, the class of what modules show; if there is none, it is `nn.Parameter` for all."""
    has_presenters: bool = attrs.field(init=False)
    """Whether modules show a tensor that is made from some full parameter."""
    meshes: Any = attrs.field(init=False)
    """The meshes beside data parallelism that presenters share, if any: `UnitMeshes` of the add-on flatparam-meshes."""
    _computed: torch.dtype = attrs.field(init=False)
    """The dtype of computation, unless somebody asks for full precision."""
    nbytes: tuple[int, int] = attrs.field(init=False)
    """The bytes of the full parameters in the dtype of computation, and in their own."""
    current: FullForm = attrs.field(init=False)
    """The full parameters that are in memory now, or were last."""
    _others: dict[tuple[torch.dtype, bool], FullForm] = attrs.field(factory=dict)

    stepped: torch.dtype = attrs.field(init=False)
    """The dtype of `.grad` of what an optimizer holds."""

    def __attrs_post_init__(self) -> None:
        own, marks = self.layout.dtype, [noted.get(PRESENTER) for noted in self.attributes]
        self._computed, self.stepped = self.precision.compute(own), self.precision.grad(own)
        self.nbytes = self.layout.numel * self._computed.itemsize, self.layout.numel * own.itemsize
        self.has_presenters = any(PRESENTER in noted for noted in self.attributes)
        self.meshes = next(filter(None, (getattr(mark, "meshes", None) for mark in marks)), None)
        self.current = self._new(self._computed)

    def _new(self, dtype: torch.dtype) -> FullForm:
        return FullForm.create(self.layout, dtype=dtype, device=self.device, pool=self.pool)

    def dtype(self, *, full_precision: bool) -> torch.dtype:
        """Return the dtype to compute in."""
        return self.layout.dtype if full_precision else self._computed

    def choose(self, dtype: torch.dtype, *, over: torch.Tensor | None = None) -> FullForm:
        """Make the form in `dtype` the current one.

        Args:
            over: the flat parameter, whose memory the form is to use.
        """
        buffer = self.current.buffer
        before, wanted = (buffer.tensor.dtype, buffer.is_borrowed), (dtype, over is not None)
        if before != wanted:
            self._others[before] = self.current
            if wanted not in self._others:
                self._others[wanted] = self._new(dtype) if over is None else FullForm.over(self.layout, over)
            self.current = self._others[wanted]
        if over is not None:
            self.current.follow(over)
        return self.current

    def follow(self, shard: torch.Tensor) -> None:
        """Have the forms that are in the memory of the flat parameter leave it for that of `shard`, where it is now."""
        for form in self.known:
            if form.buffer.is_borrowed:
                form.follow(shard)

    def again(self, layout: FlatLayout, device: torch.device) -> FullForms:
        """New forms of the same parameters, in a different dtype or on a different device."""
        return FullForms(layout, self.precision, device, self.attributes, self.pool, self.kinds)

    def has_presenter(self, index: int) -> bool:
        """Return whether modules show a tensor made from the full parameter `index`."""
        return PRESENTER in self.attributes[index]

    def present(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """The tensor that modules show for the full parameter `index`: `full`, or what its `PRESENTER` returns."""
        presenter = self.attributes[index].get(PRESENTER)
        if presenter is None:
            return full
        # A backward pass may compute with the result.
        with torch.enable_grad():
            return presenter(full)  # type: ignore[operator, no-any-return]  # it is a function

    def presented(self) -> Sequence[torch.Tensor]:
        """Return the tensors that modules show now."""
        return [self.present(index, leaf) for index, leaf in enumerate(self.current.leaves)]

    @property
    def known(self) -> Sequence[FullForm]:
        """The forms that have been made, the current one first."""
        return (self.current, *(form for form in self._others.values() if form is not self.current))

    def use_pool(self, pool: BufferPool) -> None:
        """From now on, take memory from `pool`, and return it there."""
        self.pool = pool
        for form in self.known:
            form.use_pool(pool)
