"""The page of a device, and the list of devices: nothing in them is edited by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.host import lines
from bench.plots import OURS, OURS_AT_REST, PEER, PEER_AT_REST, STYLE, colours, digest, write_values
from pages import between, table, wrapped

NONE: Final = "None yet."

Rows = Mapping[str, Mapping[str, Any]]


def page(results: Mapping[str, Any]) -> str:
    """The page of a device."""
    return wrapped("\n\n".join(_parts(results))) + "\n"


def write(file: Path) -> list[str]:
    """Write the page beside the results in `file`, and the list in the README there; a sentence for each."""
    target = file.with_suffix(".md")
    results = json.loads(file.read_text(encoding="utf-8"))
    told = [f"wrote {target}", *draw(results, file.with_suffix(".svg"))]
    target.write_text(page(results), encoding="utf-8")
    readme = file.parent / "README.md"
    if not readme.exists():
        return told
    readme.write_text(with_devices(readme.read_text(encoding="utf-8"), file.parent), encoding="utf-8")
    return [*told, f"wrote the list in {readme}"]


def with_devices(text: str, folder: Path) -> str:
    """The README with a list of the devices of which there are results in the folder.

    Raises:
        LookupError: where it has no place for the list.
    """
    lines = []
    for file in sorted(folder.glob("*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        lines.append(f"* [{results['device']['name']}]({file.stem}.md)")
        if file.with_suffix(".svg").exists():
            lines.append(f"\n  ![a step and its memory on a {results['device']['name']}]({file.stem}.svg)\n")
    return between(text, "devices", "\n".join(lines) or NONE)


def _parts(results: Mapping[str, Any]) -> Iterator[str]:
    device = results["device"]
    yield f"# {device['name']}"
    gigabytes = f", {device['bytes'] / 1e9:.0f} GB of memory each" if device["bytes"] else ""
    yield (
        "Written by `python tools/gpu`, which `nox -s gpu` and `tools/gpu/offline.sh` run. The machine has "
        f"{device['count']} of these devices{gigabytes}; torch's backend for them is {device['backend']}. [What is "
        "measured](README.md)."
    )
    for name, entry in results["measurements"].items():
        yield f"## {name}"
        if "what" in entry:
            yield entry["what"]
        yield from _findings(name, entry)
        yield f"`{entry['command']}`" + _provenance(entry)


def _findings(name: str, entry: Mapping[str, Any]) -> Iterator[str]:
    if "reason" in entry:
        yield f"Not measured: {entry['reason']}."
    elif "error" in entry:
        yield f"Failed: {entry['error']}"
    else:
        yield from _RENDER[name.split(",")[0]](entry)


def _provenance(entry: Mapping[str, Any]) -> str:
    made = entry["made"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    tiny = ", with models so small that times say nothing" if made["tiny"] else ""
    seconds = f", {entry['seconds']:.0f} s" if "seconds" in entry else ""
    return f", {made['date']}, {made['where']}{tiny}{seconds}; {versions}; driver {made['driver']}."


def _rows(heads: list[str], rows: Rows, cells: Callable[[Mapping[str, Any]], list[str]]) -> str:
    """A table; who has failed says why instead of figures."""
    lines = [["", *heads]]
    for name, row in rows.items():
        failed = [f"failed: {row.get('error')}".replace("|", "\\|"), *[""] * (len(heads) - 1)]
        lines.append([name, *(failed if "error" in row else cells(row))])
    return table(lines)


def _tests(entry: Mapping[str, Any]) -> Iterator[str]:
    yield f"{entry['passed']} passed, {entry['failed']} failed, {entry['skipped']} skipped."
    if entry["failures"]:
        yield "\n".join(f"* `{name}`" for name in entry["failures"])


def _losses(entry: Mapping[str, Any]) -> Iterator[str]:
    def cells(row: Mapping[str, Any]) -> list[str]:
        difference = row["difference"]
        off = "" if difference is None else f"{difference:.2g}"
        return [*(f"{loss:.6f}" for loss in row["losses"]), "yes" if row["equal"] else "**no**", off]

    yield "As they have to be." if entry["same"] else "**Not as they have to be.**"
    steps = max((len(row.get("losses", ())) for row in entry["rows"].values()), default=0)
    heads = [*(f"loss {step + 1}" for step in range(steps)), f"equal to {entry['reference']}", "difference"]
    yield _rows(heads, entry["rows"], cells)


def _memory(entry: Mapping[str, Any]) -> Iterator[str]:
    def cells(row: Mapping[str, Any]) -> list[str]:
        kept = row.get("keeps", False)
        said = entry["formulas"]["SHARD_GRAD_OP" if kept else "FULL_SHARD"]
        of_parts = [f"{row[part] / 1e6:.1f} ({row[part] / said[part]:.2f})" for part in ("rest", "forward", "backward")]
        held = [row.get("reserved"), row.get("retries")]
        return [*of_parts, *("" if each is None else f"{each:.0f}" for each in held)]

    yield f"{entry['workload']}. Megabytes, and in parentheses how often the formula's."
    formulas = {
        f"formula of {name}": [f"{said[part] / 1e6:.1f}" for part in ("rest", "forward", "backward")]
        for name, said in entry["formulas"].items()
    }
    heads = ["at rest", "peak of the forward pass", "peak of the backward pass", "reserved", "retries"]
    made = _rows(heads, entry["rows"], cells)
    yield "\n".join([made, *(f"| {name} | {' | '.join(said)} | | |" for name, said in formulas.items())])


def _host(entry: Mapping[str, Any]) -> Iterator[str]:
    yield table(lines(entry["rows"]))


def _columns(entry: Mapping[str, Any]) -> Iterator[str]:
    """What says itself which figures of a row are shown, under which heads."""

    def shown(value: Any) -> str:
        if isinstance(value, bool):
            return "yes" if value else "**no**"
        if isinstance(value, str):
            return value.replace("|", "\\|")
        return "" if value is None else f"{value:.4g}"

    if "workload" in entry:
        yield f"{entry['workload']}."
    if "note" in entry:
        yield entry["note"]
    columns = entry["columns"]
    yield _rows(list(columns.values()), entry["rows"], lambda row: [shown(row.get(key)) for key in columns])


_RENDER: Final[dict[str, Callable[[Mapping[str, Any]], Iterator[str]]]] = {
    **dict.fromkeys(("backend", "alignment", "link", "compiled", "capture", "steps", "others"), _columns),
    "tests": _tests,
    "losses": _losses,
    "memory": _memory,
    "host": _host,
}


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
        memory.barh(names, [row["allocated"] / 1e3 for row in rows], color=colours(names, OURS_AT_REST, PEER_AT_REST))
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
