"""Memory that is counted and never touched: a program runs on CPU tensors that have addresses and no bytes."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatparam_plan.hollow.arena import Arena, Block, Log
from flatparam_plan.hollow.kernels import Kernel, Work, operands_of
from flatparam_plan.hollow.operations import ATEN, Trait, appearance, on_meta, room_of, value_of
from flatparam_plan.hollow.temporaries import Temporaries
from flatparam_plan.hollow.unwatched import MATTERS, Composing, adds_in_place, looks_at_values, owners_if_alone
from flatparam_plan.plan_error import PlanError

_CAN_SWAP: Final = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether this torch can give a storage addresses of ours; if not, torch allocates them, and they stay untouched."""
SMALL_NBYTES: Final = 2**16
"""Tensors up to this size that depend on nothing unknown are computed: token ids, positions, masks, numbers."""
_NUMBER_NBYTES: Final = 8
_KEEPING_NODES: Final = ("MulBackward0", "DivBackward0")
"""The nodes of autograd that keep a number as a tensor, and compute with it."""
_UNDISPATCHED: Final = ("get_rng_state", "tensor", "as_tensor", "from_numpy")
"""Functions that make tensors and do not reach the dispatcher."""


_results_by_default_dtype: dict[torch.dtype, dict[Any, Any]] = defaultdict(dict)
"""The results of operations on the meta device, by their arguments: a planner rehearses a model often."""
_MANY: Final = 20_000


@final
@attrs.frozen(eq=False)
class Shapes:
    """The results of an operation, on the meta device."""

    results: list[Any]
    are_tried: bool
    """Whether it was run: then the memory of the results is as large as it really is, and shared as it really is."""


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
        self._arena = Arena(self.log)
        self._on_kernel = on_kernel
        self._unknown: set[int] = set()
        self.temporaries = Temporaries()
        self._composing = Composing()
        self._shapes: dict[Any, Shapes] = {}
        self._kept_number: weakref.ref[Tensor] | None = None
        self.works: list[Work] = []
        """The different kernels that would run."""
        self._start, self._stop = self._arena.start, self._arena.start + self._arena.size
        self._alone = owners_if_alone()
        self._traits: dict[Any, Trait] = {}
        self._accounts: dict[Any, tuple[int, int]] = {}
        self._results = _results_by_default_dtype[torch.get_default_dtype()]
        self._resize = torch.UntypedStorage.resize_
        self._replaced: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> HollowMemory:
        memory = self

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            return memory._resized(storage, nbytes)

        storage = torch.UntypedStorage
        self._replaced = [(storage, name, getattr(storage, name)) for name in ("resize_", "resizable")]
        self._replaced += [(torch, name, getattr(torch, name)) for name in _UNDISPATCHED]
        storage.resize_ = resize_  # type: ignore[method-assign,assignment]
        # Addresses are given back by `resize_` above, whatever torch thinks of them.
        storage.resizable = lambda storage: True  # type: ignore[method-assign,assignment]
        for name in _UNDISPATCHED:
            setattr(torch, name, self._noting(getattr(torch, name)))
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
        # What the model was is full of cycles. Most of it is new, and the rest takes a longer search.
        for generation in (1, 2):
            gc.collect(generation)
            if self._arena.close():
                break

    # Blocks

    def is_hollow(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor are unknown."""
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
        block: Block | None = getattr(storage, "_hollow_block", None)
        return self._arena.number_at(storage.data_ptr()) if block is None else block.number

    def _note_real(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes and not self._start <= storage.data_ptr() < self._stop and not hasattr(storage, "_hollow_block"):
            vars(storage)["_hollow_block"] = Block(self.log, nbytes, self._unknown, storage.data_ptr())

    def _resized(self, storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        """`storage`, with different memory; what it held is lost but for what is known."""
        if storage.device.type != "cpu":
            self._resize(storage, nbytes)
            return storage
        block = vars(storage).pop("_hollow_block", None)
        if storage.nbytes() == nbytes and block is None:
            return storage
        before, self.log.tag = self.log.tag, "unit buffers"
        if _CAN_SWAP:
            fresh = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
            if nbytes:
                fresh = self._addresses(nbytes, torch.uint8).untyped_storage()
            storage._swap_data_ptr_(fresh)  # type: ignore[attr-defined]
        else:
            self._resize(storage, nbytes)
        if block is not None:
            block.end()
        if not _CAN_SWAP:
            # It may be where the memory before was.
            self._hold(storage)
        self.log.tag = before
        return storage

    def _addresses(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor that has addresses and no memory."""
        if _CAN_SWAP:
            return torch.frombuffer(self._arena.take(numel * dtype.itemsize), dtype=dtype)
        tensor = torch.empty(numel, dtype=dtype)
        self._hold(tensor.untyped_storage())
        return tensor

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Note memory that torch has allocated, and that nobody touches, so that it takes addresses only."""
        if storage.nbytes():
            address = storage.data_ptr()
            vars(storage)["_hollow_block"] = Block(self.log, storage.nbytes(), self._unknown, address)
            self._unknown.add(address)

    def _make(self, like: Tensor, room: int = 0) -> Tensor:
        """Return a hollow tensor as the one on the meta device is, with room for so many elements at least."""
        size, stride, offset = like.shape, like.stride(), like.storage_offset()
        extent = room
        if like.numel() and not room:
            offset, extent = (0, 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True)))
        if not extent:
            return torch.empty_strided(size, stride, dtype=like.dtype)
        flat = self._addresses(extent, like.dtype)
        return flat if flat.shape == size else flat.as_strided(size, stride, offset)

    def _make_all(self, shapes: Shapes, room: int) -> list[Any]:
        """Hollow tensors for all results of an operation; some share their memory."""
        if not shapes.are_tried:
            return [self._make(each, room) if isinstance(each, Tensor) else each for each in shapes.results]
        made: list[Any] = []
        owners: dict[int, Tensor] = {}
        for each in shapes.results:
            if not isinstance(each, Tensor):
                made.append(each)
                continue
            storage = each.untyped_storage()
            owner = owners.get(storage._cdata)
            if owner is None or owner.dtype != each.dtype:
                owner = owners[storage._cdata] = self._make(each, storage.nbytes() // each.itemsize)
                made.append(owner)
            else:
                made.append(owner.as_strided(each.shape, each.stride(), each.storage_offset()))
        return made

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
        self._composing.clock += 1
        if func is ATEN.add.Tensor and adds_in_place(args, kwargs, self._alone):
            func = ATEN.add_.Tensor
        if func in MATTERS:
            return self._composed(func, args, kwargs, sys._getframe(1))
        return self._dispatched(func, args, kwargs)

    def _composed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> Any:
        """Return the results of an operation that torch may write in place if nobody watches."""
        written = self._composing.in_place(func, args, frame)
        if written is not None:
            # Autograd wants another tensor than the one that it gave.
            self._dispatched(written, args, kwargs)
            return args[0].detach()
        looks = looks_at_values(func, frame)
        if looks is not None:
            self.temporaries.unmeasured.add(looks)
        result = self._dispatched(func, args, kwargs)
        self._composing.note(func, result, frame)
        return result

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of the operation, with their memory noted."""
        trait = self._traits.get(func)
        if trait is None:
            trait = self._traits[func] = Trait.of(func)
        if trait.kind == "view":
            if func is ATEN.lift_fresh.default and args[0].is_cpu and not self.is_hollow(args[0]):
                # torch has made it of Python's numbers, and nobody saw.
                self._note_real(args[0])
            return func(*args, **kwargs)
        tensors: list[Tensor] = []
        key: Any = (func, appearance(args, tensors), appearance(tuple(kwargs.items()), tensors) if kwargs else None)
        hollow = False
        for tensor in tensors:
            if not tensor.is_cpu:
                return self._elsewhere(func, args, kwargs)
            if not hollow:
                hollow = self.is_hollow(tensor)
        if trait.kind == "written":
            return self._write(trait, key, args, kwargs, hollow=hollow)
        if trait.kind == "read":
            return value_of(func, args) if hollow else func(*args, **kwargs)
        return self._compute(trait, key, args, kwargs, hollow=hollow)

    def _elsewhere(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an operation on tensors of the meta device, some results of which may come to the CPU."""
        wanted = kwargs.get("device")
        if func is ATEN._to_copy.default and wanted is not None and torch.device(wanted).type == "cpu":
            raise PlanError(
                "a tensor on the meta device has no values to copy to the CPU; give the module values with "
                "reset_parameters() or param_init_fn, or use to_empty()"
            )
        wanted = torch.device("meta" if wanted is None else wanted)
        if wanted.type != "cpu":
            return func(*args, **kwargs)
        shapes = operands_of(on_meta(func, args, kwargs))
        return self._make(shapes[0])

    def _write(self, trait: Trait, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, hollow: bool) -> Any:
        """Return an operation that only writes to tensors which are there."""
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
        if trait.keeps_number:
            self._note_number(args, written[0])
        if trait.returns == 0:
            return None
        return written[0] if trait.returns == 1 else tuple(written)

    def _compute(self, trait: Trait, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, hollow: bool) -> Any:
        """Return an operation that makes new tensors."""
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type != "cpu":
            return trait.operation(*args, **kwargs)
        shapes = self._shapes_of_results(trait, key, args, kwargs)
        if not hollow and sum(each.nbytes for each in operands_of(shapes.results)) <= SMALL_NBYTES:
            result = trait.operation(*args, **kwargs)
            fresh = operands_of(result)
            for tensor in fresh:
                if self._unknown:
                    # It is at an address that may have been that of an unknown one.
                    self._unknown.discard(tensor.untyped_storage().data_ptr())
                self._note_real(tensor)
            self._account(trait, key, args, kwargs, fresh)
            if trait.keeps_number:
                self._note_number(args, result)
            return result
        room = room_of(trait.operation, args)
        made = self._make_all(shapes, room)
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
            kernel = Kernel(trait.operation, args, kwargs, operands_of(results))
            number = len(self.works)
            self.works.append(Work.of(kernel))
            known = self._accounts[key] = (self.temporaries.nbytes(kernel, key), number)
        if known[0]:
            self.log.passing(known[0] - self._kept_nbytes(trait, args))
        if self._on_kernel is not None:
            self._on_kernel(known[1])

    def _shapes_of_results(self, trait: Trait, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Shapes:
        """Return the results of the operation on the meta device; equal arguments are looked at once."""
        shapes = self._shapes.get(key)
        if shapes is not None:
            return shapes
        found = self._results.get(key)
        if found is None:
            if len(self._results) >= _MANY:
                self._results.clear()
            found = self._results[key] = on_meta(trait.operation, args, kwargs)
        kernel = Kernel(trait.operation, args, kwargs, operands_of(found))
        tried = self.temporaries.results(kernel, key)
        shapes = self._shapes[key] = Shapes(found if tried is None else tried, tried is not None)
        return shapes

    # Numbers that autograd keeps

    def _note_number(self, args: tuple[Any, ...], result: Tensor) -> None:
        """Remember a product with a Python number that autograd is about to keep for the backward pass."""
        if not torch.is_grad_enabled() or isinstance(args[1], Tensor):
            return
        # Inside of a checkpoint, too: hooks for saved tensors do not see numbers.
        if args[0].requires_grad:
            self._kept_number = weakref.ref(result)

    def _kept_nbytes(self, trait: Trait, args: tuple[Any, ...]) -> int:
        """Return the bytes of the number in `args` if autograd has kept it for this kernel, which need not make it."""
        if not trait.keeps_number or isinstance(args[1], Tensor):
            return 0
        node: Any = torch._C._current_autograd_node()
        return 0 if node is None or node.name() not in _KEEPING_NODES else _NUMBER_NBYTES

    def _keep_number(self) -> None:
        """Count the number that autograd keeps with the operation before this one, until its backward."""
        reference, self._kept_number = self._kept_number, None
        result = None if reference is None else reference()
        node = None if result is None else result.grad_fn
        if node is not None and node.name() in _KEEPING_NODES:
            block = Block(self.log, _NUMBER_NBYTES, self._unknown)
            node.register_hook(lambda *_: block.end())
