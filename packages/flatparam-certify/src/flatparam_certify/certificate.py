"""The certificate: what was run, what is right and how nearly, and what is wrong; as a table and as facts."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import attrs

ABOUT: Final = ("gradient", "loss", "clip norm", "clipped gradient", "weights", "no_sync", "run")
"""The subjects that a finding can have."""
_HOW: Final = {
    "equal": "equal bits",
    "order": "within the order of sums",
    "rounding": "within rounding inside a micro-batch",
    "bf16": "within the band of bf16",
    "none": "unused: no gradient",
}


@final
@attrs.frozen
class Finding:
    """One thing that is wrong.

    Attributes:
        about: one of `gradient`, `loss`, `clip norm`, `clipped gradient`, `weights`, `no_sync` and `run`.
        code: the diagnosis in a word, such as `factor`, `zero`, `not-reduced`, `only-last`, `low-precision`.
        text: the diagnosis as a phrase.
        parameter: its name, or empty.
        ranks: the ranks that have it; empty: all.
        mesh: the mesh of the run, such as `dp_shard=2`.
        setting: that of the run, such as `1 micro-batch, fp32, sgd`.
        step: the step, from 0.
        error: the norm of the difference, relative to that of what is expected; `nan` if there is none.
        details: a traceback or a stack, for a run that failed.
    """

    about: str
    code: str
    text: str
    parameter: str = ""
    ranks: tuple[int, ...] = ()
    mesh: str = ""
    setting: str = ""
    step: int = 0
    error: float = float("nan")
    details: str = ""

    def told(self) -> str:
        """Return the diagnosis with its ranks."""
        if not self.ranks:
            return self.text
        named = ", ".join(map(str, self.ranks))
        return f"rank{'s' if len(self.ranks) > 1 else ''} {named}: {self.text}"


@final
@attrs.frozen
class CertifiedRun:
    """One setting on one mesh.

    Attributes:
        skipped: why it was not run; empty: it was.
        agreements: how each right gradient agrees, and its largest relative error, by parameter.
        findings: what is wrong in it.
    """

    mesh: str
    setting: str
    skipped: str = ""
    agreements: dict[str, tuple[str, float]] = attrs.field(factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether it was run, to its end."""
        return not self.skipped and not any(finding.about == "run" for finding in self.findings)


@final
@attrs.frozen
class Certificate:
    """The result of `certify`.

    Attributes:
        engine: its name.
        case: its name.
        seed: that of weights and batches.
        parameters: the shape of each parameter, by name.
        runs: every combination of mesh and setting, those that were skipped too.
        notes: what the reader should know: a model that cannot be computed in float64, say.
    """

    engine: str
    case: str
    seed: int
    parameters: dict[str, tuple[int, ...]]
    runs: tuple[CertifiedRun, ...]
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what is wrong, in the order of the runs."""
        return tuple(finding for run in self.runs for finding in run.findings)

    @property
    def is_right(self) -> bool:
        """Return whether something was run, and nothing was wrong."""
        return not self.findings and any(not run.skipped for run in self.runs)

    def table(self) -> str:
        """Return the certificate as text, with a row for each parameter."""
        done = [run for run in self.runs if not run.skipped]
        lines = [f"engine {self.engine}, case {self.case}, seed {self.seed}"]
        for mesh, runs in _by_mesh(self.runs).items():
            ran = [run for run in runs if not run.skipped]
            early = sum(not run.is_whole for run in ran)
            told = f", {early} ended early" if early else ""
            lines.append(f"  {mesh}: {len(ran)} of {len(runs)} settings run{told}")
            for why, count in collections.Counter(run.skipped for run in runs if run.skipped).items():
                lines.append(f"    not run {why} ({count})")
        lines += [f"  note: {note}" for note in self.notes]
        where = _Where(len(done))
        rows = [["parameter", "shape", "error", "gradient"]]
        for name, shape in self.parameters.items():
            rows += self._rows(name, "x".join(map(str, shape)) or "1", where)
        lines += ["", *_columns(rows), ""]
        for about in ABOUT[1:]:
            lines += self._about(about, where)
        if where.marks:
            lines += ["", *where.lines()]
        return "\n".join([*lines, "", self._verdict(done)]) + "\n"

    def _rows(self, name: str, shape: str, where: _Where) -> list[list[str]]:
        """Return the row of a parameter: its diagnoses, or how it agrees in the run where it does so worst."""
        mine = [each for each in self.findings if each.about == "gradient" and each.parameter == name]
        if mine:
            rows = []
            for text, same in _by_text(mine).items():
                rows.append(["", "", f"{same[0].error:.1e}", f"WRONG {text} {where.mark(same)}"])
            rows[0][:2] = [name, shape]
            return rows
        found = [run.agreements[name] for run in self.runs if name in run.agreements]
        if not found:
            return [[name, shape, "", "not seen"]]
        exact = [each for each in found if each[0] != "bf16"]
        how = max((each[0] for each in exact), key=list(_HOW).index, default="bf16")
        error = max((each[1] for each in exact), default=max(each[1] for each in found))
        beside = ""
        if exact and len(exact) < len(found):
            beside = f"; bf16: {max(each[1] for each in found if each[0] == 'bf16'):.1e}"
        return [[name, shape, f"{error:.1e}", f"right, {_HOW[how]}{beside}"]]

    def _about(self, about: str, where: _Where) -> list[str]:
        mine = [each for each in self.findings if each.about == about]
        if not mine:
            is_after = about != "loss" and any(f.about == "gradient" for f in self.findings)
            of = "right for these gradients" if is_after else "right"
            if not any(run.is_whole for run in self.runs):
                of = "not seen"
            return [] if about in ("run", "no_sync") else [f"{about}: {of}"]
        lines = []
        for text, same in _by_text(mine).items():
            # Of many parameters with one diagnosis, the first is enough.
            names = list(dict.fromkeys(each.parameter for each in same if each.parameter))
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            named = f" of {names[0]}{more}" if names else ""
            lines.append(f"{about}{named}: WRONG {text} {where.mark(same)}")
            lines += [f"  | {line}" for line in same[0].details.splitlines()[-12:]]
        return lines

    def _verdict(self, done: Sequence[CertifiedRun]) -> str:
        if not done:
            return "nothing was run: this says nothing"
        if self.is_right:
            return f"right: {len(self.parameters)} parameters in {len(done)} runs"
        wrong = sum(bool(run.findings) for run in done)
        names = {each.parameter for each in self.findings if each.about == "gradient"}
        of = f"gradients of {len(names)} of {len(self.parameters)} parameters, " if names else ""
        return f"wrong: {of}{wrong} of {len(done)} runs"

    def facts(self) -> dict[str, Any]:
        """Return the certificate as JSON's types; `docs/guides/is-my-gradient-right.md` has the schema."""
        return {
            "format": 1,
            "right": self.is_right,
            "engine": self.engine,
            "case": self.case,
            "seed": self.seed,
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "notes": list(self.notes),
            "runs": [
                {
                    "mesh": run.mesh,
                    "setting": run.setting,
                    "skipped": run.skipped or None,
                    "right": None if run.skipped else not run.findings,
                    "gradients": {
                        name: {"agreement": how, "error": error} for name, (how, error) in run.agreements.items()
                    },
                    "findings": [_facts_of(each) for each in run.findings],
                }
                for run in self.runs
            ],
        }


def _facts_of(finding: Finding) -> dict[str, Any]:
    facts = attrs.asdict(finding)
    del facts["mesh"], facts["setting"]
    # JSON has no number that is none.
    facts["error"] = finding.error if finding.error < float("inf") else None
    return {**facts, "parameter": finding.parameter or None, "ranks": list(finding.ranks)}


@attrs.define
class _Where:
    """The marks of a table that say in which runs something was found."""

    runs: int
    marks: dict[tuple[tuple[str, str, int], ...], str] = attrs.field(factory=dict)

    def mark(self, findings: Sequence[Finding]) -> str:
        """Return the mark of the runs of some findings, such as `[a]`."""
        places = tuple(dict.fromkeys((each.mesh, each.setting, each.step) for each in findings))
        number = len(self.marks)
        letter = chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")
        return self.marks.setdefault(places, f"[{letter}]")

    def lines(self) -> list[str]:
        """Return a line for each mark."""
        found = []
        for places, mark in self.marks.items():
            mesh, setting, step = places[0]
            first = f"{'first: ' if len(places) > 1 else ''}{mesh}; {setting}; step {step}"
            found.append(f"{mark} {len(places)} of {self.runs} runs, {first}")
        return found


def _by_mesh(runs: Iterable[CertifiedRun]) -> dict[str, list[CertifiedRun]]:
    found: dict[str, list[CertifiedRun]] = {}
    for run in runs:
        found.setdefault(run.mesh, []).append(run)
    return found


def _by_text(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for each in findings:
        found.setdefault(each.told(), []).append(each)
    return found


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
