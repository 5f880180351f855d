"""Small training programs for flatparam and for torch's FSDP1 and FSDP2, on the simulated device or on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatparam_simdev.log import Kind, Record
from flatparam_simdev.races import Finding, find_races
from integration_tests.simulated.models import WIDTH, WIDTHS, Block, Chain, Matrix, Model, batch
from integration_tests.simulated.waits import Wait, watched
from integration_tests.simulated.worlds import World


@attrs.frozen
class Program:
    """How a model is sharded and trained.

    Attributes:
        library: "flatparam", "fully_shard" (flatparam's function), "fsdp1" or "fsdp2".
        strategy: "full", "grad_op", "none" (NO_SHARD), "hybrid" (replicated over all ranks), "hybrid_of_one" (sharded
            over all ranks, with nobody to replicate with) or "experts" (every other block is one expert on each half of
            the ranks; flatparam alone).
        prefetch: "", "forward" (the next unit before it is needed) or "late" (in the backward pass after, not before).
        precision: "" for float32, or what parameters are computed in: "bfloat16" or "float16".
        reduce_precision: what gradients are summed in, if `precision` is given.
        divide_factor: what flatparam divides the sums by, if not by the number of ranks.
        optimizer: a name of `OPTIMIZERS`.
        micro_batches: backward passes in a step; with `no_sync` all but the last of them are not reduced.
        checkpointing: "", "reentrant" or "not reentrant".
        width: of the blocks; 16 makes a test fast, and parameters that are all small.
        chain: whether the model is a chain of matrices, and not the one with blocks.
        plant: a bug, a name of plants.py.
        scenario: what is done with the model, a name of scenarios.py or graphs.py.
    """

    library: str = "flatparam"
    strategy: str = "full"
    prefetch: str = ""
    precision: str = ""
    reduce_precision: str = "float32"
    divide_factor: float = 0.0
    optimizer: str = "sgd"
    offload: bool = False
    use_orig_params: bool = False
    wrap_everything: bool = False
    micro_batches: int = 1
    no_sync: bool = False
    clip: bool = False
    evaluate: bool = False
    checkpointing: str = ""
    twice: bool = False
    chain: bool = False
    ranks: int = 2
    blocks: int = 3
    width: int = WIDTH
    steps: int = 3
    plant: str = ""
    scenario: str = "train"

    @property
    def name(self) -> str:
        """What is not as it is by default, in words."""
        words = [self.library]
        for field in attrs.fields(Program)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)


@attrs.frozen
class Outcome:
    """What a rank has to tell after a program.

    Attributes:
        differences: of each parameter, the largest difference from the same program on the CPU.
        waits: where the host stood still, each with its phase.
    """

    program: Program
    findings: list[Finding]
    log: list[Record]
    differences: dict[str, float]
    waits: list[tuple[str, Wait]] = attrs.field(factory=list)

    def in_phase(self, start: str) -> list[Record]:
        """What was written down in the phases whose names begin so."""
        phase, inside = "", []
        for record in self.log:
            if record.kind is Kind.MARK:
                phase = record.name
            elif phase.startswith(start):
                inside.append(record)
        return inside

    def waits_of_host(self, start: str) -> list[str]:
        """Where the host stood still in these phases."""
        return [record.name for record in self.in_phase(start) if record.kind.is_wait_of_host]


@attrs.frozen(eq=False)
class Site:
    """Where a program runs: on the simulated device, or the same on the CPU."""

    rank: int
    device: torch.device
    group: dist.ProcessGroup
    program: Program
    mark: Callable[[str], None]
    batches: Sequence[Tensor]

    @classmethod
    def of(cls, world: World, program: Program, mark: Callable[[str], None] | None = None) -> Site:
        """The world's device where there is somebody who takes marks, otherwise the CPU."""
        on_cpu = (torch.device("cpu"), world.cpu_group)
        device, group = (world.device, world.group) if mark else on_cpu
        count = program.steps + program.micro_batches
        width = WIDTHS[0] if program.chain else 8
        batches = [batch(number, world.rank, width).to(device) for number in range(count)]
        return cls(world.rank, device, group, program, mark or (lambda name: None), batches)

    @property
    def is_cpu(self) -> bool:
        """Whether there are no streams."""
        return self.device.type == "cpu"


def run(world: World, programs: Sequence[Program]) -> list[Outcome]:
    """Run them one after the other; what a rank of a world does."""
    return [_run_one(world, program) for program in programs]


def _run_one(world: World, program: Program) -> Outcome:
    from flatparam_simdev import device
    from integration_tests.simulated import plants

    site = Site.of(world, program, device.mark)
    device.start_log()
    try:
        with plants.planted(program.plant), watched() as waits:
            values = _perform(site)
    finally:
        records = device.stop_log()
    # FSDP1 cannot offload from the CPU to the CPU; that is to change nothing.
    twin = attrs.evolve(program, offload=program.offload and program.library != "fsdp1")
    differences = _differences(values, _perform(Site.of(world, twin)))
    return Outcome(program, find_races(records), records, differences, waits)


def _perform(site: Site) -> dict[str, Tensor]:
    from flatparam_simdev import device
    from integration_tests.simulated import graphs, scenarios

    torch.manual_seed(0)
    is_fsdp1 = site.program.library == "fsdp1"  # which offloads so
    scenario = getattr(scenarios, site.program.scenario, None) or getattr(graphs, site.program.scenario)
    with device.behaving("data_changes_device", is_fsdp1):
        values: dict[str, Tensor] = scenario(site)
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def _differences(values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert values.keys() == expected.keys()
    return {name: float((values[name].float() - expected[name].float()).abs().max()) for name in values}


# How a model is sharded


def build(site: Site) -> nn.Module:
    """The model of the program, with the same values on every rank, sharded."""
    program = site.program
    torch.manual_seed(0)
    blocks = program.blocks, program.checkpointing, program.twice, program.width
    model = Chain() if program.chain else Model(*blocks)
    return LIBRARIES[program.library](model, site)


def _flatparam(model: nn.Module, site: Site) -> nn.Module:
    import flatparam
    from flatparam.wrap import ModuleWrapPolicy
    from flatparam_meshes import hold_experts

    options = _options(flatparam, site)
    if site.program.strategy == "experts":
        _shard_experts(model, site, options)
    sharded = flatparam.FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy(_wrapped(site)), **options)
    if site.program.strategy == "experts":
        hold_experts(sharded)
    if site.program.divide_factor:
        sharded.set_gradient_divide_factor(site.program.divide_factor)
    return sharded


def _shard_experts(model: nn.Module, site: Site, options: dict[str, Any]) -> None:
    """Shard every other block over a half of the ranks."""
    import flatparam

    world, backend = site.group.size(), "gloo" if site.is_cpu else "simulated"
    halves = [range(world // 2), range(world // 2, world)]
    groups = [dist.new_group(list(half), backend=backend) for half in halves]
    of_half = options | {"process_group": groups[site.rank in halves[1]]}
    blocks = [
        (module, name) for module in model.modules() for name, child in module.named_children() if type(child) is Block
    ]
    for module, name in blocks[1::2]:
        setattr(module, name, flatparam.FullyShardedDataParallel(getattr(module, name), **of_half))


def _fsdp1(model: nn.Module, site: Site) -> nn.Module:
    from torch.distributed import fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy(_wrapped(site))
    return fsdp.FullyShardedDataParallel(model.to(site.device), auto_wrap_policy=policy, **_options(fsdp, site))


def _options(library: Any, site: Site) -> dict[str, Any]:
    """The settings of flatparam and of FSDP1, which have the same names."""
    program, strategy = site.program, library.ShardingStrategy
    options: dict[str, Any] = {
        "device_id": site.device,
        "process_group": site.group,
        "use_orig_params": program.use_orig_params,
        "forward_prefetch": program.prefetch == "forward",
    }
    if program.prefetch == "late":
        options["backward_prefetch"] = library.BackwardPrefetch.BACKWARD_POST
    if program.offload:
        options["cpu_offload"] = library.CPUOffload(True)
    if program.precision:
        options["mixed_precision"] = library.MixedPrecision(*_dtypes(program))
    names = {"full": "FULL_SHARD", "experts": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP", "none": "NO_SHARD"}
    options["sharding_strategy"] = strategy[names.get(program.strategy, "HYBRID_SHARD")]
    if program.strategy.startswith("hybrid"):
        alone, everybody = _group_of_one(site), site.group
        of_one = program.strategy == "hybrid_of_one"
        options["process_group"] = (everybody, alone) if of_one else (alone, everybody)
    return options


def _dtypes(program: Program) -> tuple[torch.dtype, torch.dtype]:
    """What parameters are computed in, and what gradients are summed in."""
    return getattr(torch, program.precision), getattr(torch, program.reduce_precision)


def _group_of_one(site: Site) -> dist.ProcessGroup:
    backend = "gloo" if site.is_cpu else "simulated"
    groups: list[dist.ProcessGroup] = [dist.new_group([r], backend=backend) for r in range(site.group.size())]
    return groups[site.rank]


def _fsdp2(model: nn.Module, site: Site) -> nn.Module:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import DeviceMesh

    program = site.program
    options: dict[str, Any] = {"mesh": DeviceMesh.from_group(site.group, site.device.type)}
    options["reshard_after_forward"] = program.strategy != "grad_op"
    if program.offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    if program.precision:
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(*_dtypes(program))
    model = model.to(site.device)
    for child in reversed(list(model.modules())):
        if child is not model and isinstance(child, tuple(_wrapped(site))):
            fsdp.fully_shard(child, **options)
    fsdp.fully_shard(model, **options)
    return model


def _fully_shard(model: nn.Module, site: Site) -> nn.Module:
    import flatparam

    options: dict[str, Any] = {"mesh": site.group}
    if site.program.precision:
        dtype = getattr(torch, site.program.precision)
        options["mp_policy"] = flatparam.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = model.to(site.device)
    for child in [child for child in model.modules() if isinstance(child, tuple(_wrapped(site)))]:
        flatparam.fully_shard(child, **options)
    return flatparam.fully_shard(model, **options)


LIBRARIES: Final[dict[str, Callable[[nn.Module, Site], nn.Module]]] = {
    "flatparam": _flatparam,
    "fully_shard": _fully_shard,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
}


def _wrapped(site: Site) -> set[type[nn.Module]]:
    return {Block, nn.Linear} if site.program.wrap_everything else {Block, Matrix}


# What is common to all libraries


OPTIMIZERS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "adam": ("AdamW", {"lr": 1e-2, "fused": False}),
    "fused adam": ("AdamW", {"lr": 1e-2, "fused": True}),
    "muon": ("Muon", {"lr": 0.02, "adamw_lr": 0.01}),
    "adafactor": ("Adafactor", {"lr": 1e-2, "weight_decay": 0.1}),
    "transformers adafactor": ("TransformersAdafactor", {"weight_decay": 0.1, "beta1": 0.9}),
    "shampoo": ("Shampoo", {"every": 3}),
    "shampoo with roots": ("Shampoo", {"every": 1}),
}
"""The class of each optimizer, of `flatparam.optim` if it has one of this name, and its settings."""


def optimizer_of(model: nn.Module, site: Site) -> torch.optim.Optimizer:
    """The optimizer of the program."""
    import flatparam.optim

    name, *rest = site.program.optimizer.split(", ")
    make, settings = OPTIMIZERS[name]
    if rest:  # "rate on the device"
        settings = settings | {"lr": torch.tensor(settings["lr"], device=site.device)}
    library: Any = flatparam.optim if hasattr(flatparam.optim, make) else torch.optim
    optimizer: torch.optim.Optimizer = getattr(library, make)(model.parameters(), **settings)
    return optimizer


@contextlib.contextmanager
def unreduced(model: Any, site: Site) -> Iterator[None]:
    """Inside, backward passes add to the gradients of the rank alone."""
    if site.program.library != "fsdp2":
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def clip(model: Any, site: Site) -> Tensor:
    """Scale the gradients to a norm of one half; returns what it was."""
    norm: Tensor
    if site.program.library == "fsdp2":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    else:
        norm = model.clip_grad_norm_(0.5)
    return norm


def parameters_of(model: nn.Module, site: Site) -> dict[str, Tensor]:
    """The whole parameters, by the names that they have in the model that is not sharded."""
    site.mark("the end")
    if site.program.library == "fsdp2":
        whole = {name: value.to(site.device) for name, value in model.state_dict().items()}
        return {name: value.full_tensor() for name, value in whole.items()}
    import flatparam

    is_in_place = site.program.library == "fully_shard"
    library: Any = flatparam.FullyShardedDataParallel if is_in_place else type(model)
    with library.summon_full_params(model):
        found = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
        return {name: parameter.detach().cpu().clone() for name, parameter in found.items()}
