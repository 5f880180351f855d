"""The keys under which a checkpoint has the parts of a run: averages, optimizers, the extra states of modules."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import torch
from torch import nn

from flatparam_files import CheckpointError
from flatparam_files.checkpoint.manifest import EXTRA_STATE
from flatparam_runtime import clean_fqn, warn_caller

if TYPE_CHECKING:
    from flatparam_state import ShardedEMA

Optimizers: TypeAlias = "torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None"
"""One optimizer, several by name, or none."""
AVERAGES: Final = "averages"
"""The first key of everything about averages."""
UPDATES: Final = "updates"
"""The last key of the number of updates."""
_TENSORS: Final = "model"


def tensors_of(at: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of the tensors of the averages at `at`: below them are the names that the model's tensors have."""
    return (*at, _TENSORS)


T = TypeVar("T")


def averages_by_name(averages: ShardedEMA | Mapping[str, ShardedEMA] | None) -> dict[tuple[str, ...], ShardedEMA]:
    """Return the averages, by their keys in a checkpoint; a CheckpointError for a name that is a key there."""
    return _by_name(averages, AVERAGES, (_TENSORS, UPDATES), "averages", "give them a different one")


def optimizers_by_name(optimizer: Optimizers) -> dict[tuple[str, ...], torch.optim.Optimizer]:
    """Return the optimizers, by their keys in a checkpoint; a CheckpointError for a name that is a key there."""
    taken = ("state", "param_groups")
    return _by_name(optimizer, "optimizer", taken, "an optimizer", "give it a different one")


def _by_name(
    given: T | Mapping[str, T] | None, first: str, taken: Sequence[str], what: str, hint: str
) -> dict[tuple[str, ...], T]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return {(first,): given}
    for name in given:
        if name in ("", *taken):
            raise CheckpointError(f"{name!r} cannot be the name of {what}", hint=hint)
    return {(first, name): each for name, each in given.items()}


# Extra states


def extra_state_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of `model` that have an extra state, with its names in the state dict."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = clean_fqn(path)
            yield f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE, module


_KNOWN: Final = frozenset({"torch", "torchao", "bitsandbytes", "peft"})
"""The packages whose modules add to a state dict what is made anew, such as the scales of quantised weights."""


def warn_of_own_entries(model: nn.Module, *, tells: bool) -> None:
    """Warn of modules that add something of their own to a state dict, which is in no checkpoint.

    Args:
        tells: whether this rank warns; the code of the modules, which may communicate, runs on every rank.
    """
    for path, module in model.named_modules():
        save = type(module)._save_to_state_dict
        if save is nn.Module._save_to_state_dict or save.__module__.partition(".")[0] in _KNOWN:
            continue
        entries: dict[str, object] = {}
        # It may expect full parameters; then nothing is known of it.
        with contextlib.suppress(Exception):
            module._save_to_state_dict(entries, "", True)
        own = [name for name in entries if name not in {*module._parameters, *module._buffers, EXTRA_STATE}]
        if own and tells:
            warn_caller(
                f"module {clean_fqn(path) or '(root)'!r} ({type(module).__name__}) adds {', '.join(map(repr, own))} to "
                "its state_dict() by itself, which no Checkpointer saves: return it in get_extra_state(), and take it "
                "in set_extra_state()"
            )
