"""PEFT's functions for adapters, which compare the names of modules with those of a state; PEFT is made up here."""

from __future__ import annotations

import copy
import sys
import types
from typing import Any

import pytest
import torch
from each_row import each_row
from torch import nn

import flatparam
from flatparam.wrap import ModuleWrapPolicy
from flatparam_comm import FlatParamError, SingleCollectives, run_threads

pytestmark = pytest.mark.usefixtures("leftovers_do_not_count")


def get_peft_model_state_dict(model: nn.Module, adapter_name: str = "default") -> dict[str, Any]:
    """As PEFT's: the entries that lie beneath modules of the adapter, without the adapter's own name."""
    adapters = tuple(f"{name}." for name, _ in model.named_modules() if name.endswith("lora"))
    state = model.state_dict().items()
    return {name.replace(".mine", ""): value for name, value in state if name.startswith(adapters)}


def set_peft_model_state_dict(model: nn.Module, state: dict[str, Any], **_: Any) -> Any:
    """As PEFT's: the model's state has the names with the adapter's own; the others are left as they are.

    Names without a prefix that the model's parameters have are taken for a different model's.
    """
    own = {name.replace(".mine", ""): name for name in model.state_dict()}
    state = {own.get(name, name): value for name, value in state.items()}
    prefix = "model."
    if not any(name.startswith(prefix) for name, _ in model.named_parameters()):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return model.load_state_dict(state, strict=False)


class ToSave(nn.Module):
    """As PEFT's `ModulesToSaveWrapper`: a module, and the copy of it that belongs to the adapter, which is saved whole."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original
        self.modules_to_save = nn.ModuleDict({"mine": copy.deepcopy(original)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.modules_to_save["mine"](x)  # type: ignore[no-any-return]

    def adapter_state_dict(self, adapter: str, state: dict[str, Any]) -> dict[str, Any]:
        own = self.modules_to_save[adapter].state_dict()
        return {name: state[f"modules_to_save.{adapter}.{name}"] for name in own}

    def adapter_state_dict_load_map(self, adapter: str) -> dict[str, str]:
        return {name: f"modules_to_save.{adapter}.{name}" for name in self.modules_to_save[adapter].state_dict()}


def _get_with_modules(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, ToSave):
            own = {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
            found |= {f"{name}.{key}": value for key, value in module.adapter_state_dict("mine", own).items()}
    return found


def _set_with_modules(model: nn.Module, state: dict[str, Any]) -> Any:
    state = dict(state)
    for name, module in model.named_modules():
        if isinstance(module, ToSave):
            for key, stored in module.adapter_state_dict_load_map("mine").items():
                state[f"{name}.{stored}"] = state.pop(f"{name}.{key}")
    return model.load_state_dict(state, strict=False)


# Not by name: in this module, too, the names are patched.
FUNCTIONS = (get_peft_model_state_dict, set_peft_model_state_dict)


class Layer(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.lora = nn.ModuleDict({"mine": nn.Linear(3, 3, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora["mine"](x)  # type: ignore[no-any-return]


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


def wrapped(world: Any = None) -> Any:
    model = nn.Sequential()
    model.add_module("model", nn.Sequential(Layer(), Layer()))
    return flatparam.FullyShardedDataParallel(
        model,
        process_group=SingleCollectives() if world is None else world,
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
            assert torch.equal(value, state.get(name.replace(".mine", ""), before[name])), name
        # Afterwards the names have their wrappers again.
        assert any("_fsdp_wrapped_module" in name for name, _ in model.named_modules())
        assert "named_modules" not in vars(model)


def test_wrappers_that_are_only_inside(peft: Any) -> None:
    """Of the module in the outermost wrapper, full parameters or not, the adapter's state is whole, too."""

    def ask(world: Any) -> None:
        model = wrapped(world)
        names = {"model.0.lora.weight", "model.1.lora.weight"}
        assert set(peft.get_peft_model_state_dict(model.module)) == names
        with flatparam.FullyShardedDataParallel.summon_full_params(model):
            assert set(peft.get_peft_model_state_dict(model.module)) == names
        assert "named_modules" not in vars(model.module)

    with flatparam.install():
        run_threads(2, ask)


def test_a_full_state_is_loaded_on_all_ranks(peft: Any) -> None:
    """With `rank0_only` the first rank alone has a full state; the adapter is loaded on the other rank, too.

    Each rank passes the state, or the first one alone.
    """

    def load(world: Any) -> list[list[Any]]:
        torch.manual_seed(0)
        model = wrapped(world)
        kind = flatparam.StateDictType.FULL_STATE_DICT
        only = flatparam.FullStateDictConfig(rank0_only=True)
        results = []
        for everywhere in (True, False):
            given = {f"model.{place}.lora.weight": torch.full((3, 3), place + 5.0 + everywhere) for place in range(2)}
            with flatparam.FullyShardedDataParallel.state_dict_type(model, kind, only):
                peft.set_peft_model_state_dict(model, given if everywhere or world.rank == 0 else {})
                # The form is as it was.
                assert (model.state_dict() == {}) == (world.rank > 0)
            state = model.state_dict()
            results.append([state[f"model.{place}.lora.mine.weight"].unique().tolist() for place in range(2)])
        return results

    with flatparam.install():
        assert run_threads(2, load) == [[[[6.0], [7.0]], [[5.0], [6.0]]]] * 2


@pytest.mark.parametrize("rank0_only", [False, True])
def test_modules_that_are_saved_whole(peft: Any, rank0_only: bool, use_orig_params: bool) -> None:
    """They are in the adapter's state, flat or not, and are loaded; a rank that has no state gets none, and no error."""
    home = sys.modules["peft.utils.save_and_load"]
    _get_with_modules.__name__, _set_with_modules.__name__ = (each.__name__ for each in FUNCTIONS)
    for function in (_get_with_modules, _set_with_modules):
        for module in (peft, home):
            setattr(module, function.__name__, function)

    def make(world: Any) -> Any:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(3)
        model = nn.Sequential(ToSave(nn.Linear(3, 3)), ToSave(norm))
        return flatparam.FullyShardedDataParallel(
            model,
            process_group=world,
            auto_wrap_policy=ModuleWrapPolicy({ToSave}),
            use_orig_params=use_orig_params,
        )

    def collect_and_load(world: Any) -> Any:
        model, only = make(world), flatparam.FullStateDictConfig(rank0_only=rank0_only)
        with flatparam.FullyShardedDataParallel.state_dict_type(model, flatparam.StateDictType.FULL_STATE_DICT, only):
            whole = model.state_dict()
            found = peft.get_peft_model_state_dict(model, whole)
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        given = {f"{place}.{name}": torch.full((3,), 4.0) for place in range(2) for name in names[1:2]}
        given |= {"0.weight": torch.full((3, 3), 5.0), "1.weight": torch.full((3,), 6.0)}
        given |= {f"1.{name}": torch.tensor([7.0] * 3) for name in names[2:4]}
        given["1.num_batches_tracked"] = torch.tensor(8)
        result = peft.set_peft_model_state_dict(model, given)
        assert result.unexpected_keys == []
        after = model.state_dict()
        for place in range(2):
            assert "adapter_state_dict" not in vars(model.module[place])
        return sorted(found), {name: value.unique().tolist() for name, value in after.items() if "to_save" in name}

    collected = [
        *(
            "0.bias",
            "0.weight",
            "1.bias",
            "1.num_batches_tracked",
            "1.running_mean",
            "1.running_var",
            "1.weight",
        ),
    ]
    with flatparam.install():
        for rank, (found, loaded) in enumerate(run_threads(2, collect_and_load)):
            assert found == ([] if rank0_only and rank else collected)
            assert loaded["0.modules_to_save.mine.weight"] == [5.0]
            assert loaded["1.modules_to_save.mine.weight"] == [6.0]
            assert loaded["1.modules_to_save.mine.running_var"] == [7.0]
            assert loaded["1.modules_to_save.mine.num_batches_tracked"] == [8]


def test_without_wrappers_and_without_install(peft: Any) -> None:
    """A model that is not wrapped is theirs alone, and after `uninstall` the functions are, until a model is wrapped."""
    with flatparam.install():
        wrapped()
        assert peft.get_peft_model_state_dict is not FUNCTIONS[0]
        assert set(peft.get_peft_model_state_dict(Layer())) == {"lora.weight"}
    assert peft.get_peft_model_state_dict is FUNCTIONS[0]
    model = wrapped()
    assert set(peft.get_peft_model_state_dict(model)) == {"model.0.lora.weight", "model.1.lora.weight"}


def test_an_error_leaves_the_names_alone(peft: Any) -> None:
    """If PEFT's function fails, the model is as it was."""
    with flatparam.install():
        model = wrapped()
        with pytest.raises(AttributeError):
            peft.set_peft_model_state_dict(model, None)
        assert "named_modules" not in vars(model)


class BaseTuner(nn.Module):
    """As PEFT's: the model with the layers of an adapter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def merge_adapter(self) -> None:
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.base.weight.data += layer.lora["mine"].weight.data

    def merge_and_unload(self) -> nn.Module:
        self.merge_adapter()
        del self.model.lora
        return self.model


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "originals"])
def test_an_adapter_is_merged_in_full_and_not_unloaded(use_orig_params: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging parts, or taking an adapter out of shards, is refused with what to do; merging full weights works."""
    home = types.ModuleType("peft.tuners.tuners_utils")
    # Without the guards of tests before.
    tuner = home.BaseTuner = type("BaseTuner", (BaseTuner,), dict(vars(BaseTuner)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    x = torch.ones(2, 3)

    def made() -> Any:
        torch.manual_seed(0)
        return tuner(Layer())

    def rank(world: Any) -> torch.Tensor:
        model = flatparam.FullyShardedDataParallel(made(), use_orig_params=use_orig_params)
        with pytest.raises(FlatParamError, match=r"merge_and_unload\(\).*is sharded.*nothing was changed"):
            model.module.merge_and_unload()
        with pytest.raises(FlatParamError, match=r"Call merge_adapter\(\) on every rank inside summon"):
            model.module.merge_adapter()
        with model.summon_full_params(model):
            model.module.merge_adapter()
            with pytest.raises(FlatParamError, match="call merge_adapter.* and take state_dict"):
                model.module.merge_and_unload()
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    one = made()
    one.merge_adapter()
    for found in run_threads(2, rank):
        assert torch.equal(found, one(x))
    # A model that is not sharded does as before.
    assert isinstance(made().merge_and_unload(), Layer)


class AdaLoraModel(BaseTuner):
    """As PEFT's: the loss has a penalty on whole matrices, and the budget looks at rows of them."""

    trainable_adapter_name = "mine"

    def __init__(self, model: nn.Module, orth_reg_weight: float) -> None:
        super().__init__(model)
        self.peft_config = {"mine": types.SimpleNamespace(orth_reg_weight=orth_reg_weight)}

    def forward(self, x: torch.Tensor, labels: bool = True) -> Any:
        out = self.model(x).sum()
        if labels:
            covariances = [p @ p.T for name, p in self.model.named_parameters() if "lora" in name and p.dim() == 2]
            weight = self.peft_config["mine"].orth_reg_weight
            out = out + weight * sum(each.square().sum() for each in covariances)
        return types.SimpleNamespace(loss=out if labels else None, out=out)

    def update_and_allocate(self, step: int) -> int:
        return step


INSIDE = ModuleWrapPolicy({Layer})


@each_row(
    ("policy", "weight", "labels", "is_refused"),
    [(INSIDE, 0.5, True, True), (INSIDE, 0.5, False, False), (INSIDE, 0.0, True, False), (None, 0.5, True, False)],
)
def test_penalties_of_adalora_over_parts_are_refused(
    policy: Any, weight: float, labels: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of two parts of a matrix has another size, and no error: the loss would be another. One unit is right."""
    for name, kind in (("peft.tuners.tuners_utils", BaseTuner), ("peft.tuners.adalora.model", AdaLoraModel)):
        home = types.ModuleType(name)
        setattr(home, kind.__name__, type(kind.__name__, (kind,), dict(vars(kind))))
        monkeypatch.setitem(sys.modules, name, home)
    tuner = home.AdaLoraModel
    x = torch.ones(2, 3)

    def made() -> Any:
        torch.manual_seed(0)
        return tuner(Layer(), weight)

    def rank(world: Any) -> Any:
        model = flatparam.FullyShardedDataParallel(made(), use_orig_params=True, auto_wrap_policy=policy)
        with pytest.raises(FlatParamError, match=r"update_and_allocate\(\): the model in this AdaLoraModel is sharded"):
            model.module.update_and_allocate(1)
        if not is_refused:
            return model(x, labels).out.detach()
        with pytest.raises(FlatParamError, match="multiplies and ranks the rows of whole matrices"):
            model(x, labels)
        return None

    for found in run_threads(2, rank):
        assert is_refused or torch.equal(found, made()(x, labels).out)
    assert made().update_and_allocate(2) == 2
