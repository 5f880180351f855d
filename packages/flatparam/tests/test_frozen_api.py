"""The public names and signatures of all five layers are those of `frozen_api.json`.

A name that a layer promises and an add-on has is checked where the add-on is; where it is not, it says so.

If you mean to change the public API, say so in the changelog, and write the list anew:

    python packages/flatparam/tests/test_frozen_api.py
"""

import enum
import importlib
import inspect
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeGuard

import attrs
import pytest

from flatparam.addons import Promised

FROZEN: Final = Path(__file__).with_name("frozen_api.json")
PACKAGES: Final = ("flatparam_core", "flatparam_comm", "flatparam_runtime", "flatparam_state", "flatparam")
MODULES: Final = (
    *PACKAGES,
    "flatparam_core.testing",
    "flatparam_comm.testing",
    "flatparam.api",
    "flatparam.layout",
    "flatparam.optim",
    "flatparam.wrap",
    "flatparam.sharded_grad_scaler",
    "flatparam.checkpoint",
    "flatparam.checkpoint.state_dict",
    "flatparam.algorithms._comm_hooks.default_hooks",
)
"""Each package, and then the public modules inside the packages."""
ADDONS: Final = {
    "flatparam_checkpoint": ("flatparam_state", "flatparam"),
    "flatparam_files": ("flatparam_state", "flatparam"),
    "flatparam_guard": ("flatparam_comm",),
    "flatparam_onehost": ("flatparam_comm",),
    "flatparam_clients": ("flatparam",),
    "flatparam_optim": ("flatparam", "flatparam_runtime"),
    "flatparam_plan": ("flatparam",),
    "flatparam_publish": ("flatparam_state",),
    "flatparam_simdev": ("flatparam_comm",),
}
"""The packages that promise the names of an add-on, or of a tool, as theirs, by that."""
OPERATORS: Final = (
    "__call__",
    "__contains__",
    "__enter__",
    "__exit__",
    "__getattr__",
    "__getitem__",
    "__iter__",
    "__len__",
)
LIMITS: Final = ("timeout", "pg_timeout")
"""Parameters whose defaults are not compared: the tests give them longer ones (`patience.py`)."""
WITHOUT_MEMBERS: Final = ("Unit",)
"""Classes whose attributes and methods are not promised."""
WITHOUT_ATTRIBUTES: Final = ("FlatParamHandle",)
"""Classes of which only the methods are promised; how they are made is not."""
ATTACHED: Final = ("FlatExposure", "OriginalExposure")
"""Classes that their method `attach` makes, from objects that are not public."""


def homes_of(value: Any) -> tuple[str, ...]:
    """The packages that promise what is defined in them, or in an add-on."""
    top = value.__module__.partition(".")[0]
    return ADDONS.get(top, (top,))


def is_ours(kind: type) -> bool:
    """Whether one of the five packages, or an add-on, defines the class."""
    return homes_of(kind)[0] in PACKAGES


def is_class(value: object) -> TypeGuard[type]:
    """Whether it is a class; Python 3.10 also calls `Callable[[int], int]` one."""
    return isinstance(value, type) and not isinstance(value, types.GenericAlias)


def is_defined_in(package: str, name: str, value: object) -> bool:
    """Whether `package` defines what it exports; a value may also be exported by a package beneath."""
    if is_class(value) or inspect.isfunction(value):
        return package in homes_of(value)
    beneath = (importlib.import_module(other) for other in PACKAGES[: PACKAGES.index(package)])
    return not any(name in other.__all__ and getattr(other, name) is value for other in beneath)


def shown_default(value: object) -> str:
    """A default as text that is the same in every process."""
    if isinstance(value, enum.Enum):
        return "..." if value is attrs.NOTHING else f"{type(value).__name__}.{value.name}"
    if is_class(value) or inspect.isfunction(value):
        return value.__qualname__
    text = repr(value)
    return f"a {type(value).__name__}" if " at 0x" in text else text


def signature_of(function: Any) -> str:
    """The parameters of a function with their kinds and defaults, without annotations."""
    found, kinds = [], []
    for parameter in inspect.signature(function).parameters.values():
        has_default = parameter.default is not inspect.Parameter.empty
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        if parameter.kind is parameter.KEYWORD_ONLY and not {
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        } & set(kinds):
            found.append("*")
        if kinds and kinds[-1] is parameter.POSITIONAL_ONLY and parameter.kind is not kinds[-1]:
            found.append("/")
        kinds.append(parameter.kind)
        shown = "..." if parameter.name in LIMITS else shown_default(parameter.default)
        default = f"={shown}" if has_default else ""
        found.append(f"{stars}{parameter.name}{default}")
    if kinds and kinds[-1] is inspect.Parameter.POSITIONAL_ONLY:
        found.append("/")
    return f"({', '.join(found)})"


def members_of(kind: type) -> Iterator[tuple[str, str | None]]:
    """The public members of a class that classes of ours define: a method's signature, or `attribute`.

    None for one of an add-on that is not installed.
    """
    fields = {field.name: field for field in attrs.fields(kind)} if attrs.has(kind) else {}
    for name in sorted({name for base in kind.__mro__ if is_ours(base) for name in vars(base)}):
        if name.startswith("_") and name not in OPERATORS:
            continue
        if name in fields and not fields[name].init:
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, Promised):
            try:
                value = value.fulfil()
            except AttributeError as error:
                assert "pip install flatparam-clients" in str(error), name
                yield name, None
                continue
        if isinstance(value, staticmethod | classmethod):
            yield name, f"{type(value).__name__} {signature_of(value.__func__)}"
        elif inspect.isfunction(value):
            yield name, signature_of(value)
        elif is_class(value):
            yield name, "class"
        elif kind.__name__ not in WITHOUT_ATTRIBUTES:
            yield name, "attribute"


def class_as_frozen(kind: type) -> dict[str, str | None]:
    """What the list has of a class: how it is made, and its members."""
    if issubclass(kind, enum.Enum):
        return {member.name: repr(member.value) for member in kind}
    own = [base for base in kind.__mro__ if is_ours(base)]
    is_made = any({"__init__", "__new__"} & set(vars(base)) for base in own)
    found = {}
    is_promised = kind.__name__ not in (*WITHOUT_MEMBERS, *WITHOUT_ATTRIBUTES, *ATTACHED)
    if is_made and is_promised and not getattr(kind, "_is_protocol", False):
        found["(made by)"] = signature_of(kind)
    if kind.__name__ not in WITHOUT_MEMBERS:
        found.update(members_of(kind))
    return found


def as_frozen(value: object) -> Any:
    """What the list has of a public name."""
    if is_class(value):
        return class_as_frozen(value)
    return signature_of(value) if inspect.isfunction(value) else "value"


def api_of(module: str) -> dict[str, Any]:
    """The public names that a module's package defines; None for one of an add-on that is not installed."""
    imported = importlib.import_module(module)
    package = module.partition(".")[0]
    found = {}
    for name in sorted(imported.__all__):
        try:
            value = getattr(imported, name)
        except ModuleNotFoundError as error:
            assert error.name in ADDONS, name
            assert f"pip install {error.name.replace('_', '-')}" in str(error)
            if package in ADDONS[error.name]:
                found[name] = None
        else:
            if is_defined_in(package, name, value):
                found[name] = as_frozen(value)
    return found


@pytest.mark.parametrize("module", MODULES)
def test_public_names_and_signatures(module: str) -> None:
    """Every public name is there, no other is, and each is called as the list says."""
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))[module]
    found = api_of(module)
    assert sorted(found) == sorted(frozen)
    for name, expected in frozen.items():
        if isinstance(found[name], dict):
            lacking = {member for member, value in found[name].items() if value is None}
            found[name].update({member: expected[member] for member in lacking})
        assert found[name] in (expected, None), f"{module}.{name}"


def test_every_public_module_is_in_the_list() -> None:
    """The list has the modules that this test knows, and no others."""
    assert list(json.loads(FROZEN.read_text(encoding="utf-8"))) == list(MODULES)


if __name__ == "__main__":
    everything = {module: api_of(module) for module in MODULES}
    assert all(None not in each.values() for each in everything.values()), "install every add-on first"
    text = json.dumps(everything, indent=1)
    FROZEN.write_text(f"{text}\n", encoding="utf-8")
