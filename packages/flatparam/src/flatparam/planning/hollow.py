"""Memory that is counted and never touched: a program runs on CPU tensors that have addresses and no bytes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import mmap
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam.planning.errors import PlanError
from flatparam.planning.kernels import Kernel, Temporaries, Work, tensors_in

__all__ = ["HollowMemory", "Log"]

SMALL_NBYTES: Final = 2**16
"""Tensors up to this size that depend on nothing unknown are computed: token ids, positions, masks, numbers."""
_NUMBER_NBYTES: Final = 8
_ADDRESSES: Final = 2**43
"""The address space that is reserved, as far as the system allows."""
_ALIGNMENT: Final = 64
_ATEN: Final = torch.ops.aten
_UNDISPATCHED: Final = ("get_rng_state", "tensor", "as_tensor", "from_numpy")
"""Functions that make tensors and do not reach the dispatcher."""
_KEEPS_NUMBER: Final = (_ATEN.mul.Tensor, _ATEN.div.Tensor)
_READS: Final = (_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.is_nonzero.default)
_ALIASES: Final = (_ATEN._unsafe_view.default, _ATEN.detach.default, _ATEN.lift_fresh.default)
"""Operations that return their argument's memory, of which the schema does not always tell."""


@final
@attrs.define(eq=False)
class Log:
    """The births and deaths of all blocks of memory, in order.

    `changes` has the number of a block for each birth, and its complement (`~number`) for each death; `sizes` has the
    bytes in use after each. A block's tag says what it was made for.
    """

    changes: array[int] = attrs.field(factory=lambda: array("q"))
    sizes: array[int] = attrs.field(factory=lambda: array("q"))
    nbytes: array[int] = attrs.field(factory=lambda: array("q"))
    """The bytes of each block."""
    tags: list[str] = attrs.field(factory=list)
    """The tag of each block; it may be changed later."""
    tag: str = "other"
    """The tag of the blocks that are born now."""
    in_use: int = 0

    def born(self, nbytes: int) -> int:
        """Note a new block, and return its number."""
        number = len(self.nbytes)
        self.nbytes.append(nbytes)
        self.tags.append(self.tag)
        self._note(number, nbytes)
        return number

    def died(self, number: int) -> None:
        """Note that a block's memory was given back."""
        self._note(~number, -self.nbytes[number])

    def _note(self, change: int, nbytes: int) -> None:
        self.in_use += nbytes
        self.changes.append(change)
        self.sizes.append(self.in_use)

    def passing(self, nbytes: int) -> None:
        """Note memory that a kernel takes and gives back at once."""
        before, self.tag = self.tag, "inside a kernel"
        self.died(self.born(nbytes))
        self.tag = before

    def __len__(self) -> int:
        return len(self.changes)

    def peak(self, start: int, stop: int) -> int:
        """The most bytes in use between two places in the log."""
        before = self.sizes[start - 1] if start else 0
        return max(self.sizes[start:stop], default=before) if stop > start else before

    def place_of_peak(self, start: int, stop: int) -> int:
        """The place right after the first change between two places that reached the most bytes in use."""
        within = self.sizes[start:stop]
        return start + within.index(max(within)) + 1 if within else start

    def alive_at(self, place: int) -> dict[str, int]:
        """The bytes in use at a place of the log, by tag."""
        alive: dict[str, int] = defaultdict(int)
        for change in itertools.islice(self.changes, place):
            number = change if change >= 0 else ~change
            alive[self.tags[number]] += self.nbytes[number] if change >= 0 else -self.nbytes[number]
        return {tag: nbytes for tag, nbytes in alive.items() if nbytes}


@final
class _Block:
    """The life of memory that torch allocates: it ends with the storage that holds this object."""

    __slots__ = ("_address", "_log", "_unknown", "number")

    def __init__(self, log: Log, nbytes: int, unknown: set[int], address: int = 0) -> None:
        self._log, self._unknown, self._address = log, unknown, address
        self.number = log.born(nbytes)

    def end(self) -> None:
        """Note the end of the block's life; what comes to its address is known again."""
        if self.number >= 0:
            self._log.died(self.number)
            self._unknown.discard(self._address)
            self.number = -1

    def __del__(self) -> None:
        self.end()


@final
class _Arena:
    """Addresses that the system has promised no memory for."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._memory, self.size = _reserve()
        self._view = memoryview(self._memory)
        self.start = torch.frombuffer(self._view[:1], dtype=torch.uint8).data_ptr()
        self._next = 0
        self._free: dict[int, list[int]] = defaultdict(list)
        self._alive: dict[int, tuple[weakref.ref[memoryview], int]] = {}

    def take(self, nbytes: int) -> memoryview:
        """A block of `nbytes` bytes, which returns when nobody refers to it."""
        length = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        free = self._free.get(length)
        if free:
            offset = free.pop()
        else:
            offset, self._next = self._next, self._next + length
            if self._next > self.size:
                raise PlanError(
                    f"expected a program that takes at most {self.size:,} bytes of different addresses, found one "
                    "that takes more; plan fewer or smaller steps"
                )
        block = self._view[offset : offset + nbytes]
        number = self._log.born(nbytes)

        def returned(_: object) -> None:
            del self._alive[offset]
            free_now = self._free[length]
            free_now.append(offset)
            self._log.died(number)

        self._alive[offset] = (weakref.ref(block, returned), number)
        return block

    def close(self) -> None:
        """Give the addresses back, unless some tensor still has one: then they go with the last of these."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()

    def number_at(self, address: int) -> int | None:
        """The number of the block that begins at an address."""
        found = self._alive.get(address - self.start)
        return None if found is None else found[1]


def _reserve() -> tuple[mmap.mmap, int]:
    """As many addresses as the system gives, without memory behind them."""
    size = _ADDRESSES
    flags = getattr(mmap, "MAP_PRIVATE", 2) | getattr(mmap, "MAP_ANONYMOUS", 0x20)
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags | getattr(mmap, "MAP_NORESERVE", 0x4000)), size
        except (OSError, ValueError, OverflowError) as error:
            if size < 2**32:
                raise PlanError(
                    "expected a system that reserves addresses without memory (mmap with MAP_NORESERVE), found that it "
                    f"refuses: {error}; raise the limit of virtual memory (ulimit -v), or plan on a different machine"
                ) from error
            size //= 2


@final
class HollowMemory(TorchDispatchMode):
    """Inside this context, tensors on the CPU take addresses and no memory, and no kernel computes on them.

    Everything else is as it always is: shapes, strides, views, storages that are resized, autograd, hooks. So any code
    runs unchanged, and `log` knows every block of memory that it would have taken. Small tensors that depend on
    nothing unknown have their values.
    """

    def __init__(self, on_kernel: Callable[[int], None] | None = None) -> None:
        """Begin with an empty log; `on_kernel` is told the number of every kernel's work, as it would run."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = Log()
        self._arena = _Arena(self.log)
        self._on_kernel = on_kernel
        self._unknown: set[int] = set()
        self.temporaries = Temporaries()
        self._kept_number: weakref.ref[Tensor] | None = None
        self.works: list[Work] = []
        """The different kernels that would run."""
        self._start, self._stop = self._arena.start, self._arena.start + self._arena.size
        self._traits: dict[Any, Trait] = {}
        self._accounts: dict[Any, tuple[int, int]] = {}
        self._results: dict[Any, Any] = {}
        self._resize = torch.UntypedStorage.resize_
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> HollowMemory:
        memory = self

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            return memory._resized(storage, nbytes)

        self._replaced = [(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)]
        self._replaced += [(torch, name, getattr(torch, name)) for name in _UNDISPATCHED]
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        for _, name, makes in self._replaced[1:]:
            setattr(torch, name, self._noting(makes))
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for owner, name, before in self._replaced:
            setattr(owner, name, before)

    def _noting(self, makes: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(makes)
        def made(*args: Any, **kwargs: Any) -> Tensor:
            result = makes(*args, **kwargs)
            if result.device.type == "cpu" and not self.is_hollow(result):
                self._note_real(result)
            return result

        return made

    def close(self) -> None:
        """Give the addresses back; the log stays. No tensor of this memory may be used any more."""
        self._on_kernel = None
        self._arena.close()

    # Blocks

    def is_hollow(self, tensor: Tensor) -> bool:
        """Whether the values of a tensor are unknown."""
        if self._start <= tensor.data_ptr() < self._stop:
            return True
        return bool(self._unknown) and tensor.untyped_storage().data_ptr() in self._unknown

    def tag(self, tensors: Iterable[Tensor | None], tag: str) -> int:
        """Say what the memory of `tensors` is for; returns its bytes, each block counted once."""
        numbers = set()
        for tensor in tensors:
            number = None if tensor is None else self._number(tensor.untyped_storage())
            if number is not None:
                numbers.add(number)
        for number in numbers:
            self.log.tags[number] = tag
        return sum(self.log.nbytes[number] for number in numbers)

    def _number(self, storage: torch.UntypedStorage) -> int | None:
        block: _Block | None = getattr(storage, "_hollow_block", None)
        return self._arena.number_at(storage.data_ptr()) if block is None else block.number

    def _note_real(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if (
            nbytes
            and not self._start <= storage.data_ptr() < self._stop
            and not hasattr(storage, "_hollow_block")
        ):
            vars(storage)["_hollow_block"] = _Block(self.log, nbytes, self._unknown, storage.data_ptr())

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        """`storage`, with different memory; what it held is lost but for what is known."""
        if storage.device.type != "cpu":
            self._resize(storage, nbytes)
            return storage
        block = vars(storage).pop("_hollow_block", None)
        if storage.nbytes() == nbytes and block is None:
            return storage
        before, self.log.tag = self.log.tag, "unit buffers"
        fresh = torch.UntypedStorage(0) if not nbytes else self._storage(nbytes)  # type: ignore[no-untyped-call]
        self.log.tag = before
        storage._swap_data_ptr_(fresh)  # type: ignore[attr-defined]
        if block is not None:
            block.end()
        return storage

    def _storage(self, nbytes: int) -> Any:
        storage: Any = torch.frombuffer(self._arena.take(nbytes), dtype=torch.uint8).untyped_storage()
        return storage

    def _make(self, like: Tensor) -> Tensor:
        """A hollow tensor as the one on the meta device is."""
        size, stride = like.shape, like.stride()
        extent = 0
        if like.numel():
            extent = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if not extent:
            return torch.empty_strided(size, stride, dtype=like.dtype)
        flat = torch.frombuffer(self._arena.take(extent * like.itemsize), dtype=like.dtype)
        return flat if flat.shape == size else flat.as_strided(size, stride)

    # Kernels

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing here is compiled, and torch's compiler takes seconds to import.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._kept_number is not None:
            self._keep_number()
        trait = self._traits.get(func)
        if trait is None:
            trait = self._traits[func] = Trait.of(func)
        if trait.kind == "view":
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        key: Any = (func, _look(args, tensors), _look(tuple(kwargs.items()), tensors) if kwargs else None)
        hollow = False
        for tensor in tensors:
            if not tensor.is_cpu:
                return self._elsewhere(func, args, kwargs)
            if not hollow:
                hollow = self.is_hollow(tensor)
        if trait.kind == "written":
            return self._write(trait, key, args, kwargs, hollow=hollow)
        if trait.kind == "read":
            return _value_of(func, args) if hollow else func(*args, **kwargs)
        return self._compute(trait, key, args, kwargs, hollow=hollow)

    def _elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation on tensors of the meta device, some results of which may come to the CPU."""
        wanted = kwargs.get("device")
        if func is _ATEN._to_copy.default and wanted is not None and torch.device(wanted).type == "cpu":
            raise PlanError(
                "a tensor on the meta device has no values to copy to the CPU; give the module values with "
                "reset_parameters() or param_init_fn, or use to_empty()"
            )
        wanted = torch.device("meta" if wanted is None else wanted)
        if wanted.type != "cpu":
            return func(*args, **kwargs)
        shapes = tensors_in(_on_meta(func, args, kwargs))
        return self._make(shapes[0])

    def _write(
        self, trait: Trait, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, hollow: bool
    ) -> Any:
        """An operation that only writes to tensors which are there."""
        written = trait.written(args, kwargs)
        if not hollow:
            result = trait.operation(*args, **kwargs)
            for tensor in written:
                self._note_real(tensor)
            self._account(trait, key, args, kwargs, written)
            return result
        self._account(trait, key, args, kwargs, written)
        for tensor in written:
            address = tensor.data_ptr()
            if address and not self._start <= address < self._stop:
                self._unknown.add(tensor.untyped_storage().data_ptr())
        if trait.returns == 0:
            return None
        return written[0] if trait.returns == 1 else tuple(written)

    def _compute(
        self, trait: Trait, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, hollow: bool
    ) -> Any:
        """An operation that makes new tensors."""
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type != "cpu":
            return trait.operation(*args, **kwargs)
        shapes = self._shapes_of_results(trait, key, args, kwargs)
        if not hollow and sum(each.nbytes for each in tensors_in(shapes)) <= SMALL_NBYTES:
            result = trait.operation(*args, **kwargs)
            fresh = tensors_in(result)
            for tensor in fresh:
                if self._unknown:
                    # It is at an address that may have been that of an unknown one.
                    self._unknown.discard(tensor.untyped_storage().data_ptr())
                self._note_real(tensor)
            self._account(trait, key, args, kwargs, fresh)
            if trait.keeps_number:
                self._note_number(args, result)
            return result
        made = [self._make(each) if isinstance(each, Tensor) else each for each in shapes]
        self._account(trait, key, args, kwargs, made)
        if trait.returns_list:
            return made
        if trait.returns > 1:
            return tuple(made)
        if trait.keeps_number:
            self._note_number(args, made[0])
        return made[0]

    def _account(
        self, trait: Trait, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]
    ) -> None:
        """Note what the kernel takes inside, and tell the observer of its work."""
        known = self._accounts.get(key)
        if known is None:
            kernel = Kernel(trait.operation, args, kwargs, tensors_in(results))
            number = len(self.works)
            self.works.append(Work.of(kernel))
            known = self._accounts[key] = (self.temporaries.nbytes(kernel), number)
        if known[0]:
            self.log.passing(known[0])
        if self._on_kernel is not None:
            self._on_kernel(known[1])

    def _shapes_of_results(
        self, trait: Trait, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the operation returns, on the meta device; equal arguments are looked at once."""
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = _on_meta(trait.operation, args, kwargs)
        return found

    # Numbers that autograd keeps

    def _note_number(self, args: tuple[Any, ...], result: Tensor) -> None:
        """Remember a product with a Python number that autograd is about to keep for the backward pass."""
        if not torch.is_grad_enabled() or isinstance(args[1], Tensor):
            return
        # Inside of a checkpoint nothing is kept.
        if args[0].requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            self._kept_number = weakref.ref(result)

    def _keep_number(self) -> None:
        """Count the number that autograd keeps with the operation before this one, until its backward."""
        reference, self._kept_number = self._kept_number, None
        result = None if reference is None else reference()
        node = None if result is None else result.grad_fn
        if node is not None and node.name() in ("MulBackward0", "DivBackward0"):
            block = _Block(self.log, _NUMBER_NBYTES, self._unknown)
            node.register_hook(lambda *_: block.end())


@final
@attrs.frozen(eq=False)
class Trait:
    """What an operation does with memory, as its schema says."""

    operation: Any
    kind: str
    """"view" for those that take no memory, "written" for those that write to their arguments, "read", or "new"."""
    returns: int
    returns_list: bool
    keeps_number: bool
    """Whether autograd keeps a Python number that it is given."""
    _written: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, func: Any) -> Trait:
        """Read the schema."""
        schema = func._schema
        written = tuple(
            (number, argument.name)
            for number, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        returns = schema.returns
        if func in _READS:
            kind = "read"
        elif (
            func in _ALIASES
            or func.is_view
            or (returns and not any("Tensor" in str(r.type) for r in returns))
        ):
            kind = "view"
        elif written and all(each.alias_info is not None for each in returns):
            kind = "written"
        else:
            kind = "new"
        returns_list = len(returns) == 1 and "List" in str(returns[0].type)
        return cls(func, kind, len(returns), returns_list, func in _KEEPS_NUMBER, written)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors that the operation writes to."""
        found: list[Tensor] = []
        for number, name in self._written:
            value = args[number] if number < len(args) else kwargs.get(name)
            if isinstance(value, Tensor):
                found.append(value)
            else:
                found.extend(tensors_in(value))
        return found


def _value_of(func: Any, args: tuple[Any, ...]) -> Any:
    """A value that somebody wants to know, and that is not known."""
    if func is _ATEN.equal.default:
        return True
    if args[0].is_floating_point():
        return 1.0
    raise PlanError(
        f"expected a program whose shapes and decisions do not depend on what it computes, found one that reads a "
        f"{str(args[0].dtype).removeprefix('torch.')} of a computed tensor (.item(), bool(tensor), int(tensor)); "
        "plan it with sizes that are known in advance"
    )


def _look(value: Any, tensors: list[Tensor]) -> Any:
    """Collect the tensors in `value`; returns what is equal for arguments that make equal shapes."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple([_look(each, tensors) for each in value])
    if isinstance(value, (bool, float)):
        return type(value)
    # Generators are the only arguments that cannot be keys.
    return value if not isinstance(value, torch.Generator) else None


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, (tuple, list)):
            return type(value)(map(there, value))
        return value

    named = {name: there(value) for name, value in kwargs.items() if name != "generator"}
    if any(argument.name == "device" for argument in func._schema.arguments):
        named["device"] = torch.device("meta")
    named.pop("pin_memory", None)
    try:
        result = func(*there(args), **named)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(
            f"expected operations whose results have shapes that follow from their arguments, found {func}: "
            f"{str(error).splitlines()[0]}; plan the program without it"
        ) from error
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    if func is _ATEN.native_layer_norm.default and all(
        each is None or each.dtype == args[0].dtype for each in args[2:4]
    ):
        # The CPU's kernel keeps mean and deviation in the dtype of its input, unless the weights have another.
        results[1:] = [each.to(args[0].dtype) for each in results[1:]]
    return results
