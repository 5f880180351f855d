"""The main job with Muon beside AdamW, on 1, 2 and 4 ranks: a picture of the losses, and how far ranks are apart.

    python tools/loss_curves.py                  # train six times, and write the guide's picture and table
    python tools/loss_curves.py --keep FOLDER    # leave the runs there, and use those that are there already

Each run trains the tiny model on the standard library's source, 200 steps from the same seed on the same batches.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import pages

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "guides" / "optimizers.md"
PICTURE: Final = ROOT / "docs" / "pictures" / "muon.svg"
PART = ("<!-- losses: tools/loss_curves.py -->", "<!-- end of losses -->")
RANKS: Final = (1, 2, 4)
COMMON: Final = (
    "--size",
    "tiny",
    "--steps",
    "200",
    "--eval-every",
    "20",
    "--threads",
    "1",
    "--sample-bytes",
    "0",
)
OPTIMIZERS: Final[Mapping[str, tuple[str, ...]]] = {
    "AdamW": ("--optimizer", "adamw"),
    "Muon": ("--optimizer", "muon", "--lr", "0.02"),
}
COLOURS: Final = {"AdamW": "#1f77b4", "Muon": "#d62728"}
WIDTH, HEIGHT, EDGE = 640, 360, 48

Curve: TypeAlias = "list[tuple[int, float]]"
"""Steps, each with its held-out loss in bits a byte."""


def trained(name: str, ranks: int, folder: Path) -> Curve:
    """The held-out losses of one run, which is made if `folder` does not have it."""
    out = folder / f"{name}-{ranks}"
    metrics = out / "metrics.jsonl"
    if not metrics.exists():
        command = [sys.executable, str(ROOT / "tools" / "train.py"), *COMMON, *OPTIMIZERS[name]]
        subprocess.run([*command, "--fresh", "--ranks", str(ranks), "--out", str(out)], check=True)
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [(each["step"], each["held_out_bits_per_byte"]) for each in records if "held_out_loss" in each]


def table(curves: Mapping[str, Mapping[int, Curve]]) -> str:
    """The losses at the end, and how far apart those of different numbers of ranks ever are, in Markdown."""
    heads = (f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS)
    lines = [["", *heads, "farthest apart at any evaluation"]]
    for name, runs in curves.items():
        apart = max(
            abs(one[1] - other[1])
            for first, second in itertools.combinations(runs.values(), 2)
            for one, other in zip(first, second, strict=True)
        )
        lines.append([name, *(f"{runs[ranks][-1][1]:.4f}" for ranks in RANKS), f"{apart:.1g}"])
    return pages.table(lines, ("---", "--:"))


def picture(curves: Mapping[str, Mapping[int, Curve]]) -> str:
    """The curves as SVG, in which those of 1, 2 and 4 ranks lie on each other: a line, dashes and dots."""
    every = [value for runs in curves.values() for curve in runs.values() for _, value in curve]
    steps = next(iter(next(iter(curves.values())).values()))[-1][0]
    low, high = int(min(every)), int(max(every)) + 1

    def at(step: float, value: float) -> tuple[float, float]:
        x = EDGE + (WIDTH - 2 * EDGE) * step / steps
        return x, HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in range(low, high + 1):
        (x, y), (end, _) = at(0, value), at(steps, value)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for step in range(0, steps + 1, 40):
        x, y = at(step, low)
        parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{WIDTH / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    parts.append(f'<text x="{EDGE}" y="24">held-out loss, bits a byte</text>')
    for number, (name, runs) in enumerate(curves.items()):
        for ranks, dashes, width in zip(RANKS, ("", "9 6", "1 7"), (1.5, 3.0, 5.0), strict=True):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in itertools.starmap(at, runs[ranks]))
            style = f'fill="none" stroke="{COLOURS[name]}" stroke-width="{width}" stroke-dasharray="{dashes}"'
            parts.append(f'<polyline points="{points}" {style} stroke-linecap="round"/>')
        y = 24 + 18 * number
        told = f"{name} on 1 rank (line), 2 (dashes) and 4 (dots)"
        parts.append(f'<text x="{WIDTH - EDGE}" y="{y}" text-anchor="end" fill="{COLOURS[name]}">{told}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, draw and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--keep", type=Path, help="the folder of the runs; by default one that is removed")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        curves = {name: {ranks: trained(name, ranks, folder) for ranks in RANKS} for name in OPTIMIZERS}
    found = table(curves)
    print(found)
    PICTURE.write_text(picture(curves), encoding="utf-8")
    pages.fill(PAGE, {PART: found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
