"""The picture of a device: a step and its memory over a link, beside peers, as the first page shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.plots import OURS, OURS_AT_REST, PEER, PEER_AT_REST, STYLE, colours, digest, write_values

SHOWN: Final = "link, 1.0"
"""The measurement of the picture."""


def draw(results: Mapping[str, Any], target: Path) -> list[str]:
    """Draw the picture of a device into `target`, if there is something to show; a sentence of what was done."""
    shown = what_is_shown(results)
    if not shown:
        return []
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return ["no picture: matplotlib is not installed"]
    with rc_context(STYLE):
        figure = Figure(figsize=(8.2, 0.9 + 0.24 * len(shown)), layout="constrained")
        time, memory = figure.subplots(1, 2)
        names, rows = list(shown), list(shown.values())
        time.barh(names, [row["ms"] for row in rows], color=colours(names, OURS, PEER))
        write_values(time, [f"{row['ms']:.1f}" for row in rows], [row["ms"] for row in rows])
        time.set_title(f"ms a step, {results['device']['name']}", fontsize=10)
        reserved = [row["reserved"] / 1e3 for row in rows]
        memory.barh(names, reserved, color=colours(names, OURS, PEER))
        memory.barh(
            names, [row["allocated"] / 1e3 for row in rows], color=colours(names, OURS_AT_REST, PEER_AT_REST)
        )
        write_values(memory, [f"{each:.2f}" for each in reserved], reserved)
        memory.set_title("GB reserved at the peak; darker: in tensors", fontsize=10)
        memory.set_yticklabels([])
        description = f"Drawn by `python tools/gpu` from {target.stem}.json: results {digest(shown)}"
        figure.savefig(target, transparent=True, metadata={"Date": None, "Description": description})
    return [f"drew {target}"]


def what_is_shown(results: Mapping[str, Any]) -> dict[str, Any]:
    """The rows of the picture that have figures."""
    rows = results["measurements"].get(SHOWN, {}).get("rows", {})
    wanted = ("ms", "allocated", "reserved")
    return {
        name: {key: row[key] for key in wanted}
        for name, row in rows.items()
        if all(row.get(key) is not None for key in wanted)
    }
