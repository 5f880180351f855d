"""The packages of this repository: the layers, from the lowest to the highest, and the add-ons; standard library only.

Everything that goes through the packages reads them here: nox, the walls, the matrix, the figures.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ADDONS", "LAYERS", "PACKAGES", "TESTED_WITH", "beneath"]

#: What each layer may import, and declares: the one directly beneath it; the wrapper is where all four come together.
#: `flatparam-files` is there for what will be an add-on, too: the contracts in pyproject.toml name these modules.
LAYERS: Final[dict[str, tuple[str, ...]]] = {
    "flatparam-core": (),
    "flatparam-comm": ("flatparam-core",),
    "flatparam-runtime": ("flatparam-comm",),
    "flatparam-state": ("flatparam-runtime", "flatparam-files"),
    "flatparam": (
        "flatparam-core",
        "flatparam-comm",
        "flatparam-runtime",
        "flatparam-state",
        "flatparam-files",
    ),
}
#: What each add-on may import, and declares. No layer imports an add-on.
ADDONS: Final[dict[str, tuple[str, ...]]] = {
    "flatparam-clients": (
        "flatparam-core",
        "flatparam-comm",
        "flatparam-runtime",
        "flatparam-state",
        "flatparam",
    ),
    "flatparam-files": ("flatparam-core",),
    "flatparam-guard": ("flatparam-comm",),
    "flatparam-onehost": ("flatparam-comm",),
    "flatparam-optim": ("flatparam-core", "flatparam-comm", "flatparam-runtime"),
    "flatparam-plan": (*LAYERS, "flatparam-files"),
    "flatparam-publish": ("flatparam-runtime", "flatparam-state", "flatparam-files"),
}
PACKAGES: Final = {**LAYERS, **ADDONS}
#: The packages that the tests of a package use besides, and name in its extra `test`.
TESTED_WITH: Final[dict[str, tuple[str, ...]]] = {
    "flatparam-guard": ("flatparam-onehost",),
    "flatparam-onehost": ("flatparam-guard",),
}


def beneath(name: str) -> tuple[str, ...]:
    """Return the packages that must be installed beneath `name`, the lowest first."""
    needed = set(PACKAGES[name])
    for each in PACKAGES[name]:
        needed.update(beneath(each))
    return tuple(other for other in PACKAGES if other in needed)
