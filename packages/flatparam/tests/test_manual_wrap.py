"""`enable_wrap` and `wrap`: the model says where, the caller says how."""

import threading
from typing import Any

import pytest
import torch.distributed.fsdp.wrap as theirs
from torch import nn

import flatparam.wrap as ours
from flatparam import FullyShardedDataParallel as FSDP
from flatparam.wrap import enable_wrap, wrap
from flatparam_comm import SingleCollectives

HERE = SingleCollectives()


class Recorder(nn.Module):
    """A wrapper that keeps its arguments."""

    def __init__(self, module: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.inner = module
        self.arguments = arguments


def test_outside_nothing_is_wrapped() -> None:
    """S-114: without a context `wrap` returns the module itself."""
    layer = nn.Linear(2, 2)
    assert wrap(layer) is layer
    assert wrap(layer, use_orig_params=True) is layer


def test_inside_with_the_contexts_arguments() -> None:
    """S-114: within the context `wrap` wraps with the class and arguments given there."""
    with enable_wrap(wrapper_cls=Recorder, a=1, b=2):
        found = wrap(layer := nn.Linear(2, 2))
    assert isinstance(found, Recorder)
    assert found.inner is layer
    assert found.arguments == {"a": 1, "b": 2}


def test_overrides_win() -> None:
    """S-114: an argument of `wrap` goes before the context's, for that module."""
    with enable_wrap(wrapper_cls=Recorder, a=1, b=2):
        found, other = wrap(nn.Linear(2, 2), b=3, c=4), wrap(nn.Linear(2, 2))
    assert found.arguments == {"a": 1, "b": 3, "c": 4}
    assert other.arguments == {"a": 1, "b": 2}


def test_a_modules_own_overrides_win_over_all() -> None:
    """S-114: the attribute `_wrap_overrides` of a module is honoured, as in torch."""
    layer = nn.Linear(2, 2)
    layer._wrap_overrides = {"a": 9}
    with enable_wrap(wrapper_cls=Recorder, a=1, b=2):
        assert wrap(layer, a=3).arguments == {"a": 9, "b": 2}


def test_the_context_ends() -> None:
    """After the context, also after an exception in it, `wrap` wraps nothing."""
    with pytest.raises(ZeroDivisionError), enable_wrap(wrapper_cls=Recorder):
        raise ZeroDivisionError
    assert isinstance(wrap(nn.Linear(2, 2)), nn.Linear)


def test_a_nested_context() -> None:
    """S-114, L-53: an inner context, which torch refuses, adds its arguments to the outer one's, which then go on."""
    with enable_wrap(wrapper_cls=Recorder, a=1, b=2):
        with enable_wrap(wrapper_cls=Recorder, b=3):
            inner = wrap(nn.Linear(2, 2))
        outer = wrap(nn.Linear(2, 2))
    assert inner.arguments == {"a": 1, "b": 3}
    assert outer.arguments == {"a": 1, "b": 2}


def test_a_nested_context_of_another_wrapper() -> None:
    """L-53: arguments are a wrapper's own: those of the context around do not go to another wrapper."""

    class Other(Recorder):
        pass

    with enable_wrap(wrapper_cls=Recorder, a=1):
        with enable_wrap(wrapper_cls=Other, b=2):
            with enable_wrap(wrapper_cls=Other, c=3):
                found = wrap(nn.Linear(2, 2))
        outer = wrap(nn.Linear(2, 2))
    assert (type(found), found.arguments) == (Other, {"b": 2, "c": 3})
    assert (type(outer), outer.arguments) == (Recorder, {"a": 1})


def test_the_context_object() -> None:
    """S-002: `_ConfigAutoWrap` is the context, and tells what counts now; torch's names mean what torch's mean."""
    for config in (ours._ConfigAutoWrap, theirs._ConfigAutoWrap):
        facts = []
        with config(wrapper_cls=Recorder, a=1):
            facts.append((config.in_autowrap_context, config.wrapper_cls, config.kwargs))
        facts.append((config.in_autowrap_context, config.wrapper_cls, config.kwargs))
        config.enable_autowrap_context({"wrapper_cls": Recorder, "b": 2})
        facts.append((config.in_autowrap_context, config.wrapper_cls, config.kwargs))
        config.disable_autowrap_context()
        config.disable_autowrap_context()
        facts.append((config.in_autowrap_context, config.wrapper_cls, config.kwargs))
        assert facts == [
            (True, Recorder, {"a": 1}),
            (False, None, {}),
            (True, Recorder, {"b": 2}),
            (False, None, {}),
        ]
        with pytest.raises(AssertionError, match="wrapper_cls"):
            config.enable_autowrap_context({"b": 2})
        theirs._ConfigAutoWrap.disable_autowrap_context()  # torch's stays in the context that it has refused


def test_contexts_of_threads_are_their_own() -> None:
    """Ranks that are threads of one process do not see each other's contexts."""
    found = []
    with enable_wrap(wrapper_cls=Recorder):
        thread = threading.Thread(target=lambda: found.append(wrap(nn.Linear(2, 2))))
        thread.start()
        thread.join()
    assert isinstance(found[0], nn.Linear)


def test_with_the_real_wrapper() -> None:
    """Layers that a model wraps while it is built become units below the root's."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = wrap(nn.Linear(2, 3))
            self.second = wrap(nn.Linear(3, 2), use_orig_params=False)
            self.third = nn.Linear(2, 1)

    with enable_wrap(wrapper_cls=FSDP, process_group=HERE, use_orig_params=True):
        model = wrap(Model())
    kinds = [(type(m.module).__name__, "_flat_param" in m.module._parameters) for m in FSDP.fsdp_modules(model)]
    assert kinds == [("Model", False), ("Linear", False), ("Linear", True)]
    assert list(model.state_dict()) == list(Model().state_dict())
