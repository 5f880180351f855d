"""The cells of the table in docs/guides/from-fsdp2.md; `nox -s clients` runs them, and writes the table of what they say."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.clients.cells import CELLS, SIDES, Cell, Server

if any(importlib.util.find_spec(name) is None for name in ("accelerate", "transformers", "peft")):
    pytest.skip("it takes accelerate, transformers and PEFT", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

NEEDS = {
    "trl": "trl",
    "lightning": "lightning",
    "fabric": "lightning",
    "diffusers": "diffusers",
    "--qlora": "bitsandbytes",
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    """One for each side."""
    started = {side: Server.start(side) for side in SIDES}
    yield started
    for each in started.values():
        each.end()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell, servers: dict[str, Server], tmp_path: Path) -> None:
    """Losses, norms and tokens have FSDP2's bits, and each side resumes exactly what itself and the other have saved."""
    for part, project in NEEDS.items():
        if part in cell.program or part in cell.options:
            pytest.importorskip(project)
    said = cell.decide(servers, tmp_path)
    told = os.environ.get("FLATPARAM_CLIENT_CELLS")
    if told:
        with Path(told).open("a", encoding="utf-8") as file:
            file.write(json.dumps([str(cell), said]) + "\n")
