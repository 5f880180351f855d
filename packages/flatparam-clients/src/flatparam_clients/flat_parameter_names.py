"""FSDP1's names of a flat parameter that are about more than its own memory; its class gets them from here.

A name of memory that we do not have raises an AttributeError that says what to use instead, so `hasattr` tells the
truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from flatparam_core import FlatParameter, FlatParamHandle, Span, handle_of


class OfModule(NamedTuple):
    """The attribute that holds an original parameter."""

    param_name: str
    module: nn.Module
    module_name: str


class SharedOfModule(NamedTuple):
    """A further attribute that holds an original parameter, and the first one."""

    param_name: str
    module: nn.Module
    module_name: str
    prim_param_name: str
    prim_module: nn.Module
    prim_module_name: str


class OfShard(NamedTuple):
    """The part of an original parameter that is in this rank's shard; the end is the last element's index."""

    in_shard: bool
    offset_in_shard: int | None
    numel_in_shard: int | None
    intra_param_start_idx: int | None
    intra_param_end_idx: int | None


_VIEW: Final = "_flatparam_local_shard"


def local_shard(flat_param: FlatParameter) -> torch.Tensor:
    """Return the flat parameter's memory as a tensor that stays the same object as long as the memory is the same."""
    kept: torch.Tensor | None = vars(flat_param).get(_VIEW)
    own = flat_param.detach()
    if kept is None or not same_memory(kept, own):
        kept = vars(flat_param)[_VIEW] = own
    return kept


def set_local_shard(flat_param: FlatParameter, shard: torch.Tensor) -> None:
    """Have the flat parameter use the memory of `shard`."""
    if not same_memory(shard, flat_param):
        flat_param.data = shard
    vars(flat_param)[_VIEW] = shard.detach()


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same memory, seen in the same way."""
    facts = [(tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.device) for tensor in (one, other)]
    return facts[0] == facts[1]


def params(flat_param: FlatParameter) -> list[nn.Parameter] | None:
    """Return the original parameters, each a view of the shard; `None` without `use_orig_params`."""
    held = _handle(flat_param).exposure.parameters()
    return None if held[0] is flat_param else list(held)


def param_infos(flat_param: FlatParameter) -> tuple[Any, ...]:
    """Return the place of each original parameter: its name in the module, the module, and the module's name."""
    infos = _handle(flat_param).param_infos
    return tuple(OfModule(each[0].param_name, each[0].module, each[0].module_name) for each in infos)


def shared_param_infos(flat_param: FlatParameter) -> tuple[Any, ...]:
    """Return the further places of original parameters that modules share, beside the first place of each."""
    return tuple(
        SharedOfModule(
            info.param_name, info.module, info.module_name, infos[0].param_name, infos[0].module, infos[0].module_name
        )
        for infos in _handle(flat_param).param_infos
        for info in infos[1:]
    )


def shard_param_infos(flat_param: FlatParameter) -> tuple[Any, ...]:
    """Return the part of each original parameter that is in this rank's shard."""
    found = []
    for fragment in flat_param.flat_layout.fragments(flat_param.rank):
        if not fragment.in_shard:
            found.append(OfShard(False, None, None, None, None))
            continue
        shard, param = fragment.in_shard, fragment.in_param
        found.append(OfShard(True, shard.start, shard.numel, param.start, param.stop - 1))
    return tuple(found)


def strides(flat_param: FlatParameter) -> tuple[tuple[int, ...], ...]:
    """Return the strides of each original parameter."""
    return tuple(slot.spec.stride for slot in flat_param.flat_layout.slots)


def contiguities(flat_param: FlatParameter) -> tuple[bool, ...]:
    """Return whether each original parameter is row-major, and its last stride is 1."""
    specs = [slot.spec for slot in flat_param.flat_layout.slots]
    return tuple(spec.is_row_major and spec.stride[-1:] in ((), (1,)) for spec in specs)


def numels_with_padding(flat_param: FlatParameter) -> tuple[int, ...]:
    """Return the number of elements of each original parameter and of each gap, in the order of the memory.

    The gap at the end, which makes the length a multiple of the world size, is left out.
    """
    return tuple(span.numel for span, _ in _stretches(flat_param))


def is_padding_mask(flat_param: FlatParameter) -> tuple[bool, ...]:
    """For each entry of `_numels_with_padding`, whether it is a gap."""
    return tuple(is_gap for _, is_gap in _stretches(flat_param))


def _stretches(flat_param: FlatParameter) -> list[tuple[Span, bool]]:
    layout = flat_param.flat_layout
    end = max((slot.span.stop for slot in layout.slots), default=0)
    gaps = [(gap, True) for gap in layout.gaps if gap.stop <= end]
    return sorted([*((slot.span, False) for slot in layout.slots), *gaps], key=lambda pair: pair[0].start)


def modules(flat_param: FlatParameter) -> set[nn.Module]:
    """Return the modules that have an original parameter as an attribute."""
    return {info.module for infos in _handle(flat_param).param_infos for info in infos}


def unpadded_unsharded_size(flat_param: FlatParameter) -> torch.Size:
    """Return the size of the full flat parameter without the gap at the end."""
    return torch.Size([sum(numels_with_padding(flat_param))])


def padded_unsharded_size(flat_param: FlatParameter) -> torch.Size:
    """Return the size of the full flat parameter."""
    return torch.Size([flat_param.flat_layout.numel])


def shard_numel_padded(flat_param: FlatParameter) -> int:
    """Return the number of elements of this rank's shard that belong to no parameter."""
    fragments = flat_param.flat_layout.fragments(flat_param.rank)
    return flat_param.numel() - sum(fragment.in_shard.numel for fragment in fragments)


def full_param_padded(flat_param: FlatParameter) -> torch.Tensor:
    """Return the full flat parameter with its padding; without memory while it is sharded, as FSDP1's."""
    return _handle(flat_param).buffer.tensor


def _handle(flat_param: FlatParameter) -> FlatParamHandle:
    handle = handle_of(flat_param)
    if handle is None:
        raise AttributeError("this flat parameter belongs to no model, or its model was deleted")
    return handle


_READ: Final[dict[str, Callable[[FlatParameter], Any]]] = {
    "_params": params,
    "_param_infos": param_infos,
    "_shared_param_infos": shared_param_infos,
    "_shard_param_infos": shard_param_infos,
    "_full_param_padded": full_param_padded,
    "_strides": strides,
    "_contiguities": contiguities,
    "_numels_with_padding": numels_with_padding,
    "_is_padding_mask": is_padding_mask,
    "_modules": modules,
    "_num_params": lambda flat_param: len(flat_param.flat_layout.slots),
    "_shard_numel_padded": shard_numel_padded,
    "_sharded_size": lambda flat_param: flat_param.size(),
    "_unpadded_unsharded_size": unpadded_unsharded_size,
    "_padded_unsharded_size": padded_unsharded_size,
}
_MISSING: Final[dict[str, str]] = {
    "_mp_shard": "the shard is cast while it is gathered, so there is no copy of it in low precision",
    "_full_prec_full_param_padded": "use _full_param_padded inside FullyShardedDataParallel.summon_full_params(model)",
    "_saved_grad_shard": "the shard's gradient is .grad of what model.parameters() lists",
    "_cpu_grad": "an offloaded shard's gradient is .grad of what model.parameters() lists",
}


def _refused(name: str, instead: str) -> property:
    def read(flat_param: FlatParameter) -> Any:
        raise AttributeError(f"flatparam's flat parameters have no {name}: {instead}")

    return property(read)


NAMES: Final[dict[str, property]] = {
    "_local_shard": property(local_shard, set_local_shard),
    **{name: property(read) for name, read in _READ.items()},
    **{name: _refused(name, instead) for name, instead in _MISSING.items()},
}
"""FSDP1's names, as the class of flat parameters has them."""
