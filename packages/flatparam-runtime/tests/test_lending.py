"""A parameter of a unit that the forward call of another unit reads, and does not call: the unit lends it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flatparam_comm import Collectives
from flatparam_comm.testing import run_processes
from flatparam_runtime import EventLog, FlatParamError, observe, unit_of, units_in

from .models import WIDTH, batch
from .worlds import check_at_rest, check_training, full_parameters, run, seeded, sharded


class Gain(nn.Module):
    """A vector, of which a rank's part broadcasts where the whole does."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.arange(1.0, WIDTH + 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Reader(nn.Module):
    """A body, and a head and a gain whose parameters the forward reads, or whose modules it calls, as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = Gain()

    def forward(self, x: Tensor, *way: str) -> Tensor:
        x = self.body(x)
        for step in way:
            if step == "read head":
                x = x @ self.head.weight.T
            elif step == "call head":
                x = self.head(x)
            elif step == "read gain":
                x = x * self.scale.gain
            elif step == "keep":
                vars(self)["kept"] = self.head.weight
            elif step == "penalty":
                x = x + self.body.weight.square().sum() + self.head.weight.abs().sum()
        return x


class Nested(nn.Module):
    """A reader in a unit of its own, with or without a checkpoint around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Reader()
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *way: str, how: str = "") -> Tensor:
        x = self.stem(x)
        if not how:
            return self.inner(x, *way)
        found: Tensor = checkpoint(self.inner, x, *way, use_reentrant=how == "reentrant")
        return found


UNITS = ["body", "head", "scale"]
WAYS = [
    ["read head"],
    ["read gain"],
    ["read gain", "read head", "read gain"],
    ["read head", "call head"],
    ["call head", "read head"],
    ["penalty"],
]


def loss(module: nn.Module, rank: int, *way: str, **how: Any) -> Tensor:
    out: Tensor = module(batch(rank), *way, **how).square().mean()
    return out


@each_row("way", WAYS, ids=lambda way: ", ".join(way))
def test_training_is_that_of_the_local_model(
    way: Sequence[str], ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """What the root reads of inner units is whole, and trained, in steps that read it and in steps that do not."""
    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    steps = [lambda module, rank, w=w: loss(module, rank, *w) for w in (way, [], way, ["call head"])]
    # The penalty's gradient comes in two parts, which a local model adds in a different order.
    check_training(Reader, steps, ranks, units=UNITS, exact="penalty" not in way, **plan)


@each_row("how", ["", "reentrant", "not reentrant"])
def test_a_unit_that_is_recomputed_reads_again(how: str, ranks: int, use_orig_params: bool) -> None:
    """With either kind of checkpoint around the unit that reads, the recomputation has whole parameters."""
    steps: list[Callable[[nn.Module, int], Tensor]] = [
        lambda module, rank: loss(module, rank, "read gain", "read head", how=how)
    ] * 2
    units = [*(f"inner.{name}" for name in UNITS), "inner"]
    check_training(Nested, steps, ranks, units=units, use_orig_params=use_orig_params)


def test_two_forward_passes_before_the_backward_pass(ranks: int, use_orig_params: bool) -> None:
    """Each backward pass gathers what its own forward calls have read."""

    def both(module: nn.Module, rank: int) -> Tensor:
        first, second = loss(module, rank, "read head"), loss(module, rank, "read gain", "call head")
        return first + second

    check_training(Reader, [both, both], ranks, units=UNITS, use_orig_params=use_orig_params)


def test_a_parameter_is_lent_for_the_call_that_reads_it(use_orig_params: bool) -> None:
    """It is gathered at the read, freed with the reader, gathered and freed again in backward, and then forgotten."""

    def schedule(collectives: Collectives) -> list[list[str]]:
        module = sharded(Reader, collectives, units=UNITS, use_orig_params=use_orig_params)
        found = []
        for way in (["read head"], []):
            log = EventLog()
            with observe(module, log):
                loss(module, collectives.rank, *way).backward()
            found.append([line for line in log.lines() if "head" in line or "root" in line])
            check_at_rest(module)
            assert not any(unit.links.lenders or unit.links.borrowers for unit in units_in(module))
        return found

    for reads, does_not in run(2, schedule):
        both = [line for line in reads if "head" in line]
        assert both == ["unshard head", "use head", "reshard head"] * 2 + ["reduce head", "finish head"]
        assert not any(line.startswith(("unshard head", "use head")) for line in does_not)


class Asking(nn.Module):
    """A chain that asks each layer for its dtype before it calls it, and prints itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.unsharded: list[int] = []

    def forward(self, x: Tensor, rank: int = -1) -> Tensor:
        for layer in self.layers:
            if rank == 0:
                repr(self)
            x = layer(x.to(layer.weight.dtype))
            self.unsharded.append(sum(unit_of(each).handles[0].is_unsharded for each in self.layers))  # type: ignore[union-attr]
        return x


@pytest.mark.parametrize("recorded", [False, True], ids=["no-grad", "recorded"])
def test_a_parameter_that_is_only_asked_for_its_dtype_is_not_kept(recorded: bool, use_orig_params: bool) -> None:
    """The loan of what nobody computes with, or keeps, ends when its unit is called: the chain stays sharded."""

    def ask(collectives: Collectives) -> list[int]:
        units = [f"layers.{number}" for number in range(4)]
        module = sharded(Asking, collectives, units=units, use_orig_params=use_orig_params)
        with torch.set_grad_enabled(recorded):
            module(batch(0))
        return module.unsharded

    assert run(2, ask) == [[0] * 4] * 2


class AsksEarly(nn.Module):
    """It reads a dtype of a unit, and calls other units before that one, as attention does of its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).to(self.last.weight.dtype)))  # type: ignore[no-any-return]


def _asks_in_every_step(collectives: Collectives) -> int:
    module = sharded(AsksEarly, collectives, units=["first", "second", "last"])
    for step in range(60):
        module(batch(step)).square().mean().backward()
    return collectives.size


@pytest.mark.processes
def test_ranks_that_ask_for_a_dtype_go_on_in_step() -> None:
    """Whether a loan ends does not depend on when a thread of the backend lets go of the memory that it has filled."""
    assert run_processes(2, _asks_in_every_step) == [2, 2]


def test_printing_a_module_on_one_rank_gathers_nothing(use_orig_params: bool) -> None:
    """A rank that prints the model inside its forward pass runs on with the others."""

    def show(collectives: Collectives) -> None:
        units = [f"layers.{number}" for number in range(4)]
        module = sharded(Asking, collectives, units=units, use_orig_params=use_orig_params)
        for _ in range(2):
            module(batch(0), collectives.rank).sum().backward()

    run(2, show)


def test_evaluation_reads_whole_parameters(ranks: int, use_orig_params: bool) -> None:
    """Without gradients, too, and what was lent is freed when the call is over."""

    def evaluate(collectives: Collectives) -> Tensor:
        module = sharded(Reader, collectives, units=UNITS, use_orig_params=use_orig_params)
        with torch.no_grad():
            out: Tensor = module(batch(0), "read gain", "read head")
        check_at_rest(module)
        return out

    with torch.no_grad():
        expected = seeded(Reader)(batch(0), "read gain", "read head")
    for out in run(ranks, evaluate):
        assert torch.equal(out, expected)


def test_an_exception_gives_back_what_was_lent(use_orig_params: bool) -> None:
    """After an exception in a call that has read, nothing is lent, and the next step is as ever."""

    def fail(collectives: Collectives) -> dict[str, Tensor]:
        module = sharded(Reader, collectives, units=UNITS, use_orig_params=use_orig_params)
        with pytest.raises(TypeError):
            module(batch(0), "read head", "read gain", 3, bad=True)
        with pytest.raises(RuntimeError):
            module(torch.ones(2, WIDTH + 1), "read head")
        check_at_rest(module)
        assert not any(unit.links.lenders for unit in units_in(module))
        loss(module, collectives.rank, "read head").backward()
        check_at_rest(module)
        return full_parameters(module)

    run(2, fail)


class Circle(nn.Module):
    """Two modules that read each other's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), Gain()
        self.other.forward = lambda x: self.third(x * self.one.weight.sum())  # type: ignore[method-assign]
        self.third = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) + self.one(x)


def test_units_may_read_their_siblings(use_orig_params: bool) -> None:
    """A unit reads a parameter of a unit beside it, by a reference that is no submodule."""
    check_training(
        Circle,
        [lambda module, rank: module(batch(rank)).square().mean()] * 2,
        2,
        units=["one", "third", "other"],
        use_orig_params=use_orig_params,
    )


def test_units_that_borrow_from_each_other_are_refused() -> None:
    """A circle of lenders cannot be gathered; the error names both units and the parameter."""

    def refuse(collectives: Collectives) -> None:
        module = sharded(Reader, collectives, units=UNITS)
        module(batch(0))
        head, root = (next(u for u in units_in(module) if u.name == name) for name in ("head", "(root)"))
        head.borrow(root, "body.weight")
        with pytest.raises(FlatParamError, match=r"rank \d: .*'\(root\)' reads parameter 'weight' of unit 'head'"):
            root.borrow(head, "weight")
        head.give_back(root)

    run(2, refuse)


def test_at_rest_a_flat_part_has_a_gradient(ranks: int) -> None:
    """With flat parameters, an attribute that is read outside of passes is this rank's part of the trained parameter."""

    def read(collectives: Collectives) -> list[Any]:
        module = sharded(Reader, collectives, units=UNITS)
        weight = module.head.weight
        weight.square().sum().backward()
        (handle,) = unit_of(module.head).handles  # type: ignore[union-attr]
        assert torch.equal(handle.flat_param.grad, 2 * handle.flat_param.detach())
        assert module.head.weight is weight
        with torch.no_grad():
            assert not module.head.weight.requires_grad
        handle.flat_param.requires_grad_(False)
        assert not module.head.weight.requires_grad
        return [weight.dim(), module.head._parameters.get("weight")]

    assert run(ranks, read) == [[1, None]] * ranks


class Tied(Reader):
    """A reader that returns a weight of its head, before or after it calls the head, or without."""

    def forward(self, x: Tensor, *way: str) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        weight = self.head.weight if "first" in way else None
        x = super().forward(x, *(step for step in way if step != "first"))
        return x, self.head.weight if weight is None else weight


def _with_what_is_returned(module: nn.Module, rank: int, *way: str) -> Tensor:
    out, weight = module(batch(rank), *way)
    return (out @ weight.T).square().mean() + weight.abs().sum()


@each_row("way", [[], ["call head"], ["read head"], ["first"]], ids=" ".join)
def test_a_parameter_that_is_returned_is_whole(
    way: Sequence[str], ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """The caller computes with a parameter that a forward returns, of a unit that it calls or reads, and trains it."""
    steps = [lambda module, rank: _with_what_is_returned(module, rank, *way)] * 3
    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    check_training(Tied, steps, ranks, units=UNITS, exact=False, **plan)


class Returning(nn.Linear):
    """A layer that returns its weight, or an alias of it, beside what it computes."""

    def forward(self, x: Tensor, alias: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), alias(self.weight)


class Aliases(nn.Module):
    """An inner unit and the outer one each return an alias, of an own weight and of one of another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Returning(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, alias: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, own = self.own(x, alias)
        return self.head(x) * own.sum(), own, alias(self.head.weight)


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda w: w,
    "transposed": lambda w: w.T,
    "rows": lambda w: w[:1],
    "chunk": lambda w: w.chunk(2)[1],
    "detached": lambda w: w.detach(),
    "detached rows": lambda w: w.detach()[1:],
    "data": lambda w: w.data,
}


@each_row("alias", ALIASES.values(), ids=ALIASES)
def test_an_alias_that_is_returned_is_whole(
    alias: Callable[[Tensor], Tensor], ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """The caller computes with a view, or with a detached alias, of a weight of the unit called or of another one."""

    def step(module: nn.Module, rank: int) -> Tensor:
        out, own, head = module(batch(rank), alias)
        return out.square().mean() + own.square().sum() + head.abs().sum()

    plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
    check_training(Aliases, [step] * 3, ranks, units=["own", "head"], exact=False, **plan)


@each_row("alias", ALIASES.values(), ids=ALIASES)
def test_an_alias_of_what_is_not_trained_is_whole(
    alias: Callable[[Tensor], Tensor], ranks: int, use_orig_params: bool
) -> None:
    """The same of units whose parameters are frozen, and of which no gradient tells."""

    def frozen() -> nn.Module:
        return Aliases().requires_grad_(False)

    def read(collectives: Collectives) -> None:
        module = sharded(frozen, collectives, units=["own", "head"], use_orig_params=use_orig_params)
        local = seeded(frozen)
        for _ in range(2):
            for found, expected in zip(module(batch(0), alias), local(batch(0), alias), strict=True):
                assert torch.equal(found, expected)

    run(ranks, read)


KEPT = r"rank \d: the full parameter 'weight' of unit 'head' was kept .*detach\(\)\.clone\(\)"


@pytest.mark.parametrize("recorded", [False, True], ids=["no-grad", "recorded"])
def test_a_full_parameter_that_is_kept_is_no_crash(
    recorded: bool, ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """A use of one while its memory is free names it, at its print too; the next passes are as ever."""

    def keep(collectives: Collectives) -> None:
        plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        module = sharded(Reader, collectives, units=UNITS, **plan)
        for _ in range(2):
            with torch.set_grad_enabled(recorded):
                out = module(batch(0), "keep", "read head")
            kept: Tensor = vars(module)["kept"]
            if recorded:
                out.sum().backward()
            # A world of one shows the shard itself, which stays.
            if ranks > 1 or not use_orig_params:
                for use in (lambda w: w + 1, lambda w: w.T, torch.clone, lambda w: torch.stack([w])):
                    with pytest.raises(FlatParamError, match=KEPT):
                        use(kept)
                assert "weight" in repr(kept)
            else:
                assert (kept + 1).shape == (WIDTH, WIDTH)
            assert (kept.shape, kept.dtype) == ((WIDTH, WIDTH), torch.float32)
            check_at_rest(module)
        loss(module, collectives.rank, "read head").backward()

    run(ranks, keep)


@pytest.mark.parametrize("recorded", [False, True], ids=["no-grad", "recorded"])
def test_a_view_that_a_hook_keeps_stays_right(
    recorded: bool, ranks: int, use_orig_params: bool, free_after_forward: bool
) -> None:
    """What a forward hook has made of a full parameter, by `detach()` or a slice, has its values after the pass."""

    def keep(collectives: Collectives) -> list[Tensor]:
        plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        module = sharded(Reader, collectives, units=UNITS, **plan)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        kept: list[Tensor] = []
        module.head.register_forward_hook(lambda head, *_: kept.extend([head.weight.detach(), head.weight.data[1:]]))
        for _ in range(2):
            with torch.set_grad_enabled(recorded):
                out = module(batch(collectives.rank), "call head")
            if recorded:
                out.sum().backward()
                optimizer.step()
            check_at_rest(module)
        return [each.clone() for each in kept]

    first = seeded(Reader).head.weight.detach()
    for found in run(ranks, keep):
        assert torch.equal(found[1], found[0][1:])
        # A world of one that shows the originals gives out the memory that the optimizer steps.
        if ranks > 1 or not use_orig_params:
            assert torch.equal(found[0], first)
            assert torch.equal(found[0], found[2]) is not recorded


def test_a_backward_hook_reads_whole_parameters(ranks: int, use_orig_params: bool, free_after_forward: bool) -> None:
    """A full backward hook that reads a parameter of another unit has it whole, and the pass frees it."""

    def read(collectives: Collectives) -> list[Tensor]:
        plan = {"use_orig_params": use_orig_params, "free_after_forward": free_after_forward}
        module = sharded(Reader, collectives, units=UNITS, **plan)
        found: list[Tensor] = []
        for name in ("head", "body", "scale"):
            module.get_submodule(name).register_full_backward_hook(
                lambda *_: found.extend([module.head.weight.clone(), module.body.weight.clone()])
            )
        for _ in range(2):
            loss(module, collectives.rank, "call head").backward()
            check_at_rest(module)
        return found

    local = seeded(Reader)
    for found in run(ranks, read):
        assert len(found) == 8
        for head, body in zip(found[::2], found[1::2], strict=True):
            assert torch.equal(head, local.head.weight)
            assert torch.equal(body, local.body.weight)


class Recurrent(nn.LSTM):
    """An LSTM, whose own `__setattr__` keeps a list, and has torch ask whether the attribute is there."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x)[0]
        return out


class Listing(nn.Linear):
    """It has a list of its parameters, which it reads whenever one is set."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["listed"] = [self.weight, getattr(self, "bias", None)]


class Around(nn.Module):
    """Two layers of a class in a module of their own; `frozen` ones do not train, and `normed` ones are made of others."""

    def __init__(self, make: Callable[[], nn.Module], frozen: Sequence[str], normed: bool) -> None:
        super().__init__()
        layers = [make(), make()]
        for name in frozen:
            layers[0].get_parameter(name).requires_grad_(False)
        if normed:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                name = "weight_hh_l0" if isinstance(layers[0], Recurrent) else "weight"
                layers = [torch.nn.utils.weight_norm(layer, name) for layer in layers]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@each_row(
    ("make", "frozen", "normed"),
    [
        (Recurrent, [], False),
        (Recurrent, ["weight_hh_l0", "bias_ih_l0"], False),
        (Recurrent, [], True),
        (Listing, ["bias"], False),
        (Listing, ["weight"], False),
        (Listing, [], True),
    ],
    ids=str,
)
def test_a_unit_that_is_freed_lends_nothing_to_its_own_setattr(
    make: Callable[[], nn.Module],
    frozen: Sequence[str],
    normed: bool,
    ranks: int,
    use_orig_params: bool,
    free_after_forward: bool,
) -> None:
    """It reads parameters inside the call of the unit around it, and is no reader: it trains as on one process."""
    check_training(
        lambda: Around(make, frozen, normed),
        [lambda module, rank: module(batch(rank)[None]).square().mean()] * 3,
        ranks,
        units=["layers.0", "layers.1"],
        use_orig_params=use_orig_params,
        free_after_forward=free_after_forward,
    )


def test_a_module_that_is_kept_after_its_model_shows_what_it_has(use_orig_params: bool) -> None:
    """A list of layers outlives a former model, such as bitsandbytes': reading a weight of one is no error."""

    def training(collectives: Collectives) -> bool:
        module = sharded(Reader, collectives, units=["body"], use_orig_params=use_orig_params)
        loss(module, collectives.rank, "read head").backward()
        kept = module.head
        before = kept.weight
        del module
        gc.collect()
        return kept.weight is before

    assert run(2, training) == [True, True]
