"""The wrapper's state: how `state_dict()` looks, and how model and optimizer state are saved and loaded."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Generator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry

from flatparam import state_dicts
from flatparam._debug_utils import SimpleProfiler
from flatparam._fsdp_extensions import chunker
from flatparam.api import StateDictSettings, StateDictType
from flatparam_comm import resolve_topology
from flatparam_runtime import revive_units
from flatparam_state import StateForm, load_optimizer_state, optimizer_state_dict, places_in

__all__ = ["WithState", "check_group", "to_load", "wrappers_in"]


class WithState(nn.Module):
    """What `FullyShardedDataParallel` has of state; it is not used by itself."""

    _settings: StateDictSettings

    def _attach_state(self) -> None:
        """Take part in torch's own saving and loading, with FSDP1's default settings."""
        vars(self)["_settings"] = state_dicts.default_settings()
        loading = state_dicts.Loading()
        self.register_load_state_dict_pre_hook(loading.before)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(loading.after)  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy of another wrapper, or one from a file."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        revive_units(self)

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> StateDictSettings:
        """Choose the form of the state of every wrapper in `module`.

        Returns:
            The first wrapper's settings before, to be set again; three times `None` where there is no wrapper.

        Raises:
            RuntimeError: where a configuration is not one of the form's.
            AssertionError: where the forms before differ, so that one call could not set them again.
        """
        settings = state_dicts.resolve_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        wrappers = wrappers_in(module)
        before = [wrapper._settings for wrapper in wrappers]
        assert len({state_dicts.form_of_settings(each) for each in before}) <= 1, (
            "the wrappers in this module have different state dict types"
        )
        for wrapper in wrappers:
            wrapper._settings = settings
        return before[0] if before else state_dicts.no_settings()

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings | None:
        """The settings of the wrappers in `module`, which must agree; `None` where there are none.

        Raises:
            AssertionError: where they differ.
        """
        settings = [wrapper._settings for wrapper in wrappers_in(module)]
        assert all(s == settings[0] for s in settings), (
            "the wrappers in this module have different state dict types"
        )
        return settings[0] if settings else None

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Generator[None, None, None]:
        """Choose the form of the state inside the context; also an exception restores what was before."""
        wrappers = wrappers_in(module)
        before = [wrapper._settings for wrapper in wrappers]
        WithState.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for wrapper, settings in zip(wrappers, before, strict=True):
                wrapper._settings = settings

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of any form; every rank calls it.

        Of a full one every rank passes all, and copies its own part. With `FullStateDictConfig(rank0_only=True)` the
        other ranks may pass an empty one: then the first rank's tensors are sent, one after the other.
        Where something does not fit, nothing is changed.
        """
        if getattr(self._settings.state_dict_config, "rank0_only", False):
            state_dict = state_dicts.streamed(self, state_dict)
        state_dict = state_dicts.with_inner_versions(self, state_dict)
        with SimpleProfiler.profile(SimpleProfiler.Type.ALL), state_dicts.refusing_all(strict):
            loaded = super().load_state_dict(state_dict, strict=strict, assign=assign)
        SimpleProfiler.dump_and_reset("FSDP load_state_dict() profiling:")
        return loaded

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The state of the module as if it were not wrapped, in the form that was chosen; every rank calls it."""
        if args:  # torch's own state_dict still takes these three by position
            destination, prefix, keep_vars = (*args, destination, prefix, keep_vars)[: len(args)] + (
                (destination, prefix, keep_vars)[len(args) :]
            )
        state = destination
        if state is None:
            state = cast(Any, OrderedDict())
            state._metadata = OrderedDict()  # where torch notes versions
        with state_dicts.saving(self, self._settings, state, prefix):
            super().state_dict(destination=state, prefix=prefix, keep_vars=keep_vars)
        return state

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """The optimizer's state by parameter name, in the form that was chosen; every rank calls it.

        Args:
            optim_state_dict: what `optim.state_dict()` gave; by default it is asked.
            group: the ranks that the parameters are sharded over; the model knows them, and refuses others.
        """
        check_group(model, group)
        return optimizer_state_dict(model, optim, form=_optim_form(model), state_dict=optim_state_dict)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """This rank's part of an optimizer state of any form, for `optim.load_state_dict`; every rank calls it.

        Args:
            optim_state_dict: a full one on every rank; with `FullOptimStateDictConfig(rank0_only=True)` only the first
                rank's counts, and its tensors are sent, one after the other.
            is_named_optimizer: the state of `optim` has names as keys, not numbers.
            load_directly: call `optim.load_state_dict` too.
            group: the ranks that the parameters are sharded over; the model knows them, and refuses others.
        """
        check_group(model, group)
        return to_load(
            model,
            optim,
            optim_state_dict,
            rank0_only=_optim_form(model).rank0_only,
            is_named=is_named_optimizer,
            load_directly=load_directly,
        )


def _optim_form(model: nn.Module) -> StateForm:
    settings = WithState.get_state_dict_type(model) or state_dicts.default_settings()
    kind = settings.state_dict_type
    if kind is StateDictType.LOCAL_STATE_DICT:  # as FSDP1: of optimizers there is no local form
        kind = StateDictType.SHARDED_STATE_DICT
    return state_dicts.form_of(kind, settings.optim_state_dict_config)


def to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state: Any,
    *,
    rank0_only: bool = False,
    is_named: bool = False,
    load_directly: bool = False,
) -> dict[str, Any]:
    """This rank's part of an optimizer state; see `optim_state_dict_to_load`."""
    with SimpleProfiler.profile(SimpleProfiler.Type.ALL):
        loaded = load_optimizer_state(
            model, optim, state, rank0_only=rank0_only, is_named=is_named, chunker=chunker()
        )
    SimpleProfiler.dump_and_reset("FSDP optim_state_dict_to_load() profiling:")
    if load_directly:
        optim.load_state_dict(loaded)
    return loaded


def check_group(model: nn.Module, group: Any) -> None:
    """Make sure that `group`, where one is given, are the ranks that `model` is sharded over.

    Raises:
        ValueError: where they are others.
    """
    if group is None:
        return
    given = resolve_topology(group).shard
    for place in places_in(model):
        topology = place.unit.plan.topology
        sizes = [each.size for each in (topology.shard, topology.replicate) if each is not None]
        if given.size not in {*sizes, topology.data_parallel_size}:
            raise ValueError(
                f"group: expected the ranks that the model is sharded over, {topology.shard}, found {given}"
            )


def wrappers_in(module: nn.Module, *, root_only: bool = False) -> list[WithState]:
    """The wrappers in `module`, itself included, depth first, each once; `root_only`: the outermost ones."""
    found: list[WithState] = []
    seen: set[nn.Module] = set()
    stack = [module]
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if isinstance(current, WithState):
            found.append(current)
            if root_only:
                continue
        stack.extend(child for child in reversed(list(current.children())) if not _is_replicated(child))
    return found


def _is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable `replicate` has `module`: then it is not FSDP's."""
    return "replicate" in (_get_registry(module) or ())
