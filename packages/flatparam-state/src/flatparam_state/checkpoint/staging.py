"""Loading, the half that changes nothing: what this rank needs of a checkpoint, read, verified, in host memory."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import final

from flatparam_state.checkpoint.manifest import Copy, TensorRecord
from flatparam_state.checkpoint.model_pieces import ModelTensor, extra_state_modules, model_tensors
from flatparam_state.checkpoint.optimizer_pieces import COUNTERS
from flatparam_state.checkpoint.reading import CheckpointReader
from flatparam_state.errors import CheckpointError
from flatparam_state.held import Held, held_by, held_parameters
from flatparam_state.optim_load import load_optimizer_state
from flatparam_state.source import join_path, split_path

__all__ = ["StagedModel", "StagedOptimizer", "stage_model", "stage_optimizer"]

_SHOWN = 5


@final
@attrs.frozen(eq=False)
class _Entry:
    """A saved state: a tensor, a plain value, or copies that differ between ranks."""

    path: str
    record: TensorRecord | None = None
    value: Any = None
    copies: tuple[Copy, ...] = ()


@final
@attrs.frozen(eq=False)
class StagedModel:
    """New values for the tensors of a model."""

    tensors: list[tuple[ModelTensor, Tensor]]
    extra_states: list[tuple[nn.Module, Any]]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def install(self) -> None:
        """Give them to the model."""
        for module, state in self.extra_states:
            module.set_extra_state(state)
        for tensor, staged in self.tensors:
            tensor.put(staged)


def stage_model(
    reader: CheckpointReader, model: nn.Module, *, strict: bool, convert_dtype: bool
) -> StagedModel:
    """Read what this rank has of `model`.

    Raises:
        CheckpointError: where names, shapes or dtypes do not fit, naming them; where bytes are not what was written.
    """
    wanted, used, missing, problems = [], set(), [], []
    for tensor in model_tensors(model):
        found = _paths(reader, tensor)
        used.update(found)
        if not found:
            missing.append(tensor.name)
            continue
        problem = _misfit(reader.record(found[0]), tensor, convert_dtype)
        if problem:
            problems.append(problem)
        wanted.append((tensor, found[0]))
    modules, extra = dict(extra_state_modules(model)), reader.manifest.values.get("model", {})
    missing += [name for name in modules if name not in extra]
    unexpected = [split_path(path)[1] for path in reader.tensors if _is_of_model(path) and path not in used]
    unexpected += [name for name in extra if name not in modules]
    if strict and missing:
        problems.append(f"the checkpoint lacks {_some(missing)}")
    if strict and unexpected:
        problems.append(f"the model lacks {_some(unexpected)}")
    if problems:
        raise CheckpointError(
            f"{reader.path} is of another model: {'; '.join(problems[:_SHOWN])}",
            path=reader.path,
            hint="build the model that was saved; load(strict=False) leaves what is missing as it is",
        )
    tensors = [(tensor, read_part(reader, path, tensor, tensor.info.dtype)) for tensor, path in wanted]
    states = [(module, reader.decode(extra[name])) for name, module in modules.items() if name in extra]
    return StagedModel(tensors, states, tuple(missing), tuple(unexpected))


def _is_of_model(path: str) -> bool:
    parts = split_path(path)
    return parts[0] == "model" and len(parts) == 2


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _paths(reader: CheckpointReader, tensor: ModelTensor) -> list[str]:
    """Where the checkpoint has `tensor`, under any of its names or theirs."""
    manifest = reader.manifest
    paths = [join_path(("model", name)) for name in tensor.names]
    found = [manifest.aliases.get(path, path) for path in paths]
    return list(dict.fromkeys(path for path in found if path in manifest.tensors))


def _misfit(record: TensorRecord, tensor: ModelTensor, convert_dtype: bool) -> str:
    if record.info.shape != tensor.info.shape:
        return f"{tensor.name!r}: expected shape {tensor.info.shape}, found {record.info.shape}"
    if record.info.dtype != tensor.info.dtype and not convert_dtype:
        return (
            f"{tensor.name!r}: expected {tensor.info.dtype}, found {record.info.dtype} "
            "(load(convert_dtype=True) converts)"
        )
    return ""


def read_part(reader: CheckpointReader, path: str, like: ModelTensor, dtype: torch.dtype) -> Tensor:
    """This rank's elements of a saved tensor that is shaped like `like`: 1-D, in the memory order of `like`.

    Only these elements' blocks are read, unless the checkpoint has another memory order.
    """
    record = reader.record(path)
    staged = torch.empty(like.span.numel, dtype=dtype)
    if not like.span:
        return staged
    if _order(like.info.shape, record.stride) == _order(like.info.shape, like.stride):
        done = 0
        for chunk in reader.read_stored(path, like.span):
            staged[done : done + chunk.numel()].copy_(chunk)
            done += chunk.numel()
        return staged
    full = reader.load(path)
    if like.stride is not None:
        full = torch.empty_strided(like.info.shape, like.stride, dtype=full.dtype).copy_(full)
        full = full.as_strided((full.numel(),), (1,))
    return staged.copy_(full.reshape(-1)[like.span.as_slice()])


def _order(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The strides that order elements; None where they are row-major."""
    if stride is None:
        return None
    return tuple(step for size, step in zip(shape, stride, strict=True) if size > 1)


@final
@attrs.frozen(eq=False)
class StagedOptimizer:
    """A new state for an optimizer, as its `load_state_dict` takes it."""

    optimizer: torch.optim.Optimizer
    state_dict: dict[str, Any]

    def install(self) -> None:
        """Give it to the optimizer as it was saved.

        Torch itself would cast tensors to the parameters' dtype, and make generators of strings.
        """
        self.optimizer.load_state_dict(self.state_dict)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, values in self.state_dict["state"].items():
            installed = self.optimizer.state[parameters[index]]
            for name, value in values.items():
                now = installed.get(name)
                if not isinstance(value, Tensor):
                    installed[name] = value
                elif isinstance(now, Tensor) and now.dtype != value.dtype:
                    installed[name] = value.to(now.device)


def stage_optimizer(
    reader: CheckpointReader, model: nn.Module, optimizer: torch.optim.Optimizer, at: tuple[str, ...]
) -> StagedOptimizer:
    """Read what this rank has of the optimizer's state that was saved under the keys `at`.

    Raises:
        CheckpointError: where there is none, or it does not fit.
        FlatParamError: where the parameter groups do not.
    """
    staging = _OptimizerStaging(reader, model, at)
    state: dict[int, dict[str, Any]] = {}
    number = 0
    for _, found in held_by(optimizer, held_parameters(model)):
        for item in found:
            values = staging.values_of(item)
            if values:
                state[number] = values
            number += 1
    groups = {"state": {}, "param_groups": staging.groups()}
    made = load_optimizer_state(model, optimizer, groups)["param_groups"]
    return StagedOptimizer(
        optimizer, {"state": state, "param_groups": [copy.deepcopy(group) for group in made]}
    )


class _OptimizerStaging:
    """One optimizer's state in a checkpoint, by the names that its parameters have in the model now."""

    def __init__(self, reader: CheckpointReader, model: nn.Module, at: tuple[str, ...]) -> None:
        self._reader = reader
        self._at = at
        self._tensors = {name: tensor for tensor in model_tensors(model) for name in tensor.names}
        self._tree = self._find_tree()
        self._saved: dict[str, dict[str, _Entry]] = {}
        prefix = (*at, "state")
        for path, record in reader.manifest.tensors.items():
            self._note(prefix, _Entry(path, record))
        for path, copies in reader.manifest.per_rank.items():
            self._note(prefix, _Entry(path, copies=copies))
        for fqn, values in self._tree.get("state", {}).items():
            for name, value in values.items():
                self._note(prefix, _Entry(join_path((*prefix, fqn, name)), value=value))

    def _find_tree(self) -> dict[str, Any]:
        tree: Any = self._reader.manifest.values
        for key in self._at:
            tree = tree.get(key, {}) if isinstance(tree, dict) else {}
        if not isinstance(tree, dict) or "param_groups" not in tree:
            there = self._reader.manifest.values.get("optimizer", {})
            raise CheckpointError(
                f"{self._reader.path} has no state of an optimizer at {join_path(self._at)!r}; "
                f"under 'optimizer' it has {sorted(there) or 'nothing'}",
                path=self._reader.path,
                hint="give the optimizers the names that they had, or load without an optimizer",
            )
        return tree

    def _note(self, prefix: tuple[str, ...], entry: _Entry) -> None:
        parts = split_path(entry.path)
        if len(parts) == len(prefix) + 2 and parts[:-2] == prefix:
            self._saved.setdefault(self._name_now(parts[-2]), {})[parts[-1]] = entry

    def _name_now(self, saved: str) -> str:
        """The first name in the model of the parameter that was called `saved`, or `saved`."""
        if saved in self._tensors:
            return self._tensors[saved].name
        path = join_path(("model", saved))
        aliases = (split_path(alias)[1] for alias, of in self._reader.manifest.aliases.items() if of == path)
        return next((self._tensors[alias].name for alias in aliases if alias in self._tensors), saved)

    def groups(self) -> list[dict[str, Any]]:
        """The saved groups, with the names of now."""
        groups = self._reader.decode(self._tree["param_groups"])
        for group in groups:
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [self._name_now(fqn) for fqn in group[key]]
        return list(groups)

    def values_of(self, item: Held) -> dict[str, Any]:
        """The states of one parameter of the optimizer."""
        names = dict.fromkeys(name for fqn in item.fqns for name in self._saved.get(fqn, {}))
        return {name: self._value(item, name) for name in names}

    def _value(self, item: Held, name: str) -> Any:
        entries = {fqn: self._saved[fqn][name] for fqn in item.fqns if name in self._saved.get(fqn, {})}
        shaped = {fqn: self._shaped(fqn, name, entry) for fqn, entry in entries.items()}
        if all(shaped.values()):
            return self._cut(item, entries)
        if any(shaped.values()):
            raise self._unclear(name, list(entries), "is shaped like the parameter for some of them only")
        values = {fqn: self._uncut(fqn, name, entry) for fqn, entry in entries.items()}
        first_fqn, first = next(iter(values.items()))
        for fqn, value in values.items():
            if not _equal(value, first):
                raise self._unclear(
                    name, [first_fqn, fqn], f"is {first!r} for one and {value!r} for the other"
                )
        return first

    def _unclear(self, name: str, fqns: list[str], why: str) -> CheckpointError:
        return CheckpointError(
            f"optimizer state {name!r} of {_some(fqns)}, which lie in one flat parameter, {why}",
            fqn=fqns[0],
            path=self._reader.path,
            hint="shard with use_orig_params=True, or make them units of their own",
        )

    def _shaped(self, fqn: str, name: str, entry: _Entry) -> bool:
        """Whether a state is cut like its parameter."""
        if entry.record is None or entry.record.whole:
            return False
        shape = self._tensors[fqn].info.shape
        return entry.record.info.shape == shape and (shape != () or name not in COUNTERS)

    def _cut(self, item: Held, entries: Mapping[str, _Entry]) -> Tensor:
        """This rank's part of states that are shaped like their parameters."""
        parts: dict[str, Tensor] = {}
        for fqn, entry in entries.items():
            dtype = self._reader.record(entry.path).info.dtype
            parts[fqn] = read_part(self._reader, entry.path, self._tensors[fqn], dtype)
        first = next(iter(parts.values()))
        if item.place is None or not item.is_flat:
            return first.view(item.parameter.shape)
        handle = item.place.handle
        shard = torch.zeros(handle.layout.shard_numel, dtype=first.dtype)
        for fqn, index in zip(item.fqns, item.indices, strict=True):
            if fqn in parts:
                shard[handle.layout.fragment(index, handle.rank).in_shard.as_slice()].copy_(parts[fqn])
        return shard

    def _uncut(self, fqn: str, name: str, entry: _Entry) -> Any:
        """A state that belongs to its parameter as a whole, in memory of its own."""
        if entry.record is not None:
            return self._reader.load(entry.path)
        if not entry.copies:
            return self._reader.decode(entry.value)
        span = self._tensors[fqn].span
        for each in entry.copies:
            if each.span == span:
                return self._reader.decode(each.value)
        if not span:  # of nothing there is nothing
            value = self._reader.decode(entry.copies[0].value)
            return value[:0] if isinstance(value, Tensor) and value.dim() else value
        held = ", ".join(f"[{each.span.start}, {each.span.stop})" for each in entry.copies[:_SHOWN])
        raise CheckpointError(
            f"optimizer state {name!r} of {fqn!r} was saved for the parts {held} of the parameter, each with "
            f"a value of its own, and this rank has the part [{span.start}, {span.stop}): it cannot be cut anew",
            fqn=fqn,
            path=self._reader.path,
            hint="load at the world size and the wrapping at which it was saved, or load without the optimizer",
        )


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)
