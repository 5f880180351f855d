"""How many graphs torch.compile makes of a sharded model, and how often it breaks off, beside torch's own libraries."""

from __future__ import annotations

from typing import Final

import pytest

from integration_tests.simulated.compiled import BACKENDS, LIBRARIES, WAYS, Counts, Row, counted

pytestmark = [pytest.mark.processes, pytest.mark.long]

OURS: Final = {"the model": (1, 1), "each block, wrapped": (1, 0), "each block, before it is wrapped": (1, 0)}
"""Graphs and graph breaks, whatever the number of blocks: all blocks share one graph."""

ROWS: Final = [
    *(Row(way, library) for way in WAYS for library in LIBRARIES),
    *(Row(way, library, blocks=4) for way in WAYS for library in LIBRARIES[:2]),
    *(Row(way, "flatparam", backend) for way in WAYS for backend in (*BACKENDS[1:], "")),
]


@pytest.fixture(scope="module")
def counts() -> dict[Row, Counts]:
    """Those of every row."""
    return dict(zip(ROWS, counted(ROWS), strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_graphs_and_breaks(counts: dict[Row, Counts], way: str) -> None:
    """One graph serves all blocks, and only a whole model that is compiled has a break, the one around its root."""
    for row, count in counts.items():
        if row.way == way and row.library.startswith("flatparam") and row.backend:
            assert (count.graphs, count.breaks) == OURS[way], (row, count.reasons)


@pytest.mark.parametrize("way", WAYS)
def test_no_more_of_them_than_of_torchs_own(counts: dict[Row, Counts], way: str) -> None:
    """Neither FSDP1 nor FSDP2 has fewer graphs or fewer breaks."""
    ours = counts[Row(way, "flatparam")]
    for library in ("FSDP1", "FSDP2"):
        theirs = counts[Row(way, library)]
        assert (ours.graphs, ours.breaks) <= (theirs.graphs, theirs.breaks)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_losses_are_the_same(counts: dict[Row, Counts], way: str) -> None:
    """With backends that generate no code, three steps have the losses of an uncompiled model, bit for bit."""
    expected = counts[Row(way, "flatparam", "")].losses
    for row, count in counts.items():
        if row.way == way and row.blocks == 3:
            assert count.losses == expected, row
