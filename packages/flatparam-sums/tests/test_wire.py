"""Formats of the wire: their bytes and errors, what is rounded and what is not, and what rounding has lost comes back."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from each_row import each_row
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flatparam_comm import ByteLedger, Collectives, RankError, RecordingCollectives
from flatparam_comm.testing import rectangle, run_threads
from flatparam_runtime import FlatParamError, Topology, UnitPlan, shard_module, summon_full_params, units_in
from flatparam_sums import ExactSums, Wire, carriage, load_residuals, save_residuals
from flatparam_sums.wire import Bf16, Codec, Int8, MxFp8, decoded, encoded

CODECS: dict[str, Codec] = {"bf16": Bf16(), "int8": Int8(), "mxfp8": MxFp8()}
NBYTES: dict[str, Callable[[int], int]] = {
    "bf16": lambda numel: 2 * numel,
    "int8": lambda numel: 4 * math.ceil(numel / 4) + 4 * math.ceil(numel / 256),
    "mxfp8": lambda numel: numel + math.ceil(numel / 32),
}


def most_error(name: str, values: Tensor) -> Tensor:
    """Return the most that the format may change each of the values, in float64."""
    sizes = values.double().abs()
    if name == "bf16":
        return sizes * 2**-8 + 2**-134
    block = {"int8": 256, "mxfp8": 32}[name]
    largest = torch.cat([part.max().expand(len(part)) for part in sizes.split(block)])
    if name == "int8":
        # A float32 factor, and a float32 quotient, are rounded.
        return largest / 254 * (1 + 2**-20) + 2**-142
    return torch.maximum(sizes * 2**-4, largest * 2**-17) + 2**-137


@pytest.mark.parametrize("name", CODECS)
@given(seed=st.integers(0, 2**31), numel=st.integers(1, 700), spread=st.sampled_from([0, 3, 20, 100]))
@settings(max_examples=60, deadline=None)
def test_errors_are_bounded(name: str, seed: int, numel: int, spread: int) -> None:
    """No number changes by more than the format's bound, from subnormals to the largest."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, (numel,), generator=generator)
    values = torch.ldexp(torch.randn(numel, generator=generator), exponents)
    found = decoded(CODECS[name], encoded(CODECS[name], values, [numel]), [numel])
    assert bool(((found.double() - values.double()).abs() <= most_error(name, values)).all())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("numels", [[1], [0, 5, 31], [32, 33, 255], [256, 257, 4096]])
def test_bytes_and_parts(name: str, numels: list[int]) -> None:
    """A part has the bytes of the formula, and is decoded by itself."""
    codec, values = CODECS[name], torch.randn(sum(numels))
    source = encoded(codec, values, numels)
    sizes = [codec.nbytes(numel) for numel in numels]
    assert sizes == [NBYTES[name](numel) for numel in numels]
    assert source.numel() == sum(sizes)
    for part, numel, begin in zip(source.split(sizes), numels, torch.tensor([0, *numels]).cumsum(0), strict=False):
        if numel:
            alone = decoded(codec, encoded(codec, values[begin : begin + numel], [numel]), [numel])
            assert torch.equal(codec.decode(part, numel), alone)


@pytest.mark.parametrize("name", ["int8", "mxfp8"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_told(name: str, bad: float) -> None:
    """A block with an infinite number, or none, is NaN; the others are as they were."""
    codec, values = CODECS[name], torch.ones(600)
    values[300] = bad
    found = decoded(codec, encoded(codec, values, [600]), [600])
    block = {"int8": 256, "mxfp8": 32}[name]
    is_bad = torch.arange(600) // block == 300 // block
    assert torch.equal(found.isnan(), is_bad)
    assert torch.equal(found[~is_bad], torch.ones(600)[~is_bad])


@each_row("name", CODECS)
def test_zeros_and_powers_of_two(name: str) -> None:
    """Zeros are zeros, and a block of one power of two is exact in bf16 and in MXFP8."""
    codec = CODECS[name]
    assert not decoded(codec, encoded(codec, torch.zeros(70), [70]), [70]).any()
    for exponent in (-126, -20, 0, 100, 127):
        values = torch.full((40,), 2.0) ** exponent
        if name != "int8":
            assert torch.equal(decoded(codec, encoded(codec, values, [40]), [40]).float(), values)


# Units


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * step + rank))


def shard(topology: Topology, wire: Wire, **plan: object) -> nn.Sequential:
    """Return the model, of which the second layer has the wire."""
    model = build()
    shard_module(model[2], UnitPlan(topology, **plan, **carriage("default", wire)))  # type: ignore[arg-type]
    shard_module(model, UnitPlan(topology, **plan))  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("free", [True, False], ids=["full shard", "shard grad op"])
@pytest.mark.parametrize("name", CODECS)
def test_gathers_are_rounded_and_nothing_else_is(name: str, free: bool, use_orig_params: bool) -> None:
    """Computing sees what the wire has made of the parameters; what is summoned and updated is as it was."""

    def rank(world: Collectives) -> tuple[int, float]:
        ledger, seen = ByteLedger(), []
        group = RecordingCollectives(world, ledger)
        plan = {"free_after_forward": free, "use_orig_params": use_orig_params}
        model = shard(Topology(group), Wire(gather=name), **plan)  # type: ignore[arg-type]
        model[2].register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
        whole = [each.detach() for each in build().parameters()]
        before = ledger.by_label()["2"].sent_nbytes if "2" in ledger.by_label() else 0
        model(batch(0, world.rank)).sum().backward()
        sent = ledger.by_label()["2"].sent_nbytes - before
        with summon_full_params(model):
            for mine, original in zip(model.parameters(), whole, strict=True):
                assert torch.equal(mine, original)
        error = (seen[-1] - whole[2]).abs()
        assert 0 < float(error.max()) <= float(whole[2].abs().max()) / 15
        # The same again: what was summoned has not stayed.
        model(batch(0, world.rank)).sum()
        assert torch.equal(seen[-1], seen[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.step()
        with summon_full_params(model, writeback=True):
            for mine, original in zip(model.parameters(), whole, strict=True):
                assert torch.equal(mine, original)
        return sent, float(seen[0].double().sum())

    found = run_threads(2, rank)
    # Every rank computes with the same numbers.
    assert len({each[1] for each in found}) == 1
    numel = -(-(33 * 40 + 40) // 2)
    scattered = 4 * numel
    gathers = 2 if free else 1
    assert {each[0] for each in found} == {gathers * CODECS[name].nbytes(numel) + scattered}


def test_evaluation_in_full_precision() -> None:
    """With `full_precision_in_eval` evaluation computes with parameters that are not rounded, and training with rounded."""

    def rank(world: Collectives) -> None:
        model = shard(Topology(world), Wire(gather="int8"), full_precision_in_eval=True, free_after_forward=False)
        plain = build()
        x = batch(0, 0)
        rounded_output = model(x)
        assert not torch.equal(rounded_output, plain(x))
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain(x))
            assert torch.equal(model.train()(x), rounded_output)

    run_threads(2, rank)


def test_a_hook_beside_a_wire() -> None:
    """A user's all-gather and a format for gathers are refused together, by name."""

    def rank(world: Collectives) -> None:
        model = shard(Topology(world), Wire(gather="int8"))
        [unit] = units_in(model[2])
        unit.reducer.hooks.set("all_gather", None, lambda state, mine, full: None, in_place=False)
        model(batch(0, 0))

    with pytest.raises(RankError, match="unit '2', rank 0: expected no hook in the place of the all-gather"):
        run_threads(2, rank)


def gradients(model: nn.Module) -> list[Tensor]:
    with summon_full_params(model, with_grads=True):
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_gradients_are_within_the_bound(name: str, shards: int) -> None:
    """The mean is off by no more than the mean of the contributions' bounds, once for each link that rounds."""

    def rank(world: Collectives) -> tuple[list[Tensor], int]:
        ledger = ByteLedger()
        topology = rectangle(RecordingCollectives(world, ledger), shards)
        model = shard(topology, Wire(reduce=name))  # type: ignore[arg-type]
        model(batch(0, world.rank)).square().sum().backward()
        return gradients(model)[2:4], 0

    found = run_threads(4, rank)
    of_ranks = []
    for each in range(4):
        plain = build()
        plain(batch(0, each)).square().sum().backward()
        of_ranks.append([p.grad.double() for p in plain.parameters() if p.grad is not None][2:4])
    for place in range(2):
        mean = sum((each[place] for each in of_ranks[1:]), of_ranks[0][place]) / 4
        largest = max(float(each[place].abs().max()) for each in of_ranks)
        relative = {"bf16": 2**-8, "int8": 1 / 254, "mxfp8": 2**-4}[name]
        stages = (shards > 1) + (shards < 4)
        for other in found:
            assert torch.equal(other[0][place], found[0][0][place])
            error = float((other[0][place].double() - mean).abs().max())
            # Blocks reach beyond a parameter, so the largest of the unit counts.
            assert error <= stages * 1.1 * relative * max(largest, max(float(e.abs().max()) for e in of_ranks[0]))
            assert error > 0


def test_bytes_across_hosts() -> None:
    """In hybrid sharding the sum over copies travels in the format, and in full if it is asked to be exact."""

    def rank(world: Collectives, wire: Wire) -> tuple[int, int]:
        ledger, model = ByteLedger(), build()
        topology = Topology.cut(RecordingCollectives(world, ledger), [[0, 1], [2, 3]])
        shard_module(model, UnitPlan(topology, **carriage("default", wire)))  # type: ignore[arg-type]
        model(batch(0, world.rank)).sum().backward()
        [handle] = units_in(model)[0].handles
        return ledger.by_op()["all_to_all"].sent_nbytes, handle.layout.shard_numels[0]

    int8, cases = (
        CODECS["int8"].nbytes,
        (
            (Wire(reduce="bf16"), lambda inside, across: 2 * inside + 2 * across),
            (Wire(reduce="bf16", across="exact"), lambda inside, across: 2 * inside + 8 * across),
            (Wire(across="int8"), lambda inside, across: 4 * inside + int8(across)),
            (Wire(reduce="int8", across="bf16"), lambda inside, across: int8(inside) + 2 * across),
        ),
    )
    for wire, formula in cases:
        for sent, inside in run_threads(4, rank, wire):
            # An accelerator's shards are a little longer.
            assert sent == formula(inside, math.ceil(inside / 2))


# Error feedback


PULL = torch.tensor([1.0, 0.003, -0.0047, 0.5, 0.0, 1e-4]).repeat(11)
"""The gradient of a weight in every step; a block's largest number hides the small ones."""


def pulled(topology: Topology, wire: Wire, steps: int, optimizer: bool = False, **plan: object) -> nn.Module:
    """Train one layer whose gradient is `PULL` times the rank's number in each step."""
    model = nn.Linear(len(PULL), 1, bias=False)
    nn.init.zeros_(model.weight)
    shard_module(model, UnitPlan(topology, **plan, **carriage("default", wire)))  # type: ignore[arg-type]
    stepper = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(steps):
        (model(PULL) * (1 + topology.rank)).sum().backward()
        stepper.step()
        stepper.zero_grad()
    return model


def whole_of(model: nn.Module) -> Tensor:
    with summon_full_params(model):
        return model.weight.detach().flatten().clone()  # type: ignore[operator]


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("name", ["int8", "mxfp8"])
def test_what_was_lost_comes_back(name: str, shards: int, use_orig_params: bool) -> None:
    """After many steps the sum of gradients is off by one step's rounding, and without feedback by that of all."""

    def rank(world: Collectives, feedback: bool) -> Tensor:
        wire = Wire(reduce=name, error_feedback=feedback)  # type: ignore[arg-type]
        return whole_of(pulled(rectangle(world, shards), wire, 40, use_orig_params=use_orig_params))

    wanted = -40 * 2.5 * PULL.double()
    # What is sent may be twice the gradient, and hybrid sharding rounds twice.
    once = 2 * (2 if shards == 2 else 1) * 2.5 * most_error(name, PULL)
    for found in run_threads(4, rank, True):
        assert bool(((found.double() - wanted).abs() <= once).all())
    lost = run_threads(4, rank, False)[0]
    assert bool(((lost.double() - wanted).abs() > 2 * once).any())


def test_a_step_that_is_not_finite_loses_nothing_else() -> None:
    """An infinite gradient is told, and what is lost in that step is no part of the next ones."""

    def rank(world: Collectives) -> None:
        model = pulled(Topology(world), Wire(reduce="int8"), 3)
        (model(PULL) * math.inf).sum().backward()
        assert not all(bool(each.isfinite().all()) for each in gradients_of(model))
        for parameter in model.parameters():
            parameter.grad = None
        model(PULL).sum().backward()
        assert all(bool(each.isfinite().all()) for each in gradients_of(model))

    run_threads(2, rank)


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_a_parameter_without_a_gradient_keeps_what_it_has_lost() -> None:
    """What was lost of a parameter waits while other parameters of the unit are trained."""

    def rank(world: Collectives) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(40))])
        sums = ExactSums(Wire(reduce="int8"))
        holder = nn.Module()
        holder.parameters_of = model
        holder.forward = lambda which: sum(
            (model[each] * (each + torch.linspace(0.001, 1, 40))).sum() for each in which
        )  # type: ignore[method-assign]
        shard_module(holder, UnitPlan(Topology(world), use_orig_params=True, sums=sums))
        [unit] = units_in(holder)
        holder([0, 1]).backward()
        [handle] = unit.handles
        kept = unit.reducer.sums.residuals.first[handle].clone()  # type: ignore[union-attr]
        assert bool(kept[:40].any())
        assert bool(kept[40:].any())
        unit.reducer.forget()
        holder([0]).backward()
        after = unit.reducer.sums.residuals.first[handle]  # type: ignore[union-attr]
        assert torch.equal(after[40:], kept[40:])
        assert not torch.equal(after[:40], kept[:40])

    run_threads(2, rank)


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_losses_in_the_optimizer_s_state(before: int, after: int, use_orig_params: bool) -> None:
    """They add up to the same in a world that shards differently, and the state is as it was without them."""
    states: dict[int, Tensor] = {}

    def total_of(model: nn.Module) -> Tensor:
        [unit] = units_in(model)
        [handle] = unit.handles
        part = unit.reducer.sums.residuals.summed(handle, unit.topology)  # type: ignore[union-attr]
        return torch.cat(unit.topology.shard.exchange(part))[: len(PULL)]

    def save(world: Collectives) -> Tensor:
        topology = rectangle(world, before)
        model = pulled(topology, Wire(reduce="mxfp8"), 5, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        save_residuals(model, optimizer)
        [parameter] = model.parameters()
        found = optimizer.state[parameter]["wire_residual"]
        assert found.shape == parameter.shape
        states[world.rank] = found.flatten()
        return total_of(model)

    totals = run_threads(4, save)
    assert bool(totals[0].any())
    shards = [states[rank] for rank in range(before)]
    flat = torch.cat(shards)[: len(PULL)]
    assert torch.equal(flat, totals[0])

    def load(world: Collectives) -> Tensor:
        topology = rectangle(world, after)
        model = pulled(topology, Wire(reduce="mxfp8"), 0, use_orig_params=use_orig_params)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        [unit] = units_in(model)
        [handle] = unit.handles
        [parameter] = model.parameters()
        span = handle.layout.shard_span(handle.rank)
        padded = torch.cat([flat, flat.new_zeros(handle.layout.numel - len(flat))])
        part = padded[span.as_slice()][: parameter.numel()]
        optimizer.state[parameter]["wire_residual"] = part.view_as(parameter).clone()
        load_residuals(model, optimizer)
        assert "wire_residual" not in optimizer.state[parameter]
        return total_of(model)

    for found in run_threads(4, load):
        assert torch.equal(found, totals[0])


@each_row(
    ("make", "message"),
    [
        (lambda: Wire(reduce="fp4"), "expected 'bf16', 'int8', 'mxfp8' or None as reduce, found 'fp4'"),  # type: ignore[arg-type]
        (lambda: Wire(gather="exact"), "as gather, found 'exact'"),  # type: ignore[arg-type]
        (lambda: Wire(gather="int8", error_feedback=True), "error_feedback=True, found neither"),
        (lambda: carriage("default", "int4"), "expected wire to be 'default', 'bf16', 'fp32' or"),
        (lambda: carriage("fast", "default"), "expected reduction to be 'default' or 'exact', found 'fast'"),
    ],
)
def test_what_is_no_wire(make: Callable[[], object], message: str) -> None:
    """A format that is not known is refused, with those that are."""
    with pytest.raises(ValueError, match=message):
        make()


def test_a_residual_that_does_not_fit() -> None:
    """A state of another parameter is refused, with its unit and rank."""

    def rank(world: Collectives) -> None:
        model = pulled(Topology(world), Wire(reduce="int8"), 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer.state[next(model.parameters())]["wire_residual"] = torch.zeros(3)
        with pytest.raises(FlatParamError, match="rank [01]: expected 'wire_residual' of .. elements"):
            load_residuals(model, optimizer)

    run_threads(2, rank)
