"""The engines that a certificate can be about: those with a name here, and a user's own."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final, final

import attrs
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatparam_certify.case import found_at
from flatparam_certify.meshes import CertifyError, MeshSizes
from flatparam_certify.trainer import AutocastTrainer, SummoningTrainer, Trainer

_DTYPES: Final = {"bf16": torch.bfloat16}
_DATA: Final = ("dp_replicate", "dp_shard")
_OF_TORCH: Final = "torch.distributed.fsdp"
"""The module of torch's FSDP1 and FSDP2."""


@final
@attrs.frozen
class EngineUnderTest:
    """An engine by its name, as each rank finds it.

    Attributes:
        name: one of `BUILT_IN`, or `MODULE:NAME` or `FILE.py:NAME` of a function.
        function: a function in place of a name: it takes a model and a `DeviceMesh`.
        wrap: the classes of modules that become units of their own; for the engines of `BUILT_IN`.
    """

    name: str
    function: Callable[..., Any] | None = None
    wrap: tuple[str, ...] = ()

    @classmethod
    def of(cls, engine: str | Callable[..., Any], wrap: tuple[str, ...] = ()) -> EngineUnderTest:
        """Return the engine of a name or of a function."""
        if isinstance(engine, str):
            return cls(engine, None, wrap)
        return cls(f"{engine.__module__}:{getattr(engine, '__qualname__', engine)}", engine, wrap)

    def check(self, mesh: MeshSizes) -> None:
        """Refuse what can be seen before any rank runs.

        Raises:
            CertifyError: for an engine that cannot be found, or a mesh that a built-in one does not know.
        """
        if self.name in BUILT_IN:
            allowed = BUILT_IN[self.name].dimensions
            beyond = [name for name in mesh.long if name not in allowed]
            if beyond:
                raise CertifyError(
                    f"engine {self.name}: expected a mesh of {' and '.join(allowed) or 'one rank'}, found {mesh}; to "
                    f"have {' and '.join(beyond)}, give an engine of your own, a function of the model and the mesh"
                )
        elif not callable(self._found()):
            raise CertifyError(
                f"engine {self.name}: expected a function of a model and a mesh, found "
                f"{type(self._found()).__name__}; built-in ones are {', '.join(BUILT_IN)}"
            )

    def _found(self) -> Any:
        if self.function is not None:
            return self.function
        if self.name in BUILT_IN:
            return functools.partial(BUILT_IN[self.name].make, self.wrap)
        if ":" not in self.name:
            raise CertifyError(f"engine: expected one of {', '.join(BUILT_IN)}, or MODULE:NAME, found {self.name!r}")
        return found_at(self.name)

    def takes(self, precision: str) -> bool:
        """Return whether it can compute in this precision: each can in fp32, and in others if it takes `dtype`."""
        return precision == "fp32" or "dtype" in inspect.signature(self._found()).parameters

    def trainer(self, model: nn.Module, mesh: DeviceMesh, precision: str) -> Trainer:
        """Return the trainer of a model; every rank calls it.

        Raises:
            CertifyError: if the engine returns neither a module nor a trainer.
        """
        dtype = {} if precision == "fp32" else {"dtype": _DTYPES[precision]}
        made = self._found()(model, mesh, **dtype)
        if isinstance(made, nn.Module):
            return _trainer_of(made)
        if not isinstance(made, Trainer):
            raise CertifyError(
                f"engine {self.name}: expected a torch.nn.Module or a flatparam_certify.Trainer, found "
                f"{type(made).__name__}; return what the loss is called with"
            )
        return made


def _trainer_of(module: nn.Module) -> Trainer:
    """Return the trainer of a module: one of flatparam or of FSDP1 shows whole parameters on demand."""
    units, fsdp1 = (sys.modules.get(name) for name in ("flatparam_runtime", _OF_TORCH))
    if units is not None and units.units_in(module):
        import flatparam

        clip = None if hasattr(module, "clip_grad_norm_") else _clip_ours
        return SummoningTrainer(module, flatparam.FullyShardedDataParallel.summon_full_params, clip)
    if fsdp1 is not None and isinstance(module, fsdp1.FullyShardedDataParallel):
        return SummoningTrainer(module, fsdp1.FullyShardedDataParallel.summon_full_params)
    return Trainer(module)


def _clip_ours(module: nn.Module, norm: float) -> torch.Tensor:
    import flatparam

    return flatparam.clip_grad_norm_(module.parameters(), norm)


@final
@attrs.frozen
class _BuiltIn:
    """How a built-in engine is made, and along which dimensions it has more than one rank."""

    make: Callable[..., Trainer]
    dimensions: tuple[str, ...] = _DATA


def _of_data(mesh: DeviceMesh) -> tuple[DeviceMesh, bool]:
    """Return the part of a mesh that data-parallel engines take, and whether it has copies."""
    is_hybrid = mesh["dp_replicate"].size() > 1
    return (mesh[_DATA] if is_hybrid else mesh["dp_shard"]), is_hybrid


def _units(model: nn.Module, wrap: tuple[str, ...]) -> list[nn.Module]:
    return [each for each in model.modules() if type(each).__name__ in wrap and each is not model]


def _plain(wrap: tuple[str, ...], model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> Trainer:
    return Trainer(model) if dtype is None else AutocastTrainer(model, dtype)


def _wrapped(
    library: str, wrap: tuple[str, ...], model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None
) -> Trainer:
    """Return the trainer of a model in the class `FullyShardedDataParallel` of torch or of flatparam."""
    found, (part, is_hybrid) = importlib.import_module(library), _of_data(mesh)
    wrapped = found.FullyShardedDataParallel(
        model,
        device_mesh=part,
        sharding_strategy=found.ShardingStrategy.HYBRID_SHARD if is_hybrid else None,
        mixed_precision=None if dtype is None else found.MixedPrecision(dtype, torch.float32),
        auto_wrap_policy=_policy(model, wrap),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return _trainer_of(wrapped)


def _in_place(
    library: str, wrap: tuple[str, ...], model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None
) -> Trainer:
    """Return the trainer of a model that `fully_shard` of torch or of flatparam has sharded."""
    found, (part, _) = importlib.import_module(library), _of_data(mesh)
    policy = found.MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32)
    for each in (*_units(model, wrap), model):
        found.fully_shard(each, mesh=part, mp_policy=policy)
    return _trainer_of(model)


def _policy(model: nn.Module, wrap: tuple[str, ...]) -> Any:
    """Return a policy by which torch's FSDP1 and ours make units of some classes, or None."""
    # Groups of one rank are asked for, so the warning about them says nothing new.
    warnings.filterwarnings("ignore", message=".*NO_SHARD")
    units = {id(each) for each in _units(model, wrap)}
    if not units:
        return None
    return lambda module, recurse, nonwrapped_numel: recurse or id(module) in units


def _torch_ddp(wrap: tuple[str, ...], model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> Trainer:
    # Every rank of such a mesh has data of its own, so the group is that of all ranks.
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    return Trainer(wrapped) if dtype is None else AutocastTrainer(wrapped, dtype)


BUILT_IN: Final = {
    "flatparam": _BuiltIn(functools.partial(_wrapped, "flatparam")),
    "fully_shard": _BuiltIn(functools.partial(_in_place, "flatparam")),
    "torch-fsdp1": _BuiltIn(functools.partial(_wrapped, _OF_TORCH)),
    "torch-fsdp2": _BuiltIn(functools.partial(_in_place, _OF_TORCH)),
    "torch-ddp": _BuiltIn(_torch_ddp),
    "plain": _BuiltIn(_plain, ()),
}
"""The engines with a name: flatparam's two doors, torch's three, and one process beside itself."""
