"""`certify`: every mesh and every setting of an engine, beside one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from flatparam_certify.case import Case, case_named
from flatparam_certify.certificate import Certificate, CertifiedRun, Finding
from flatparam_certify.engines import EngineUnderTest
from flatparam_certify.judging import Judge
from flatparam_certify.meshes import OF_DATA, CertifyError, MeshSizes
from flatparam_certify.rank import RunSeen, Skipped
from flatparam_certify.reference import Reference
from flatparam_certify.settings import CLIPS, OPTIMIZERS, PRECISIONS, STEPS, Setting, few_settings, settings_for
from flatparam_certify.watched_ranks import Failed, World

TIMEOUT: Final = 120.0
"""Seconds for one setting."""
_LOST_WORLDS: Final = 2
"""After so many settings that ended a world, the rest of its mesh is not run."""


def certify(
    case: Case | str,
    engine: str | Callable[..., Any] = "flatparam",
    mesh: Mapping[str, int] | str | None = None,
    *,
    wrap: Sequence[str] = (),
    of_data: Sequence[str] = OF_DATA,
    groups_of_one: bool = True,
    precisions: Sequence[str] = PRECISIONS,
    optimizers: Sequence[str] = OPTIMIZERS,
    micro_batches: int | None = None,
    steps: int = STEPS,
    seed: int = 0,
    timeout: float = TIMEOUT,
    observe: Callable[[int], object] = lambda done: None,
) -> Certificate:
    """Run an engine on CPU beside one process, and compare losses, gradients, clipping and weights.

    Args:
        case: the model, its batches and its loss, or the name that leads to them: `FILE.py`, `MODULE:NAME`.
        engine: `flatparam`, `fully_shard`, `torch-fsdp1`, `torch-fsdp2`, `torch-ddp`, `plain`, or a function, or its
            name: it takes a model and a `DeviceMesh`, maybe a `dtype` to compute in, and returns a module or a
            `Trainer`.
        mesh: the number of ranks along each dimension, such as `{"dp_shard": 2, "tp": 2}`; by default two along
            `dp_shard`, and one rank for `plain`.
        wrap: for the built-in engines, the class names of the modules that become units of their own.
        of_data: the dimensions whose ranks have batches of their own.
        groups_of_one: whether also to run the meshes in which one of the dimensions, or all, have one rank.
        precisions: those to compute in: `fp32`, `bf16`.
        optimizers: those to step with: `sgd`, `adamw`.
        micro_batches: those of an accumulated step; by default 3, or another number that is no size of the mesh.
        steps: those of a run.
        seed: that of weights and batches.
        timeout: the seconds after which a setting counts as hung.
        observe: called with the number of settings that are done.

    Returns:
        What was run, and what was wrong.

    Raises:
        CertifyError: for a case, an engine or a mesh that cannot be used.
    """
    shown = case if isinstance(case, str) else case.build.__module__
    known = case_named(case) if isinstance(case, str) else case
    found = EngineUnderTest.of(engine, tuple(wrap))
    default = "dp_shard=1" if found.name == "plain" else "dp_shard=2"
    asked = default if mesh is None else mesh
    sizes = MeshSizes.read(asked, tuple(of_data)) if isinstance(asked, str) else MeshSizes.of(asked, tuple(of_data))
    found.check(sizes)
    settings = settings_for(sizes, precisions, optimizers, micro_batches, steps)
    if not settings:
        raise CertifyError("expected at least one precision and one optimizer, found none; leave them out")
    meshes = [(sizes, settings)]
    if groups_of_one:
        meshes += [(each, few_settings(settings)) for each in sizes.shrunk()]
    before = torch.get_num_threads()
    # As on the ranks: the bits of some sums depend on it.
    torch.set_num_threads(1)
    try:
        model = known.model(seed)
        kinds = {type(each).__name__ for each in model.modules()}
        if lacking := [name for name in wrap if name not in kinds]:
            raise CertifyError(f"wrap: expected classes of the model ({', '.join(sorted(kinds))}), found {lacking}")
        shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        notes: list[str] = []
        runs: list[CertifiedRun] = []
        for each, some in meshes:
            reference = Reference(known, each, seed, notes)
            for run in _runs_on(each, case, found, reference, some, timeout):
                runs.append(run)
                observe(1)
    finally:
        torch.set_num_threads(before)
    return Certificate(found.name, shown, seed, shapes, tuple(runs), tuple(notes))


def _runs_on(
    mesh: MeshSizes,
    case: Case | str,
    engine: EngineUnderTest,
    reference: Reference,
    settings: Sequence[Setting],
    timeout: float,
) -> Iterable[CertifiedRun]:
    """Yield each setting's run; a world that was lost in one is followed by another one."""
    # What is wrong with the case is told before any rank runs.
    for each in settings:
        reference.first(each.micro_batches, each.precision == "bf16")
    left, lost = list(settings), 0
    while left:
        if lost == _LOST_WORLDS:
            why = "because the engine ended the ranks of two settings before"
            yield from (CertifiedRun(str(mesh), str(each), why) for each in left)
            return
        with World(mesh, case, engine, reference.seed, timeout) as world:
            begun = world.begin()
            if any(begun):
                yield _failed(mesh, left.pop(0), begun)
                lost += 1
                continue
            while left and world.is_sound:
                setting = left.pop(0)
                limit = CLIPS * reference.first(setting.micro_batches, setting.precision == "bf16").norm()
                yield _judged(reference, setting, world.run(setting, limit))
            lost += not world.is_sound


def _judged(reference: Reference, setting: Setting, answers: Sequence[Any]) -> CertifiedRun:
    if any(isinstance(each, Failed) for each in answers):
        return _failed(reference.mesh, setting, answers)
    skipped = [each for each in answers if isinstance(each, Skipped)]
    if skipped:
        return CertifiedRun(str(reference.mesh), str(setting), skipped[0].why)
    seen = [each for each in answers if isinstance(each, RunSeen)]
    return Judge(reference, setting, seen).run()


def _failed(mesh: MeshSizes, setting: Setting, answers: Sequence[Any]) -> CertifiedRun:
    """Return a run that ranks did not finish: who raised, died or hung, and where."""
    told: dict[tuple[str, str], list[int]] = {}
    details: dict[tuple[str, str], str] = {}
    failed = [(rank, each) for rank, each in enumerate(answers) if isinstance(each, Failed)]
    for rank, each in _causes(failed):
        key = (each.kind, each.text)
        told.setdefault(key, []).append(rank)
        details.setdefault(key, each.details)
    findings = []
    done = [str(rank) for rank, each in enumerate(answers) if isinstance(each, RunSeen)]
    for key, ranks in told.items():
        kind, text = key
        if kind == "hung" and done:
            text += f"; rank{'s' if len(done) > 1 else ''} {', '.join(done)} had finished"
        shown = () if len(ranks) == mesh.ranks else tuple(ranks)
        findings.append(
            Finding("run", kind, f"{kind}: {text}", "", shown, str(mesh), str(setting), details=details[key])
        )
    return CertifiedRun(str(mesh), str(setting), "", {}, tuple(findings))


def _causes(failed: list[tuple[int, Failed]]) -> list[tuple[int, Failed]]:
    """Return the ranks that failed by themselves; those that waited for one of them hang, or lose a connection."""
    died = [(rank, each) for rank, each in failed if each.kind == "died"]
    raised = [(rank, each) for rank, each in failed if each.kind == "raised"]
    alone = [(rank, each) for rank, each in raised if "gloo/transport" not in each.text]
    return died or alone or raised or failed
