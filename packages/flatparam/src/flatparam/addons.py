"""Add-ons: packages on top of the layers, imported by name when they are needed. Nothing here imports torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, Final, final

GROUP: Final = "flatparam.commands"
"""The entry points of subcommands: functions that add theirs to the subparsers of argparse that they are given."""
_KNOWN: Final = {
    "certify": "flatparam_certify.certify_command:add",
    "ckpt": "flatparam_files.command:add",
    "plan": "flatparam_plan.command:add",
    "run": "flatparam_clients.programs:add",
    "trace": "flatparam_plan.command.trace_command:add_trace",
}
"""The subcommands of our own add-ons, which are also found where nothing is installed, as in a checkout."""
_ADDONS: Final = (
    "flatparam_certify",
    "flatparam_checkpoint",
    "flatparam_clients",
    "flatparam_files",
    "flatparam_meshes",
    "flatparam_optim",
    "flatparam_plan",
    "flatparam_publish",
    "flatparam_sums",
)
"""Those that can be lacking."""
_CLIENTS: Final = "flatparam_clients"
TRACE_FOLDER: Final = "FLATPARAM_TRACE"
"""The variable of the environment that has the folder of traces."""


def load(module: str) -> ModuleType:
    """Import a module.

    Raises:
        ModuleNotFoundError: if it is of an add-on that is not installed; the message says how to install it.
    """
    addon = module.partition(".")[0]
    if _is_lacking(addon):
        name = addon.replace("_", "-")
        raise ModuleNotFoundError(
            f"expected the add-on {name}, which is not installed: pip install {name} (flatparam[all]: every add-on)",
            name=addon,
        )
    return importlib.import_module(module)


def _is_lacking(addon: str) -> bool:
    return addon in _ADDONS and importlib.util.find_spec(addon) is None


def tell_clients(moment: str) -> None:
    """Call the function `moment` of `flatparam_clients.occasions`, if that add-on is installed."""
    if not _is_lacking(_CLIENTS):
        getattr(load(f"{_CLIENTS}.occasions"), moment)()


def commands() -> dict[str, EntryPoint]:
    """Return the subcommands of add-ons, by name; an installed one comes before what is known here."""
    known = [EntryPoint(name, value, GROUP) for name, value in _KNOWN.items()]
    return {each.name: each for each in (*known, *entry_points(group=GROUP))}


def lazily(package: str, homes: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Return the function `__getattr__` of a module, which imports names on first use, and submodules too.

    Args:
        package: the module's `__name__`.
        homes: the names that the module exports, by the modules that have them.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:
        nothing = AttributeError(f"module {package!r} has no attribute {name!r}")
        if name in home_of:
            value = getattr(load(home_of[name]), name)
        elif name.startswith("__"):
            raise nothing
        else:
            try:
                value = importlib.import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                raise nothing from None
        setattr(sys.modules[package], name, value)
        return value

    return get


_MOVED: Final = {
    "flatparam.private": f"{_CLIENTS}.private",
    **{
        f"flatparam.{name}": f"{_CLIENTS}.private.{name}"
        for name in ("_debug_utils", "_fsdp_extensions", "_trace_utils")
    },
    **{
        f"flatparam.compat.{name}": f"{_CLIENTS}.{name}"
        for name in ("adapters", "children", "installing", "names", "reading")
    },
    "flatparam.compat.planning": f"{_CLIENTS}.reading",
    "flatparam.compat.reaching": f"{_CLIENTS}.children",
    # What programs have saved may name its classes.
    "flatparam.wrapper.averaging": f"{_CLIENTS}.averaging",
}
"""The old name of each module, or of the package around it, and the new one."""


class _Moved(MetaPathFinder, Loader):
    """Finds a module under its old name: it is the very module that has the new one."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module that has moved, and no other one."""
        is_known = fullname.startswith("flatparam.") and _new_name(fullname) is not None
        return ModuleSpec(fullname, self) if is_known else None

    def exec_module(self, module: ModuleType) -> None:
        """Have the module of the new name take the place of `module`.

        Raises:
            ModuleNotFoundError: if its add-on is not installed; the message says how to install it.
        """
        new = _new_name(module.__name__)
        assert new is not None, "it was found"
        sys.modules[module.__name__] = load(new)


def _new_name(old: str) -> str | None:
    parts = old.split(".")
    for length in range(2, len(parts) + 1):
        new = _MOVED.get(".".join(parts[:length]))
        if new is not None:
            return ".".join([new, *parts[length:]])
    return None


def find_moved_modules() -> None:
    """Have Python find them from now on, before it looks into the folders of the packages around them."""
    sys.meta_path.insert(0, _Moved())


_OF_WRAPPERS: Final = """
    full_optim_state_dict sharded_optim_state_dict shard_full_optim_state_dict scatter_full_optim_state_dict
    flatten_sharded_optim_state_dict rekey_optim_state_dict training_state _has_params _handle _all_handles
    _all_fsdp_states _flat_param _use_orig_params _sync_gradients _comm_hook _comm_hook_state
    _state_dict_type _state_dict_config _optim_state_dict_config _inter_node_pg _device_handle _device_mesh
    _current_stream _default_stream _unshard_stream _pre_unshard_stream _post_backward_stream
    _all_reduce_stream _exec_order_data _handle_training_state _assert_state _use_training_state _unshard
    _ignored_modules _ignored_params _wait_unshard_streams_on_current_stream
"""
"""The attributes of the wrapper that programs written for FSDP1 reach for, and nothing of ours."""
_OF_FLAT_PARAMETERS: Final = """
    _params _param_infos _shared_param_infos _shard_param_infos _full_param_padded _strides _contiguities
    _numels_with_padding _is_padding_mask _modules _num_params _sharded_size _unpadded_unsharded_size _local_shard
    _padded_unsharded_size _shard_numel_padded _mp_shard _full_prec_full_param_padded _saved_grad_shard _cpu_grad
"""
"""Those of a flat parameter."""


@final
class Promised:
    """Stands for an attribute of a class until a program reads or sets it."""

    def __init__(self, owner: type, name: str, home: str) -> None:
        """Stand for `owner.name`, which the module `home` has in its mapping `NAMES`."""
        self.owner, self.name, self.home = owner, name, home

    def fulfil(self) -> Any:
        """Put the attribute in its place, and return it.

        Raises:
            AttributeError: if the add-on is not installed; the message says how to install it.
        """
        try:
            found = load(self.home).NAMES[self.name]
        except ModuleNotFoundError as error:
            if error.name != self.home.partition(".")[0]:
                raise
            raise AttributeError(f"{self.owner.__name__}.{self.name} is in an add-on: {error}") from None
        setattr(self.owner, self.name, found)
        return found

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self.fulfil().__get__(instance, owner)

    def __set__(self, instance: object, value: object) -> None:
        found = self.fulfil()
        if hasattr(type(found), "__set__"):
            found.__set__(instance, value)
        else:
            vars(instance)[self.name] = value


def promise_clients_names(wrapper: type, flat_parameter: type) -> None:
    """Have the two classes promise the names that the add-on flatparam-clients has in mappings `NAMES`."""
    for owner, home, names in (
        (wrapper, "flatparam_clients.wrapper_names", _OF_WRAPPERS),
        (flat_parameter, "flatparam_clients.flat_parameter_names", _OF_FLAT_PARAMETERS),
    ):
        for name in names.split():
            setattr(owner, name, Promised(owner, name, home))


def fulfil(owner: type) -> None:
    """Put every attribute that `owner` promises in its place."""
    for value in list(vars(owner).values()):
        if isinstance(value, Promised):
            value.fulfil()


def raise_if_lacking(kind: type, name: str) -> None:
    """Raise the error that says what to install, if classes promise `name` and the add-on is lacking.

    Raises:
        AttributeError: as the attribute itself does, whose error Python drops before it asks `__getattr__`.
    """
    for base in kind.__mro__:
        value = vars(base).get(name)
        if isinstance(value, Promised):
            value.fulfil()
