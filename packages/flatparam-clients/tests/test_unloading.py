"""PEFT may ask a module inside of what is sharded for its state, because of the names in it."""

import sys
from types import ModuleType

import pytest
from torch import nn

from flatparam import FullyShardedDataParallel as FSDP
from flatparam_comm import Collectives, FlatParamError
from packages.flatparam.tests.test_past_the_wrapper import Saves
from packages.flatparam.tests.worlds import on_ranks


def test_names_of_a_state_past_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT may ask a module that an adapter has beside its own weights for its state, for the names in it."""

    class Keeper:
        """As PEFT's `ModulesToSaveWrapper`."""

        def adapter_state_dict(self, module: nn.Module) -> list[str]:
            return list(module.state_dict())

        adapter_state_dict_load_map = adapter_state_dict

    for name, members in (
        ("peft.tuners.tuners_utils", {"BaseTuner": type("BaseTuner", (), {})}),
        ("peft.utils.other", {"ModulesToSaveWrapper": Keeper}),
    ):
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    def names(ranks: Collectives) -> None:
        model = FSDP(Saves(), ranks, use_orig_params=True)
        for ask in (Keeper().adapter_state_dict, Keeper().adapter_state_dict_load_map):
            assert ask(model.module) == ["gain.g"]
        with pytest.raises(FlatParamError, match="was called by itself"):
            model.module.gain.state_dict()

    on_ranks(2, names)
