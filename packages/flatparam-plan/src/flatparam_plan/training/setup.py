"""How a program is to be run: ranks, strategy, wrapping by the names of modules, precision, optimizer, and a step."""

from __future__ import annotations

import copy
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias, final

import attrs
import torch
from torch import nn

from flatparam.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from flatparam.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from flatparam_comm import Collectives, SingleCollectives, Topology
from flatparam_plan.plan_error import PlanError
from flatparam_plan.training.lone_rank import TRANSPORTS, Call, lone_topology

Optimize: TypeAlias = "Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]"

STRATEGIES: Final = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
    "hybrid_grad_op": ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""The strategies, by the names that a plan gives them; the hybrid ones take a number, as in `hybrid:8`."""
OPTIMIZERS: Final = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": functools.partial(torch.optim.SGD, lr=1e-3),
    "momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "none": None,
}
"""The optimizers that have a name."""
_PREFETCHES: Final = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def _known(names: Iterable[str]) -> Callable[[Any, attrs.Attribute[Any], str], None]:
    def check(_: Any, attribute: attrs.Attribute[Any], value: str) -> None:
        if value not in names:
            raise PlanError(f"{attribute.name}: expected one of {', '.join(names)}, found {value!r}")

    return check


@final
@attrs.frozen(kw_only=True)
class Setup:
    """How a program is to be run on its ranks."""

    world_size: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    ranks_per_host: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    rank: int = 0
    strategy: str = "full"
    wrap: Wrapping = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    optimizer: str | Optimize = "adamw"
    cpu_offload: bool = False
    checkpointing: tuple[str, ...] = attrs.field(default=(), validator=attrs.validators.instance_of(tuple))
    """The names of the modules, or of their classes, whose activations are recomputed."""
    use_orig_params: bool = False
    accumulate: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """The micro-batches of a step."""
    no_sync: bool = True
    """Whether all micro-batches but the last are inside `no_sync()`."""
    max_norm: float | None = attrs.field(default=None)
    """The norm that gradients are clipped to."""
    forward_prefetch: int = 0
    backward_prefetch: str = attrs.field(default="pre", validator=_known(_PREFETCHES))
    transport: str = attrs.field(default="direct", validator=_known(TRANSPORTS))
    device: str = attrs.field(default="cpu", validator=_known(("cpu", "accelerator")))
    """Whose schedule it is: an accelerator gathers and reduces beside the computation, and steps tensors together."""

    @max_norm.validator
    def _is_norm(self, _: Any, value: float | None) -> None:
        if value is not None and not value > 0:
            raise PlanError(f"max_norm: expected a number above 0, found {value}")

    def __attrs_post_init__(self) -> None:
        # Says at once if it does not fit.
        lone_topology(self.world_size, self.rank, shard_size=self.shard_size)
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise PlanError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, found {self.optimizer!r}")

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """FSDP1's name for the strategy."""
        name, _, _ = self.strategy.partition(":")
        if name not in STRATEGIES:
            names = ", ".join(each + ":N" if "hybrid" in each else each for each in STRATEGIES)
            raise PlanError(f"strategy: expected one of {names}, found {self.strategy!r}")
        return STRATEGIES[name]

    @property
    def shard_size(self) -> int:
        """The number of ranks that one copy of the parameters is sharded over."""
        strategy = self.sharding_strategy
        name, _, number = self.strategy.partition(":")
        if not name.startswith("hybrid"):
            if number:
                raise PlanError(f"strategy: only the hybrid ones take a number of ranks, found {self.strategy!r}")
            return 1 if strategy is ShardingStrategy.NO_SHARD else self.world_size
        if number and not number.isdecimal():
            raise PlanError(f"strategy: expected a number of ranks as in hybrid:8, found {self.strategy!r}")
        size = int(number) if number else self.ranks_per_host
        if size < 1 or self.world_size % size:
            raise PlanError(
                f"strategy: expected shards over a divisor of the {self.world_size} ranks, found {self.strategy!r}; "
                "choose hybrid:N with such an N"
            )
        return size

    def topology(
        self,
        *,
        decorate: Callable[[Collectives], Collectives] = lambda group: group,
        on_call: Callable[[str, Call], None] | None = None,
    ) -> Topology:
        """Return the groups of the rank in a world where it is the only one that exists."""
        return lone_topology(
            self.world_size,
            self.rank,
            shard_size=self.shard_size,
            transport=self.transport,
            decorate=decorate,
            on_call=on_call,
        )

    def topology_on(self, group: Collectives) -> Topology:
        """Return the groups of a real rank whose world is `group`. A collective for the hybrid strategies.

        Args:
            group: has `world_size` ranks.
        """
        size = self.shard_size
        if size == group.size:
            return Topology(group)
        if size == 1:
            return Topology(SingleCollectives(), group)
        return Topology.cut(group, [range(start, start + size) for start in range(0, group.size, size)])

    def arguments(self, topology: Topology, model: nn.Module) -> dict[str, Any]:
        """Return the wrapper's arguments."""
        groups: Any = topology.shard
        if self.sharding_strategy in (STRATEGIES["hybrid"], STRATEGIES["hybrid_grad_op"]):
            groups = (topology.shard, topology.replicate or SingleCollectives())
        elif topology.replicate is not None:
            groups = topology.replicate
        mixed = None
        if self.param_dtype or self.reduce_dtype or self.buffer_dtype:
            mixed = MixedPrecision(self.param_dtype, self.reduce_dtype, self.buffer_dtype)
        return {
            "process_group": groups,
            "sharding_strategy": self.sharding_strategy,
            "auto_wrap_policy": self.policy(model),
            "mixed_precision": mixed,
            "cpu_offload": CPUOffload(True) if self.cpu_offload else None,
            "use_orig_params": self.use_orig_params,
            "forward_prefetch": self.forward_prefetch,
            "backward_prefetch": _PREFETCHES[self.backward_prefetch],
        }

    def policy(self, model: nn.Module) -> Any:
        """Return the policy that chooses the units of `model`."""
        return policy_for(self.wrap, model)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return the optimizer of the wrapped model."""
        make: Any = OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer
        if make is None:
            return None
        made: torch.optim.Optimizer = make(model.parameters())
        # Who makes one of its optimizers has imported the add-on.
        matrices: Any = sys.modules.get("flatparam_optim")
        if self.world_size > 1 and matrices is not None and isinstance(made, matrices.WholeOptimizer):
            raise PlanError(
                f"optimizer: expected one that steps each rank's part alone, found {type(made).__name__}, which "
                "exchanges whole matrices with ranks that a plan lacks; plan optimizer='none', and add its states"
            )
        if self.device == "accelerator" and isinstance(self.optimizer, str):
            # As torch's optimizers do by themselves there.
            for group in made.param_groups:
                group["foreach"] = True
        return made


Wrapping: TypeAlias = Any
"""Names of classes, a least number of elements, a policy of `flatparam.wrap`, or `None` for one unit."""


def policy_for(wrap: Wrapping, model: nn.Module) -> Any:
    """Return the policy that chooses the units of `model`.

    Raises:
        PlanError: if it cannot be planned, or if the model has no module of a class that is named.
    """
    if getattr(wrap, "_plans", False):
        raise PlanError("wrap: planned() plans by itself while a model is wrapped; plan by --fit instead")
    if isinstance(wrap, str):
        wrap = (wrap,)
    if isinstance(wrap, int):
        return functools.partial(size_based_auto_wrap_policy, min_num_params=wrap)
    if isinstance(wrap, Sequence):
        if all(isinstance(each, type) for each in wrap):
            return ModuleWrapPolicy(wrap)
        return CustomPolicy(_among(classes_named(model, wrap)))
    return wrap


def _among(classes: tuple[type[nn.Module], ...]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, classes)


# The modules of a model, by their names or those of their classes


def classes_named(model: nn.Module, names: Iterable[str]) -> tuple[type[nn.Module], ...]:
    """Return the classes of the modules in `model` that have these names; several classes may have one.

    Raises:
        PlanError: if the model has no module of such a class.
    """
    kinds = Counter(type(module) for module in model.modules())
    wanted = list(names)
    missing = [name for name in wanted if name not in {kind.__name__ for kind in kinds}]
    if missing:
        repeated = {kind.__name__ for kind, count in kinds.items() if count > 1}
        raise PlanError(
            f"the model has no module of class {missing[0]!r}; classes that it has several of: "
            f"{', '.join(sorted(repeated)) or 'none'}"
        )
    return tuple(kind for kind in kinds if kind.__name__ in wanted)


def _modules_named(model: nn.Module, names: Iterable[str]) -> set[nn.Module]:
    """Return the modules in `model` that have these names, as `blocks.3`, or are of a class with such a name.

    Raises:
        PlanError: if the model has no such module.
    """
    modules = dict(model.named_modules())
    named = [name for name in names if name in modules]
    for name in names:
        if "." in name and name not in modules:
            raise PlanError(f"the model has no module named {name!r}; give a name of named_modules(), or a class")
    classes = classes_named(model, [name for name in names if name not in modules])
    return {modules[name] for name in named} | {each for each in modules.values() if isinstance(each, classes)}


def recompute(model: nn.Module, names: Iterable[str]) -> None:
    """Have the activations of the modules with these names recomputed in the backward pass; the model itself stays."""
    # A private module of torch, as the guide about activation checkpointing uses it. Its function that wraps all
    # chosen modules of a model imports torch's FSDP for that, which takes longer than many a plan.
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    chosen = _modules_named(model, names)
    if model in chosen:
        raise PlanError(
            f"checkpointing: expected modules inside the model, found the whole model, {type(model).__name__}; name "
            "its blocks"
        )
    wrapped = {module: checkpoint_wrapper(module) for module in chosen}
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            if child in wrapped:
                setattr(parent, name, wrapped[child])


def without_cache(model: nn.Module) -> bool:
    """Have a model of transformers keep no keys and values for later tokens, as one trains it.

    The configurations are copied, since a caller may share them with other models.

    Returns:
        Whether it would have kept them.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        config: Any = vars(module).get("config")
        if getattr(config, "use_cache", False) is True:
            if id(config) not in copies:
                copies[id(config)] = copy.copy(config)
                copies[id(config)].use_cache = False
            # Not by the module's own `__setattr__`, which may check what it is given.
            vars(module)["config"] = copies[id(config)]
    return bool(copies)
