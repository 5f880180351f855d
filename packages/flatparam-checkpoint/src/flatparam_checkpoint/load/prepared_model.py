"""The part of a saved model that this rank needs, read and verified, in host memory: nothing is changed yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_checkpoint.agreement import some_of
from flatparam_checkpoint.keys import UPDATES, extra_state_modules, tensors_of
from flatparam_files import CheckpointError, CheckpointReader, join_path, split_path
from flatparam_files.checkpoint.manifest import TensorRecord
from flatparam_files.disk.source import filled
from flatparam_files.disk.system import bytes_view
from flatparam_runtime import ParamSpec, Span
from flatparam_state.model_tensors import ModelTensor, model_tensors

if TYPE_CHECKING:
    from flatparam_state import ShardedEMA

_SHOWN = 5


@final
@attrs.frozen
class LoadOptions:
    """The choices of `Checkpointer.load`."""

    strict: bool
    convert_dtype: bool
    other_states: bool


@final
@attrs.frozen(eq=False)
class PreparedModel:
    """New values for the tensors of a model."""

    tensors: list[tuple[ModelTensor, Tensor]]
    extra_states: list[tuple[nn.Module, Any]]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    converted: Mapping[str, torch.dtype] = attrs.field(factory=dict)
    """The dtypes in which tensors were saved that have a different one in the model, by all their names."""

    def install(self) -> None:
        """Give the new values to the model."""
        for module, state in self.extra_states:
            module.set_extra_state(state)
        for tensor, staged in self.tensors:
            tensor.put(staged)


@final
@attrs.frozen(eq=False)
class PreparedAverages:
    """New values for the averages of a model, and the number of their updates."""

    averages: ShardedEMA
    tensors: PreparedModel
    updates: int

    def install(self) -> None:
        """Give the new values to the averages."""
        self.tensors.install()
        self.averages.updates = self.updates


def prepare_model(reader: CheckpointReader, model: nn.Module, options: LoadOptions) -> PreparedModel:
    """Read what this rank has of `model`, extra states included; see `prepare_tensors`."""
    modules, extra = dict(extra_state_modules(model)), reader.manifest.values.get("model", {})
    states = [(module, extra[name]) for name, module in modules.items() if name in extra]
    prepared = prepare_tensors(
        reader,
        model,
        ("model",),
        options,
        missing=[name for name in modules if name not in extra],
        unexpected=[name for name in extra if name not in modules],
        apart=extra,
    )
    extra_states = [(module, reader.decode(state)) for module, state in states]
    return attrs.evolve(prepared, extra_states=extra_states)


def prepare_averages(
    reader: CheckpointReader, averages: ShardedEMA, at: tuple[str, ...], options: LoadOptions
) -> PreparedAverages | None:
    """Read what this rank has of the averages that were saved under the keys `at`; None, if not `strict`, without them.

    Raises:
        CheckpointError: see `prepare_tensors`; also if there are none.
    """
    tree: Any = reader.manifest.values
    for key in (*at, UPDATES):
        tree = tree.get(key) if isinstance(tree, dict) else None
    if type(tree) is not int:
        if not options.strict:
            return None
        raise CheckpointError(
            f"{reader.path} has no averages at {join_path(at)!r}",
            path=reader.path,
            hint="load without them, or with strict=False: then the next update() starts them again",
        )
    prepared = averages.in_place(lambda: prepare_tensors(reader, averages.model, tensors_of(at), options))
    return PreparedAverages(averages, prepared, tree)


def prepare_tensors(
    reader: CheckpointReader,
    model: nn.Module,
    at: tuple[str, ...],
    options: LoadOptions,
    *,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    apart: Collection[str] = (),
) -> PreparedModel:
    """Read what this rank has of the tensors of `model`, which were saved under the keys `at`.

    Args:
        missing: names that the checkpoint lacks, as is known already.
        unexpected: names that the model lacks, as is known already.
        apart: names of extra states, which may be tensors.

    Raises:
        CheckpointError: if names, shapes or dtypes do not fit, naming them; if bytes are not what was written.
    """
    wanted, used = [], set()
    converted: dict[str, torch.dtype] = {}
    problems: list[str] = []
    missing, unexpected = [*missing], [*unexpected]
    for tensor in model_tensors(model):
        found = _paths(reader, tensor, at)
        used.update(found)
        if not found:
            missing.append(tensor.name)
            continue
        problems += filter(None, (_misfit(reader.record(path), tensor, options.convert_dtype) for path in found))
        wanted.append((tensor, found))
        saved = reader.record(found[0]).info.dtype
        if saved != tensor.dtype:
            converted.update(dict.fromkeys(tensor.names, saved))
    there = [split_path(path) for path in reader.tensors if path not in used]
    unexpected += [parts[-1] for parts in there if parts[:-1] == at and parts[-1] not in apart]
    if options.strict and missing:
        problems.append(f"the checkpoint lacks {some_of(missing, _SHOWN)}")
    if options.strict and unexpected:
        problems.append(f"the model lacks {some_of(unexpected, _SHOWN)}")
    if problems:
        raise CheckpointError(
            f"{reader.path} is of a different model: {'; '.join(problems[:_SHOWN])}",
            path=reader.path,
            hint="build the model that was saved"
            + ("; load(strict=False) leaves what is missing as it is" if options.strict and missing else ""),
        )
    tensors = []
    for tensor, found in wanted:
        part, *others = (
            read_part(reader, path, tensor.stride, tensor.intervals(tensor.span), tensor.dtype)
            for path in found[: None if options.strict else 1]
        )
        if not all(torch.equal(bytes_view(part), bytes_view(other)) for other in others):
            names = " and ".join(repr(split_path(path)[-1]) for path in found)
            raise CheckpointError(
                f"{reader.path} has different values for {names}, which are one parameter of the model",
                path=reader.path,
                fqn=tensor.name,
                hint="build the model that was saved, in which they are not tied; load(strict=False) takes the first",
            )
        tensors.append((tensor, part))
    return PreparedModel(tensors, [], tuple(missing), tuple(unexpected), converted)


def read_part(
    reader: CheckpointReader, path: str, stride: tuple[int, ...] | None, spans: Sequence[Span], dtype: torch.dtype
) -> Tensor:
    """Return the elements `spans` of a saved tensor, counted in the memory order of `stride` (row-major if None): 1-D.

    Only these elements' blocks are read, unless the checkpoint has a different memory order.
    """
    record = reader.record(path)
    shape = record.info.shape
    staged = torch.empty(sum(span.numel for span in spans), dtype=dtype, device="cpu")
    if not staged.numel():
        return staged
    if _order(shape, record.stride) == _order(shape, stride):
        chunks = (chunk for span in spans if span for chunk in reader.read_stored(path, span))
        return filled(staged, chunks)
    full = reader.load(path)
    if stride is not None:
        full = torch.empty_strided(shape, stride, dtype=full.dtype, device="cpu").copy_(full)
        full = full.as_strided((full.numel(),), (1,))
    full = full.reshape(-1)
    return filled(staged, (full[span.as_slice()] for span in spans))


def _order(shape: tuple[int, ...], stride: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the strides that order elements: those of dimensions longer than 1."""
    stride = stride or ParamSpec("", shape, torch.uint8, requires_grad=False).stride
    return tuple(step for size, step in zip(shape, stride, strict=True) if size > 1)


def _paths(reader: CheckpointReader, tensor: ModelTensor, at: tuple[str, ...]) -> list[str]:
    """Return the paths at which the checkpoint has `tensor`, under any of its names or theirs."""
    manifest = reader.manifest
    paths = [join_path((*at, name)) for name in tensor.names]
    found = [manifest.aliases.get(path, path) for path in paths]
    return list(dict.fromkeys(path for path in found if path in manifest.tensors))


def _misfit(record: TensorRecord, tensor: ModelTensor, convert_dtype: bool) -> str:
    if record.info.shape != tensor.shape:
        return f"{tensor.name!r}: expected shape {tensor.shape}, found {record.info.shape}"
    if record.info.dtype != tensor.dtype and not convert_dtype:
        return (
            f"{tensor.name!r}: expected {tensor.dtype}, found {record.info.dtype} (load(convert_dtype=True) converts)"
        )
    return ""
