"""docs/performance.md from the results: the text between two markers is replaced, and pictures are drawn beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from pages import fill, table, wrapped

from .absent import PLAIN
from .figures import Row, cells
from .host import lines as lines_of_host

SECTIONS: Final = ("steps", "host", "instructions", "world size", "growth", "optimizer", "profile")


def write(results: Mapping[str, Any], page: Path) -> list[str]:
    """Fill the page's sections of which there are results; returns what was done, a sentence for each."""
    fill(
        page,
        {each: wrapped("\n\n".join(_RENDER[each](results[each]))) for each in SECTIONS if each in results},
    )
    if "steps" not in results:
        return [f"wrote {page}"]
    from .plots import draw

    return [f"wrote {page}", *draw(results, page.parent)]


def _provenance(entry: Mapping[str, Any]) -> str:
    machine = entry["machine"]
    load = f", load average {entry['load']:.1f} when it ended" if "load" in entry else ""
    return f"{machine['date']}, {machine['cpus']} CPUs, torch {machine['torch']}, Python {machine['python']}{load}."


def _steps(section: Mapping[str, Any]) -> Iterator[str]:
    yield "![step and CPU time over the sharded floor](performance-steps.svg)"
    for title, entry in section.items():
        rows: Mapping[str, Row] = entry["rows"]
        first = next(iter(rows.values()))
        yield f"### {title}"
        yield (
            f"{entry['what']}. {first['rounds']} rounds; the floor takes {1e3 * first['step']:.0f} ms. "
            + _provenance(entry)
        )
        yield table(cells(rows))


def _host(section: Mapping[str, Any]) -> Iterator[str]:
    for title, entry in section.items():
        yield f"### {title}"
        yield table(lines_of_host(entry["rows"]))
        yield _provenance(entry)


def _instructions(section: Mapping[str, Any]) -> Iterator[str]:
    for title, entry in section.items():
        rows = entry["rows"]
        counts = list(next(iter(rows.values())))
        yield f"{title}. {_provenance(entry)}"
        parts = ("pass", "update", "build")
        for chosen in [parts] if len(counts) == 2 else [(part,) for part in parts]:
            heads = [f"{part}, {count} parameters" for count in counts for part in chosen]
            lines = [["millions of instructions per unit, over the plain model", *heads]]
            for name, by in rows.items():
                figures = (by[count][part] / 1e6 for count in counts for part in chosen)
                lines.append([name, *(f"{figure:.2f}" for figure in figures)])
            yield table(lines)


def _world_size(section: Mapping[str, Any]) -> Iterator[str]:
    sizes = list(section)
    names = list(section[sizes[0]]["rows"])
    for part in ("pass", "build"):
        lines = [[f"{part}: millions of instructions per unit of 4, over the plain model", *sizes]]
        for name in names:
            lines.append([name, *(f"{section[size]['rows'][name]['4'][part] / 1e6:.2f}" for size in sizes)])
        yield table(lines)
    yield _provenance(section[sizes[-1]])


def _growth(section: Mapping[str, Any]) -> Iterator[str]:
    yield "![construction and passes](performance-growth.svg)"
    for title, entry in section.items():
        rows = entry["rows"]
        names = list(next(iter(rows.values())))
        yield f"### {title}"
        for part, unit, scale in (
            ("build", "s", 1.0),
            ("build calls", "thousands", 1e-3),
            ("pass", "ms", 1e3),
            ("calls", "thousands", 1e-3),
        ):
            lines = [[f"{part}, {unit}", *rows]]
            for name in names:
                lines.append([name, *(f"{scale * by[name][part]:.3g}" for by in rows.values())])
            yield table(lines)
        yield _provenance(entry)


def _optimizer(section: Mapping[str, Any]) -> Iterator[str]:
    for title, entry in section.items():
        rows = entry["rows"]
        lines = [["", *(head for when in rows[PLAIN] for head in (f"{when}, ms (quartiles)", "x plain"))]]
        for name, found in rows.items():
            cells = []
            for when, (low, middle, high) in found.items():
                cells += [f"{middle:.2f} ({low:.2f}-{high:.2f})", f"{middle / rows[PLAIN][when][1]:.3f}"]
            lines.append([name, *cells])
        yield f"{title}. {_provenance(entry)}"
        yield table(lines)


def _profile(section: Mapping[str, Any]) -> Iterator[str]:
    for title, entry in section.items():
        rows = entry["rows"]
        owners = dict.fromkeys(owner for by in rows.values() for owner in by)
        yield f"### {title}: milliseconds of a step"
        lines = [["", *rows]]
        for owner in sorted(owners, key=lambda owner: -max(by.get(owner, 0.0) for by in rows.values())):
            lines.append([owner, *(f"{by.get(owner, 0.0):.1f}" for by in rows.values())])
        lines.append(["all", *(f"{sum(by.values()):.1f}" for by in rows.values())])
        yield table(lines)
        yield _provenance(entry)


_RENDER: Final = {
    "steps": _steps,
    "host": _host,
    "instructions": _instructions,
    "world size": _world_size,
    "growth": _growth,
    "optimizer": _optimizer,
    "profile": _profile,
}
