"""What was found, in a file for each kind of device."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from .facts import Facts
from .measurement import Measurement
from .place import Plan

COMMAND: Final = "python tools/gpu"


def made_by(plan: Plan, facts: Facts) -> dict[str, Any]:
    """When a measurement was made, how, and with which versions."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "where": plan.where,
        "ranks": plan.ranks,
        "tiny": plan.tiny,
        "versions": facts.versions,
        "driver": facts.driver,
    }


def command_for(measurement: Measurement, plan: Plan) -> str:
    """What measures it again."""
    words = [COMMAND, "--only", measurement.module]
    words += ["--device", plan.kind] if plan.on_cpu else []
    words += ["--tiny"] if plan.tiny else []
    words += ["--import", *plan.imports] if plan.imports else []
    return " ".join(words)


def enter(file: Path, facts: Facts, name: str, entry: Mapping[str, Any]) -> None:
    """Put one measurement into the file, in place of an earlier one of its name."""
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"measurements": {}}
    results["device"] = {
        "name": facts.name,
        "kind": facts.kind,
        "count": facts.count,
        "backend": facts.backend,
        "bytes": facts.total_nbytes,
    }
    results["measurements"][name] = dict(entry)
    _replace(file, results)


def keep(file: Path, names: Collection[str]) -> None:
    """Drop what an earlier version measured under other names, of which today's page knows nothing."""
    if file.exists():
        results = json.loads(file.read_text(encoding="utf-8"))
        found = results["measurements"]
        results["measurements"] = {name: found[name] for name in found if name in names}
        _replace(file, results)


def _replace(file: Path, results: Mapping[str, Any]) -> None:
    made = file.with_suffix(".new")  # whoever is killed leaves what was there
    made.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    made.replace(file)
