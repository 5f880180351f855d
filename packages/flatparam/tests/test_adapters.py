"""PEFT's functions for adapters, which compare the names of modules with those of a state; PEFT is made up here."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

import flatparam
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import SingleCollectives

pytestmark = pytest.mark.usefixtures("leftovers_do_not_count")


def get_peft_model_state_dict(model: nn.Module, adapter_name: str = "default") -> dict[str, Any]:
    """As PEFT's: the entries that lie beneath modules of the adapter."""
    adapters = tuple(f"{name}." for name, _ in model.named_modules() if name.endswith("lora"))
    return {name: value for name, value in model.state_dict().items() if name.startswith(adapters)}


def set_peft_model_state_dict(model: nn.Module, state: dict[str, Any], **_: Any) -> Any:
    """As PEFT's: names without a prefix that the model's parameters have are taken for another model's."""
    prefix = "model."
    if not any(name.startswith(prefix) for name, _ in model.named_parameters()):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return model.load_state_dict(state, strict=False)


# Not by name: in this module, too, the names are patched.
FUNCTIONS = (get_peft_model_state_dict, set_peft_model_state_dict)


class Layer(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.lora = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora(x)  # type: ignore[no-any-return]


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package as programs have it: both functions are at home in one module, and imported by another."""
    modules = {name: types.ModuleType(name) for name in ("peft", "peft.utils", "peft.utils.save_and_load")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        for function in FUNCTIONS:
            if name != "peft.utils":
                setattr(module, function.__name__, function)
    return modules["peft"]


def wrapped() -> Any:
    model = nn.Sequential()
    model.add_module("model", nn.Sequential(Layer(), Layer()))
    return flatparam.FullyShardedDataParallel(
        model,
        process_group=SingleCollectives(),
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        use_orig_params=True,
    )


def test_an_adapter_is_saved_and_loaded(peft: Any) -> None:
    """Of a model with wrappers inside, the adapter's state is whole, and it is what is loaded, and nothing else."""
    with flatparam.install():
        model, other = wrapped(), wrapped()
        before = {name: value.clone() for name, value in other.state_dict().items()}
        state = peft.get_peft_model_state_dict(model)
        assert set(state) == {"model.0.lora.weight", "model.1.lora.weight"}
        result = peft.set_peft_model_state_dict(other, state)
        assert result.unexpected_keys == []
        after = other.state_dict()
        for name, value in after.items():
            assert torch.equal(value, state.get(name, before[name])), name
        # Afterwards the names have their wrappers again.
        assert any("_fsdp_wrapped_module" in name for name, _ in model.named_modules())
        assert "named_modules" not in vars(model)


def test_without_wrappers_and_without_install(peft: Any) -> None:
    """A model that is not wrapped is theirs alone, and after `uninstall` the functions are, too."""
    with flatparam.install():
        wrapped()
        assert peft.get_peft_model_state_dict is not FUNCTIONS[0]
        assert set(peft.get_peft_model_state_dict(Layer())) == {"lora.weight"}
    assert peft.get_peft_model_state_dict is FUNCTIONS[0]
    wrapped()
    assert peft.get_peft_model_state_dict is FUNCTIONS[0]


def test_an_error_leaves_the_names_alone(peft: Any) -> None:
    """If PEFT's function fails, the model is as it was."""
    with flatparam.install():
        model = wrapped()
        with pytest.raises(TypeError):
            peft.set_peft_model_state_dict(model, None)
        assert "named_modules" not in vars(model)
