"""The engine over process groups of `torch.distributed`, of any backend."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from flatparam_comm import checks
from flatparam_comm.collectives import COMPLETED, Collectives, Pending, ReduceOp, copied
from flatparam_comm.errors import CollectiveError, CommError
from flatparam_comm.guarding import GroupMonitor, monitor_of
from flatparam_comm.process_group import c10d, groups

if dist.is_available() and not dist.is_initialized():
    # The functions of this module take the default group at the time of its import as a default argument. torch.optim
    # imports it in the first step: then that group is never freed, and a process with gloo may abort at its exit.
    importlib.import_module("torch.distributed.nn.functional")

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
#: The dtypes that gloo, NCCL and MPI all support. The rest (bool, complex, 16-bit and unsigned integers, fp8) travel as
#: bytes if they are only moved: gloo and NCCL refuse several of them with "Invalid scalar type".
_CARRIED: Final = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)
_REDUCTIONS: Final = {op: number for number, op in enumerate(ReduceOp)}


@final
class ProcessGroupCollectives:
    """Use a process group of `torch.distributed` (the default one when None) as `Collectives`.

    Every collective is issued with `async_op=True`. For gloo and NCCL, `wait()` is `Work.wait()`, which blocks for CPU
    tensors and orders the current stream for CUDA tensors. An error of the backend is raised as `CollectiveError`.
    A group of one rank copies by itself, and does not call the backend, as `SingleCollectives`.
    Raises ValueError if there is no default group, or if this process is not in the group.

    The group is held weakly: torch keeps it until `destroy_process_group()`, which then really ends it. A gloo group
    that lives until the interpreter exits can abort the process then.
    """

    __slots__ = ("_calls", "_hash", "_is_gloo", "_rank", "_reference", "_sites", "_size", "adds_in_rank_order")

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """Use `group`, or the default one."""
        found = groups.default_group() if group is None else group
        if found is None:
            raise ValueError(
                "expected a process group, found no default one: call torch.distributed.init_process_group() first "
                "(torchrun sets what it needs), or pass a group"
            )
        rank = found.rank() if hasattr(found, "rank") else -1
        if rank < 0:
            # torch hands an object without ranks to processes that are not in the group that new_group() made.
            raise ValueError(
                f"expected a process group that this process is in, found {found!r}: "
                "make Collectives only on the ranks that were passed to new_group()"
            )
        self._reference: weakref.ReferenceType[ProcessGroup] = weakref.ref(found)
        # A group keeps both, also when it has been destroyed.
        self._rank, self._size = rank, found.size()
        self._hash = hash(found)
        self._is_gloo = groups.cpu_backend(found) == "gloo"
        self.adds_in_rank_order = True
        """Whether sums over gloo are exchanged parts, added here; gloo's own sums have an order of their own."""
        self._sites: dict[tuple[str, str], checks.Site] = {}
        self._calls: GroupMonitor | None = None

    def __repr__(self) -> str:
        if self._reference() is None:
            return "ProcessGroupCollectives(destroyed)"
        return f"ProcessGroupCollectives(rank={self.rank}, size={self.size}, backend={self.group.name()!r})"

    def __eq__(self, other: object) -> bool:
        """Two objects over one process group are equal, so that work to be done once for a group is done once."""
        return isinstance(other, ProcessGroupCollectives) and other._reference == self._reference

    def __hash__(self) -> int:
        return self._hash

    @property
    def group(self) -> ProcessGroup:
        """The process group underneath.

        Raises:
            CommError: if it was destroyed.
        """
        return self._reference() or c10d.destroyed()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of processes in the group."""
        return self._size

    def all_gather(self, output: Tensor, shard: Tensor, *, label: str = "") -> Pending:
        """Gather by the process group; two ranks of gloo swap their shards."""
        site = self._sites.get(("all_gather", label)) or self._site("all_gather", label)
        checks.check_all_gather(site, output, shard)
        if site.size == 1:
            return copied(output, shard)
        calls = self._calls or self._find_calls()
        calls.begin(site, output.dtype, output.numel())
        carried, carried_shard = _as_carried(output, shard)
        if self._is_gloo and output.is_cpu:
            carried, carried_shard = _under_other_storages(carried, carried_shard)
        if site.size == 2 and self._is_gloo and output.is_cpu:
            # gloo's own all-gather fills a buffer of its own, which it copies, and takes 1.3 to 2 times as long.
            halves, given = carried.view(2, -1), carried_shard.view(-1)
            # First: a tensor without an address raises here, before gloo is told where to write.
            is_in_place = halves[site.rank].data_ptr() == given.data_ptr()
            theirs, sizes, group = halves[1 - site.rank], _of_a_swap(site, given), self._reference()
            pending = _issued(site, calls, (output, shard), c10d.all_to_all, theirs, given, group, sizes)
            if not is_in_place:
                halves[site.rank].copy_(given)
            return pending
        return _issued(site, calls, (output, shard), c10d.all_gather, carried, carried_shard, self._reference())

    def reduce_scatter(self, output: Tensor, full: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce by the process group; gloo's sums are an all-to-all and a local sum, in rank order."""
        site = self._sites.get(("reduce_scatter", label)) or self._site("reduce_scatter", label)
        checks.check_reduce_scatter(site, output, full, op)
        if site.size == 1:
            return copied(output, full)
        calls = self._calls or self._find_calls()
        calls.begin(site, full.dtype, full.numel(), _REDUCTIONS[op])
        carried, carried_full = _plain(output, full)
        exchanges = self._is_gloo and (self.adds_in_rank_order or site.size == 2)
        if exchanges and op is ReduceOp.SUM and full.is_floating_point() and full.is_cpu:
            return self._exchange_and_add(site, calls, carried, carried_full)
        return _issued(site, calls, (output, full), c10d.reduce_scatter, carried, carried_full, op, self._reference())

    def _exchange_and_add(self, site: checks.Site, calls: GroupMonitor, output: Tensor, full: Tensor) -> Pending:
        """Return a reduce-scatter by an all-to-all and a local sum, in rank order.

        gloo's own reduce-scatter is an all-reduce of a copy: it sends twice the bytes, and takes three times as long.
        """
        parts = full.view(site.size, -1)
        if site.size == 2 and output.data_ptr() != parts[site.rank].data_ptr():
            add, given = functools.partial(_add, output, (output, parts[site.rank])), parts[1 - site.rank]
            sizes, group = _of_a_swap(site, given), self._reference()
            return _issued(site, calls, (output, full), c10d.all_to_all, output, given, group, sizes, then=add)
        received = torch.empty_like(full)
        add = functools.partial(_add, output, received.view(site.size, -1).unbind())
        return _issued(site, calls, (received, full), c10d.all_to_all, received, full, self._reference(), then=add)

    def all_reduce(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, label: str = "") -> Pending:
        """Reduce by the process group, in the order of its backend."""
        site = self._site("all_reduce", label)
        checks.check_all_reduce(site, tensor, op)
        if site.size == 1:
            return COMPLETED
        calls = self._begin(site, tensor, _REDUCTIONS[op])
        return _issued(site, calls, (tensor,), c10d.all_reduce, *_plain(tensor), op, self._reference())

    def broadcast(self, tensor: Tensor, *, root: int = 0, label: str = "") -> Pending:
        """Broadcast from `root`, a rank of this group, as bytes if the backend does not carry the dtype."""
        site = self._site("broadcast", label)
        checks.check_broadcast(site, tensor, root)
        if site.size == 1:
            return COMPLETED
        calls = self._begin(site, tensor, root)
        return _issued(site, calls, (tensor,), c10d.broadcast, *_as_carried(tensor), root, self._reference())

    def all_to_all(
        self,
        output: Tensor,
        given: Tensor,
        *,
        output_numels: Sequence[int],
        given_numels: Sequence[int],
        label: str = "",
    ) -> Pending:
        """Give each rank its elements, as bytes if the backend does not carry the dtype."""
        site = self._site("all_to_all", label)
        checks.check_all_to_all(site, output, given, output_numels, given_numels)
        if site.size == 1:
            return copied(output, given)
        # The numbers of elements differ between ranks that agree.
        calls = self._begin(site)
        # A view as bytes has more elements.
        factor = 1 if output.dtype in _CARRIED else output.itemsize
        sizes = ([factor * n for n in output_numels], [factor * n for n in given_numels])
        carried, carried_given = _as_carried(output, given)
        if self._is_gloo and output.is_cpu:
            carried, carried_given = _under_other_storages(carried, carried_given)
        return _issued(site, calls, (output, given), c10d.all_to_all, carried, carried_given, self._reference(), sizes)

    def exchange(self, value: object, *, label: str = "") -> list[Any]:
        """Exchange pickled values; on NCCL the bytes go through this process's current CUDA device."""
        site = self._site("exchange", label)
        calls = self._begin(site)
        return calls.wait_for(site, calls.issued, lambda: groups.exchange(value, self.group))

    def barrier(self, *, label: str = "") -> None:
        """Wait for every process of the group."""
        site = self._site("barrier", label)
        calls = self._begin(site)
        calls.wait_for(site, calls.issued, lambda: groups.barrier(self.group))

    def subgroup(self, ranks: Sequence[int]) -> ProcessGroupCollectives | None:
        """Make a process group of these ranks, with this one's backends and timeout."""
        site = self._site("subgroup", "")
        chosen = checks.check_subgroup(site, ranks)
        calls = self._begin(site)
        group = calls.wait_for(site, calls.issued, lambda: groups.new_subgroup(self.group, chosen))
        return None if group is None else ProcessGroupCollectives(group)

    def _begin(self, site: checks.Site, tensor: Tensor | None = None, detail: int = 0) -> GroupMonitor:
        """Count the next collective of the group; for the errors see `GroupMonitor.begin`."""
        calls = self._calls or self._find_calls()
        calls.begin(site, *(() if tensor is None else (tensor.dtype, tensor.numel(), detail)))
        return calls

    def _find_calls(self) -> GroupMonitor:
        self._calls = monitor_of(self.group)
        return self._calls

    def _site(self, op: str, label: str) -> checks.Site:
        site = self._sites.get((op, label))
        if site is None:
            site = self._sites[op, label] = checks.Site(rank=self._rank, size=self._size, op=op, label=label)
        return site


@attrs.define(eq=False)
class _WorkPending:
    """A `Work` of torch.distributed. `tensors` are kept alive until the first `wait()` returns."""

    moves_by_itself: ClassVar[bool] = True
    site: checks.Site
    work: Any
    tensors: tuple[Tensor, ...]
    calls: GroupMonitor
    number: int
    """The number of the collective in its group."""
    then: Callable[[], None] | None = None
    """The last step of the collective, on this rank alone: it runs once, when all bytes are there."""
    error: CommError | None = None

    def wait(self) -> None:
        """Wait for the `Work`, let the tensors go, and take the last step; after an interrupt, a second call waits."""
        if self.error is None and self.work is not None:
            try:
                self.calls.wait_for(self.site, self.number, self.work.wait)
            except CommError as error:
                self.error = error
            # On CUDA the current stream is now ordered after the collective, so memory that is freed and reused on
            # this stream is safe.
            self.work = None
            self.tensors = ()
        if self.error is not None:
            raise self.error
        if self.then is not None:
            last, self.then = self.then, None
            last()

    def done(self) -> bool:
        """Ask the `Work` whether it is complete."""
        return self.work is None or bool(self.work.is_completed())


def _of_a_swap(site: checks.Site, given: Tensor) -> tuple[list[int], list[int]]:
    """Return the sizes of an all-to-all in which two ranks swap as much as `given`, and keep nothing."""
    sizes = [0, 0]
    sizes[1 - site.rank] = given.numel()
    return sizes, sizes


def _add(output: Tensor, parts: Sequence[Tensor]) -> None:
    """Fill `output` with the sum of `parts`, added from the first to the last."""
    if len(parts) == 1:
        output.copy_(parts[0])
        return
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


def _as_carried(*tensors: Tensor) -> Sequence[Tensor]:
    """Views of contiguous tensors' memory, of one dtype, in a dtype that every backend can move: theirs, or bytes.

    See `_plain`.
    """
    carried = _plain(*tensors)
    return carried if tensors[0].dtype in _CARRIED else [each.view(-1).view(torch.uint8) for each in carried]


def _plain(*tensors: Tensor) -> Sequence[Tensor]:
    """Return the tensors, detached if one requires gradients: else c10d would add the outputs to autograd's graph."""
    return [each.detach() for each in tensors] if any(map(_REQUIRES_GRAD, tensors)) else tensors


def _under_other_storages(output: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """Return CPU tensors over the same memory that is `output`'s, and so is that of `given` if it is a part of that.

    A thread of gloo has references to what it was given, and keeps them for a moment after the collective is complete.
    Who counts the references to full parameters, and so to their storage, finds none of these.
    """
    if not output.nbytes:
        return output, given
    bytes_of_it = _bytes(output.nbytes).from_address(output.data_ptr())
    bytes_of_it.owner = output
    other = torch.frombuffer(bytes_of_it, dtype=output.dtype).view(output.shape)
    start = (given.data_ptr() - output.data_ptr()) // output.itemsize
    if start >= 0 and start + given.numel() <= output.numel() and given.numel():
        return other, other.view(-1)[start : start + given.numel()].view(given.shape)
    return other, given


@functools.lru_cache(maxsize=256)
def _bytes(count: int) -> Any:
    return ctypes.c_ubyte * count


def _issued(
    site: checks.Site,
    calls: GroupMonitor,
    tensors: tuple[Tensor, ...],
    call: Callable[..., Any],
    *args: Any,
    then: Callable[[], None] | None = None,
) -> _WorkPending:
    """Issue a collective by `call`; an exception becomes one that names the rank and who failed."""
    work = None
    try:
        work = call(*args)
        return _WorkPending(site, work, tensors, calls, calls.issued, then)
    except CollectiveError:
        raise
    except Exception as error:
        raise calls.error_of(site, error, waited=False) from error
    except BaseException:
        # An interrupt, when the backend reads and writes already.
        if work is not None:
            with contextlib.suppress(RuntimeError):
                work.wait()
        raise


def process_group_of(collectives: Collectives) -> ProcessGroup | None:
    """Return the process group that `collectives` works over, through all decorators; None for a different engine."""
    engine = engine_of(collectives)
    return engine.group if isinstance(engine, ProcessGroupCollectives) else None


def engine_of(collectives: Collectives) -> Collectives:
    """Return the engine beneath all decorators; for shared memory, the process group behind it."""
    engine: Any = collectives
    while not isinstance(engine, ProcessGroupCollectives) and hasattr(engine, "inner"):
        engine = engine.inner
    return engine  # type: ignore[no-any-return]  # decorators hold collectives
