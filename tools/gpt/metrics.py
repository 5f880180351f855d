"""The figures of each step, as lines of JSON in a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from attrs import define, field


@define(eq=False)
class Metrics:
    """``metrics.jsonl``: one object per step (``loss``, ...) and one per evaluation (``held_out_loss``), in order.

    Only the first rank has a file. Lines of steps after the one that a run starts from are dropped when it starts:
    they belong to steps that are about to be done again.
    """

    path: Path | None
    records: list[dict[str, Any]] = field(factory=list)
    _file: TextIO | None = None

    def open(self, *, keep_up_to: int) -> None:
        """Keep the lines up to that step of an earlier run, and be ready to add to them."""
        if self.path is None:
            return
        if keep_up_to > 0 and self.path.exists():
            self.records = [record for record in read_metrics(self.path) if record["step"] <= keep_up_to]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        temporary.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, **record: Any) -> None:
        """Write one line, at once."""
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a file; a last line that was cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def bits(nats: float) -> float:
    """A loss in bits per byte."""
    return nats / math.log(2)
