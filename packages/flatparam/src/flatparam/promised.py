"""Attributes of classes that an add-on has: each takes its place in the class when it is asked for."""

from __future__ import annotations

from typing import Any, Final, final

from flatparam.addons import load

__all__ = ["Promised", "fulfil", "promise_clients_names", "raise_if_lacking"]

_OF_WRAPPERS: Final = """
    full_optim_state_dict sharded_optim_state_dict shard_full_optim_state_dict scatter_full_optim_state_dict
    flatten_sharded_optim_state_dict rekey_optim_state_dict training_state _has_params _handle _all_handles
    _all_fsdp_states _flat_param _use_orig_params _sync_gradients _comm_hook _comm_hook_state
    _state_dict_type _state_dict_config _optim_state_dict_config _inter_node_pg _device_handle
    _current_stream _default_stream _unshard_stream _pre_unshard_stream _post_backward_stream
    _all_reduce_stream _exec_order_data _handle_training_state _assert_state _use_training_state _unshard
    _wait_unshard_streams_on_current_stream
"""
"""The attributes of the wrapper that programs written for FSDP1 reach for, and nothing of ours."""
_OF_FLAT_PARAMETERS: Final = """
    _params _param_infos _shared_param_infos _shard_param_infos _full_param_padded _strides _contiguities
    _numels_with_padding _is_padding_mask _modules _num_params _sharded_size _unpadded_unsharded_size
    _padded_unsharded_size _mp_shard _full_prec_full_param_padded _saved_grad_shard _cpu_grad _local_shard
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
        (flat_parameter, "flatparam_clients.flat_parameter", _OF_FLAT_PARAMETERS),
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
