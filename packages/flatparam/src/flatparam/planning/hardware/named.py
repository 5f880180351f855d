"""Hardware profiles by name: those that ship with the package, and files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from flatparam.planning.errors import PlanError
from flatparam.planning.hardware.profile import Profile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["profile_named"]

_SHIPPED: Final = Path(__file__).parent / "profiles"


def profile_named(name: str | Path | Profile) -> Profile:
    """The profile of this name that ships with the package, or the one in a TOML file.

    Raises:
        PlanError: if there is none, or it does not fit.
    """
    if isinstance(name, Profile):
        return name
    path = _SHIPPED / f"{name}.toml" if str(name).isalnum() else Path(name)
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in _SHIPPED.glob("*.toml")))
        raise PlanError(
            f"expected a hardware profile ({names}), this-machine, this-machine:gloo, or a TOML file, found "
            f"{str(name)!r}"
        )
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(
            f"expected a hardware profile as a TOML file, found {str(path)!r}, which is not TOML: {error}"
        ) from error
    return Profile.of(found)
