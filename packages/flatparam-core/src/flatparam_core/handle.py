"""One flat parameter on one rank, and what is done with it between passes: made, copied, moved, changed.

What a pass does with it is in `cycle`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import attrs
import torch
from torch import nn

from flatparam_core.cycle import FlatParamCycle
from flatparam_core.errors import FlatParamError, IllegalStepError
from flatparam_core.exposure import (
    MARKS,
    BoundParameter,
    Exposure,
    FlatExposure,
    OriginalExposure,
    ParamInfo,
    mark_owner,
)
from flatparam_core.flat_parameter import FlatParameter
from flatparam_core.geometry import FlatLayout
from flatparam_core.names import PRESENTER
from flatparam_core.storage import (
    FullForms,
    Precision,
    Shard,
    give_data,
    kind_of,
)

__all__ = ["FlatParamHandle"]


@final
@attrs.define(eq=False, repr=False)
class FlatParamHandle(FlatParamCycle):
    """A flat parameter on one rank. Make it with `flatparam_core.flatten_module`."""

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
        return True

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """FSDP1's name for the parameters' own dtype.

        Code that gives the flat parameter data of a different dtype sets it, too. As in FSDP1, the full parameters then
        keep the dtype that they had, and so does the reduction.
        """
        return self.layout.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        computed = self.forms.dtype(full_precision=False)
        self._follow()
        if dtype != self.layout.dtype:
            self.apply(lambda tensor: tensor.to(dtype))
        if computed != self.forms.dtype(full_precision=False):
            forms, precision = self.forms, attrs.evolve(self.precision, param_dtype=computed)
            self.forms = FullForms(
                self.layout, precision, forms.device, forms.attributes, forms.pool, forms.kinds
            )
            self.gradients = self._make_gradients()

    def has_presenter(self, index: int) -> bool:
        """Whether the module shows a tensor made from the full parameter `index`, for example a `DTensor`."""
        return self.forms.has_presenter(index)

    def present(self, index: int, full: torch.Tensor) -> torch.Tensor:
        """The tensor that the module shows for the full parameter `index`: `full`, or what its `PRESENTER` returns."""
        return self.forms.present(index, full)

    def flattened(self, index: int, shown: object) -> object:
        """The tensor that was flattened, of one like `present` makes; anything else is returned as it is."""
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
