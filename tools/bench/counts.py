"""What is the same in every run: operators, collectives, bytes on the wire, calls of Python, bytes of memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from attrs import asdict, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flatparam_comm import ByteLedger, Collectives, sent_nbytes

from .contenders import Contender
from .memory import Allocator
from .training import Setting
from .workloads import Workload

# c10d's operator -> what `sent_nbytes` calls it, and which argument is the full buffer
_COLLECTIVES: Final[dict[str, tuple[str, int]]] = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
}
_WITHOUT_TENSORS: Final = {"barrier", "monitored_barrier_"}


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base has no types
    """Counts the operators inside; those of c10d apart, with the bytes that the rank must send for them."""

    def __init__(self, group: Collectives) -> None:
        """Count for this rank of the group."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.group = group
        self.others = self.collectives = self.sent = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count one."""
        if function.namespace.endswith("c10d"):
            self._collective(function._opname, args)
        else:
            self.others += 1
        return function(*args, **(kwargs or {}))

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        self.collectives += 1
        if name == "alltoall_base_":
            _, given, _, _, sizes, *_ = args
            of_rank = sizes[self.group.rank] * len(sizes) / sum(sizes) if sizes else 1
            self.sent += round(given.nbytes * (1 - of_rank / self.group.size))
        elif name not in _WITHOUT_TENSORS:
            op, position = _COLLECTIVES[name]
            full = sum(t.numel() * t.element_size() for t in tree_leaves(args[position]) if isinstance(t, Tensor))
            self.sent += sent_nbytes(op, full, rank=self.group.rank, size=self.group.size)


class Calls:
    """How many functions, of Python or of C, were called from Python inside `counting`."""

    def __init__(self) -> None:
        """None yet."""
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count on this thread, which on CPU is that of backward passes too."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: object, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


@frozen
class Counts:
    """What one step of one rank takes; bytes, except where the name says otherwise. `losses` are of three steps."""

    peak: int
    at_rest: int
    sent: int
    collectives: int
    operators: int
    python_calls: int
    losses: list[float]


def count(group: Collectives, workload: Workload, bf16: bool, contender: Contender) -> dict[str, Any]:
    """Train from the beginning, and count; every rank calls it."""
    ledger = ByteLedger()
    setting = Setting(workload, bf16, group, ledger)
    allocator = Allocator()
    training = contender.build(setting)
    losses = [training.step()]
    group.barrier()

    def second_step() -> None:
        losses.append(training.step())
        group.barrier()

    memory = allocator.during(second_step)
    ledger.reset()
    with Operators(group) as operators:
        losses.append(training.step())
    ledgered = ledger.total
    counts = Counts(
        peak=memory.peak,
        at_rest=memory.at_rest,
        sent=operators.sent + ledgered.sent_nbytes,
        collectives=operators.collectives + ledgered.count,
        operators=operators.others,
        python_calls=calls_of(training.step),
        losses=losses,
    )
    return asdict(counts)


def calls_of(step: Callable[[], object]) -> int:
    """How many calls `step` makes, on this thread."""
    calls = Calls()
    with without_collector(), calls.counting():
        step()
    return calls.count


@contextmanager
def without_collector() -> Iterator[None]:
    """As `timeit` measures: Python's cyclic collector looks at the whole process, whoever's turn it is."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
