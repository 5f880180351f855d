"""A step as a picture, with lanes of pieces and a curve of memory, and as a trace for Perfetto; numbers in columns."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import Final, final
from xml.sax.saxutils import escape

import attrs

from flatparam.addons import load


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


def shown_nbytes(nbytes: float) -> str:
    """Return a number of bytes: `1.23 GB`."""
    return str(load("flatparam_files.command").shown_nbytes(nbytes))


def shown_flops(flops: float) -> str:
    """Return a number of floating-point operations: `1.23 TFLOP`."""
    return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def shown_seconds(seconds: float) -> str:
    """Return a time: `1.23 ms`."""
    return _scaled(seconds * 1e6, ("µs", "ms", "s")) if seconds < 100 else f"{seconds:,.0f} s"


def _scaled(value: float, units: Sequence[str]) -> str:
    return str(load("flatparam_files.command").scaled(value, units))


_LEFT: Final = 130
_WIDTH: Final = 1000
_LANE: Final = 26
_CURVE: Final = 110
_LINE: Final = "by the formula"
"""The name of the counter, in a trace, that stays at a curve's line."""


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
    def length(self) -> float:
        """The last end."""
        return max((piece.end for piece in self.pieces), default=0.0) or 1e-9

    @property
    def lanes(self) -> list[str]:
        """The names of the lanes, in the order of their first pieces."""
        return list(dict.fromkeys(piece.lane for piece in self.pieces))

    def chrome(self) -> str:
        """Return a trace in Chrome's format, which Perfetto reads; times are in microseconds."""
        lanes = {lane: number for number, lane in enumerate(self.lanes)}
        events: list[dict[str, object]] = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        events += [
            {
                "name": piece.name,
                "cat": piece.lane,
                "ph": "X",
                "pid": 0,
                "tid": lanes[piece.lane],
                "ts": piece.begin * 1e6,
                "dur": (piece.end - piece.begin) * 1e6,
                "args": {"unit": piece.unit},
            }
            for piece in self.pieces
        ]
        if self.curve is not None:
            events += [
                {"name": self.curve.name, "ph": "C", "pid": 0, "ts": at * 1e6, "args": {"bytes": nbytes}}
                for at, nbytes in self.curve.points
            ]
        told: dict[str, object] = {"title": self.title}
        if self.curve is not None:
            told |= {"curve": self.curve.name, "line": self.curve.line}
            if self.curve.points:
                ends = (self.curve.points[0][0], self.curve.points[-1][0])
                events += [
                    {"name": _LINE, "ph": "C", "pid": 0, "ts": at * 1e6, "args": {"bytes": self.curve.line}}
                    for at in ends
                ]
        return json.dumps({"traceEvents": events, "otherData": told})

    @classmethod
    def read(cls, text: str) -> Picture:
        """Return the picture of a trace that `chrome` has written.

        Raises:
            ValueError: if it is no such trace.
        """
        try:
            found = json.loads(text)
            events = found["traceEvents"]
            names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
            pieces = [
                Piece(
                    names[event["tid"]],
                    event["args"]["unit"],
                    event["name"],
                    event["ts"] / 1e6,
                    (event["ts"] + event["dur"]) / 1e6,
                )
                for event in events
                if event["ph"] == "X"
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
        """One picture of several ranks, each with lanes of its own; the curve is the first one's."""
        pieces = [
            attrs.evolve(piece, lane=f"{piece.lane}, {picture.title}")
            for picture in pictures
            for piece in picture.pieces
        ]
        return cls(", ".join(picture.title for picture in pictures), pieces, pictures[0].curve)

    def totals(self) -> dict[tuple[str, str], tuple[int, float]]:
        """For each lane and name of pieces, how many there are and how long they take together."""
        found: dict[tuple[str, str], tuple[int, float]] = {}
        for piece in self.pieces:
            count, seconds = found.get((piece.lane, piece.name), (0, 0.0))
            found[piece.lane, piece.name] = count + 1, seconds + piece.end - piece.begin
        return found

    def svg(self) -> str:
        """Return the picture as SVG, readable on light and dark pages."""
        lanes = self.lanes
        height = 40 + len(lanes) * (_LANE + 6) + (_CURVE + 30 if self.curve else 0) + 24
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="100%" height="100%" fill="#fff"/><text x="{_LEFT}" y="20" font-size="14">'
            f"{escape(self.title)}: {shown_seconds(self.length)}</text>",
        ]
        for number, lane in enumerate(lanes):
            top = 34 + number * (_LANE + 6)
            parts.append(f'<text x="{_LEFT - 8}" y="{top + 17}" text-anchor="end">{escape(lane)}</text>')
            parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_LANE}" fill="#f3f3f3"/>')
            parts += [self._drawn(piece, top) for piece in self.pieces if piece.lane == lane]
        if self.curve is not None:
            parts.append(self._curve(self.curve, 44 + len(lanes) * (_LANE + 6)))
        return "\n".join([*parts, "</svg>", ""])

    def _at(self, seconds: float) -> float:
        return _LEFT + seconds / self.length * _WIDTH

    def _drawn(self, piece: Piece, top: int) -> str:
        width = max(self._at(piece.end) - self._at(piece.begin), 0.2)
        told = f"{piece.name}: {shown_seconds(piece.end - piece.begin)}"
        return (
            f'<rect x="{self._at(piece.begin):.2f}" y="{top}" width="{width:.2f}" height="{_LANE}" '
            f'fill="{_colour(piece.unit)}"><title>{escape(told)}</title></rect>'
        )

    def _curve(self, curve: Curve, top: int) -> str:
        most = max([curve.line, *(nbytes for _, nbytes in curve.points)]) or 1
        bottom = top + _CURVE

        def y(nbytes: int) -> float:
            return bottom - nbytes / most * _CURVE

        corners, before = [f"{_LEFT},{bottom}"], 0
        for at, nbytes in curve.points:
            corners += [f"{self._at(at):.1f},{y(before):.1f}", f"{self._at(at):.1f},{y(nbytes):.1f}"]
            before = nbytes
        corners.append(f"{self._at(curve.points[-1][0]):.1f},{bottom}")
        line = y(curve.line)
        return (
            f'<polygon points="{" ".join(corners)}" fill="#9bbcd8"/>'
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{line:.1f}" y2="{line:.1f}" stroke="#b22" '
            f'stroke-dasharray="6 3"/><text x="{_LEFT - 8}" y="{line + 10:.1f}" text-anchor="end">'
            f"{shown_nbytes(curve.line)}</text>"
            f'<text x="{_LEFT - 8}" y="{bottom}" text-anchor="end">{escape(curve.name)}</text>'
        )


def _colour(unit: str) -> str:
    """Return a colour of its own for each unit, the same in every picture."""
    if not unit or unit == "(root)":
        return "#8a8a8a"
    hue = zlib.crc32(unit.encode()) % 360
    return f"hsl({hue},55%,58%)"
