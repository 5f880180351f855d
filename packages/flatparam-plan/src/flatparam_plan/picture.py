"""Steps as a picture, with lanes of pieces and a curve of memory, and as a trace for Perfetto; numbers in columns."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, Final, final
from xml.sax.saxutils import escape

import attrs

from flatparam_files.command import scaled, shown_nbytes


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def shown_flops(flops: float) -> str:
    """Return a number of floating-point operations: `1.23 TFLOP`."""
    return scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def shown_seconds(seconds: float) -> str:
    """Return a time: `1.23 ms`."""
    return scaled(seconds * 1e6, ("µs", "ms", "s")) if seconds < 100 else f"{seconds:,.0f} s"


PHASE, COMPUTING, COMMUNICATION, WAITING = "phase", "computing", "communication", "waiting"
"""The lanes."""
FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer"
"""The phases of a step."""

_LEFT: Final = 130
_WIDTH: Final = 1000
_BESIDE: Final[dict[str, Any]] = {"x": _LEFT - 8, "text_anchor": "end"}
"""Where the names of lanes are."""
_LANE: Final = 26
_CURVE: Final = 110
_AXIS: Final = 34
_LINE: Final = "by the formula"
"""The name of the counter, in a trace, that stays at a curve's line."""
_LEGEND: Final = 24
"""The units that a legend names at most."""
_GREYS: Final = {
    "(root)": "#8a8a8a",
    "": "#8a8a8a",
    FORWARD: "#cfd8dc",
    BACKWARD: "#90a4ae",
    STEP: "#546e7a",
    "clipping": "#78909c",
}


@final
@attrs.frozen
class Piece:
    """Something in a lane, from a beginning to an end, in seconds; pieces of one unit have one colour."""

    lane: str
    unit: str
    name: str
    begin: float
    end: float


@final
@attrs.frozen
class Curve:
    """Bytes over time, and a line that they are to reach."""

    name: str
    points: tuple[tuple[float, int], ...]
    line: int


@final
@attrs.frozen(eq=False)
class Picture:
    """Lanes of pieces, and a curve of memory. `lanes` of several ranks have the rank in their names."""

    title: str
    pieces: Sequence[Piece]
    curve: Curve | None = None

    @property
    def begin(self) -> float:
        """Return the first beginning: what a program does before it is no part of the picture."""
        return min((piece.begin for piece in self.pieces), default=0.0)

    @property
    def length(self) -> float:
        """Return the time from the first beginning to the last end."""
        return max((piece.end for piece in self.pieces), default=0.0) - self.begin or 1e-9

    @property
    def lanes(self) -> list[str]:
        """The names of the lanes, in the order of their first pieces."""
        return list(dict.fromkeys(piece.lane for piece in self.pieces))

    @property
    def steps(self) -> list[float]:
        """Return when steps begin: with the forward pass after an optimizer's step, or after a backward pass."""
        phases = sorted((each for each in self.pieces if each.lane == PHASE), key=lambda each: each.begin)
        ends = STEP if any(piece.unit == STEP for piece in phases) else BACKWARD
        pairs = itertools.pairwise(phases)
        after = [piece.begin for before, piece in pairs if before.unit == ends and piece.unit == FORWARD]
        return [self.begin, *after] if phases else []

    def after_first_step(self) -> Picture:
        """Return the picture without its first step, in which memory and much else is made; itself, if it has one."""
        if len(steps := self.steps) < 2:
            return self
        pieces = [piece for piece in self.pieces if piece.begin >= steps[1]]
        curve = self.curve
        if curve is not None:
            curve = attrs.evolve(curve, points=tuple(each for each in curve.points if each[0] >= steps[1]))
        numbers = f"steps 2 to {len(steps)}" if len(steps) > 2 else "step 2"
        return Picture(f"{self.title}, {numbers}", pieces, curve)

    def chrome(self) -> str:
        """Return a trace in Chrome's format, which Perfetto reads; times are in microseconds."""
        lanes = {lane: number for number, lane in enumerate(self.lanes)}
        events = [_event("M", "process_name", args={"name": self.title})]
        for lane, number in lanes.items():
            events.append(_event("M", "thread_name", tid=number, args={"name": lane}))
            events.append(_event("M", "thread_sort_index", tid=number, args={"sort_index": number}))
        for piece in self.pieces:
            times = {"ts": piece.begin * 1e6, "dur": (piece.end - piece.begin) * 1e6}
            place = {"cat": piece.lane, "tid": lanes[piece.lane]}
            events.append(_event("X", piece.name, **place, **times, args={"unit": piece.unit}))
        about: dict[str, object] = {"title": self.title}
        if self.curve is not None:
            about |= {"curve": self.curve.name, "line": self.curve.line}
            points = [(self.curve.name, at, nbytes) for at, nbytes in self.curve.points]
            points += [(_LINE, at, self.curve.line) for _, at, _ in (*points[:1], *points[-1:])]
            events += [_event("C", name, ts=at * 1e6, args={"bytes": nbytes}) for name, at, nbytes in points]
        return json.dumps({"traceEvents": events, "otherData": about})

    @classmethod
    def read(cls, text: str) -> Picture:
        """Return the picture of a trace that `chrome` has written.

        Raises:
            ValueError: if it is no such trace.
        """
        try:
            found = json.loads(text)
            events = found["traceEvents"]
            names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
            drawn = [(each, each["ts"] / 1e6) for each in events if each["ph"] == "X"]
            pieces = [
                Piece(names[each["tid"]], each["args"]["unit"], each["name"], at, at + each["dur"] / 1e6)
                for each, at in drawn
            ]
            points = tuple(
                (event["ts"] / 1e6, event["args"]["bytes"])
                for event in events
                if event["ph"] == "C" and event["name"] != _LINE
            )
            told = found["otherData"]
            title, name = told["title"], told.get("curve", "memory")
            line = told.get("line", max((height for _, height in points), default=0))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"expected a trace that flatparam has written, found {type(error).__name__}: {error}"
            ) from error
        curve = Curve(name, points, line) if points else None
        return cls(title, pieces, curve)

    @classmethod
    def together(cls, pictures: Sequence[Picture]) -> Picture:
        """Return one picture of several ranks, whose lanes begin together; the curve is the first one's."""
        pieces = [
            attrs.evolve(
                piece,
                lane=f"{piece.lane}, {picture.title.partition(',')[0]}",
                begin=piece.begin - picture.begin + pictures[0].begin,
                end=piece.end - picture.begin + pictures[0].begin,
            )
            for picture in pictures
            for piece in picture.pieces
        ]
        return cls("; ".join(picture.title for picture in pictures), pieces, pictures[0].curve)

    def totals(self) -> dict[tuple[str, str], tuple[int, float]]:
        """For each lane and name of pieces, how many there are and how long they take together; phases do not count."""
        found: dict[tuple[str, str], tuple[int, float]] = {}
        for piece in (each for each in self.pieces if each.lane != PHASE):
            count, seconds = found.get((piece.lane, piece.name), (0, 0.0))
            found[piece.lane, piece.name] = count + 1, seconds + piece.end - piece.begin
        return found

    def svg(self) -> str:
        """Return the picture as SVG, readable on light and dark pages: lanes, a curve, an axis of time and a legend."""
        lanes, colours = self.lanes, self._colours()
        bottom = 34 + len(lanes) * (_LANE + 6)
        foot = bottom + (_CURVE + 20 if self.curve else 0)
        legend, height = _legend(colours, foot + _AXIS + 16)
        drawn = [
            _tag("rect", width="100%", height="100%", fill="#fff"),
            _tag("text", f"{self.title}: {shown_seconds(self.length)}", x=_LEFT, y=20, font_size=14),
        ]
        for number, lane in enumerate(lanes):
            top = 34 + number * (_LANE + 6)
            drawn.append(_tag("text", lane, **_BESIDE, y=top + 17))
            drawn.append(_tag("rect", x=_LEFT, y=top, width=_WIDTH, height=_LANE, fill="#f3f3f3"))
            # A unit's backward pass lies within those of the units around it.
            here = [piece for piece in self.pieces if piece.lane == lane]
            here.sort(key=lambda piece: piece.begin - piece.end)
            drawn += [self._drawn(piece, top, colours) for piece in here]
        if self.curve is not None:
            drawn += self._curve(self.curve, bottom + 10)
        box = f'viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" font-family="sans-serif" font-size="12"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box}>'
        return "\n".join([head, *drawn, *self._axis(foot), *legend, "</svg>", ""])

    def _colours(self) -> dict[str, str]:
        """Return a colour for each unit: hues far from those of the units before and after it."""
        units = [unit for unit in dict.fromkeys(piece.unit for piece in self.pieces) if unit not in _GREYS]
        hues = [round(number * 137.5 % 360) for number in range(len(units))]
        return _GREYS | {unit: f"hsl({hue},60%,62%)" for unit, hue in zip(units, hues, strict=True)}

    def _at(self, seconds: float) -> float:
        return _LEFT + max(0.0, seconds - self.begin) / self.length * _WIDTH

    def _drawn(self, piece: Piece, top: int, colours: dict[str, str]) -> str:
        left, width = self._at(piece.begin), max(self._at(piece.end) - self._at(piece.begin), 0.2)
        told = escape(f"{piece.name}: {shown_seconds(piece.end - piece.begin)}")
        # A backward pass has an edge, which the forward pass of the same unit has not.
        has_edge = piece.name.startswith(f"{BACKWARD} ") and width > 4
        edge: dict[str, Any] = {"stroke": "#000", "stroke_opacity": 0.45} if has_edge else {}
        box = {"x": f"{left:.2f}", "y": top, "width": f"{width:.2f}", "height": _LANE}
        drawn = _tag("rect", f"<title>{told}</title>", raw=True, **box, fill=colours[piece.unit], **edge)
        if piece.lane.startswith(PHASE) and width > 7 * len(piece.name):
            place = {"x": f"{left + width / 2:.1f}", "y": top + 17, "text_anchor": "middle"}
            drawn += _tag("text", piece.name, **place, fill="#fff" if piece.unit == STEP else "#222")
        return drawn

    def _axis(self, top: int) -> list[str]:
        """Return the axis of time: round numbers, from the first beginning."""
        rough = self.length / 8
        power = 10 ** math.floor(math.log10(rough))
        every = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        drawn = [_tag("line", x1=_LEFT, x2=_LEFT + _WIDTH, y1=top + 6, y2=top + 6, stroke="#555")]
        for number in range(int(self.length / every) + 1):
            x = f"{self._at(self.begin + number * every):.1f}"
            drawn.append(_tag("line", x1=x, x2=x, y1=34, y2=top + 11, stroke="#555", opacity=0.25))
            told = shown_seconds(number * every) if number else "0"
            drawn.append(_tag("text", told, x=x, y=top + 25, text_anchor="middle"))
        return drawn

    def _curve(self, curve: Curve, top: int) -> list[str]:
        most = max([curve.line, *(nbytes for _, nbytes in curve.points)]) or 1
        bottom = top + _CURVE

        def y(nbytes: int) -> float:
            return bottom - nbytes / most * _CURVE

        corners, before = [f"{_LEFT},{bottom}"], 0
        for at, nbytes in curve.points:
            corners += [f"{self._at(at):.1f},{y(before):.1f}", f"{self._at(at):.1f},{y(nbytes):.1f}"]
            before = nbytes
        corners.append(f"{self._at(curve.points[-1][0]):.1f},{bottom}")
        line = f"{y(curve.line):.1f}"
        ends: dict[str, Any] = {"x1": _LEFT, "x2": _LEFT + _WIDTH, "y1": line, "y2": line}
        return [
            _tag("polygon", points=" ".join(corners), fill="#9bbcd8"),
            _tag("line", **ends, stroke="#b22", stroke_dasharray="6 3"),
            _tag("text", shown_nbytes(curve.line), **_BESIDE, y=f"{y(curve.line) + 10:.1f}"),
            _tag("text", curve.name, **_BESIDE, y=bottom),
        ]


def _legend(colours: dict[str, str], top: int) -> tuple[list[str], int]:
    """Return the names of the units beside their colours, and the height of the picture with them."""
    units = [unit for unit in colours if unit not in _GREYS]
    rest = [f"and {len(units) - _LEGEND} more: each piece has its name"] if len(units) > _LEGEND else []
    drawn, x, y = [], _LEFT, top
    for unit in ("(root)", *units[:_LEGEND], *rest):
        width = 24 + 7 * len(unit)
        if x + width > _LEFT + _WIDTH:
            x, y = _LEFT, y + 20
        if unit in colours:
            drawn.append(_tag("rect", x=x, y=y, width=12, height=12, fill=colours[unit]))
        drawn.append(_tag("text", unit, x=x + 17, y=y + 11))
        x += width
    return drawn, y + 24


def _event(kind: str, name: str, **rest: object) -> dict[str, object]:
    """Return an event of a trace of Chrome."""
    return {"name": name, "ph": kind, "pid": 0, **rest}


def _tag(name: str, text: str = "", *, raw: Any = False, **attributes: object) -> str:
    """Return an element of SVG, with `text` in it."""
    told = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f"<{name}{told}>{text if raw else escape(text)}</{name}>"
