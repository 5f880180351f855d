"""One flat parameter on one rank: gathered, shown, freed, its gradients reduced; and moved or changed between passes.

A runtime calls, in this order and for each flat parameter::

    full, shard = handle.begin_unshard()      # allocates; now gather `shard` of every rank into `full`
    handle.finish_unshard()                   # the module's parameters are the full leaves
    ...                                       # compute; autograd fills leaf.grad
    handle.deposit(index)                     # as each leaf's gradient is finished
    handle.reshard()                          # the full form is freed
    output, full = handle.begin_reduce()      # now reduce-scatter `full` of every rank into `output`
    handle.finish_reduce(output)              # `.grad` of what the optimizer holds

Nothing here moves bytes between ranks, registers a hook, or knows a strategy.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import nn

from flatparam_core.errors import FlatParamError, IllegalStepError
from flatparam_core.exposure import (
    MARKS,
    BoundParameter,
    Exposure,
    Faces,
    FlatExposure,
    FreedParameter,
    OriginalExposure,
    ParamInfo,
    clear_owner,
    mark_owner,
    owner_of,
)
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.geometry import FlatLayout, Unflattened
from flatparam_core.names import PRESENTER
from flatparam_core.storage import (
    RESIDENCY,
    BufferPool,
    FlatBuffer,
    FullForm,
    FullForms,
    GradientLedger,
    Precision,
    Residency,
    Shard,
    give_data,
    kind_of,
)

_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")


@final
@attrs.define(eq=False, repr=False, weakref_slot=True)
class FlatParamHandle:
    """A flat parameter on one rank. Make it with `flatparam_core.flatten_module`."""

    _shard: Shard
    """This rank's part, which lives for ever."""
    exposure: Exposure
    forms: FullForms
    """The full parameters; the buffer of the current form is allocated exactly while the handle is not SHARDED."""
    gradients: GradientLedger = attrs.field()
    residency: Residency = Residency.SHARDED
    trained: list[bool] = attrs.Factory(lambda self: [*self.exposure.requires_grad()], takes_self=True)
    """For each parameter, whether it was to get a gradient when the full parameters were last shown."""
    taken_over: tuple[str, ...] = ()
    """The parameters that the user gave other data, which the last unshard copied to the shard."""
    gathered: int = 0
    """The stamp of the shard that `begin_unshard` was last called with."""
    unit: str = ""
    """The name in messages of the module that the parameters belong to, if a runtime says it."""

    def __attrs_post_init__(self) -> None:
        self.flat_param._held_by = weakref.ref(self)

    @gradients.default
    def _make_gradients(self) -> GradientLedger:
        dtype = self.precision.reduce(self.layout.dtype)
        return GradientLedger.create(self.layout, dtype=dtype, device=self.device, pool=self.forms.pool)

    @classmethod
    def create(
        cls,
        owner: nn.Module,
        bound: Sequence[BoundParameter],
        layout: FlatLayout,
        shard: torch.Tensor,
        *,
        rank: int,
        attribute: str | None,
        precision: Precision,
        device: torch.device,
    ) -> FlatParamHandle:
        """Take over the parameters in `bound` (the slots of `layout`, in order), whose values `shard` holds.

        Args:
            shard: 1-D, `layout.shard_numel` elements; see `pack_shard`.
            attribute: the name under which `owner` registers the flat parameter; `None` keeps the original
                parameters, as views of the shard.
            device: the device of the full parameters.
        """
        attributes = tuple(dict(vars(b.parameter)) for b in bound)
        kinds = tuple(kind_of(b.parameter) for b in bound)
        trainable = any(b.parameter.requires_grad for b in bound)
        flat_param = FlatParameter(shard, layout, rank, trainable)
        exposure: Exposure
        if attribute is None:
            exposure = OriginalExposure.attach(flat_param, bound)
        else:
            exposure = FlatExposure.attach(owner, attribute, flat_param, bound)
        forms = FullForms(layout, precision, device, attributes, kinds=kinds)
        handle = cls(Shard.of(flat_param), exposure, forms)
        for index, b in enumerate(bound):
            mark_owner(b.parameter, handle, index)
        return handle

    @property
    def flat_param(self) -> FlatParameter:
        """The parameter that is this rank's shard; it lives for ever."""
        return self._shard.flat_param

    @property
    def layout(self) -> FlatLayout:
        """The layout: the position of each parameter in the flat parameter."""
        return self._shard.flat_param.flat_layout

    @property
    def rank(self) -> int:
        """This rank's index among the ranks that share the flat parameter."""
        return self._shard.flat_param.rank

    @property
    def param_infos(self) -> Sequence[tuple[ParamInfo, ...]]:
        """For each parameter, the module attributes that hold it."""
        return self.exposure.infos

    @property
    def precision(self) -> Precision:
        """The dtypes of computation, reduction and the optimizer step."""
        return self.forms.precision

    @property
    def device(self) -> torch.device:
        """The device of the full parameters; the shard may be on a different one."""
        return self.forms.device

    @property
    def name(self) -> str:
        """The names of the parameters, shortened, for messages."""
        names = self.layout.fqns
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} parameters)"

    @property
    def form(self) -> FullForm:
        """The full parameters that are in memory now, or were last."""
        return self.forms.current

    @property
    def buffer(self) -> FlatBuffer:
        """The buffer of the full parameters that are in memory now, or were last."""
        return self.forms.current.buffer

    @property
    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The full parameters, one autograd leaf each, always the same objects; empty before the first unshard."""
        return self.forms.current.leaves

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard is on a different device than the full parameters."""
        return self._shard.device != self.forms.device

    @property
    def is_whole(self) -> bool:
        """Whether one rank has the whole flat parameter."""
        return self.forms.layout.world_size == 1

    @property
    def is_unsharded(self) -> bool:
        """Whether the module shows the full parameters."""
        return self.residency is Residency.UNSHARDED

    def __str__(self) -> str:
        return f"flat parameter {self.name} on rank {self.rank}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.residency.name}, {self.flat_param!r})"

    def use_pool(self, pool: BufferPool) -> None:
        """From now on, take the memory of full parameters and gradients from `pool`, and return it there."""
        self.forms.use_pool(pool)
        self.gradients.buffer.pool = pool

    def _check_rests(self, deed: str) -> None:
        if self.residency is not Residency.SHARDED or not self.gradients.is_empty:
            raise FlatParamError(f"{self}: it can be {deed} only outside of a pass, while it is sharded")

    # Parameters

    def stamp(self) -> int:
        """Return a number that grows with every change of the shard, or of the originals that are views of it."""
        if self._shard.flat_param.data_ptr() != self._shard.address:
            self._follow()
        return self.exposure.stamp() + self._shard.moves

    def _follow(self) -> None:
        """If somebody gave the flat parameter other data, update everything that refers to its memory.

        Raises:
            FlatParamError: if the data have a different shape, or a different dtype or device while the handle is not
                SHARDED.
        """
        shard = self._shard
        if shard.flat_param.data_ptr() == shard.address:
            return
        shard.check_shape(self)
        is_offloaded, changed = self.is_offloaded, shard.is_another_kind
        if changed:
            self._check_rests("moved or cast")
        shard.follow()
        if changed:
            self.forms = self.forms.again(self.layout, self.device if is_offloaded else shard.device)
            self.gradients = self._make_gradients()
        elif self.residency is Residency.SHARDED:
            self.forms.follow(shard.values)
        self.exposure.refresh()

    def full_nbytes(self, *, full_precision: bool = False) -> int:
        """Return the bytes that `begin_unshard` allocates for the full parameters."""
        return self.forms.nbytes[full_precision]

    def computes_in(self, *, full_precision: bool) -> bool:
        """Return whether the current or last full parameters have the dtype that `begin_unshard` gives them."""
        return self.buffer.tensor.dtype == self.forms.dtype(full_precision=full_precision)

    def begin_unshard(
        self, *, full_precision: bool = False, take_over: bool = True, copied: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the full buffer and return what to gather: `(output, input)`.

        `output` is 1-D, `layout.numel` elements, the shards of all ranks end to end; `input` is this rank's shard,
        `layout.shard_numel` elements. If the shard has a different dtype or device, `input` is the rank's own slice of
        `output` and is already filled. If one rank has the whole flat parameter in the dtype to compute in, and
        originals are shown, the full parameters are views of it: `output` and `input` are the same memory.

        Args:
            full_precision: gather the parameters in their own dtype, whatever the compute dtype.
            take_over: check whether the user gave a parameter other data or replaced it, and take that over.
            copied: give the full parameters memory of their own in any case, so that a change of them does not
                change the flat parameter.
        """
        if self.residency is not Residency.SHARDED:
            RESIDENCY.move(self.residency, Residency.UNSHARDING, who=self)
        if take_over:
            self.take_over()
        else:
            self._follow()
        self.gathered = self.exposure.stamp() + self._shard.moves
        self.residency = Residency.UNSHARDING
        full, shard = self._reserve(full_precision=full_precision, copied=copied), self._shard.values
        if full.dtype == shard.dtype and full.device == shard.device:
            return full, shard
        own = full[self.layout.shard_span(self.rank).as_slice()]
        own.copy_(shard, non_blocking=True)
        return full, own

    def reserve(self, *, full_precision: bool = False, copied: bool = False) -> bool:
        """Allocate what `begin_unshard` with these arguments fills; return whether the shard has to be copied there.

        On an accelerator, the copy may be queued on a different stream than the one that the memory is allocated on.

        Raises:
            IllegalStepError: if the handle is not SHARDED.
        """
        RESIDENCY.move(self.residency, Residency.UNSHARDING, who=self)
        self._follow()
        full, shard = self._reserve(full_precision=full_precision, copied=copied), self._shard.values
        moves = full.dtype != shard.dtype or self.is_offloaded
        return moves or (self.is_whole and full.data_ptr() != shard.data_ptr())

    def unreserve(self) -> None:
        """Free what `reserve` allocated, if `begin_unshard` has not begun to fill it."""
        if self.residency is Residency.SHARDED:
            self.form.free()

    def _reserve(self, *, full_precision: bool, copied: bool) -> torch.Tensor:
        shard, dtype = self._shard.values, self.forms.dtype(full_precision=full_precision)
        lends = self.forms.layout.world_size == 1 and shard.dtype == dtype
        lends = lends and not (copied or self.is_offloaded or self.exposure.lists_shard)
        form = self.forms.choose(dtype, over=shard if lends else None)
        if form.kept:
            for index in form.kept:
                FreedParameter.release(form.leaves[index])
            form.kept = []
        return form.allocate()

    def take_over(self) -> None:
        """Have the shard hold what the user gave a parameter since (`.data =`, or a new object), while it is SHARDED.

        Whoever reads or writes the shard between passes calls it first. `taken_over` then names the parameters.

        Raises:
            FlatParamError: if the data do not fit, or the flat parameter was replaced; nothing has changed.
        """
        self._follow()
        if self.residency is not Residency.SHARDED:
            return
        taken = self.exposure.take_over()
        if not taken:
            self.taken_over = ()
            return
        self.taken_over = tuple(self.layout.fqns[index] for index in taken)
        self._shard.follow()
        self.exposure.refresh()
        for index, old in taken.items():
            clear_owner(old)
            # Of one that two units show, the first is the owner.
            faces = () if self.faces is None else (self.exposure.listed()[index],)
            for each in (self.exposure.originals()[index], *faces):
                if self.faces is None or owner_of(each) is None:
                    mark_owner(each, self, index)

    def finish_unshard(self) -> None:
        """Show the full parameters in the module, once the bytes are in the buffer."""
        if self.residency is not Residency.UNSHARDING:
            RESIDENCY.move(self.residency, Residency.UNSHARDED, who=self)
        form = self.forms.current
        is_new = not form.leaves
        if self.forms.layout.is_chunked:
            form.fill()
        self.follow_training()
        presented = self.forms.presented() if self.forms.has_presenters else form.leaves
        form.note_filled()
        self.exposure.show(presented)
        if is_new:
            self._count_references(form, presented)
        # Last: if showing is refused, the buffer can still be given back. At once: an interrupt may come at any call.
        self.residency = Residency.UNSHARDED

    def _count_references(self, form: FullForm, presented: Sequence[torch.Tensor]) -> None:
        """Count the references to new leaves that are there while nobody else has any, as after the first pass."""
        for _ in range(2):
            self.exposure.show_shard()
            form.count_own()
            self.exposure.show(presented)

    def follow_training(self) -> None:
        """Have full parameters, and those that users see while sharded, require gradients alike: as last told."""
        form = self.forms.current
        found = [*map(_REQUIRES_GRAD, form.leaves)]
        if found != form.trained:
            listed = self.exposure.listed()
            for parameter, was, wants in zip(listed, form.trained, found, strict=False):
                # A flat parameter is trained as a whole.
                if was != wants and (len(listed) == len(found) or len({*found}) == 1):
                    parameter.requires_grad_(wants)
        wanted = list(self.exposure.requires_grad())
        # An equal list stays the same object.
        if wanted != self.trained:
            self.trained = wanted
        if not form.leaves:
            form.make_leaves(self.forms.attributes, wanted, self.forms.kinds)
            for index, leaf in enumerate(form.leaves):
                mark_owner(leaf, self, index)
        elif found != wanted:
            for leaf, wants in zip(form.leaves, wanted, strict=True):
                leaf.requires_grad_(wants)
        form.trained = wanted

    def reshard(self) -> None:
        """Show the sharded form again and free the full buffer, even while it is being filled."""
        moved, form = [], self.forms.current
        if self.residency is Residency.UNSHARDED:
            self.exposure.show_shard()
            moved = form.reclaim()
        if self.residency is Residency.SHARDED:
            RESIDENCY.move(self.residency, Residency.SHARDED, who=self)
        self.residency = Residency.SHARDED
        form.free()
        for index in form.kept:
            FreedParameter.guard(form.leaves[index])
        if moved:
            raise self._refusal(moved)

    def told(self, index: int) -> str:
        """Parameter `index`, its unit and this rank, in words."""
        unit = f" of unit {self.unit!r}" if self.unit else ""
        return f"rank {self.rank}: the full parameter {self.layout.fqns[index]!r}{unit}"

    def check_leaves(self) -> None:
        """Check that the full parameters, which the module shows, are those that were gathered.

        Raises:
            FlatParamError: if a leaf was given other data, which are lost; the message names the parameter.
        """
        moved = self.forms.current.reclaim()
        if moved:
            raise self._refusal(moved)

    def _refusal(self, moved: Sequence[int]) -> FlatParamError:
        names = ", ".join(self.layout.fqns[index] for index in moved)
        return FlatParamError(
            f"{self}: the full parameters of {names} were given other data, which the shards do not see; "
            "change values in place instead, inside summon_full_params()"
        )

    # Gradients

    def deposit(self, index: int, *, divisor: float = 1.0, weight: float = 1.0) -> None:
        """Move the finished gradient of leaf `index`, `weight / divisor` times, to its slot, unless it is None."""
        for _, gradient in zip(*self.form.take_gradients([index]), strict=True):
            self.gradients.deposit(index, gradient, divisor=divisor, weight=weight)

    def keep(self, indices: Sequence[int], *, divisor: float = 1.0) -> None:
        """Deposit the gradients of leaves `indices` later, with others: at the latest in `begin_reduce`."""
        self.gradients.keep_all(*self.form.take_gradients(indices), divisor=divisor)

    def deposit_all(self, indices: Sequence[int], *, divisor: float = 1.0) -> None:
        """Deposit the gradients of leaves `indices` and the kept ones; a few calls handle all small ones."""
        indices, gradients = self.forms.current.take_gradients(indices)
        self.gradients.deposit_all(indices, gradients, divisor=divisor)

    def begin_reduce(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what to reduce-scatter: `(output, input)`.

        `output` is new, 1-D, `layout.shard_numel` elements; `input` is the flat gradient, `layout.numel` elements, the
        shards of all ranks end to end, both in the reduction dtype. If one rank has the whole flat parameter, both are
        the flat gradient, whose memory then belongs to the caller.
        """
        if self.forms.layout.world_size == 1:
            full = self.gradients.give_away()
            return full, full
        full = self.gradients.joined() if self.forms.layout.is_chunked else self.gradients.complete()
        return full.new_empty(self._shard.values.numel()), full

    def begin_reduce_parts(self) -> tuple[torch.Tensor, Unflattened]:
        """Do what `begin_reduce` does, if all gradients were kept: the parts of `input` stay where autograd left them.

        Raises:
            FlatParamError: if `gradients.is_apart` is false.
        """
        full = self.gradients.hand_over()
        return torch.empty(self._shard.values.numel(), dtype=full.dtype, device=full.device), full

    def finish_reduce(
        self, reduced: torch.Tensor, *, arrived: Sequence[int] | None = None, divisor: float = 1.0
    ) -> None:
        """Free the flat gradient and add the reduced shard, divided by `divisor`, to `.grad`.

        A runtime that can free the memory before it learns which parameters have a gradient calls the two halves,
        `settle_reduce` and `accumulate`.

        Args:
            reduced: the `output` of `begin_reduce`.
            arrived: for each parameter, non-zero if any rank had a gradient; by default if this rank had one.
            divisor: the averaging factor after the reduction.
        """
        if arrived is None:
            arrived = bytes(self.gradients.deposited)
        self.accumulate(self.settle_reduce(reduced, divisor=divisor), arrived)

    def settle_reduce(self, reduced: torch.Tensor, *, divisor: float = 1.0) -> torch.Tensor:
        """Free the flat gradient, which the reduction has read, and return the shard's mean as `for_grad` does."""
        self.gradients.release()
        if divisor != 1.0:
            reduced.div_(divisor)
        return self.for_grad(reduced)

    def for_grad(self, reduced: torch.Tensor) -> torch.Tensor:
        """`reduced` in the dtype of `.grad` and on the shard's device; on an accelerator the copy is only queued."""
        dtype = self.forms.stepped
        if reduced.dtype == dtype and reduced.device == self._shard.device:
            return reduced
        return reduced.to(self.flat_param.device, dtype, non_blocking=True)

    def drop_gradients(self) -> None:
        """Drop every gradient that has arrived and was not reduced, those on the leaves too."""
        self.gradients.release()
        for leaf in self.leaves:
            leaf.grad = None

    def accumulate(self, gradient: torch.Tensor, arrived: Sequence[int]) -> None:
        """Add the shard's gradient to `.grad`; see `Exposure.add_gradient`."""
        self.exposure.add_gradient(gradient, arrived)

    # Between passes: copied, moved, cast, changed

    def __getstate__(self) -> tuple[object, ...]:
        """Return the state for a copy, modules included; only a handle that is SHARDED can be copied."""
        self._check_rests("copied or pickled")
        return (
            self.flat_param,
            self.exposure,
            self.precision,
            self.is_offloaded,
            self.device,
            self.forms.attributes,
            self.forms.kinds,
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Restore a copy; call `revive` once the copies of its modules are whole."""
        flat_param, exposure, precision, is_offloaded, device, attributes, kinds = state
        # A file may have been loaded onto a different device.
        home = device if is_offloaded else flat_param.device
        forms = FullForms(flat_param.flat_layout, precision, home, attributes, kinds=kinds)
        type(self).__init__(self, Shard.of(flat_param), exposure, forms)

    def revive(self) -> bool:
        """Make the modules of a copy show the copied shard; return false if they are not whole yet."""
        if not self.exposure.is_dormant:
            return True
        modules = [info.module for infos in self.param_infos for info in infos]
        if any("_parameters" not in vars(module) for module in modules):
            return False
        # The copied modules may still register copies of full parameters.
        self.exposure.put_back()
        self.take_over()
        self.exposure.refresh()
        self.exposure.show_shard()
        for index, parameter in self.exposure.originals().items():
            mark_owner(parameter, self, index)
        if self.faces is not None:
            self.wear(self.faces)
        return True

    @property
    def faces(self) -> Faces | None:
        """The maker of the parameters that the module shows in the place of originals, if there is one."""
        return getattr(self.exposure, "faces", None)

    def wear(self, faces: Faces) -> None:
        """Have the module show a face of each parameter while it is sharded; original parameters have to be shown."""
        assert isinstance(self.exposure, OriginalExposure)
        for index, face in enumerate(self.exposure.wear(faces)):
            mark_owner(face, self, index)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Gather and reduce in `dtype` from now on."""
        forms, precision = self.forms, attrs.evolve(self.precision, param_dtype=dtype)
        self.forms = FullForms(self.layout, precision, forms.device, forms.attributes, forms.pool, forms.kinds)
        self.gradients = self._make_gradients()

    def has_presenter(self, index: int) -> bool:
        """Return whether the module shows a tensor made from the full parameter `index`, for example a `DTensor`."""
        return self.forms.has_presenter(index)

    def present(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """The tensor that the module shows for the full parameter `index`: `full`, or what its `PRESENTER` returns."""
        return self.forms.present(index, full)

    def flattened(self, index: int, shown: object) -> object:
        """Return the tensor that was flattened, of one like `present` makes; anything else is returned as it is."""
        back = getattr(self.forms.attributes[index].get(PRESENTER), "flattened", None)
        return shown if back is None else back(shown)

    def write_back(self) -> None:
        """Write this rank's part of the full parameters to the shard, if it has changed.

        A parameter that somebody has put in the place of a full one has the same effect as new values of that one, if
        it has the same shape, dtype and device: its values and its attributes are taken over.

        Raises:
            IllegalStepError: if the full parameters are not complete in memory, in their own dtype.
        """
        if not self.is_unsharded or self.buffer.tensor.dtype != self.flat_param.dtype:
            raise IllegalStepError(
                f"{self!r}: there are no full parameters to write back; finish an unshard in full precision first"
            )
        self.form.reclaim(keep=True)
        self._take_replacements()
        self._shard.write(self.buffer.shard(self.rank))

    def _take_replacements(self) -> None:
        found = self.exposure.replacements()
        if not found:
            return
        for index, new in found.items():
            if self.has_presenter(index):
                continue
            leaf = self.leaves[index]
            leaf.detach().copy_(new.detach())
            # Such as the scales of a quantised weight. The marks say where a parameter belongs.
            noted = {name: value for name, value in vars(new).items() if name not in MARKS}
            holders = [form.leaves[index] for form in self.forms.known if form.leaves]
            holders += [each for at, each in self.exposure.originals().items() if at == index]
            for each in (self.forms.attributes[index], *map(vars, holders)):
                each.update(noted)
            self.exposure.put_back([index])

    def lend(self, index: int, infos: Sequence[ParamInfo]) -> None:
        """Show parameter `index` under the names `infos` too, in the modules of another unit that shares it."""
        self.exposure.lend(index, infos)

    def original(self, index: int) -> nn.Parameter:
        """The original parameter `index`, this rank's part of it, as a view of the shard that optimizers can hold.

        If the flat parameter is what is listed, it is made at the first call; its `.grad` follows that of the flat
        parameter, and stepping either steps both.
        """
        parameter = self.exposure.follow(index)
        mark_owner(parameter, self, index)
        return parameter

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move or cast the flat parameter and its gradient, as `torch.nn.Module.to` and similar methods do.

        Args:
            function: keeps the shape; may change the device and the floating-point dtype.

        Raises:
            FlatParamError: if full parameters or unreduced gradients are in memory, or the shape changes.
        """
        self._check_rests("moved or cast")
        shard = self.flat_param.data
        changed = function(shard)
        if changed.shape != shard.shape:
            raise FlatParamError(f"{self}: expected a change of device or dtype, found one of shape")
        if self.is_offloaded:
            changed = changed.to(shard.device)
        grads = [(p, p.grad) for p in self.exposure.parameters() if p.grad is not None]
        for parameter, _ in grads:
            parameter.grad = None
        give_data(self.flat_param, changed)
        self._follow()
        for parameter, grad in grads:
            # None allows any dtype.
            parameter.grad_dtype = None
            parameter.grad = function(grad).to(changed.device)
