"""From what the ranks saw in a run, and what one process finds, to findings: loss, gradients, norm, weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import Tensor, nn

from flatparam_certify.certificate import CertifiedRun, Finding
from flatparam_certify.diagnosis import Diagnosis, Doctor, agreement, relative_error
from flatparam_certify.meshes import MeshSizes
from flatparam_certify.rank import RunSeen, optimizer_of
from flatparam_certify.reference import EPS, Reference, StepExpected
from flatparam_certify.settings import CLIPS, Setting

_SCALAR: Final = 1e-5
"""The relative error of a norm, and of the factor of clipping, that its sum in fp32 may have."""
_UPDATE: Final = 64.0
"""Roundings of an update of the optimizer, whose implementations order operations differently."""


@final
@attrs.define(eq=False)
class Judge:
    """Judges one run: step by step, each from the weights that the engine had before it.

    So an error of one step is not one of the next, too; and no bound has to hold for what an optimizer makes of a
    difference of two gradients near zero. The first step that is wrong is the last one that is judged.
    """

    reference: Reference
    setting: Setting
    seen: Sequence[RunSeen]
    findings: list[Finding] = attrs.field(factory=list)
    agreements: dict[str, tuple[str, float]] = attrs.field(factory=dict)
    _names: dict[str, str] = attrs.field(factory=dict, init=False)
    _frozen: set[str] = attrs.field(factory=set, init=False)
    _unsure: set[str] = attrs.field(factory=set, init=False)

    @property
    def mesh(self) -> MeshSizes:
        """Return the ranks."""
        return self.reference.mesh

    @property
    def _is_bf16(self) -> bool:
        return self.setting.precision == "bf16"

    def run(self) -> CertifiedRun:
        """Return the run with everything that is wrong in it."""
        self._learn_names()
        replay = _Replay(self.reference.model(), self.setting.optimizer)
        before: list[dict[str, Tensor | None]] | None = None
        for step in range(self.setting.steps):
            weights = self._whole([each.steps[step].weights for each in self.seen])
            gradients = [self._renamed(each.steps[step].gradients) for each in self.seen]
            if not self._weights_agree(step, weights):
                break
            if step == 0:
                expected = self.reference.first(self.setting.micro_batches, self._is_bf16)
            else:
                expected = self.reference.step(
                    {name: each[0][1] for name, each in weights.items()},
                    step,
                    self.setting.micro_batches,
                    self._is_bf16,
                )
            self._judge_gradients(step, gradients, before, expected)
            self._judge_losses(step, expected)
            used = self._judge_clipping(step, gradients)
            after = self._whole(
                [each.steps[step + 1].weights if step + 1 < self.setting.steps else each.weights for each in self.seen]
            )
            if not any(each.about in ("clip norm", "clipped gradient") for each in self.findings):
                self._judge_update(step, replay, weights, after, used)
            if self.findings:
                break
            before = used
        self._judge_no_sync()
        return CertifiedRun(str(self.mesh), str(self.setting), "", self.agreements, tuple(self.findings))

    def _find(
        self,
        about: str,
        code: str,
        text: str,
        step: int,
        *,
        parameter: str = "",
        ranks: Sequence[int] = (),
        error: float = float("nan"),
    ) -> None:
        shown = () if len(ranks) == self.mesh.ranks else tuple(ranks)
        self.findings.append(
            Finding(about, code, text, parameter, shown, str(self.mesh), str(self.setting), step, error)
        )

    # Names

    def _learn_names(self) -> None:
        """Learn the names that a shared parameter has: an engine may use another one."""
        model = self.reference.model()
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names[name] = first[id(parameter)]
            if not parameter.requires_grad:
                self._frozen.add(first[id(parameter)])

    def _renamed(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        return {self._names.get(name, name): each for name, each in tensors.items()}

    def _whole(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, Tensor]]]:
        """Return each parameter on each rank that has it, by the names of the reference."""
        found: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in self._names.values()}
        for rank, tensors in enumerate(ranks):
            for name, each in self._renamed(tensors).items():
                if each is not None:
                    found.setdefault(name, []).append((rank, each))
        return found

    # Weights before a step

    def _weights_agree(self, step: int, weights: dict[str, list[tuple[int, Tensor]]]) -> bool:
        """Check that every rank has the same weights, and before the first step those of `build`."""
        before = len(self.findings)
        built = dict(self.reference.model().named_parameters())
        for name, found in weights.items():
            if name not in built:
                self._find(
                    "weights",
                    "unknown-name",
                    "the model as it was built has none of this name",
                    step,
                    parameter=name,
                    ranks=[rank for rank, _ in found],
                )
                continue
            if not found:
                self._find("weights", "missing", "on no rank", step, parameter=name)
                continue
            wanted = built[name].detach() if step == 0 else found[0][1]
            shapes = [rank for rank, each in found if each.numel() != wanted.numel()]
            if shapes:
                text = f"not whole: expected {wanted.numel()} elements, found {found[0][1].numel()}"
                self._find("weights", "shape", text, step, parameter=name, ranks=shapes)
                continue
            other = [rank for rank, each in found if not torch.equal(each.float().reshape(-1), wanted.reshape(-1))]
            if other and step == 0:
                text = "not those that build() made"
                self._find("weights", "not-as-built", text, step, parameter=name, ranks=other)
            elif other:
                self._tell_replicas(step, name, found)
        return len(self.findings) == before

    def _tell_replicas(self, step: int, name: str, found: Sequence[tuple[int, Tensor]]) -> None:
        first = found[0][1].float()
        other = [rank for rank, each in found if not torch.equal(each.float(), first)]
        along = [
            dimension
            for dimension in self.mesh.long
            if any(other_rank in other for other_rank in self.mesh.along(dimension, found[0][0]))
        ]
        over = f" over {' and '.join(along)}" if along else ""
        largest = max(float((each.float() - first).abs().max()) for _, each in found)
        text = f"replicas differ{over} from rank {found[0][0]}'s, by up to {largest:.1g}"
        self._find("weights", "replicas-differ", text, step, parameter=name, ranks=other)

    # Gradients

    def _judge_gradients(
        self,
        step: int,
        gradients: Sequence[dict[str, Any]],
        before: list[dict[str, Tensor | None]] | None,
        expected: StepExpected,
    ) -> None:
        may_lack = self.mesh["pp"] > 1 or self.mesh["ep"] > 1
        by_shape: dict[torch.Size, dict[str, Tensor]] = {}
        for name, wanted in expected.gradients.items():
            by_shape.setdefault(wanted.shape, {})[name] = wanted.total
        for name, wanted in expected.gradients.items():
            holds = [name in each for each in gradients]
            if not any(holds) or not may_lack:
                holds = [True] * len(gradients)
            seen = [each.get(name) for each in gradients]
            if name in self._frozen:
                seen = [None if each is None or not bool(each.any()) else each for each in seen]
            previous = before[0].get(name) if before is not None else None
            others = {key: total for key, total in by_shape[wanted.shape].items() if key != name}
            doctor = Doctor(wanted, self.mesh, previous, others, self._is_bf16)
            found = doctor.diagnoses(seen, holds)
            for diagnosis, ranks in found.items():
                self._find(
                    "gradient",
                    diagnosis.code,
                    diagnosis.text,
                    step,
                    parameter=name,
                    ranks=ranks,
                    error=relative_error(seen[ranks[0]], wanted),
                )
            if not found:
                self._note_agreement(name, [each for each, has in zip(seen, holds, strict=True) if has], wanted)

    def _note_agreement(self, name: str, seen: Sequence[Tensor | None], wanted: Any) -> None:
        order = ("equal", "order", "rounding", "bf16", "none")
        for each in seen:
            found = agreement(each, wanted, bf16=self._is_bf16)
            assert found is not None, "nothing was wrong"
            how, error = self.agreements.get(name, ("equal", 0.0))
            # In bf16, agreeing better than that is chance.
            now = "bf16" if self._is_bf16 and found.how != "none" else found.how
            self.agreements[name] = (max(how, now, key=order.index), max(error, found.error))

    # Losses

    def _judge_losses(self, step: int, expected: StepExpected) -> None:
        """Ranks with the same data may have parts of its loss, whose mean is the loss."""
        shares: dict[int, list[int]] = {}
        for rank in range(self.mesh.ranks):
            shares.setdefault(self.mesh.data_rank(rank), []).append(rank)
        told: dict[tuple[str, str], list[int]] = {}
        allowed = expected.loss_error_bf16 if self._is_bf16 else expected.loss_error
        for number in range(self.setting.micro_batches):
            for data_rank, ranks in shares.items():
                known = [found for rank in ranks if (found := self.seen[rank].steps[step].losses[number]) is not None]
                if not known:
                    continue
                mean, wanted = sum(known) / len(known), float(expected.losses[number, data_rank])
                if abs(mean - wanted) <= float(allowed[number, data_rank]):
                    continue
                is_right = not any(each.about == "gradient" for each in self.findings)
                beside = "; its gradient is right" if is_right else ""
                factor = mean / wanted if wanted else math.inf
                named = self.mesh.named(factor, self.setting.micro_batches)
                shown = f" ({named})" if named else ""
                key = ("loss", f"{factor:.5g}{shown} times the right one{beside}")
                for rank in ranks:
                    if rank not in told.setdefault(key, []):
                        told[key].append(rank)
        for (_, text), ranks in list(told.items())[:3]:
            self._find("loss", "factor", text, step, ranks=ranks)

    # Clipping

    def _judge_clipping(self, step: int, gradients: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Judge the norm, and what clipping made of the gradients; returns those that the optimizer has."""
        if not self.setting.clips:
            return gradients
        merged: dict[str, Tensor] = {}
        for each in gradients:
            merged.update({name: found for name, found in each.items() if found is not None})
        squares = {name: float(each.double().square().sum()) for name, each in merged.items()}
        norm = math.sqrt(sum(squares.values()))
        # Where the gradients of ranks differ, which is told already, each rank may clip by its own.
        rights = [norm] * self.mesh.ranks
        if any(each.about == "gradient" for each in self.findings):
            rights = [_norm_of(each) if each.keys() == merged.keys() else norm for each in gradients]
        seen = [each.steps[step].norm for each in self.seen]
        norms = [math.nan if each is None else each for each in seen]
        # An engine that has gradients in bf16 may have their norm in it.
        is_short = any(each.dtype != torch.float32 for each in merged.values())
        allowed = 2.0**-6 if is_short else _SCALAR
        is_wrong = [not math.isclose(each, right, rel_tol=allowed) for each, right in zip(norms, rights, strict=True)]
        if any(is_wrong):
            ranks = [rank for rank, wrong in enumerate(is_wrong) if wrong]
            diagnosis = self._norm_diagnosis(norms, norm, squares)
            error = abs(norms[ranks[0]] / norm - 1) if norm else math.inf
            self._find("clip norm", diagnosis.code, diagnosis.text, step, ranks=ranks, error=error)
            return gradients
        clipped = [self._renamed(each.steps[step].clipped or {}) for each in self.seen]
        self._judge_clipped(step, gradients, clipped, norms if is_short else rights)
        return clipped

    def _norm_diagnosis(self, norms: Sequence[float], norm: float, squares: dict[str, float]) -> Diagnosis:
        first = norms[0]
        if not all(map(math.isfinite, norms)) or not norm:
            return Diagnosis("unknown", f"found {first:.6g}, expected {norm:.6g}")
        for name in self.mesh.long:
            parts = [
                math.sqrt(sum(norms[rank] ** 2 for rank in self.mesh.along(name, each)))
                for each in range(self.mesh.ranks)
            ]
            differ = len(set(norms)) > 1
            if differ and all(math.isclose(each, norm, rel_tol=_SCALAR) for each in parts):
                return Diagnosis("not-reduced", f"not summed over {name}: each rank has that of its part")
        ratio = first / norm
        if named := self.mesh.named(ratio, self.setting.micro_batches):
            return Diagnosis("factor", f"{ratio:.5g} ({named}) times the right one")
        prefixes = {".".join(name.split(".")[:count]) for name in squares for count in range(1, name.count(".") + 2)}
        for prefix in sorted(prefixes, key=lambda each: (-each.count("."), each)):
            part = sum(each for name, each in squares.items() if f"{name}.".startswith(f"{prefix}."))
            times = (first**2 - norm**2 + part) / part if part else math.nan
            if math.isclose(first**2, norm**2 - part, rel_tol=2 * _SCALAR):
                return Diagnosis("leaves-out", f"leaves out {prefix}")
            if times > 1.5 and abs(times - round(times)) < 1e-3:
                size = self.mesh.named(float(round(times)), self.setting.micro_batches)
                shown = f" ({size})" if size else ""
                return Diagnosis("counts-twice", f"counts {prefix} {round(times)} times{shown}")
        return Diagnosis("unknown", f"{ratio:.6g} times the right one, which is {norm:.6g}")

    def _judge_clipped(
        self, step: int, gradients: list[dict[str, Any]], clipped: list[dict[str, Any]], norms: Sequence[float]
    ) -> None:
        told: dict[tuple[str, Diagnosis], list[int]] = {}
        for rank, (before, after) in enumerate(zip(gradients, clipped, strict=True)):
            coefficient = min(1.0, self.limit() / (norms[rank] + 1e-6))
            for name, each in before.items():
                if each is None or not bool(each.any()):
                    continue
                found = after.get(name)
                wrong = _clipped_wrongly(each, found, coefficient)
                if wrong is not None:
                    told.setdefault((name, wrong), []).append(rank)
        for (name, wrong), ranks in told.items():
            self._find("clipped gradient", wrong.code, wrong.text, step, parameter=name, ranks=ranks)

    def limit(self) -> float:
        """Return the norm that gradients are clipped to."""
        return CLIPS * self.reference.first(self.setting.micro_batches, self._is_bf16).norm()

    # Weights after a step

    def _judge_update(
        self,
        step: int,
        replay: _Replay,
        before: dict[str, list[tuple[int, Tensor]]],
        after: dict[str, list[tuple[int, Tensor]]],
        used: list[dict[str, Any]],
    ) -> None:
        gradients = {name: found for each in reversed(used) for name, found in each.items()}
        start = {name: each[0][1] for name, each in before.items() if each}
        wanted = replay.step(start, gradients)
        for name, found in after.items():
            if not found or name not in wanted:
                continue
            gradient = gradients.get(name)
            if name not in self._frozen and (gradient is None or not bool(gradient.any())):
                # Whether an optimizer skips a parameter, or decays it, depends on None or zero inside the engine.
                self._unsure.add(name)
            if name in self._unsure:
                continue
            first, *others = (_bits(each) for _, each in found)
            if not all(torch.equal(first, other) for other in others):
                if not self.findings or self.findings[-1].code == "replicas-differ":
                    self._tell_replicas(step, name, found)
                continue
            diagnosis = self._update_diagnosis(start[name], found[0][1], wanted[name])
            if diagnosis is not None and not any(
                each.parameter == name and each.about == "gradient" for each in self.findings
            ):
                self._find("weights", diagnosis.code, diagnosis.text, step, parameter=name)

    def _update_diagnosis(self, start: Tensor, found: Tensor, wanted: Tensor) -> Diagnosis | None:
        old, new, right = (each.double().reshape(-1) for each in (start, found, wanted))
        update, moved = right - old, new - old
        size = float(update.abs().max()) if update.numel() else 0.0
        allowed = 8 * EPS * (old.abs() + right.abs()) + _UPDATE * EPS * (update.abs() + size)
        if bool(((new - right).abs() <= allowed).all()):
            return None
        if not bool(moved.any()):
            return Diagnosis("not-updated", "not updated")
        ratio = float(moved @ update) / (float(update @ update) or 1.0)
        if bool(((moved - ratio * update).abs() <= 1e-3 * (update.abs() + 0.01 * size)).all()):
            named = self.mesh.named(abs(ratio), self.setting.micro_batches)
            shown = f" ({named})" if named else ""
            return Diagnosis("factor", f"the update is {ratio:.5g}{shown} times the right one")
        unmoved = int(((moved == 0) & (update != 0)).sum())
        if unmoved:
            return Diagnosis("not-updated", f"{unmoved} of {len(moved)} elements are not updated")
        error = float((moved - update).norm()) / (float(update.norm()) or 1.0)
        return Diagnosis("unknown", f"do not follow from the gradients: the update is off by {error:.2g} of its norm")

    # no_sync

    def _judge_no_sync(self) -> None:
        counts = [each.collectives for each in self.seen if each.collectives is not None]
        if counts and all(inside > 0 and outside <= inside for inside, outside in counts):
            inside, outside = counts[0]
            text = f"without effect: {inside} collectives ran inside it, and {outside} with the last micro-batch"
            self._find("no_sync", "no-sync-without-effect", text, self.setting.steps - 1)


def _clipped_wrongly(before: Tensor, after: Tensor | None, coefficient: float) -> Diagnosis | None:
    if after is None:
        return Diagnosis("missing", "no gradient after clipping")
    old, new = before.double().reshape(-1), after.double().reshape(-1)
    # A bf16 gradient rounds once more.
    unit = EPS if before.dtype == torch.float32 else 2.0**-8
    if bool(((new - coefficient * old).abs() <= (_SCALAR + 4 * unit) * coefficient * old.abs() + 1e-40).all()):
        return None
    ratio = float(new @ old) / float(old @ old)
    if math.isclose(ratio, 1.0, rel_tol=_SCALAR):
        return Diagnosis("not-clipped", "not clipped")
    if math.isclose(ratio, coefficient**2, rel_tol=10 * _SCALAR):
        return Diagnosis("clipped-twice", "clipped twice")
    return Diagnosis("factor", f"scaled by {ratio:.5g}, and not by {coefficient:.5g}")


def _norm_of(tensors: Mapping[str, Any]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors.values() if each is not None))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@final
class _Replay:
    """The optimizer of one process, which takes the engine's gradients."""

    def __init__(self, model: nn.Module, optimizer: str) -> None:
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer_of(optimizer)(self._parameters.values())

    def step(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the weights after a step from `weights` with `gradients`."""
        for name, parameter in self._parameters.items():
            if name in weights:
                with torch.no_grad():
                    parameter.copy_(weights[name].reshape(parameter.shape))
            found = gradients.get(name) if parameter.requires_grad else None
            parameter.grad = None if found is None else found.to(parameter.dtype).reshape(parameter.shape)
        self._optimizer.step()
        return {name: each.detach().clone() for name, each in self._parameters.items()}
