"""What a version costs, by learning rate and by encoding, in bytes and seconds: the table of docs/guides/publishing.md.

All encodings are of the same changes: the bits in bfloat16 after one step of AdamW, against those before. The first is
what is sent; the others were tried, and are here so that the choice can be made anew.
"""

from __future__ import annotations

import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import attrs
import pages
import torch
from torch import Tensor, nn

from flatparam_publish import Mailbox, Publisher, Receiver, publish
from flatparam_publish.encoding import bits_of, changes

from .job import batches, pretrained, train

__all__ = ["Row", "measured", "table"]

T = TypeVar("T")

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "guides" / "publishing.md"
PART = "table of costs"
FIRST_STEP: Final = 1000
HALF: Final = torch.bfloat16

Encoding = Callable[[Tensor, Tensor], int]
"""From the integers before and after to the bytes of the changes."""


def positions(old: Tensor, new: Tensor) -> int:
    """Gaps and directions, as they are sent."""
    where = (old != new).nonzero().view(-1)
    if not where.numel():
        return 0
    nbytes = sum(piece.numel() for piece in changes(0, 0, where, old[where], new[where]))
    return min(nbytes, 32 + new.nbytes)


def long_positions(old: Tensor, new: Tensor) -> int:
    """Two bytes for each position in its block of 65,536, and the two of the new value."""
    return 32 + 4 * -(-new.numel() // 65536) + 4 * int((old != new).sum())


def bit_planes(old: Tensor, new: Tensor) -> int:
    """A bit for each element, whether it changed; a bit for each that did, up or down; the other values as they are."""
    where = old != new
    changed = int(where.sum())
    others = int(((new - old).abs() > 1).sum())
    return 32 + -(-new.numel() // 8) + -(-changed // 8) + others * 3


def zipped(old: Tensor, new: Tensor) -> int:
    """The exclusive or of both, by zlib at its fastest."""
    return len(zlib.compress((old ^ new).numpy().tobytes(), 1))


ENCODINGS: Final[dict[str, Encoding]] = {
    "positions and directions": positions,
    "positions and values": long_positions,
    "bit-planes": bit_planes,
    "zlib of the difference": zipped,
}


@attrs.frozen
class Row:
    """What the last of some versions cost at one learning rate."""

    rate: float
    changed: float
    """The share of elements that changed."""
    times: tuple[float, ...]
    """How many times fewer bytes than all values each encoding takes."""
    sent: float
    """The same of what a publisher really sent, for all versions but the first."""
    seconds: float
    """For `publish()`."""
    dense_seconds: float
    """For a version with all values."""
    receive_seconds: float


def measured(size: str, pretraining: int, versions: int, rates: Sequence[float]) -> list[Row]:
    """Fine-tune the same model at each of `rates`, with a version after each step."""
    torch.set_num_threads(1)
    model = pretrained(size, pretraining)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    return [_measured(model, start, size, versions, rate) for rate in rates]


def _measured(model: nn.Module, start: dict[str, Tensor], size: str, versions: int, rate: float) -> Row:
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    found: list[tuple[float, ...]] = []
    spent: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        publisher = Publisher(model, Mailbox(folder), dtype=HALF)
        receiver = Receiver({}, Mailbox(folder))
        publisher.publish()
        receiver.receive()
        sent = dense = 0
        before = _bits(model)

        def each() -> None:
            nonlocal before, sent, dense
            published = _timed(spent, "publish", publisher.publish)
            _timed(spent, "receive", receiver.receive)
            _timed(spent, "dense", lambda: publish(model, Mailbox(f"{folder}/dense"), dtype=HALF))
            sent, dense = sent + published.nbytes, dense + published.dense_nbytes
            after = _bits(model)
            found.append(_shares(before, after))
            before = after

        train(model, optimizer, batches(size, 16), range(FIRST_STEP, FIRST_STEP + versions), each)
    changed, *times = found[-1]
    seconds = (spent["publish"], spent["dense"], spent["receive"])
    return Row(rate, changed, tuple(times), dense / sent, *seconds)


def _timed(spent: dict[str, float], what: str, action: Callable[[], T]) -> T:
    """What `action()` returns; the fastest of its times is kept."""
    start = time.perf_counter()
    result = action()
    spent[what] = min(spent.get(what, float("inf")), time.perf_counter() - start)
    return result


def _bits(model: nn.Module) -> list[Tensor]:
    return [bits_of(parameter.detach().to(HALF).view(-1)).clone() for parameter in model.parameters()]


def _shares(before: list[Tensor], after: list[Tensor]) -> tuple[float, ...]:
    """The share of changed elements, and how many times fewer bytes each encoding takes."""
    pairs = list(zip(before, after, strict=True))
    numel = sum(new.numel() for _, new in pairs)
    changed = sum(int((old != new).sum()) for old, new in pairs)
    times = (2 * numel / sum(encode(*pair) for pair in pairs) for encode in ENCODINGS.values())
    return (changed / numel, *times)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def table(rows: Sequence[Row]) -> str:
    """The rows as a table of the page."""
    heads = [
        "learning rate",
        "changed",
        *ENCODINGS,
        "sent, over all",
        "publish",
        "receive",
        "publish all values",
    ]
    lines = [heads]
    for row in rows:
        cells = [
            f"{row.rate:g}",
            f"{100 * row.changed:.2f} %",
            *(f"{times:.1f} ×" for times in row.times),
            f"{row.sent:.1f} ×",
            *(f"{1000 * each:.0f} ms" for each in (row.seconds, row.receive_seconds, row.dense_seconds)),
        ]
        lines.append(cells)
    return pages.table(lines, ["---:"])
