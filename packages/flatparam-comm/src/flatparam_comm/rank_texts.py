"""Sets of ranks in messages, which people read at any world size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

#: Ranks in a row that are written as a range, and ranks that say the same which become one entry.
_MANY: Final = 5
#: The entries of a message; the ranks of the others are counted.
_ENTRIES: Final = 8
#: What becomes of the verb if several ranks do it.
_PLURALS: Final = (
    ("waits ", "wait "),
    ("has ", "have "),
    ("is ", "are "),
    ("was ", "were "),
    ("trains ", "train "),
)


def told_ranks(ranks: Iterable[int]) -> str:
    """Return the ranks, in order: `[0, 1]`, or with ranges `[0-54, 56-63]`."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rank == rows[-1][-1] + 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    parts = [[f"{row[0]}-{row[-1]}"] if len(row) >= _MANY else map(str, row) for row in rows]
    return f"[{', '.join(part for row in parts for part in row)}]"


def said_by_ranks(said: Sequence[tuple[int, str]]) -> str:
    """Return the deeds of the ranks in words: `rank 0 waits for ...; rank 1 has finished`; equal ones are one entry."""
    return "; ".join(_entries(said))


def told_by_ranks(claim: str, said: Sequence[tuple[int, str]], advice: str = "") -> str:
    """Return a message about several ranks: a claim, the deeds of the ranks, and what to do.

    With few ranks it is one line, `claim: rank 0 ...; rank 1 ...; advice`. With many, each entry has its own line.
    """
    entries = _entries(said)
    if len(said) < _MANY:
        return "; ".join([f"{claim}: {'; '.join(entries)}", *([advice] if advice else [])])
    return "\n".join([f"{claim}:", *(f"  {entry}" for entry in entries), *([advice] if advice else [])])


def _entries(said: Sequence[tuple[int, str]]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, text in said:
        by_text.setdefault(text, []).append(rank)
    entries: list[tuple[int, str]] = []
    for text, ranks in by_text.items():
        if len(ranks) >= _MANY:
            plural = next(
                (text.replace(one, many, 1) for one, many in _PLURALS if text.startswith(one)), text
            )
            entries.append((ranks[0], f"ranks {told_ranks(ranks)[1:-1]} {plural}"))
        else:
            entries += [(rank, f"rank {rank} {text}") for rank in ranks]
    texts = [text for _, text in sorted(entries)]
    if len(texts) > _ENTRIES + 1:
        left_out = len(texts) - _ENTRIES
        texts[_ENTRIES:] = [f"{left_out} more, which differ from these"]
    return texts
