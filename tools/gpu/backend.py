"""Whether what multiplies gradients over the device's own backend does: torch's part of it, and ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from bench.contenders import in_place, ours
from bench.training import Setting, Training
from bench.workloads import stack

from .contenders import sharded_alone
from .facts import Facts
from .measurement import Measurement
from .place import Place, Plan, in_processes, told

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
DIVISOR: Final = 4.0

FORMS: Final[dict[str, Callable[[Setting], Training]]] = {
    "flatparam": ours,
    "flatparam, sharded over one rank": sharded_alone,
    "flatparam, original": partial(ours, use_orig_params=True),
    "flatparam, fully_shard": in_place,
}


def measure(place: Place) -> dict[str, dict[str, Any]]:
    """A row for each product: what was expected, and what was found."""
    rows = {}
    for dtype in DTYPES:
        for name, multiply in (("all-reduce", _all_reduced), ("reduce-scatter", _reduce_scattered)):
            rows[f"PREMUL_SUM by {1 / DIVISOR}, {name}, {str(dtype)[6:]}"] = _row(
                place.group.size / DIVISOR, partial(multiply, place, dtype), is_ours=False
            )
    for form, build in FORMS.items():
        for bf16 in (False, True):
            rows[f"{form}, divisor {DIVISOR:.0f}, {'bf16' if bf16 else 'fp32'}"] = _row(
                place.group.size / DIVISOR, partial(_divided, place, build, bf16), is_ours=True
            )
    return rows


def _row(expected: float, action: Callable[[], float], *, is_ours: bool) -> dict[str, Any]:
    try:
        found = action()
    except Exception as error:
        return {"error": told(error), "ours": is_ours}
    return {"expected": expected, "found": found, "right": abs(found - expected) < 1e-2, "ours": is_ours}


def _times() -> Any:
    make: Any = dist._make_nccl_premul_sum  # type: ignore[attr-defined, unused-ignore]
    return make(1 / DIVISOR)


def _all_reduced(place: Place, dtype: torch.dtype) -> float:
    ones = torch.ones(1024, dtype=dtype, device=place.device)
    dist.all_reduce(ones, op=_times(), group=place.process_group)
    return ones.float().mean().item()


def _reduce_scattered(place: Place, dtype: torch.dtype) -> float:
    ones = torch.ones(1024 * place.group.size, dtype=dtype, device=place.device)
    output = torch.zeros(1024, dtype=dtype, device=place.device)
    dist.reduce_scatter_tensor(output, ones, op=_times(), group=place.process_group)
    return output.float().mean().item()


def _divided(place: Place, build: Callable[[Setting], Training], bf16: bool) -> float:
    """How many times the gradient of this rank the reduced one is: all ranks have the same batch."""
    setting = place.setting(stack(units=2, width=64, depth=1), bf16=bf16)
    batch = tuple(each.to(place.device) for each in setting.workload.batch_of(0))
    norms = []
    for divisor in (float(place.group.size), DIVISOR):
        training = build(setting)
        training.batch = batch
        for module in training.model.modules():  # of `fully_shard` each has its own
            set_divisor: Any = getattr(module, "set_gradient_divide_factor", None)
            if set_divisor is not None:
                set_divisor(divisor)
        training.backward(training.forward())
        gradients = [each.grad for each in training.model.parameters() if each.grad is not None]
        norms.append(sum(each.double().square().sum() for each in gradients))
    total = torch.stack([torch.as_tensor(norm).to(place.device) for norm in norms])
    dist.all_reduce(total, group=place.process_group)
    mean, divided = total.sqrt().tolist()
    return float(divided / mean)


def _run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
    return judged(in_processes(plan, limit, measure)[0], on_cpu=plan.on_cpu)


def judged(rows: dict[str, dict[str, Any]], *, on_cpu: bool) -> dict[str, Any]:
    """The entry of the rows: it is right where ours are; what is wrong of torch's own is told, and decides nothing."""
    of_torch = [name for name, row in rows.items() if not row["ours"]]
    wrong = [name for name in of_torch if not rows[name].get("right", False) and "error" not in rows[name]]
    if on_cpu:  # no backend of the CPU has it
        rows = {name: row for name, row in rows.items() if name not in of_torch}
    said = "not on this device: PREMUL_SUM is NCCL's" if on_cpu else "PREMUL_SUM of this torch is right"
    return {
        "columns": {"expected": "expected", "found": "found", "right": "right"},
        "note": f"A fault of this torch, which flatparam has to avoid: {', '.join(wrong)}" if wrong else said,
        "rows": rows,
        "same": all(row.get("right", False) for row in rows.values() if row["ours"]),
    }


MEASUREMENTS: Final = (
    Measurement(
        "backend",
        "What PREMUL_SUM of torch's NCCL makes of ones, and how many times a gradient becomes what it is without "
        "`set_gradient_divide_factor`. The run fails where flatparam's gradients are not divided rightly; of torch's "
        "own products it is told which are wrong (pytorch#190745).",
        10,
        40,
        _run,
        decides=True,
    ),
)
