"""The table of QLoRA in docs/guides/client-peft.md, measured: `python -m integration_tests.clients.page`.

With `--print` the table is only printed. Every row trains the model of `quantised` on two ranks, in processes over gloo.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import torch

from flatparam_comm import RankError
from flatparam_comm.testing import run_processes
from tools import pages

from . import quantised
from .quantised import RANKS, trained, whole

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "guides" / "client-peft.md"

SAVED: Final = {"modules_to_save": ["embed_tokens", "norm"]}
IN_FP32: Final = {"storage": torch.float32}
ORIGINALS: Final = {"use_orig_params": True}
ROWS: Final[list[tuple[str, str, dict[str, Any], dict[str, Any]]]] = [
    ("`FullyShardedDataParallel`", "ours", {}, {}),
    ("the same, `use_orig_params=True`", "ours", {}, ORIGINALS),
    ("the same, embeddings and a norm trained whole", "ours", SAVED, ORIGINALS),
    ("the same, DoRA", "ours", {"use_dora": True}, ORIGINALS),
    ("`fully_shard`", "ours_in_place", {}, {}),
    ("the same, DoRA", "ours_in_place", {"use_dora": True}, {}),
    ("torch's FSDP1", "torchs", {}, ORIGINALS),
    ("torch's FSDP2", "torchs_in_place", {}, {}),
    ("torch's FSDP1, `quant_storage=torch.float32`", "torchs", IN_FP32, ORIGINALS),
    ("torch's FSDP2, `quant_storage=torch.float32`", "torchs_in_place", IN_FP32, {}),
    ("the same, DoRA", "torchs_in_place", {**IN_FP32, "use_dora": True}, {}),
]


def row(shard: str, adapter: dict[str, Any], options: dict[str, Any]) -> tuple[str, str]:
    """What the losses of two ranks are, and how many bytes of quantised weights a rank keeps."""
    expected = quantised.losses(whole(**adapter))
    try:
        found = run_processes(RANKS, trained, getattr(quantised, shard), adapter, options)
    except RankError as error:
        return f"`{str(error).splitlines()[0]}`", ""
    if isinstance(found[0], str):
        return f"`{found[0].splitlines()[0].rstrip(':')}`", ""
    pairs = [
        (mine, of_ranks[rank])
        for rank, (losses, _) in enumerate(found)
        for mine, of_ranks in zip(losses, expected, strict=True)
    ]
    total = sum(each.nbytes for each in whole(**adapter).parameters() if not _is_number(each, adapter))
    nbytes = f"{found[0][1]:,} of {total:,}" if not adapter.get("storage") else ""
    if all(mine == wanted for mine, wanted in pairs):
        return "those of one process, bit for bit", nbytes
    most = max(abs(mine - wanted) for mine, wanted in pairs)
    return f"up to {most:.1e} away from those of one process; the first is {pairs[0][0]:.4f}", nbytes


def _is_number(parameter: torch.Tensor, adapter: dict[str, Any]) -> bool:
    return parameter.dtype != adapter.get("storage", torch.uint8)


def table() -> str:
    """The table, in Markdown."""
    lines = [["on two ranks", "losses of four steps", "quantised bytes on a rank"]]
    for name, *what in ROWS:
        lines.append([name, *row(*what)])
        sys.stderr.write(" | ".join(lines[-1]) + "\n")
    return pages.table(lines, ["---"])


def main(arguments: list[str]) -> None:
    """Measure, and write the page or print."""
    found = table()
    if "--print" in arguments:
        sys.stdout.write(found + "\n")
        return
    pages.fill(PAGE, {"table of QLoRA": found}, gap="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
