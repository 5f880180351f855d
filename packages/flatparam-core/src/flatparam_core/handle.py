"""One flat parameter in use: its shard, its full form while there is one, and its gradients.

A runtime calls, in this order and for each flat parameter::

    full, shard = handle.begin_unshard()      # allocates; now gather `shard` of every rank into `full`
    handle.finish_unshard()                   # the module's parameters are the full leaves
    ...                                       # compute; autograd fills leaf.grad
    handle.deposit(index)                     # as each leaf's gradient is finished
    handle.reshard()                          # the full form is freed
    output, full = handle.begin_reduce()      # now reduce-scatter `full` of every rank into `output`
    handle.finish_reduce(output)              # `.grad` of what the optimizer holds

It moves no bytes between ranks, registers no hook, and knows no strategy.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import attrs
import torch
from torch import nn
from typing_extensions import Self, final

from flatparam_core.bindings import BoundParameter, ParamInfo, memory_view
from flatparam_core.buffer import FlatBuffer
from flatparam_core.errors import IllegalStepError
from flatparam_core.exposure import Exposure, FlatExposure, OriginalExposure
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.gradients import GradientLedger
from flatparam_core.layout import FlatLayout
from flatparam_core.precision import Precision
from flatparam_core.transitions import Transitions

__all__ = ["FlatParamHandle", "Residency"]


class Residency(enum.Enum):
    """What is in memory of a flat parameter on this rank."""

    SHARDED = "the shard"
    UNSHARDING = "the shard, and a full buffer that is being filled"
    UNSHARDED = "the shard, and the full parameters, which the module shows"


RESIDENCY: Final = Transitions(
    "residency",
    {
        Residency.SHARDED: frozenset({Residency.UNSHARDING}),
        Residency.UNSHARDING: frozenset({Residency.UNSHARDED, Residency.SHARDED}),
        Residency.UNSHARDED: frozenset({Residency.SHARDED}),
    },
)


@final
@attrs.define(eq=False)
class FlatParamHandle:
    """A flat parameter on one rank. Make it with `flatparam_core.flatten_module`."""

    layout: FlatLayout
    rank: int
    flat_param: FlatParameter
    """This rank's shard; lives for ever."""
    param_infos: tuple[tuple[ParamInfo, ...], ...]
    """For each parameter, the module attributes that hold it."""
    exposure: Exposure
    precision: Precision
    buffer: FlatBuffer
    """The full parameters in the compute dtype; allocated exactly while not SHARDED."""
    gradients: GradientLedger
    residency: Residency = Residency.SHARDED
    _leaves: tuple[nn.Parameter, ...] = ()
    _attributes: tuple[dict[str, object], ...] = ()

    @classmethod
    def create(
        cls,
        owner: nn.Module,
        bound: Sequence[BoundParameter],
        layout: FlatLayout,
        *,
        rank: int,
        attribute: str | None,
        precision: Precision,
        device: torch.device,
    ) -> Self:
        """Pack the parameters in `bound` (the slots of `layout`, in order) and take them over.

        Args:
            attribute: the name under which `owner` registers the flat parameter; `None` keeps the original
                parameters, as views of the shard.
        """
        attributes = tuple(dict(vars(b.parameter)) for b in bound)
        shard = pack_shard([b.parameter for b in bound], layout, rank=rank, device=device)
        trainable = any(b.parameter.requires_grad for b in bound)
        flat_param = FlatParameter(shard, layout, rank, trainable)
        for b in bound:
            b.parameter._fsdp_flattened = True  # type: ignore[attr-defined]  # a mark that other libraries read too
        exposure: Exposure
        if attribute is None:
            exposure = OriginalExposure.attach(flat_param, bound)
        else:
            exposure = FlatExposure.attach(owner, attribute, flat_param, bound)
        compute, reduce = precision.compute(layout.dtype), precision.reduce(layout.dtype)
        return cls(
            layout,
            rank,
            flat_param,
            tuple(b.infos for b in bound),
            exposure,
            precision,
            FlatBuffer.create(layout, dtype=compute, device=device),
            GradientLedger.create(layout, dtype=reduce, device=device),
            attributes=attributes,
        )

    def __repr__(self) -> str:
        return f"FlatParamHandle({self.residency.name}, {self.flat_param!r})"

    @property
    def name(self) -> str:
        """The names of the parameters, shortened, for messages."""
        names = self.layout.fqns
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)} parameters)"

    @property
    def leaves(self) -> tuple[nn.Parameter, ...]:
        """The full parameters, one autograd leaf each, always the same objects; empty before the first unshard."""
        return self._leaves

    @property
    def is_unsharded(self) -> bool:
        """Whether the module shows the full parameters."""
        return self.residency is Residency.UNSHARDED

    @property
    def _who(self) -> str:
        return f"flat parameter {self.name} on rank {self.rank}"

    def _move(self, target: Residency) -> None:
        self.residency = RESIDENCY.move(self.residency, target, who=self._who)

    # Parameters

    def stamp(self) -> int:
        """A number that grows with every in-place change of the shard, or of the originals that are views of it."""
        return self.flat_param._version + sum(p._version for p in self.exposure.parameters())

    def begin_unshard(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate the full buffer and say what to gather: `(output, input)`.

        `output` is 1-D, `layout.numel` elements in the compute dtype, rank after rank; `input` is this rank's
        part, `layout.shard_numel` elements. Where the compute dtype is another than the shard's, `input` is the
        rank's own slice of `output` and is already there.
        """
        self._move(Residency.UNSHARDING)
        self.buffer.allocate()
        full = self.buffer.tensor
        if full.dtype == self.flat_param.dtype:
            return full, self.flat_param.detach()
        own = self.buffer.shard(self.rank)
        own.copy_(self.flat_param.detach())
        return full, own

    def finish_unshard(self) -> None:
        """Show the full parameters in the module, once the bytes are in the buffer."""
        RESIDENCY.move(self.residency, Residency.UNSHARDED, who=self._who)
        if not self._leaves:
            self._leaves = self._make_leaves()
        for leaf, wanted in zip(self._leaves, self.exposure.requires_grad(), strict=True):
            if leaf.requires_grad != wanted:
                leaf.requires_grad_(wanted)
        self.exposure.show(self._leaves)
        self._move(Residency.UNSHARDED)  # last: where showing is refused, the buffer can still be given back

    def reshard(self) -> None:
        """Show the sharded form again and free the full buffer, also one that is still being filled."""
        if self.residency is Residency.UNSHARDED:
            self.exposure.show_shard()
        self._move(Residency.SHARDED)
        self.buffer.free()

    def write_back(self) -> None:
        """Take this rank's part of the full parameters over into the shard.

        Raises:
            IllegalStepError: where the full parameters are not complete in memory.
        """
        if not self.is_unsharded:
            raise IllegalStepError(
                f"{self!r}: there are no full parameters to write back; finish an unshard first"
            )
        self.flat_param.detach().copy_(self.buffer.shard(self.rank))

    def _make_leaves(self) -> tuple[nn.Parameter, ...]:
        leaves = []
        with torch.inference_mode(False):  # or leaves made in inference mode could never be trained
            for view, attributes, wanted in zip(
                self.buffer.views(), self._attributes, self.exposure.requires_grad(), strict=False
            ):
                leaf = nn.Parameter(view, requires_grad=wanted)
                # What users and libraries noted on the parameter they made, and that it has its flat parameter.
                vars(leaf).update(attributes, _fsdp_flattened=True)
                leaves.append(leaf)
        return tuple(leaves)

    # Gradients

    def deposit(self, index: int, *, divisor: float = 1.0) -> None:
        """Move the finished gradient of leaf `index`, divided by `divisor`, to its slot; `None` moves nothing."""
        leaf = self._leaves[index]
        if leaf.grad is not None:
            self.gradients.deposit(index, leaf.grad, divisor=divisor)
            leaf.grad = None

    def begin_reduce(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Say what to reduce-scatter: `(output, input)`.

        `output` is new, 1-D, `layout.shard_numel` elements; `input` is the flat gradient, `layout.numel`
        elements, both in the reduction dtype.
        """
        full = self.gradients.complete()
        return full.new_empty(self.layout.shard_numel), full

    def finish_reduce(
        self, reduced: torch.Tensor, *, arrived: Sequence[int] | None = None, divisor: float = 1.0
    ) -> None:
        """Free the flat gradient and add the reduced shard, divided by `divisor`, to `.grad`.

        The two halves are `settle_reduce` and `accumulate`, for a runtime that learns later than
        it can free memory which parameters have a gradient.

        Args:
            reduced: the `output` of `begin_reduce`.
            arrived: for each parameter, non-zero where any rank had a gradient; by default where this rank had one.
            divisor: the averaging factor after the reduction.
        """
        if arrived is None:
            arrived = bytes(self.gradients.deposited)
        self.accumulate(self.settle_reduce(reduced, divisor=divisor), arrived)

    def settle_reduce(self, reduced: torch.Tensor, *, divisor: float = 1.0) -> torch.Tensor:
        """Free the flat gradient, which the reduction has read, and return the shard's mean in the shard's dtype."""
        self.gradients.release()
        if divisor != 1.0:
            reduced.div_(divisor)
        return reduced.to(self.flat_param.dtype)

    def accumulate(self, gradient: torch.Tensor, arrived: Sequence[int]) -> None:
        """Add the shard's gradient to `.grad`; see `Exposure.add_gradient`."""
        self.exposure.add_gradient(gradient, arrived)


def pack_shard(
    tensors: Sequence[torch.Tensor], layout: FlatLayout, *, rank: int, device: torch.device
) -> torch.Tensor:
    """This rank's shard of the flat parameter that `tensors` (one per slot) make, 1-D; padding is zero.

    Only the rank's own part is copied: no flat buffer of the whole unit is made.
    """
    shard = torch.zeros(layout.shard_numel, dtype=layout.dtype, device=device)
    for fragment in layout.fragments(rank):
        if fragment.in_param:
            flat = memory_view(tensors[fragment.index], layout.slots[fragment.index].spec)
            shard[fragment.in_shard.as_slice()].copy_(flat[fragment.in_param.as_slice()])
    return shard
