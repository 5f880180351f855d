"""Random models: trees of small modules, as recipes that print as themselves, and the modules that they stand for.

Every module takes and returns activations that are -1, 0 or 1, and passes on gradients that are -3/4, 0 or 3/4. So every
gradient of a parameter is a small multiple of 3/4; sums of them, and their quotients by 2, 3 and 4, are exact in fp32
(and mostly in bf16) in whatever order they are taken. That the true derivative of this rounding is zero does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 3
ROWS = 2
LONG = 349_529
"""Rows of a long parameter: a quarter of its elements is more than 2^18."""
UNIT = 0.75
"""What gradients are multiples of."""


# Recipes


class Recipe:
    """Prints as the call that makes it, without what is as by default."""

    def __repr__(self) -> str:
        given = [
            f"{field.name}={value!r}"
            for field in attrs.fields(type(self))
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"


@attrs.frozen(repr=False)
class Leaf(Recipe):
    """One layer.

    Attributes:
        kind: a key of `LAYERS`.
        frozen: which parameters get no gradient: "", "bias" or "all".
    """

    kind: str = "linear"
    frozen: str = ""


@attrs.frozen(repr=False)
class Place(Recipe):
    """How a block calls what it contains.

    Attributes:
        when: "always", in "even" or "odd" forward passes, or "never"; the same on all ranks.
        calls: how often in a row.
        used: whether the block's output depends on it.
        checkpoint: the kind of activation checkpointing around each call: "", "reentrant" or "non-reentrant".
    """

    item: Leaf | Block
    when: str = "always"
    calls: int = 1
    used: bool = True
    checkpoint: str = ""

    def is_called(self, moment: int) -> bool:
        """Whether the forward pass of this number calls it."""
        return {"always": True, "even": moment % 2 == 0, "odd": moment % 2 == 1, "never": False}[self.when]


@attrs.frozen(repr=False)
class Block(Recipe):
    """Several modules, each added to the residual; with `aside`, the block returns what the last one gave, too."""

    places: tuple[Place, ...]
    aside: bool = False


Tie: TypeAlias = tuple[str, str]
"""The names of two layers: the second gets the weight of the first."""


def layers_of(block: Block, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """The layers of a recipe by the names that they will have in the model."""
    for name, item in items_of(block, prefix):
        if isinstance(item, Leaf):
            yield name, item


def items_of(block: Block, prefix: str = "") -> Iterator[tuple[str, Leaf | Block]]:
    """Everything inside a recipe by name, outer before inner."""
    for number, place in enumerate(block.places):
        name = f"{prefix}{number}"
        yield name, place.item
        if isinstance(place.item, Block):
            yield from items_of(place.item, f"{name}.")


# Rounding


class _Snap(torch.autograd.Function):
    """Forward, a scramble of the activations onto {-1, 0, 1}; backward, one of the gradients onto 3/4 times that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return wrap_around(x * 2, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return wrap_around(gradient * (2 / UNIT), 1) * UNIT


class _OnGrid(torch.autograd.Function):
    """A parameter as it is, whose gradient is made a small multiple of 3/4."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return wrap_around(gradient * 4, 2) * UNIT


class _Total(torch.autograd.Function):
    """The sum over a long parameter's rows, each times -2 to 2, on {-1, 0, 1}: exact in fp32, and so in any order."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return wrap_around(2 * (parameter.float() * _factors()).sum(0), 1).to(parameter.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _factors().to(gradient.dtype) * gradient


def _factors() -> Tensor:
    return (torch.arange(LONG) % 5 - 2).unsqueeze(1).float()


def wrap_around(x: Tensor, most: int) -> Tensor:
    """The nearest whole numbers, and of these the remainders from `-most` to `most`; only 0 and its likes become 0."""
    return torch.remainder(x.round() + most, 2 * most + 1) - most


def snap(x: Tensor) -> Tensor:
    """Activations, rounded in both directions."""
    return _Snap.apply(x)


# Layers


class Gain(nn.Module):
    """A 0-d parameter and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.bias = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias.sum()


class TwoDtypes(nn.Module):
    """A parameter in a dtype of its own beside a float32 one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.weight.dtype) * self.weight).to(x.dtype) + self.bias


class Norm(nn.LayerNorm):
    """A LayerNorm whose parameters' gradients are rounded, since they are no sums of small integers."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _OnGrid.apply(self.weight), _OnGrid.apply(self.bias)
        return functional.layer_norm(x, (WIDTH,), weight, bias)


class Lookup(nn.Embedding):
    """An embedding that makes its tokens of the activations."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.detach().float().sum(-1).long() % WIDTH
        return x + super().forward(tokens)


class Convolution(nn.Module):
    """A weight in the memory order of channels_last, of which each element has another gradient."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.empty(WIDTH, WIDTH, 2, 2)
        self.weight = nn.Parameter(weight.to(memory_format=torch.channels_last))
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        pattern = torch.tensor([[1.0, 0.0], [-1.0, 2.0]]).to(self.weight.dtype)
        return functional.linear(x, (self.weight * pattern).sum((2, 3)), self.bias)


class Buffered(nn.Module):
    """Buffers: one that is used, one that forward passes change, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("signs", torch.tensor([1.0, -1.0, 1.0]))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("passing", torch.tensor(1.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.signs * self.passing).to(x.dtype) + self.bias


class Scale(nn.Module):
    """A weight without a bias: one element, or one for each activation."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Long(nn.Module):
    """A parameter whose shards on up to four ranks have more than 2^18 elements, and neighbours different gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(LONG, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = _Total.apply(self.weight)
        return x + total


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": Norm,
    "embedding": Lookup,
    "gain": Gain,
    "double": lambda: TwoDtypes(torch.float64),
    "half": lambda: TwoDtypes(torch.float16),
    "convolution": Convolution,
    "buffered": Buffered,
    "plain": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "scale": lambda: Scale(WIDTH),
    "single": lambda: Scale(1),
    "long": Long,
}

WITHOUT_BIAS = {
    "linear": "plain",
    "norm": "scale",
    "gain": "single",
    "convolution": "plain",
    "buffered": "scale",
}
"""For layers with biases, similar ones of one parameter."""

TIED_TO = {
    "linear": "matrix",
    "plain": "matrix",
    "embedding": "matrix",
    "norm": "row",
    "scale": "row",
    "long": "long",
}
"""Layers whose weights have the same name and shape can share them."""


class Layer(nn.Module):
    """A layer with its inputs and outputs rounded."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.layer = LAYERS[leaf.kind]()

    def forward(self, x: Tensor, moment: int) -> Tensor:
        if self.training and isinstance(self.layer, Buffered):
            self.layer.seen.clamp_(min=moment + 1)
        return snap(self.layer(snap(x)))


class Residual(nn.Module):
    """What a `Block` stands for."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        for number, place in enumerate(block.places):
            make = Layer if isinstance(place.item, Leaf) else Residual
            self.add_module(str(number), make(place.item))

    def forward(self, x: Tensor, moment: int) -> Any:
        y = x
        for place, module in zip(self.block.places, self.children(), strict=True):
            if not place.is_called(moment):
                continue
            for _ in range(place.calls):
                y = _call(place, module, x, moment)
                if place.used:
                    x = snap(x + y)
        return (x, y) if self.block.aside else x


def _call(place: Place, module: nn.Module, x: Tensor, moment: int) -> Tensor:
    if place.checkpoint:
        out = checkpoint(module, x, moment, use_reentrant=place.checkpoint == "reentrant")
    else:
        out = module(x, moment)
    return main_of(out)


def build(tree: Block, ties: tuple[Tie, ...] = ()) -> nn.Module:
    """The model of a recipe; the same parameters at each call."""
    model = Residual(tree)
    for first, second in ties:
        model.get_submodule(second).layer.weight = model.get_submodule(first).layer.weight
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator) / 2)
    for name, leaf in layers_of(tree):
        layer = model.get_submodule(name).layer
        frozen = {"": [], "bias": ["bias"], "all": ["weight", "bias"]}[leaf.frozen]
        for attribute in frozen:
            if getattr(layer, attribute, None) is not None:
                getattr(layer, attribute).requires_grad_(False)
    return model


def inputs(moment: int, rank: int) -> Tensor:
    """What a rank feeds the model in the forward pass of this number."""
    generator = torch.Generator().manual_seed(100 * moment + rank + 1)
    return torch.randint(-1, 2, (ROWS, WIDTH), generator=generator).float()


def main_of(output: Any) -> Tensor:
    """What a module returns, without what it returns aside."""
    main: Tensor = output[0] if isinstance(output, tuple) else output
    return main


def loss_of(output: Any) -> Tensor:
    """A whole number that tells every output from every other one; its gradients are powers of two, never zero."""
    output = main_of(output)
    weights = 2.0 ** (2 * torch.arange(output.numel())).view_as(output)
    return (output.float() * weights).sum()
