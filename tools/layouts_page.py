"""The tables of padding: `python tools/layouts_page.py` plans ten public models anew, and writes docs/layouts.md.

The shapes are written from the models' public configurations; nothing is downloaded, and no tensor is made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import attrs
import torch
from pages import fill, table

from flatparam_core import (
    ALIGNMENT_NBYTES,
    ELEMENT,
    ROW,
    WHOLE,
    FlatLayout,
    LayoutRule,
    ParamSpec,
    block_of,
)
from flatparam_core.geometry.placing import fewest_elements

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "layouts.md"

Shapes: TypeAlias = "tuple[tuple[int, ...], ...]"

WORLD_SIZES: Final = (2, 8, 64, 256, 1024)
RULES: Final = {
    "Blocks of 32": block_of(32),
    "Blocks of 128": block_of(128),
    "Rows": ROW,
    "Whole matrices": WHOLE,
}


@attrs.frozen
class Model:
    """The units of a model: how often each occurs, and the shapes of its parameters."""

    units: tuple[tuple[int, Shapes], ...]

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(count * sum(map(math.prod, shapes)) for count, shapes in self.units)


def biased(*shapes: tuple[int, int]) -> Shapes:
    """Weights, each with its bias."""
    return tuple(each for out, width in shapes for each in ((out, width), (out,)))


def gated(width: int, hidden: int) -> Shapes:
    """A perceptron with a gate."""
    return (hidden, width), (hidden, width), (width, hidden)


def grouped(width: int, queries: int, keys: int) -> Shapes:
    """Attention whose keys and values have fewer heads than its queries."""
    return (queries, width), (keys, width), (keys, width), (width, queries)


def latent(width: int, heads: int) -> Shapes:
    """DeepSeek's attention, with its norms: ranks of 1,536 and 512, heads of 128 and 64 beside."""
    queries = ((1536, width), (1536,), (heads * 192, 1536))
    return *queries, (576, width), (512,), (heads * 256, 512), (width, heads * 128)


def llama(width: int, hidden: int, keys: int, layers: int, vocabulary: int) -> Model:
    """A model of Llama's kind, with a head of its own."""
    block = (*grouped(width, width, keys), *gated(width, hidden), (width,), (width,))
    return Model(((layers, block), (1, ((vocabulary, width), (width,), (vocabulary, width)))))


def sparse(width: int, heads: int, experts: int, dense: int, layers: int, vocabulary: int) -> Model:
    """A model of DeepSeek-V3's kind, with experts of 2,048, one of them shared; its first blocks are dense."""
    norms = ((width,), (width,))
    mixture = ((experts, width), (experts,), *gated(width, 2048) * (experts + 1))
    return Model(
        (
            (layers - dense, (*latent(width, heads), *mixture, *norms)),
            (dense, (*latent(width, heads), *gated(width, 18432), *norms)),
            (1, ((vocabulary, width), (width,), (vocabulary, width))),
        )
    )


def encoder(width: int, layers: int, root: Shapes) -> Model:
    """A model of BERT's kind."""
    square = biased(*((width, width),) * 4, (4 * width, width), (width, 4 * width))
    return Model(((layers, (*square, *((width,),) * 4)), (1, root)))


def gpt2() -> Model:
    """GPT-2, whose weights are stored as (in, out)."""
    weights = ((768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,))
    root = ((50257, 768), (1024, 768), (768,), (768,))
    return Model(((12, (*weights, *((768,),) * 4)), (1, root)))


def qwen2() -> Model:
    """Qwen2-7B, with biases in attention."""
    attention = (*biased((3584, 3584), (512, 3584), (512, 3584)), (3584, 3584))
    block = (*attention, *gated(3584, 18944), (3584,), (3584,))
    return Model(((28, block), (1, ((152064, 3584), (3584,), (152064, 3584)))))


def mixtral() -> Model:
    """Mixtral-8x7B."""
    block = (*grouped(4096, 4096, 1024), (8, 4096), *gated(4096, 14336) * 8, (4096,), (4096,))
    return Model(((32, block), (1, ((32000, 4096), (4096,), (32000, 4096)))))


def gemma() -> Model:
    """Gemma-7B, with a tied head."""
    block = (*grouped(3072, 4096, 4096), *gated(3072, 24576), (3072,), (3072,))
    return Model(((28, block), (1, ((256000, 3072), (3072,)))))


BERT_ROOT: Final = (
    *((30522, 1024), (512, 1024), (2, 1024), (1024,), (1024,)),
    *biased((1024, 1024)),
)
VIT_ROOT: Final = (
    *((1, 1, 1024), (1, 197, 1024), (1024, 3, 16, 16), (1024,), (1024,), (1024,)),
    *biased((1000, 1024)),
)
MODELS: Final = {
    "GPT-2": gpt2(),
    "BERT-large": encoder(1024, 24, BERT_ROOT),
    "ViT-L/16": encoder(1024, 24, VIT_ROOT),
    "Gemma-7B": gemma(),
    "Qwen2-7B": qwen2(),
    "Llama-3-8B": llama(4096, 14336, 1024, 32, 128256),
    "Llama-3-70B": llama(8192, 28672, 1024, 80, 128256),
    "Mixtral-8x7B": mixtral(),
    "DeepSeek-V3": sparse(7168, 128, 256, 3, 61, 129280),
    "Kimi-K2": sparse(7168, 64, 384, 1, 61, 163840),
}


def specs_of(shapes: Shapes, rule: LayoutRule) -> list[ParamSpec]:
    """The parameters of a unit; of whole tensors, only matrices are kept whole, as Muon needs them."""
    return [
        ParamSpec(f"p{number}", shape, torch.float32, rule=ELEMENT if rule == WHOLE and len(shape) < 2 else rule)
        for number, shape in enumerate(shapes)
    ]


def held(layout: FlatLayout) -> list[int]:
    """The elements of parameters on each rank."""
    found = [0] * layout.world_size
    for index in range(len(layout.slots)):
        for rank in layout.ranks_of(index):
            found[rank] += layout.fragment(index, rank).in_param.numel
    return found


@attrs.frozen
class Cost:
    """The cost of a rule for a model at a world size, each beside what no padding would be, as a fraction."""

    padding: float
    bound: float
    """The least padding that any order of the parameters could have."""
    imbalance: float
    """What the fullest rank has more than the mean."""
    rows_alone: float
    """The padding if each parameter is cut in rows by itself, as FSDP2 does."""


def cost(model: Model, rule: LayoutRule, ranks: int) -> Cost:
    """Plan every unit of the model."""
    numel = bound = alone = 0
    on_rank = [0] * ranks
    for count, shapes in model.units:
        specs = specs_of(shapes, rule)
        layout = FlatLayout.plan(specs, world_size=ranks, alignment_nbytes=ALIGNMENT_NBYTES.value)
        numel += count * layout.numel
        bound += count * ranks * fewest_elements(specs, ranks)
        alone += count * sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in shapes)
        on_rank = [total + count * own for total, own in zip(on_rank, held(layout), strict=True)]
    whole = model.numel
    return Cost(numel / whole - 1, bound / whole - 1, max(on_rank) * ranks / whole - 1, alone / whole - 1)


def shown(fraction: float) -> str:
    """A fraction in words of a table."""
    if fraction >= 1:
        return f"{fraction + 1:.3g} x"
    return f"{100 * fraction:.2f} %" if fraction >= 0.00005 else "0"


def cells(rule: LayoutRule, each: Cost) -> str:
    """What a table says of one plan."""
    if rule == ROW:
        return f"{shown(each.padding)}, {shown(each.imbalance)} ({shown(each.rows_alone)})"
    if rule == WHOLE:
        return f"{shown(each.padding)}, {shown(each.imbalance)} ({shown(each.bound)})"
    return f"{shown(each.padding)} ({shown(each.bound)})"


def row(name: str, rule: LayoutRule) -> list[str]:
    """The cells of a model in a table."""
    return [name, *(cells(rule, cost(MODELS[name], rule, ranks)) for ranks in WORLD_SIZES)]


def tables() -> Iterator[str]:
    """The tables of all rules, each with its title."""
    head = ["model", *(f"{ranks:,} ranks" for ranks in WORLD_SIZES)]
    for title, rule in RULES.items():
        yield f"### {title}\n\n" + table([head, *(row(name, rule) for name in MODELS)], ("---", "--:"))


def seconds_to_plan(name: str, rule: LayoutRule, ranks: int) -> float:
    """The time that planning each kind of unit of a model takes, once, as the wrapper does."""
    planned = [specs_of(shapes, rule) for _, shapes in MODELS[name].units]
    start = time.perf_counter()
    for specs in planned:
        FlatLayout.plan(specs, world_size=ranks, alignment_nbytes=ALIGNMENT_NBYTES.value)
    return time.perf_counter() - start


def main() -> None:
    """Write the page, and say how long planning takes."""
    fill(PAGE, {"tables": "\n\n".join(tables())})
    for name in ("Llama-3-70B", "Kimi-K2"):
        worst = max(seconds_to_plan(name, rule, ranks) for rule in RULES.values() for ranks in WORLD_SIZES)
        print(f"{name}: planning its units takes at most {1000 * worst:.0f} ms")


if __name__ == "__main__":
    main()
