"""`load_pretrained`: a model that is sharded before it has values, and whose ranks read their own bytes of files."""

from __future__ import annotations

import enum
import importlib
import importlib.util
import os
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, final, overload

import attrs
import torch
from torch import nn

from flatparam_checkpoint.agreement import raise_told, some_of
from flatparam_checkpoint.pretrained.by_transformers import as_transformers_loads
from flatparam_checkpoint.pretrained.files import Fit, Names, PretrainedFiles, fit
from flatparam_checkpoint.pretrained.making import (
    cast_parameters,
    hollow,
    materialise,
    unknown_buffers,
    unknown_parameters,
)
from flatparam_checkpoint.pretrained.read import read_pretrained
from flatparam_comm import telling
from flatparam_files import CheckpointError
from flatparam_files.disk.progress import progress_bar
from flatparam_runtime import ExchangesValues, Topology, clean_fqn, resolve_topology, units_in
from flatparam_state.forms.deferred import ValuesLater
from flatparam_state.ranks import all_of, topology_of

_SHOWN = 10
_WRAPPER: Final = "flatparam"

T = TypeVar("T")


@final
@attrs.frozen
class PretrainedReport:
    """The keys that were not loaded, as `output_loading_info=True` of transformers lists them, and the bytes read."""

    missing_keys: tuple[str, ...]
    """Parameters and buffers that the files lack, which have the values that their modules begin with."""
    unexpected_keys: tuple[str, ...]
    """Names in the files that the model lacks, which were not read."""
    tied_keys: dict[str, str]
    """The names of tied parameters that the files lack, and the name under which they have them."""
    nbytes: int
    """The bytes of the tensors in the files."""
    nbytes_read: int
    """The bytes of tensors that this rank has read."""


@overload
def load_pretrained(
    model: nn.Module | Callable[[], nn.Module],
    path: str | os.PathLike[str],
    *,
    mapping: Names | None = ...,
    dtype: torch.dtype | None = ...,
    strict: bool = ...,
    progress: bool | None = ...,
    output_loading_info: Literal[False] = ...,
    **arguments: Any,
) -> nn.Module: ...
@overload
def load_pretrained(
    model: nn.Module | Callable[[], nn.Module],
    path: str | os.PathLike[str],
    *,
    mapping: Names | None = ...,
    dtype: torch.dtype | None = ...,
    strict: bool = ...,
    progress: bool | None = ...,
    output_loading_info: Literal[True],
    **arguments: Any,
) -> tuple[nn.Module, PretrainedReport]: ...
def load_pretrained(
    model: nn.Module | Callable[[], nn.Module],
    path: str | os.PathLike[str],
    *,
    mapping: Names | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = False,
    progress: bool | None = None,
    output_loading_info: bool = False,
    **arguments: Any,
) -> nn.Module | tuple[nn.Module, PretrainedReport]:
    """Shard a model and give it the values in files; every rank calls it, and reads its own part of each tensor.

    All ranks together read each byte once; ranks that hold copies of a shard read a part each. A rank holds its shards
    and one tensor at most. Names, shapes and dtypes are compared on every rank before anything is made. Values are cast
    to the dtype of their parameter while they are read.

    Args:
        model: a function without arguments that makes the model (best: its buffers have values then), or a model on
            the meta device, or one that is sharded already, in whichever way, whose values are replaced.
        path: a safetensors file, a folder with one or with several and an index, `pytorch_model.bin` (one or several),
            a directory of `torch.distributed.checkpoint`, or of a `Checkpointer`.
        mapping: what tensors are called in the model, by their name in the files: a mapping, for those whose name
            differs, or a function, which returns None for a name that stays. By default names stay, but for a model of
            transformers, whose tensors are renamed, joined (experts) and cut as `from_pretrained` does it.
        dtype: for the floating-point parameters; by default those that the model gives them.
        strict: refuse files that lack a tensor of the model, or have others. Otherwise what is missing gets the values
            that `param_init_fn` or `reset_parameters()` gives it; the first rank warns of both.
        progress: show a bar on the first rank; by default if stderr is a terminal and `FLATPARAM_PROGRESS` is not 0.
        output_loading_info: return a report too.
        arguments: those of `FullyShardedDataParallel`; none for a model that is sharded already.

    Returns:
        The sharded model; with `output_loading_info` also a `PretrainedReport`.

    Raises:
        CheckpointError: on every rank, if the files are damaged or do not fit on one, or nothing gives values to
            buffers, naming rank and tensors. If the function, or an argument, is wrong on some ranks, those raise
            what it has raised there, and the others this, which says what and where.
        TypeError: for a model, a path or a dtype that is none, or a function that returns no module.
        ValueError: for arguments that do not fit each other.
    """
    try:
        topology = _topology(model, arguments)
    except Exception:
        # Without ranks there is nobody to tell what is wrong with the arguments.
        _check_arguments(model, path, dtype, arguments)
        raise
    if isinstance(arguments.get("process_group"), str):
        # A name makes a group each time that it is resolved.
        arguments["process_group"] = topology.shard
    made = _made_by_all(lambda: _made(model, path, dtype, arguments), topology)
    # A function may have sharded what it returns.
    ranks: Any = all_of(made) if units_in(made) else _topology(made, arguments)
    asked = {"dtype": dtype, "strict": strict, **dict(_settings_alike(arguments))}
    files, found = _compared(made, path, mapping, strict, ranks, arguments.get("param_init_fn"), asked)
    with telling("load_pretrained"):
        if not units_in(made):
            if dtype is not None:
                cast_parameters(made, dtype)
            made = _sharded(made, files, found, arguments)
            _equal_copies(made, found.missing)
        ranks = all_of(made)
        share = files.nbytes // topology_of(made).data_parallel_size
        with progress_bar(f"load {files.path.name}", share, progress if ranks.is_first else False) as observe:
            nbytes_read = read_pretrained(made, files, topology_of(made), observe=observe)
    if ranks.is_first:
        _warn(files, found)
    if not output_loading_info:
        return made
    return made, PretrainedReport(found.missing, found.unexpected, dict(found.tied), files.nbytes, nbytes_read)


def _check_arguments(model: Any, path: Any, dtype: Any, arguments: dict[str, Any]) -> None:
    """Check what can be checked without the files.

    Raises:
        TypeError: for something that is neither a module nor a function, no path, or no dtype.
        ValueError: for arguments that do not fit each other.
    """
    if not isinstance(model, nn.Module) and not callable(model):
        raise TypeError(f"load_pretrained: expected a module, or a function that makes one, found {model!r}")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"load_pretrained: expected the path of a file or a folder, found {path!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"load_pretrained: expected a dtype, such as torch.bfloat16, found {dtype!r}")
    if arguments.get("sync_module_states"):
        raise ValueError(
            "load_pretrained: sync_module_states sends rank 0's values, and here each rank reads its own; leave it out"
        )
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"load_pretrained: expected a floating-point dtype, found {dtype}")


def _made(model: Any, path: Any, dtype: Any, arguments: dict[str, Any]) -> nn.Module:
    """Return the model without values; for the errors see `_check_arguments`."""
    _check_arguments(model, path, dtype, arguments)
    made = model if isinstance(model, nn.Module) else hollow(model)
    if not isinstance(made, nn.Module):
        raise TypeError(f"load_pretrained: expected a function that returns a module, and it returned {made!r}")
    _check_unsharded(made, dtype, arguments)
    if not units_in(made):
        # Here, where a rank that lacks it is told of.
        _wrapper()
    return made


def _check_unsharded(model: nn.Module, dtype: torch.dtype | None, arguments: dict[str, Any]) -> None:
    """Check that a model that is sharded already comes without arguments that say how to shard it.

    Raises:
        ValueError: if it does not.
    """
    named = [*arguments, *(["dtype"] if dtype is not None else [])]
    if named and units_in(model):
        raise ValueError(
            f"load_pretrained: this {type(model).__name__} is sharded already, so {', '.join(named)} would have no "
            "effect; leave them out"
        )


def _tried(action: Callable[[], T]) -> tuple[T | None, Exception | None, str]:
    """Return what `action()` returns; or its exception, and the words for that which other ranks are told."""
    try:
        return action(), None, ""
    except Exception as error:
        return None, error, CheckpointError.told(error)


def _made_by_all(make: Callable[[], nn.Module], topology: Topology) -> nn.Module:
    """Return the result of `make()`, if it returns on all ranks: there is no other news of a rank that raises so early.

    Raises:
        CheckpointError: if it has raised on another rank only; here, its own exception goes on.
    """
    made, cause, said = _tried(make)
    told = topology.exchange(said, label="make the model")
    if cause is not None:
        raise cause
    raise_told(told, None, hint="the model was not made there; nothing was read")
    assert made is not None, "nobody has failed"
    return made


def _topology(model: Any, arguments: dict[str, Any]) -> Topology:
    units = units_in(model) if isinstance(model, nn.Module) else []
    if units:
        return units[0].topology
    chosen = arguments.get("device_mesh")
    return resolve_topology(arguments.get("process_group") if chosen is None else chosen)


def _settings_alike(arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """The plain values in the wrapper's arguments that are the same on all ranks: each may have a device of its own."""
    return sorted(
        (name, value)
        for name, value in arguments.items()
        if isinstance(value, (bool, int, enum.Enum)) and name != "device_id"
    )


def _compared(
    model: nn.Module,
    path: str | os.PathLike[str],
    mapping: Names | None,
    strict: bool,
    topology: ExchangesValues,
    initialise: Callable[[nn.Module], object] | None,
    asked: dict[str, Any],
) -> tuple[PretrainedFiles, Fit]:
    """Return the files, and how they fit; if that fails on a rank, no rank has changed anything.

    Raises:
        CheckpointError: on every rank, naming the first that has failed, and what does not fit.
    """
    shapes = [(name, p.shape, p.dtype) for name, p in model.named_parameters()]
    own = zlib.crc32(repr(shapes if not units_in(model) else None).encode())

    def compare() -> tuple[PretrainedFiles, Fit, str, int, object]:
        files = PretrainedFiles.open(path, mapping)
        found = fit(model, files)
        if mapping is None and found.missing and found.unexpected:
            inner = [module for name, module in model.named_modules() if not clean_fqn(name)][-1]
            files = as_transformers_loads(inner, files, found.missing, found.unexpected)
            found = fit(model, files)
        facts = zlib.crc32(repr([(name, files.info(name)) for name in files.paths]).encode())
        return files, found, _refusal(model, files, found, strict, initialise), facts, files.stamp

    # `mapping` is somebody else's function, which may raise anything.
    result, cause, said = _tried(compare)
    facts, stamp = None, None
    if result is not None:
        _, _, said, facts, stamp = result
    told = topology.exchange((said, facts, stamp, own, asked), label="compare files")
    texts = []
    for text, theirs, _, shape, wants in told:
        if not text and wants != told[0][4]:
            text = f"the ranks ask for different things: {_differing(wants, told[0][4])}"
        if not text and theirs != told[0][1]:
            text = f"{os.fspath(path)} has other names, shapes or dtypes of tensors than on rank 0"
        if not text and shape != told[0][3]:
            text = "its model has other parameters than on rank 0"
        texts.append(text)
    raise_told(texts, cause, path=Path(path))
    assert result is not None, "nobody has failed"
    if any(each is None or each != told[0][2] for _, _, each, *_ in told):
        _compare_samples(result[0], topology)
    return result[0], result[1]


def _differing(wants: dict[str, Any], first: dict[str, Any]) -> str:
    names = [name for name in {**first, **wants} if wants.get(name) != first.get(name)]
    return "; ".join(f"{name} is {wants.get(name)!r} here, and {first.get(name)!r} on rank 0" for name in names)


def _compare_samples(files: PretrainedFiles, topology: ExchangesValues) -> None:
    """Compare some elements of each tensor, as ranks may have copies of the files, or files of a different step.

    Raises:
        CheckpointError: on every rank, naming the first that has others, or could not read.
    """
    found, cause, said = _tried(files.samples)
    told = topology.exchange((said, found), label="compare values in files")
    other = (
        f"{files.path} has other values than on rank 0, and the model would be a mixture; give all ranks the same files"
    )
    texts = [text or ("" if theirs == told[0][1] else other) for text, theirs in told]
    raise_told(texts, cause, path=files.path)


def _refusal(
    model: nn.Module, files: PretrainedFiles, found: Fit, strict: bool, initialise: Callable[[nn.Module], object] | None
) -> str:
    problems = list(found.mismatched[:_SHOWN])
    if strict and found.missing:
        problems.append(f"the files lack {some_of(found.missing)}")
    if strict and found.unexpected:
        problems.append(f"the model lacks {some_of(found.unexpected)}")
    if len(found.unexpected) == len(files.paths):
        problems.append(f"no name is the model's: {some_of(found.unexpected)}; pass mapping=")
    lost = [] if problems or initialise is not None else unknown_parameters(model, found.missing)
    if lost:
        others = f" (they have {some_of(found.unexpected)}, which the model lacks)" if found.unexpected else ""
        problems.append(
            f"the files lack {some_of(lost)}{others}, and no module gives values to these; pass mapping= if the files "
            "have them under different names, or param_init_fn= to begin them anew. If a library makes them of "
            "others when it loads, save the state_dict() of the model that it has loaded, and load that"
        )
    unknown = [] if problems else unknown_buffers(model, files.paths)
    if unknown:
        problems.append(
            f"the buffers {some_of(unknown)} are on the meta device, and nothing gives them values; pass the function "
            "that makes the model, not a model, so that they are computed"
        )
    return f"{files.path} does not fit the {type(model).__name__}: {'; '.join(problems)}" if problems else ""


def _wrapper() -> Any:
    """Return the class that shards a model, from the top of the house: it is imported only if there is one to shard.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    if importlib.util.find_spec(_WRAPPER) is None:
        raise ModuleNotFoundError(
            "load_pretrained: expected a model that is sharded, or the package flatparam, which shards it and is not "
            "installed: pip install flatparam",
            name=_WRAPPER,
        )
    return importlib.import_module(_WRAPPER).FullyShardedDataParallel


def _sharded(model: nn.Module, files: PretrainedFiles, found: Fit, arguments: dict[str, Any]) -> nn.Module:
    known = {*files.paths, *found.tied}
    later = [p for name, p in model.named_parameters(remove_duplicate=False) if name in known and p.is_meta]
    initialise = ValuesLater.of(later, arguments.get("param_init_fn"))
    device = torch.device("cpu") if torch.get_default_device().type == "meta" else torch.get_default_device()
    materialise(model, device, known)
    wrapped: nn.Module = _wrapper()(model, **{**arguments, "param_init_fn": initialise})
    materialise(wrapped, units_in(wrapped)[0].device)
    return wrapped


def _equal_copies(model: nn.Module, missing: Sequence[str]) -> None:
    """If a shard has something that the files lack, give its copies the values of the first, as each drew its own."""
    lacking = set(missing)
    names = {module: clean_fqn(name) for name, module in model.named_modules() if lacking}
    for unit in units_in(model) if lacking else ():
        copies = unit.topology.replicate
        if copies is None or copies.size == 1:
            continue
        for handle in unit.handles:
            infos = [info for infos in handle.param_infos for info in infos]
            if lacking.isdisjoint(f"{names[i.module]}.{i.param_name}".removeprefix(".") for i in infos):
                continue
            values = handle.flat_param.data
            sent = values.to(unit.device)
            copies.broadcast(sent, label=unit.name).wait()
            if sent is not values:
                values.copy_(sent)


def _warn(files: PretrainedFiles, found: Fit) -> None:
    if found.missing:
        warnings.warn(
            f"{files.path} lacks {some_of(found.missing)}: they have initial values, so train them before you use them",
            stacklevel=3,
        )
    if found.unexpected:
        warnings.warn(f"{files.path} has {some_of(found.unexpected)}, which the model lacks: not read", stacklevel=3)
