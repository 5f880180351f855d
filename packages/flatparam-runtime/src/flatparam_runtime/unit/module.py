"""The module of a unit: its calls and those of modules inside it, its buffers, its initial weights, its leaves."""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, TypeAlias, final

import attrs
from torch import Tensor, nn
from torch.autograd.graph import Node
from typing_extensions import Self

from flatparam_comm import Collectives, FlatParamError, FlatParamHandle, Topology, engine_of, process_group_of
from flatparam_runtime.autograd import CALL, accumulation_node, will_run
from flatparam_runtime.unit.buffers import UnitBuffers
from flatparam_runtime.unit.calls import ForwardCall, InnerCall
from flatparam_runtime.unit.initial_weights import InitialWeights

_GRAD: Final = operator.attrgetter("grad")
TREE: Final = "_flatparam_tree"
"""The attribute of a module that holds the tree of its unit, so that both have the same lifetime."""


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
    def over(cls, handle: FlatParamHandle, arrived: Callable[[int], Callable[[Tensor], Any]], stream: int = 0) -> Self:
        """Return a watch over the present leaves of `handle`; `arrived` makes the hook of a leaf, by its index."""
        leaves = handle.leaves
        nodes = [accumulation_node(leaf) for leaf in leaves]
        trained = [index for index, node in enumerate(nodes) if node is not None]
        return cls(leaves, nodes, trained, [], arrived, stream)

    def follow(self, stream: int) -> None:
        """Accumulate gradients on `stream`, the current one, once no graph holds the nodes of a different stream."""
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
        """Return the leaves without a hook whose gradient the running backward pass has yet to compute."""
        if not any(map(operator.is_, map(_GRAD, self.leaves), itertools.repeat(None))):
            return []
        return [index for index in self.unhooked if self.leaves[index].grad is None and self.will_arrive(index)]

    def will_arrive(self, index: int) -> bool:
        """Return whether the running backward pass computes, or has computed, the gradient of leaf `index`."""
        node = self.nodes[index]
        return node is not None and self.leaves[index].requires_grad and will_run(node)


WatchedHandle: TypeAlias = tuple[int, FlatParamHandle, LeafWatch]
"""A flat parameter whose present leaves are watched: its number in the unit, its handle, and the watch."""


def leaf_watches(handles: Sequence[FlatParamHandle]) -> Sequence[WatchedHandle]:
    """Return those of `handles` whose present leaves are watched."""
    found = []
    for number, handle in enumerate(handles):
        watch: LeafWatch | None = handle.forms.current.watch
        if watch is not None:
            found.append((number, handle, watch))
    return found


LeafKey: TypeAlias = tuple[int, int]
"""A leaf of a unit: the number of its handle, and its index there."""


def hooked_leaves_to_come(watches: Sequence[WatchedHandle]) -> set[LeafKey]:
    """Return the leaves with a hook whose gradient the running backward pass computes, or has computed."""
    found: set[LeafKey] = set()
    for number, _, watch in watches:
        if watch.hooked:
            found.update((number, index) for index in watch.hooked if watch.will_arrive(index))
    return found


@final
@attrs.define(eq=False)
class InnerCalls:
    """The stand-ins for calls from outside of a unit's own call.

    They are in place exactly while the unit is not called, nor, if something is compiled, in its backward pass, which
    has the full parameters: what a checkpoint inside recomputes there has to run as in the forward pass. They stand for
    the `forward` of each module inside and, under a wrapper, for that of the unit's module and its call.
    """

    calls: tuple[InnerCall[Any], ...] = ()

    @classmethod
    def of(cls, calls: tuple[InnerCall[Any], ...]) -> Self:
        """Return these calls, watched from now on."""
        watched = cls(calls)
        watched.put()
        return watched

    def put(self) -> None:
        """Put every stand-in in its place: the unit is not called any more."""
        for call in self.calls:
            module = call.reference()
            own = None if module is None else module.__dict__
            # The shortcut for nearly all calls.
            if own is not None and call.name not in own and call.own is None and call.covered is None:
                own[call.name] = call
            else:
                call.put()

    def restore(self) -> None:
        """Put the stand-ins for calls in their places, which torch leaves out when it copies a module."""
        for call in self.calls:
            module = call.reference()
            if module is not None and call.name == CALL and module.__dict__.get(CALL) is None:
                call.put()

    def lift(self) -> None:
        """Remove every stand-in: the unit is called, and calls the modules inside directly, also under a compiler."""
        for call in self.calls:
            module = call.reference()
            own = None if module is None else module.__dict__
            if own is not None and call.own is None and own.get(call.name) is call:
                del own[call.name]
            else:
                call.lift()


@final
class _Numbers(threading.local):
    """The units that this rank, which may be a thread, has made: for each group of ranks a counter."""

    def __init__(self) -> None:
        """Begin to count."""
        # Two objects over one process group are equal, and hold nothing; others may hold memory.
        self.of_process_groups: dict[Collectives, Iterator[int]] = {}
        self.of_others: weakref.WeakKeyDictionary[Collectives, Iterator[int]] = weakref.WeakKeyDictionary()


_NUMBERS: Final = _Numbers()


def next_number(topology: Topology) -> int:
    """Return the number of units over the ranks of `topology` that were made before, which is now one more.

    It is 0 for collectives to which nobody can refer weakly.
    """
    engine = engine_of(topology.group)
    is_light = process_group_of(engine) is not None
    known = _NUMBERS.of_process_groups if is_light else _NUMBERS.of_others
    try:
        return next(known.setdefault(engine, itertools.count()))
    except TypeError:
        return 0


@final
@attrs.define(eq=False)
class UnitModule:
    """The module whose forward pass needs a unit's parameters, held weakly."""

    reference: weakref.ReferenceType[nn.Module]
    by_hooks: bool = True
    """Whether hooks on the module follow its calls; otherwise a wrapper makes them, by `call_unit`."""
    number: int = -1
    """The number of units that were made over the same ranks before, copies too."""
    buffers: UnitBuffers = attrs.field(factory=UnitBuffers)
    initial: InitialWeights | None = None
    """The checksums of the initial weights, until the ranks have compared them."""
    left_whole: frozenset[str] | None = None
    """The names of the parameters below that no unit held when the module was sharded; None if that is not known."""
    inner: InnerCalls = attrs.field(factory=InnerCalls)
    """The stand-ins in the modules inside, in place while the module itself is not called."""
    calls: list[ForwardCall] = attrs.field(factory=list)
    """The module's running forward calls, the innermost last."""
    in_backward: bool = False
    """Whether a backward pass computes gradients of the unit, and it counts as a call."""

    def get(self, unit: str) -> nn.Module:
        """Return the module.

        Raises:
            FlatParamError: if it does not exist any more; the message names `unit`.
        """
        module = self.reference()
        if module is None:
            raise FlatParamError(
                f"the module of unit {unit!r} does not exist any more: keep a reference to the model until its "
                "backward pass is over"
            )
        return module

    def begin_call(self, call: ForwardCall) -> None:
        """Add a forward call that begins."""
        if not (self.calls or self.in_backward):
            self.inner.lift()
        self.calls.append(call)

    def end_call(self) -> ForwardCall:
        """Remove the innermost forward call, which is over, and return it."""
        call = self.calls.pop()
        if not (self.calls or self.in_backward):
            self.inner.put()
        return call

    def note_backward(self, in_backward: bool) -> None:
        """Note that the unit's part of a backward pass begins, or ends."""
        if in_backward is not self.in_backward and not self.calls:
            (self.inner.lift if in_backward else self.inner.put)()
        self.in_backward = in_backward

    def forget_calls(self) -> None:
        """Remove every call, after an exception has interrupted them."""
        self.calls.clear()
        self.in_backward = False
        self.inner.put()

    def look_after(
        self, buffers: UnitBuffers, initial: InitialWeights | None, inner: InnerCalls, left_whole: frozenset[str]
    ) -> None:
        """Take the buffers to cast, the weights to compare, the calls inside to watch, and what was left whole."""
        self.buffers, self.initial, self.inner = buffers, initial, inner
        self.left_whole = left_whole
