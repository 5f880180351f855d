"""Hardware profiles by name: those that ship with the package, and files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, TypeAlias

from flatparam_plan.errors import PlanError
from flatparam_plan.hardware.profile import Profile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["AnyProfile", "device_of", "profile_named", "transport_here"]

AnyProfile: TypeAlias = "str | Path | Profile"
"""A hardware profile, the name of one, or the path of its TOML file."""

_SHIPPED: Final = Path(__file__).parent / "profiles"


def profile_named(name: AnyProfile) -> Profile:
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


def transport_here(profile: object) -> str | None:
    """The transport that the name of a profile asks to measure here, if it does.

    That is "shared_memory" of "this-machine", and "gloo" of "this-machine:gloo".
    """
    name, _, transport = profile.partition(":") if isinstance(profile, str) else ("", "", "")
    known = transport in ("", "gloo", "shared_memory")
    return (transport or "shared_memory") if name == "this-machine" and known else None


def device_of(profile: AnyProfile) -> str:
    """Whose schedule the runtime has under a profile: "cpu" or "accelerator"."""
    return "cpu" if transport_here(profile) else profile_named(profile).device
