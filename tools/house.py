"""The packages of this repository: the layers, lowest first, the add-ons and the tools; standard library only.

Everything that goes through the packages reads them here: nox, the walls, the matrix, the figures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

__all__ = ["ADDONS", "LAYERS", "PACKAGES", "TESTED_WITH", "TOOLS", "beneath", "read_toml", "tested_with"]

#: What each layer may import, and declares: the one directly beneath it; the wrapper is where all four come together.
LAYERS: Final[dict[str, tuple[str, ...]]] = {
    "flatparam-core": (),
    "flatparam-comm": ("flatparam-core",),
    "flatparam-runtime": ("flatparam-comm",),
    "flatparam-state": ("flatparam-runtime",),
    "flatparam": (
        "flatparam-core",
        "flatparam-comm",
        "flatparam-runtime",
        "flatparam-state",
    ),
}
#: What each add-on may import, and declares. No layer imports an add-on.
ADDONS: Final[dict[str, tuple[str, ...]]] = {
    "flatparam-certify": ("flatparam", "flatparam-files"),
    "flatparam-clients": (
        "flatparam-core",
        "flatparam-comm",
        "flatparam-runtime",
        "flatparam-state",
        "flatparam",
        "flatparam-meshes",
        "flatparam-optim",
    ),
    "flatparam-files": ("flatparam-core",),
    "flatparam-checkpoint": ("flatparam-comm", "flatparam-runtime", "flatparam-state", "flatparam-files"),
    "flatparam-guard": ("flatparam-comm",),
    "flatparam-meshes": ("flatparam-core", "flatparam-comm", "flatparam-runtime", "flatparam"),
    "flatparam-onehost": ("flatparam-comm",),
    "flatparam-optim": ("flatparam-core", "flatparam-comm", "flatparam-runtime"),
    "flatparam-plan": (*LAYERS, "flatparam-files"),
    "flatparam-publish": ("flatparam-comm", "flatparam-runtime", "flatparam-state", "flatparam-files"),
    "flatparam-sums": ("flatparam-comm", "flatparam-runtime"),
}
#: What each tool may import. Tools are for tests, ours and others': no package needs one to run.
TOOLS: Final[dict[str, tuple[str, ...]]] = {"flatparam-simdev": ("flatparam-comm",)}
PACKAGES: Final = {**LAYERS, **ADDONS, **TOOLS}
#: The packages that the tests of a package use besides, and name in its extra `test`; they name tools, too.
TESTED_WITH: Final[dict[str, tuple[str, ...]]] = {
    "flatparam-guard": ("flatparam-onehost",),
    "flatparam-onehost": ("flatparam-guard",),
    # Their tests have ranks that fail while others wait, over every transport; those of comm do without both.
    **dict.fromkeys(
        (
            "flatparam-runtime",
            "flatparam-state",
            "flatparam-checkpoint",
            "flatparam-optim",
            "flatparam-publish",
            "flatparam-sums",
        ),
        ("flatparam-guard", "flatparam-onehost"),
    ),
    # The wrapper brings every add-on along, and has their names.
    **dict.fromkeys(("flatparam", "flatparam-certify", "flatparam-plan"), tuple(ADDONS)),
    **dict.fromkeys(
        ("flatparam-clients", "flatparam-meshes"),
        tuple(each for each in ADDONS if each not in ("flatparam-certify", "flatparam-plan")),
    ),
}


def beneath(name: str) -> tuple[str, ...]:
    """Return the packages that must be installed beneath `name`, the lowest first."""
    needed = set(PACKAGES[name])
    for each in PACKAGES[name]:
        needed.update(beneath(each))
    return tuple(other for other in PACKAGES if other in needed)


def tested_with(name: str) -> tuple[str, ...]:
    """Return what must be installed for the tests of `name`, lowest first: with what is beneath it, and tools."""
    needed = {name, *beneath(name), *TESTED_WITH.get(name, ())}
    needed.update(tool for tool in TOOLS if needed.issuperset(beneath(tool)))
    return tuple(other for other in PACKAGES if other in needed)


def read_toml(path: Path) -> dict[str, Any]:
    """Return what is in a file such as pyproject.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))
