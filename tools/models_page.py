"""The table of real models: `python tools/models_page.py build/models.xml` writes docs/models.json and docs/models.md.

What it reads are the results of `nox -s run -- models`, as pytest writes them: a test names its model and column.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from pages import between, table

ROOT: Final = Path(__file__).resolve().parent.parent
RESULTS: Final = ROOT / "docs" / "models.json"
PAGE: Final = ROOT / "docs" / "models.md"

FACTS: Final = {"parameters": "parameters", "longest": "the longest", "units": "units"}
COLUMNS: Final = {
    "fp32": "fp32",
    "bf16": "bf16",
    "saved": "saved and loaded",
    "generate": "`generate()`",
    "meta": "from the meta device",
}


def read(results: Path) -> dict[str, dict[str, int]]:
    """For each model its facts, and how many tests of each column passed; LookupError where one did not."""
    models: dict[str, dict[str, int]] = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        said = {each.attrib["name"]: each.attrib["value"] for each in case.iter("property")}
        if "model" not in said:
            continue
        if any(child.tag in ("failure", "error", "skipped") for child in case):
            raise LookupError(f"expected results of tests that have passed, found that {case.attrib['name']} has not")
        model = models.setdefault(said["model"], {})
        model.update({fact: int(said[fact]) for fact in FACTS if fact in said})
        if "column" in said:
            model[said["column"]] = model.get(said["column"], 0) + 1
    if not models:
        raise LookupError(f"expected the results of `nox -s run -- models` in {results}, found no model")
    return models


def provenance() -> dict[str, str]:
    """When the results were made, and with which versions."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "diffusers")}
    return {"date": f"{datetime.date.today()}", "Python": platform.python_version(), **versions}


def page(found: Mapping[str, Any], text: str) -> str:
    """The page `text` with the table of what was found."""
    made = found["made"]
    lines = [["model", *FACTS.values(), *COLUMNS.values()]]
    for name, model in found["models"].items():
        cells = [f"{model[fact]:,}" for fact in FACTS] + [str(model.get(column, "-")) for column in COLUMNS]
        lines.append([name, *cells])
    versions = ", ".join(f"{name} {version}" for name, version in made.items() if name != "date")
    return between(text, "table", f"{table(lines)}\n\n{made['date']}, {versions}.")


def in_order(models: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The models in the order of those that are known, and then the others: workers finish in any order."""
    places = {name: place for place, name in enumerate(known)}
    return {name: models[name] for name in sorted(models, key=lambda name: places.get(name, len(places)))}


def main(results: Path) -> None:
    """Write both files."""
    known = json.loads(RESULTS.read_text(encoding="utf-8"))["models"]
    found = {"made": provenance(), "models": in_order(read(results), [*known])}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(found, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
