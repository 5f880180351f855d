"""What a plan says of a kernel is what the kernel does: the memory that it takes inside, and what it returns."""

from typing import Any

import pytest
import torch
from plans.configurations import CONFIGURATIONS

from flatparam_plan.hollow.kernels import Kernel, by_rule, operands_of
from flatparam_plan.hollow.temporaries import Temporaries, tried
from flatparam_plan.rehearsal import rehearse
from flatparam_plan.training import Setup

pytestmark = pytest.mark.filterwarnings("ignore")


def returned(kernel: Kernel) -> list[tuple[Any, ...]]:
    """The memory and dtype of what the kernel returns when it runs on zeros."""

    def real(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
        return type(value)(map(real, value)) if isinstance(value, (tuple, list)) else value

    result = kernel.operation(*real(kernel.args), **{name: real(value) for name, value in kernel.kwargs.items()})
    return [(each.untyped_storage().nbytes(), each.dtype, each.shape) for each in operands_of(result)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_rules_and_shapes_are_those_of_the_kernels(
    name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each kernel of a training step that is known by a rule, one is run and says the same."""
    wrong: set[str] = set()

    def compared(self: Temporaries, kernel: Kernel, key: object = None) -> int:
        known = by_rule(kernel)
        random = torch.Tag.nondeterministic_seeded in kernel.operation.tags
        if not random and kernel.results:
            trial = tried(kernel)
            by_running = 0 if trial is None else trial.taken
            if known not in (None, by_running):
                wrong.add(f"{kernel.operation}: {known} by rule, {by_running} taken")
            if any(each.alias_info is None for each in kernel.operation._schema.returns):
                expected = [(e.untyped_storage().nbytes(), e.dtype, e.shape) for e in kernel.results]
                if returned(kernel) != expected:
                    wrong.add(f"{kernel.operation}: {expected} planned, {returned(kernel)} returned")
        return known or 0

    monkeypatch.setattr(Temporaries, "nbytes", compared)
    configuration = CONFIGURATIONS[name]
    setup = Setup(world_size=4, wrap=configuration.units, param_dtype=dtype, max_norm=1.0)
    rehearse(configuration.program(), setup)
    assert not wrong, "\n".join(sorted(wrong))
