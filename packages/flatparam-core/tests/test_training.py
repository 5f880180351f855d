"""Several ranks in one process, by hand, train exactly as one local model on the mean of the ranks' losses."""

from collections.abc import Callable, Sequence

import pytest
import torch
from each_row import each_row
from torch import nn

from flatparam_core import Precision, flatten_module

from .ranks import Ranks, gather, reduce, seeded

STEPS = 5
Make = Callable[[], nn.Module]


class Transformer(nn.Module):
    """Tied embeddings, attention, norms, a 0-d scale and a frozen position table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(5, 8), requires_grad=False)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, seed: int) -> torch.Tensor:
        tokens = torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(seed))
        hidden = self.block(self.embed(tokens) + self.position) * self.scale
        logits: torch.Tensor = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Conv(nn.Module):
    """A channels_last convolution with a batch of images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.out = nn.Linear(5, 2)

    def forward(self, seed: int) -> torch.Tensor:
        images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        images = images.to(memory_format=torch.channels_last)
        out: torch.Tensor = self.out(self.conv(images).mean((2, 3)))
        return out.square().mean()


class Recurrent(nn.Module):
    """An LSTM, and double-precision parameters beside single-precision ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)
        self.out = nn.Linear(4, 1).double()

    def forward(self, seed: int) -> torch.Tensor:
        inputs = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(seed))
        found: torch.Tensor = self.out(self.lstm(inputs)[0].double())
        return found.square().mean()


class Conditional(nn.Module):
    """A branch that is taken every other time, by all ranks alike, and a parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)
        self.never = nn.Parameter(torch.randn(4))

    def forward(self, seed: int) -> torch.Tensor:
        x = self.always(torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))
        if seed // 10 % 2:
            x = self.sometimes(x)
        return x.square().mean()


ZOO: dict[str, Make] = {
    "transformer": Transformer,
    "conv": Conv,
    "recurrent": Recurrent,
    "conditional": Conditional,
}
OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


def train_locally(
    make: Make, optimizer: str, world_size: int, *, fill: bool = False, set_to_none: bool = True
) -> tuple[list[float], nn.Module]:
    """One model on the mean of ``world_size`` losses; the gradients are summed in the order of ranks.

    ``fill`` gives a parameter without gradient one of zeros, as it has inside a flat parameter.
    """
    model = seeded(make)
    stepper = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        stepper.zero_grad(set_to_none=set_to_none)
        for rank in range(world_size):
            loss = model(10 * step + rank)
            losses.append(loss.item())
            (loss / world_size).backward()
        for parameter in model.parameters() if fill else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        stepper.step()
    return losses, model


def train_ranks(ranks: Ranks, optimizers: Sequence[torch.optim.Optimizer], *, set_to_none: bool = True) -> list[float]:
    losses = []
    for step in range(STEPS):
        ranks.unshard()
        found = [module(10 * step + rank) for rank, module in enumerate(ranks.modules)]
        losses += [loss.item() for loss in found]
        ranks.backward(found)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return losses


def check_equal(ranks: Ranks, reference: nn.Module) -> None:
    """Every rank gathers, bit for bit, the parameters of the reference."""
    for rank in range(ranks.world_size):
        full = ranks.full_parameters(rank)
        for name, wanted in reference.named_parameters():
            assert torch.equal(full[name], wanted.detach()), name


@each_row("optimizer", OPTIMIZERS)
@each_row("model", ZOO)
def test_two_ranks_equal_one_model(model: str, optimizer: str, use_orig_params: bool) -> None:
    """Two ranks have, over five steps, bit for bit the losses and parameters of one model on the mean of the losses.

    A parameter that no rank used is left alone among the originals, and has a gradient of zeros in a flat parameter.
    """
    losses, reference = train_locally(ZOO[model], optimizer, 2, fill=not use_orig_params)
    ranks = Ranks(ZOO[model], 2, use_orig_params=use_orig_params)
    optimizers = [
        OPTIMIZERS[optimizer]([p for p in module.parameters() if p.requires_grad]) for module in ranks.modules
    ]
    assert train_ranks(ranks, optimizers) == losses
    check_equal(ranks, reference)


@pytest.mark.parametrize("world_size", [1, 4])
def test_other_powers_of_two(world_size: int, use_orig_params: bool) -> None:
    """One and four ranks, whose averaging factor loses nothing either, equal the local model bit for bit."""
    losses, reference = train_locally(Transformer, "adamw", world_size)
    ranks = Ranks(Transformer, world_size, use_orig_params=use_orig_params)
    optimizers = [OPTIMIZERS["adamw"]([p for p in m.parameters() if p.requires_grad]) for m in ranks.modules]
    assert train_ranks(ranks, optimizers) == losses
    check_equal(ranks, reference)


def test_three_ranks_are_close(use_orig_params: bool) -> None:
    """Dividing by three rounds, so three ranks follow the local model closely rather than exactly."""
    losses, reference = train_locally(Transformer, "sgd", 3)
    ranks = Ranks(Transformer, 3, use_orig_params=use_orig_params)
    optimizers = [OPTIMIZERS["sgd"]([p for p in m.parameters() if p.requires_grad]) for m in ranks.modules]
    torch.testing.assert_close(train_ranks(ranks, optimizers), losses, rtol=1e-5, atol=0)
    full = ranks.full_parameters()
    for name, wanted in reference.named_parameters():
        torch.testing.assert_close(full[name], wanted.detach(), rtol=1e-4, atol=1e-6)


@each_row("optimizer", OPTIMIZERS)
def test_an_optimizer_that_was_made_before_flattening(optimizer: str) -> None:
    """With the original parameters, an optimizer that was built on the model before it was sharded trains it."""
    losses, reference = train_locally(Conv, optimizer, 2)
    modules = [seeded(Conv) for _ in range(2)]
    optimizers = [OPTIMIZERS[optimizer](list(module.parameters())) for module in modules]
    prepared = iter(modules)
    ranks = Ranks(lambda: next(prepared), 2, use_orig_params=True)
    assert train_ranks(ranks, optimizers) == losses
    check_equal(ranks, reference)


@each_row("optimizer", OPTIMIZERS)
def test_both_exposures_agree(optimizer: str) -> None:
    """Stepping the flat parameter and stepping the originals give the same bits."""
    full = []
    for use_orig_params in (False, True):
        ranks = Ranks(Transformer, 2, use_orig_params=use_orig_params)
        optimizers = [OPTIMIZERS[optimizer]([p for p in m.parameters() if p.requires_grad]) for m in ranks.modules]
        train_ranks(ranks, optimizers)
        full.append(ranks.full_parameters())
    assert full[0].keys() == full[1].keys()
    assert all(torch.equal(full[0][name], full[1][name]) for name in full[0])


class Lookup(nn.Module):
    """An embedding whose gradient lists the rows that were looked up, some of them twice."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3, padding_idx=0, sparse=sparse)
        self.head = nn.Linear(3, 2)

    def forward(self, seed: int) -> torch.Tensor:
        tokens = torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(seed))
        found: torch.Tensor = self.head(self.embed(tokens))
        return found.square().mean()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sparse_gradients(optimizer: str, use_orig_params: bool) -> None:
    """A sparse gradient is added to its dense slot, so the ranks train as with a dense one."""
    losses, reference = train_locally(lambda: Lookup(sparse=False), optimizer, 2)
    ranks = Ranks(lambda: Lookup(sparse=True), 2, use_orig_params=use_orig_params)
    optimizers = [OPTIMIZERS[optimizer](list(module.parameters())) for module in ranks.modules]
    assert train_ranks(ranks, optimizers) == losses
    check_equal(ranks, reference)


def test_units_of_one_model_gather_and_reduce_on_their_own(use_orig_params: bool) -> None:
    """Two units of one model, each resharded between forward and backward, equal the unsharded model."""

    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def inputs(rank: int) -> torch.Tensor:
        return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank))

    reference = seeded(make)
    for rank in range(2):
        (reference(inputs(rank)).square().sum() / 2).backward()
    models = [seeded(make) for _ in range(2)]
    units = [
        [
            flatten_module(model[at], rank=rank, world_size=2, use_orig_params=use_orig_params)[0]
            for rank, model in enumerate(models)
        ]
        for at in (0, 2)
    ]
    hidden = [inputs(rank) for rank in range(2)]
    for at, unit in zip((0, 2), units, strict=True):
        gather(unit)
        hidden = [model[at](h) for model, h in zip(models, hidden, strict=True)]
        if at == 0:
            hidden = [torch.tanh(h) for h in hidden]
        for handle in unit:
            handle.reshard()
    # One backward call needs both units.
    for unit in units:
        gather(unit)
    for h in hidden:
        h.square().sum().backward()
    for at, unit in zip((0, 2), units, strict=True):
        for handle in unit:
            handle.deposit(0, divisor=2)
            handle.deposit(1, divisor=2)
            handle.reshard()
        reduce(unit)
        for name in ("weight", "bias"):
            wanted = getattr(reference[at], name).grad
            parts = [
                handle.exposure.parameters()[handle.layout.fqns.index(name)].grad
                if use_orig_params
                else handle.flat_param.grad[
                    handle.layout.fragment(handle.layout.fqns.index(name), r).in_shard.as_slice()
                ]
                for r, handle in enumerate(unit)
            ]
            here = [part.flatten() for part in parts if part is not None]
            assert torch.equal(torch.cat(here), wanted.reshape(-1))


def test_mixed_precision_trains_on_a_full_precision_shard(use_orig_params: bool) -> None:
    """In bf16 compute and fp32 reduction, small steps add up in the shard that would be lost in bf16."""
    precision = Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ranks = Ranks(lambda: nn.Linear(1, 1, bias=False), 1, use_orig_params=use_orig_params, precision=precision)
    (handle,) = ranks.handles[0]
    with torch.no_grad():
        handle.flat_param.fill_(1.0)
    optimizer = torch.optim.SGD(ranks.modules[0].parameters(), lr=2.0**-10)
    for step in range(1, 9):
        ranks.unshard()
        assert ranks.modules[0].weight.dtype is torch.bfloat16
        ranks.backward([ranks.modules[0](torch.ones(1, 1, dtype=torch.bfloat16)).sum()])
        optimizer.step()
        optimizer.zero_grad()
        assert handle.flat_param[0].item() == 1.0 - step * 2.0**-10
