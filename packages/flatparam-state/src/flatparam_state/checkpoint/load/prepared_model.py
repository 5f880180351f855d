"""Loading, the half that changes nothing: what this rank needs of a checkpoint, read, verified, in host memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from typing_extensions import final

from flatparam_runtime import ParamSpec, Span
from flatparam_state.checkpoint.manifest.records import TensorRecord
from flatparam_state.checkpoint.reader import CheckpointReader
from flatparam_state.checkpoint.save.model_pieces import ModelTensor, extra_state_modules, model_tensors
from flatparam_state.errors import CheckpointError
from flatparam_state.forms.wanted import Stored, StoredTensor
from flatparam_state.optimizer.collect import COUNTERS, PER_RANK
from flatparam_state.optimizer.load import AsItIs, load_optimizer_state
from flatparam_state.source import join_path, split_path

__all__ = ["StagedModel", "StagedOptimizer", "stage_model", "stage_optimizer"]

_SHOWN = 5


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
    tensors = [
        (tensor, read_part(reader, path, tensor.stride, tensor.span, tensor.info.dtype))
        for tensor, path in wanted
    ]
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


def read_part(
    reader: CheckpointReader, path: str, stride: tuple[int, ...] | None, span: Span, dtype: torch.dtype
) -> Tensor:
    """Elements `span` of a saved tensor, counted in the memory order of `stride` (row-major where None): 1-D.

    Only these elements' blocks are read, unless the checkpoint has another memory order.
    """
    record = reader.record(path)
    shape = record.info.shape
    staged = torch.empty(span.numel, dtype=dtype, device="cpu")
    if not span:
        return staged
    if _order(shape, record.stride) == _order(shape, stride):
        done = 0
        for chunk in reader.read_stored(path, span):
            staged[done : done + chunk.numel()].copy_(chunk)
            done += chunk.numel()
        return staged
    full = reader.load(path)
    if stride is not None:
        full = torch.empty_strided(shape, stride, dtype=full.dtype, device="cpu").copy_(full)
        full = full.as_strided((full.numel(),), (1,))
    return staged.copy_(full.reshape(-1)[span.as_slice()])


def _order(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[int, ...]:
    """The strides that order elements: those of dimensions longer than 1."""
    stride = stride or ParamSpec("", shape, torch.uint8, requires_grad=False).stride
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
        CheckpointError: where there is none.
        FlatParamError: where it does not fit.
    """
    made = load_optimizer_state(model, optimizer, _saved_state(reader, model, at))
    return StagedOptimizer(optimizer, {**made, "param_groups": copy.deepcopy(made["param_groups"])})


def _saved_state(reader: CheckpointReader, model: nn.Module, at: tuple[str, ...]) -> dict[str, Any]:
    """An optimizer's state by the names that its parameters have in the model now, to be read when it is needed."""
    name_now = _names_now(reader, model)
    prefix, tree = (*at, "state"), _tree(reader, at)
    state: dict[str, dict[str, Any]] = {}

    def note(path: str, value: Any) -> None:
        parts = split_path(path)
        if len(parts) == len(prefix) + 2 and parts[:-2] == prefix:
            state.setdefault(name_now(parts[-2]), {})[parts[-1]] = value

    for path, record in reader.manifest.tensors.items():
        stored = _Tensor(reader, path)
        note(path, AsItIs(stored) if record.whole else stored)
    for path, copies in reader.manifest.per_rank.items():
        values = [
            {"interval": [each.span.start, each.span.stop], "value": _Value(reader, each.value)}
            for each in copies
        ]
        note(path, {PER_RANK: values})
    for fqn, plain in tree.get("state", {}).items():
        for name, value in plain.items():
            note(join_path((*prefix, fqn, name)), reader.decode(value))
    state = {fqn: _counters_first(values) for fqn, values in state.items()}
    groups = reader.decode(tree["param_groups"])
    for group in groups:
        for key in {"params", "param_names"} & group.keys():
            group[key] = [name_now(fqn) for fqn in group[key]]
    return {"state": state, "param_groups": groups}


def _counters_first(values: dict[str, Any]) -> dict[str, Any]:
    """The order in which the optimizers of torch make them: files have what is cut like the parameter first."""
    return dict(sorted(values.items(), key=lambda entry: entry[0] not in COUNTERS))


def _tree(reader: CheckpointReader, at: tuple[str, ...]) -> dict[str, Any]:
    tree: Any = reader.manifest.values
    for key in at:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    if not isinstance(tree, dict) or "param_groups" not in tree:
        there = reader.manifest.values.get("optimizer", {})
        raise CheckpointError(
            f"{reader.path} has no state of an optimizer at {join_path(at)!r}; "
            f"under 'optimizer' it has {sorted(there) or 'nothing'}",
            path=reader.path,
            hint="give the optimizers the names that they had, or load without an optimizer",
        )
    return tree


def _names_now(reader: CheckpointReader, model: nn.Module) -> Callable[[str], str]:
    """From a name of a parameter when it was saved, to the first name that it has in the model; else as it was."""
    now = {name: tensor.name for tensor in model_tensors(model) for name in tensor.names}
    aliases: dict[str, list[str]] = {}
    for alias, path in reader.manifest.aliases.items():
        aliases.setdefault(path, []).append(split_path(alias)[-1])

    def name_now(saved: str) -> str:
        known = (saved, *aliases.get(join_path(("model", saved)), ()))
        return next((now[name] for name in known if name in now), saved)

    return name_now


@final
@attrs.frozen(eq=False)
class _Value(Stored):
    """A value in a manifest, perhaps with a tensor in a file."""

    _reader: CheckpointReader
    _tree: Any

    def whole(self) -> Any:
        """See `Stored`."""
        return self._reader.decode(self._tree)


@final
class _Tensor(StoredTensor):
    """A tensor of a checkpoint."""

    def __init__(self, reader: CheckpointReader, path: str) -> None:
        info = reader.record(path).info
        self.shape, self.dtype = info.shape, info.dtype
        self._reader, self._path = reader, path

    def whole(self) -> Tensor:
        """See `Stored`."""
        return self._reader.load(self._path)

    def part(self, spec: ParamSpec, span: Span) -> Tensor:
        """See `StoredTensor`."""
        return read_part(self._reader, self._path, spec.stride, span, self.dtype)
