"""An optimizer that would train different numbers on shards is refused, and an unknown one causes a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_comm import Collectives, FlatParamError, SingleCollectives
from flatparam_optim import allow_shards
from flatparam_runtime import notice_optimizers

from .segments.beneath import Stack, batch, full_parameters, run, sharded

BLOCKS = ["blocks.0", "blocks.1"]


@pytest.fixture(autouse=True)
def _noticed() -> None:
    notice_optimizers()


class Quiet(torch.optim.Optimizer):
    """An unknown optimizer, which steps by the sign."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad.sign()


def named(name: str) -> type[Quiet]:
    return type(name, (Quiet,), {})


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() == 2]


def step(collectives: Collectives, make: Callable[..., Any], only: Callable[..., Any], **options: Any) -> None:
    module = sharded(Stack, collectives, units=BLOCKS, **options)
    optimizer = make(only(module))
    module(batch(collectives.rank)).square().mean().backward()
    before = full_parameters(module)
    try:
        if make is torch.optim.LBFGS:
            optimizer.step(lambda: module(batch(collectives.rank)).square().mean())
        else:
            optimizer.step()
    except FlatParamError:
        after = full_parameters(module)
        assert all(torch.equal(after[name], before[name]) for name in before)
        raise


REFUSED = [
    torch.optim.Adafactor,
    torch.optim.LBFGS,
    *map(named, ("Lamb", "FusedLAMB", "LARS", "Shampoo", "SOAP")),
]
REFUSED += list(map(named, ("MuonWithAuxAdam", "SingleDeviceMuon", "DistributedShampoo", "GaLoreAdamW8bit", "CAME")))
REFUSED += [named("Prodigy"), named("DAdaptAdam"), named("LAMB8bit"), named("PagedLARS8bit")]


@each_row("make", REFUSED, ids=lambda make: make.__name__)
def test_what_looks_at_shapes_is_refused(make: Callable[..., Any], use_orig_params: bool) -> None:
    """Before its first step every rank raises an error with the optimizer, a parameter and what to do; nothing moves."""

    def rank(collectives: Collectives) -> str:
        with pytest.raises(FlatParamError) as caught:
            step(collectives, make, nn.Module.parameters, use_orig_params=use_orig_params)
        return str(caught.value)

    for number, message in enumerate(run(2, rank)):
        assert message.startswith(f"rank {number}: {make.__name__} ")
        assert "stem.weight" in message
        assert "NO_SHARD" in message
        assert "allow_shards" in message


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused() -> None:
    """torch's own Muon takes shards of two dimensions without a word, so it is refused."""

    def rank(collectives: Collectives) -> None:
        with pytest.raises(FlatParamError, match="Muon looks at the shapes"):
            step(collectives, torch.optim.Muon, matrices, use_orig_params=True)

    run(2, rank)


@each_row(
    "make",
    [
        *map(
            named,
            (
                "Lion",
                "DistributedFusedAdam",
                "AdamWScheduleFree",
                "PagedAdamW8bit",
                "DecoupledLionW_8bit",
                "DeepSpeedCPUAdam",
            ),
        ),
        type("Mine", (torch.optim.AdamW,), {}),
    ],
    ids=lambda make: make.__name__,
)
def test_what_treats_each_element_alone_is_silent(make: Callable[..., Any], use_orig_params: bool) -> None:
    """Known elementwise optimizers, and classes that only inherit their step, neither raise nor warn."""

    def rank(collectives: Collectives) -> None:
        step(collectives, make, nn.Module.parameters, use_orig_params=use_orig_params)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(2, rank)


class ClipsEach(torch.optim.AdamW):
    """It looks at the norm of each gradient before it does what its base does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    parameter.grad.div_(parameter.grad.norm() + 0.1)
        super().step(closure)


class Set(Quiet):
    """Elementwise, unless its setting is on, as Lion of timm and of pytorch-optimizer."""

    def __init__(self, parameters: Any, setting: str, value: float) -> None:
        torch.optim.Optimizer.__init__(self, parameters, {"lr": 0.1, setting: value})


def is_told_of(make: Callable[..., Any]) -> bool:
    """Whether two ranks are told that an optimizer sees shards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(2, lambda collectives: step(collectives, make, nn.Module.parameters))
    return any("is not an optimizer that flatparam knows" in str(each.message) for each in caught)


@each_row("name", ["StableAdamW", "NormSGD", "ClippedAdamW", "ScaledAdam", "MySGD", "AdamW", "SGD"])
def test_a_step_of_ones_own_is_known_by_no_ending_of_a_name(name: str) -> None:
    """A longer name than that of a known class says nothing, also if the base is one, and the class has its own step."""
    assert is_told_of(type(name, (Quiet,), {})) is (name not in ("AdamW", "SGD"))
    assert is_told_of(type(name, (ClipsEach,), {}))


class Collects(torch.optim.SGD):
    """It does something to each gradient where torch collects them."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.numel():
                parameter.grad.div_(parameter.grad.norm() + 0.1)
        return super()._init_group(group, *lists)


def test_a_class_that_collects_otherwise_is_told_of() -> None:
    """What torch calls in a step counts as the step does."""
    assert is_told_of(Collects)
    assert not is_told_of(type("Same", (torch.optim.SGD,), {}))


@each_row("setting", ["caution", "use_gc", "adanorm", "max_grad_norm"])
def test_a_setting_may_have_one_look_at_more(setting: str) -> None:
    """Lion treats each element alone, and with some settings it looks at whole parameters, as those of libraries do."""
    kind = type("Lion", (Set,), {})
    assert is_told_of(lambda parameters: kind(parameters, setting, 1.0))
    assert not is_told_of(lambda parameters: kind(parameters, setting, 0.0))
    assert not is_told_of(lambda parameters: kind(parameters, "other", 1.0))


@each_row("ranks", [1, 2])
def test_an_unknown_one_is_told_of_once(ranks: int) -> None:
    """An unknown kind of optimizer warns once on each of several ranks, however often it steps; one rank has no shards."""

    def steps(collectives: Collectives) -> None:
        module = sharded(Stack, collectives, use_orig_params=True)
        optimizer = Quiet(module.parameters())
        for _ in range(3):
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(ranks, steps)
    told = [each.filename for each in caught if "Quiet is not an optimizer" in str(each.message)]
    assert told == [__file__] * (ranks if ranks > 1 else 0)


@each_row("make", [named("Shampoo"), Quiet])
def test_allowing_it(make: Callable[..., Any]) -> None:
    """`allow_shards` turns off both."""

    def allowed(parameters: Any) -> Any:
        optimizer = make(parameters)
        allow_shards(optimizer)
        return optimizer

    def rank(collectives: Collectives) -> None:
        step(collectives, allowed, nn.Module.parameters, use_orig_params=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(2, rank)


@each_row("make", [torch.optim.Adafactor, torch.optim.LBFGS, named("Shampoo"), Quiet])
def test_whole_parameters_may_be_stepped_by_any(make: Callable[..., Any]) -> None:
    """In a world of one the originals have their shapes, and every optimizer steps them as those of the plain model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(SingleCollectives(), make, nn.Module.parameters, use_orig_params=True)


class Scaled(nn.Module):
    """Has a scalar beside a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain


@each_row("ranks", [1, 2])
def test_a_scalar_is_always_whole(ranks: int) -> None:
    """It has neither rows nor columns, and its norm as one element: what looks at shapes steps it, as one process does."""

    def train(collectives: Collectives | None) -> list[float]:
        torch.manual_seed(0)
        module = Scaled() if collectives is None else sharded(Scaled, collectives, use_orig_params=True)
        optimizer = torch.optim.Adafactor([module.gain], lr=0.1)
        for _ in range(3):
            module(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(map(float, module.gain.flatten()))

    parts = run(ranks, train)
    assert sorted(value for part in parts for value in part) == train(None)


def test_optimizers_of_other_models_are_left_alone() -> None:
    """An optimizer without parameters of a unit is not checked."""
    module = nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (Quiet, named("Shampoo"), torch.optim.Adafactor):
            optimizer = make(module.parameters())
            module(torch.ones(1, 3)).sum().backward()
            optimizer.step()
