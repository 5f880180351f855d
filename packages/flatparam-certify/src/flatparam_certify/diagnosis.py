"""The fault in a gradient: hypotheses about how it was made of the contributions, the simplest first.

Each hypothesis says what the gradient would be, and is taken if that explains every element within what rounding can
do. The contributions of all micro-batches of all data ranks are known, so few gradients remain unexplained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, final

import attrs
import torch
from torch import Tensor

from flatparam_certify.meshes import MeshSizes
from flatparam_certify.reference import EPS, Expected

_LOW: Final = (("fp16", torch.float16, 1.0), ("bf16", torch.bfloat16, 4.0))
"""Formats that sums may be in, and the error in their units beyond which it is of another one."""
_ROUND: Final = 1e-4
"""How far a factor may be from the number that it is taken for."""


@final
@attrs.frozen
class Diagnosis:
    """The fault.

    Attributes:
        code: one word for programs: `factor`, `zero`, `not-reduced`, ...
        text: a phrase for people.
    """

    code: str
    text: str


@final
@attrs.frozen
class Agreement:
    """How near a right gradient is: equal, within any order of the sum, or within rounding inside micro-batches.

    Attributes:
        how: `equal`, `order`, `rounding`, `bf16` or `none` (of a parameter that nothing uses).
        error: the largest difference, relative to the largest element.
    """

    how: str
    error: float = 0.0


def agreement(seen: Tensor | None, expected: Expected, *, bf16: bool = False) -> Agreement | None:
    """Return how a gradient agrees with what is expected, or None if it does not.

    Args:
        seen: the gradient, or None.
        bf16: whether it was computed in bf16, for which there is a band.
    """
    total = expected.total
    if seen is None or not total.numel():
        return Agreement("none") if not total.abs().sum() else None
    if seen.numel() != total.numel():
        return None
    found = seen.double().reshape(-1)
    size = float(total.abs().max())
    error = float((found - total).abs().max()) / size if size else float(found.abs().max())
    if not math.isfinite(error):
        return None
    if torch.equal(found, total.float().double()):
        return Agreement("equal", error)
    if _fits(found, total, expected.parts.abs().sum((0, 1)), expected.additions * EPS, 0.0):
        return Agreement("order", error)
    if _fits(found, total, expected.parts.abs().sum((0, 1)), expected.additions * EPS, expected.inside):
        return Agreement("rounding", error)
    if bf16 and float((found - total).norm()) <= expected.bf16:
        return Agreement("bf16", error)
    return None


def relative_error(seen: Tensor | None, expected: Expected) -> float:
    """Return the norm of the difference beside the norm of what is expected."""
    total = expected.total
    found = torch.zeros_like(total) if seen is None else seen.double().reshape(-1)
    if found.shape != total.shape:
        return math.inf
    return float((found - total).norm()) / (float(total.norm()) or 1.0)


def _fits(found: Tensor, wanted: Tensor, sizes: Tensor, relative: float, absolute: float) -> bool:
    return bool(((found - wanted).abs() <= relative * sizes + absolute + 1e-45).all())


@final
@attrs.define(eq=False)
class Doctor:
    """Finds what is wrong with the gradients of one parameter.

    Attributes:
        expected: what they should be.
        mesh: the ranks.
        previous: the gradient of the step before, or None.
        others: the gradients expected of other parameters of the same shape, by name.
        bf16: whether it was computed in bf16: then bands are wider, and low precision is what was asked for.
    """

    expected: Expected
    mesh: MeshSizes
    previous: Tensor | None = None
    others: dict[str, Tensor] = attrs.field(factory=dict)
    bf16: bool = False

    def diagnoses(self, seen: Sequence[Tensor | None], holds: Sequence[bool]) -> dict[Diagnosis, list[int]]:
        """Return what is wrong on which ranks; nothing, if all is right.

        Args:
            seen: the gradient on each rank.
            holds: whether each rank has the parameter at all; another stage, or another expert's rank, need not.
        """
        ranks = [rank for rank in range(self.mesh.ranks) if holds[rank]]
        wrong = [rank for rank in ranks if agreement(seen[rank], self.expected, bf16=self.bf16) is None]
        if not wrong:
            return {}
        lacking = {rank: told for rank in wrong if (told := self._lacking(seen[rank])) is not None}
        if len(lacking) == len(wrong):
            return _grouped(lacking)
        every = [each for each in seen if each is not None]
        if not lacking and len(ranks) == len(every) == self.mesh.ranks:
            reduced = self._not_reduced(every)
            if reduced is not None:
                return {reduced: ranks}
        found = dict(lacking)
        cache: list[tuple[Tensor, Diagnosis]] = []
        for rank in wrong:
            if rank not in found:
                gradient = seen[rank]
                assert gradient is not None, "it is not lacking"
                found[rank] = next(
                    (known for same, known in cache if torch.equal(same, gradient)), None
                ) or self._diagnosis(gradient)
                cache.append((gradient, found[rank]))
        return _grouped(found)

    def _lacking(self, seen: Tensor | None) -> Diagnosis | None:
        if seen is None:
            return Diagnosis("missing", "no gradient, and one process has one")
        if seen.numel() != self.expected.total.numel():
            shapes = f"shape {tuple(seen.shape)}, and the parameter has {tuple(self.expected.shape)}"
            return Diagnosis("shape", shapes)
        if not bool(torch.isfinite(seen).all()):
            return Diagnosis("not-finite", "infinite, or not a number")
        if not bool(seen.any()):
            return Diagnosis("zero", "zero")
        return None

    # Of all ranks together

    def _not_reduced(self, seen: Sequence[Tensor]) -> Diagnosis | None:
        """Return whether the gradients of the ranks along a dimension have to be summed to get the right one."""
        gradients = torch.stack([each.double().reshape(-1) for each in seen])
        for names in _sets(self.mesh.long):
            groups = _groups(self.mesh, names)
            if any(bool((gradients[group] == gradients[group[0]]).all()) for group in groups):
                continue
            over = " and ".join(names)
            sums = [gradients[group].sum(0) for group in groups]
            factors = {self._factor(each, slack=2.0 * len(group)) for each, group in zip(sums, groups, strict=True)}
            if len(factors) != 1 or None in factors:
                told = self._sums_weighed(sums)
                if told is not None:
                    return Diagnosis("not-reduced", f"not reduced over {over}: in the sum over it, {told}")
                continue
            factor = next(iter(factors)) or 0.0
            size = math.prod(self.mesh[name] for name in names)
            if factor == 1:
                return Diagnosis(
                    "not-reduced", f"not reduced over {over}: each rank has a part, and their sum is right"
                )
            if factor == size:
                return Diagnosis(
                    "not-reduced", f"not reduced over {over}: each rank has its own, and their mean is right"
                )
            if named := self.mesh.named(factor, self._micro_batches):
                return Diagnosis(
                    "not-reduced", f"not reduced over {over}: the sum over it is {named} times the right one"
                )
        return None

    def _sums_weighed(self, sums: Sequence[Tensor]) -> str | None:
        """Return how micro-batches count in sums that are not the right gradient, if they count alike on all ranks."""
        told = {self._weighed(each, 2 * self.expected.additions * EPS, self.expected.inside) for each in sums}
        first = next(iter(told))
        return first.text if len(told) == 1 and first is not None and first.text.startswith("the ") else None

    # Of one rank

    @property
    def _micro_batches(self) -> int:
        return int(self.expected.parts.shape[0])

    def _diagnosis(self, seen: Tensor) -> Diagnosis:
        found = seen.double().reshape(-1)
        relative = self.expected.additions * EPS
        return (
            self._explained(found, relative, self.expected.inside)
            or (None if self.bf16 else self._low_precision(found))
            or (self._explained(found, 2.0**-7, self.expected.bf16) if self.bf16 else None)
            or self._in_part(found)
            or self._unknown(found)
        )

    def _explained(self, found: Tensor, relative: float, absolute: float) -> Diagnosis | None:
        for hypothesis in (self._scaled, self._patterns, self._stale, self._of_another, self._weighed):
            told = hypothesis(found, relative, absolute)
            if told is not None:
                return told
        return None

    def _factor(self, found: Tensor, slack: float = 1.0) -> float | None:
        """Return the number that the gradient is `found` divided by, as a round number if it is near one."""
        factor = _ratio(found, self.expected.total)
        relative = slack * self.expected.additions * EPS
        absolute = slack * self.expected.inside
        return self._accepted(found, self.expected.parts.sum((0, 1)), None, factor, relative, absolute)

    def _accepted(
        self, found: Tensor, wanted: Tensor, sizes: Tensor | None, factor: float, relative: float, absolute: float
    ) -> float | None:
        """Return `factor`, rounded, if `found` is `factor * wanted` within rounding; None, if it is not."""
        if not factor or not math.isfinite(factor):
            return None
        sizes = self.expected.parts.abs().sum((0, 1)) if sizes is None else sizes
        for tried in (float(round(factor)), 1.0 / round(1 / factor) if abs(1 / factor) > 0.5 else 0.0, factor):
            near = bool(tried) and abs(tried / factor - 1) < _ROUND
            if near and _fits(found, tried * wanted, abs(tried) * sizes, relative, max(1.0, abs(tried)) * absolute):
                return tried
        return None

    def _scaled(self, found: Tensor, relative: float, absolute: float) -> Diagnosis | None:
        factor = self._accepted(
            found, self.expected.total, None, _ratio(found, self.expected.total), relative, absolute
        )
        if factor is None or factor == 1:
            return None
        return Diagnosis("factor", f"{self._shown(factor)} times the right one")

    def _shown(self, factor: float) -> str:
        shown = f"1/{round(1 / factor)}" if 0 < factor < 1 and _is_round(1 / factor) else f"{factor:.6g}"
        named = self.mesh.named(abs(factor), self._micro_batches)
        return f"{shown} ({named})" if named else shown

    def _patterns(self, found: Tensor, relative: float, absolute: float) -> Diagnosis | None:
        """Return whether some of the contributions, all with one factor, make up the gradient."""
        for code, text, weights in _subsets(self._micro_batches, self.expected.parts.shape[1]):
            chosen = self.expected.parts * weights[:, :, None]
            wanted, sizes = chosen.sum((0, 1)), chosen.abs().sum((0, 1))
            factor = self._accepted(found, wanted, sizes, _ratio(found, wanted), relative, absolute)
            if factor is not None:
                scaled = "" if factor == 1 else f", times {self._shown(factor)}"
                return Diagnosis(code, f"{text}{scaled}")
        return None

    def _stale(self, found: Tensor, relative: float, absolute: float) -> Diagnosis | None:
        if self.previous is None:
            return None
        before = self.previous.double().reshape(-1)
        sizes = self.expected.parts.abs().sum((0, 1)) + before.abs()
        if _fits(found, self.expected.total + before, sizes, 2 * relative, absolute):
            return Diagnosis("stale", "that of the step before is added: gradients are not zeroed")
        if bool(before.any()) and _fits(found, before, sizes, relative, 0.0):
            return Diagnosis("stale", "that of the step before")
        return None

    def _of_another(self, found: Tensor, relative: float, absolute: float) -> Diagnosis | None:
        for name, total in self.others.items():
            sizes = total.abs() + self.expected.parts.abs().sum((0, 1))
            if bool(total.any()) and _fits(found, total, sizes, relative, absolute):
                return Diagnosis("of-another", f"the gradient of {name}")
        return None

    def _weighed(self, found: Tensor, relative: float, absolute: float) -> Diagnosis | None:
        """Solve for the weight of each contribution, if there are more elements than contributions."""
        micro_batches, ranks, numel = self.expected.parts.shape
        count = micro_batches * ranks
        if count < 2 or numel <= count:
            return None
        columns = self.expected.parts.reshape(count, numel).T
        scale = columns.norm(dim=0)
        if not bool((scale > 0).all()):
            return None
        columns = columns / scale
        if float(torch.linalg.svdvals(columns)[-1]) < 1e-3:
            return None
        weights = torch.linalg.lstsq(columns, found[:, None]).solution[:, 0] / scale
        rounded = torch.where((weights - weights.round()).abs() < 1e-3, weights.round(), weights)
        chosen = self.expected.parts * rounded.reshape(micro_batches, ranks, 1)
        if not _fits(found, chosen.sum((0, 1)), chosen.abs().sum((0, 1)), relative, 4 * absolute):
            return None
        table = rounded.reshape(micro_batches, ranks)
        for what, lines in (("micro-batches", table), ("data ranks", table.T)):
            if len(lines) > 1 and bool(((lines - lines[:, :1]).abs() < 1e-3).all()):
                counts = ", ".join(f"{float(each):.4g}" for each in lines[:, 0])
                return Diagnosis("weights", f"the {what} count {counts} times, and not once each")
        uneven = [
            f"micro-batch {number} of data rank {rank} counts {float(table[number, rank]) + 0.0:.4g} times"
            for number, rank in itertools.product(range(micro_batches), range(ranks))
            if abs(float(table[number, rank]) - 1) > 1e-3
        ]
        return Diagnosis("weights", "; ".join(uneven[:4]) + ("; ..." if len(uneven) > 4 else ""))

    def _low_precision(self, found: Tensor) -> Diagnosis | None:
        """Return whether rounding of partial sums to a shorter format explains what is too much for fp32."""
        sizes = self.expected.parts.abs().sum((0, 1))
        noise = float((found - self.expected.total).norm()) / (float(sizes.norm()) or 1.0)
        # Every number in bf16 that is not too small is one in fp16, too.
        is_bf16 = torch.equal(found, found.bfloat16().double())
        for shown, dtype, most in _LOW:
            unit = torch.finfo(dtype).eps / 2
            relative = self.expected.additions * unit
            # Their values tell the format, and otherwise the error, of which each rounding makes about half a unit.
            is_of = dtype == torch.bfloat16 if is_bf16 else noise < most * unit
            if is_of and _fits(found, self.expected.total, sizes, relative, self.expected.inside):
                return Diagnosis(
                    "low-precision", f"summed in {shown}: too far off for fp32, and what rounding to {shown} explains"
                )
            factor = self._accepted(
                found,
                self.expected.total,
                sizes,
                _near_round(_ratio(found, self.expected.total), unit * 4),
                relative,
                self.expected.inside,
            )
            if factor is not None and factor != 1:
                return Diagnosis("factor", f"{self._shown(factor)} times the right one, and summed in {shown}")
        # Rounding of what gradients are computed of: it is not bounded by the contributions, element by element.
        if noise < 2 * torch.finfo(torch.bfloat16).eps:
            within = self.expected.inside / (float(sizes.max()) or 1.0)
            return Diagnosis(
                "low-precision",
                f"computed in low precision: off by {noise:.1e} of its norm, and fp32 by {within:.0e} at most",
            )
        return None

    def _in_part(self, found: Tensor) -> Diagnosis | None:
        """Return whether only some of the elements are wrong, and all of those alike."""
        sizes = self.expected.parts.abs().sum((0, 1))
        allowed = self.expected.additions * EPS * sizes + self.expected.inside
        wrong = (found - self.expected.total).abs() > allowed
        elements = wrong.nonzero().reshape(-1)
        if not 0 < len(elements) < len(found):
            return None
        first, last = int(elements[0]), int(elements[-1])
        inner = attrs.evolve(self, expected=self.expected.only(elements), previous=None, others={})
        told = (
            Diagnosis("zero", "zero")
            if not bool(found[elements].any())
            else inner._explained(found[elements], self.expected.additions * EPS, self.expected.inside)
        )
        if told is None:
            return None
        where = f"{len(elements)} of {len(found)} elements, from {first} to {last}"
        return Diagnosis(told.code, f"{told.text}, in {where}")

    def _unknown(self, found: Tensor) -> Diagnosis:
        total = self.expected.total
        scale = float(total.norm()) * float(found.norm())
        cosine = float(found @ total) / scale if scale else 0.0
        error = float((found - total).norm()) / (float(total.norm()) or 1.0)
        return Diagnosis("unknown", f"off by {error:.2g} of its norm (cosine {cosine:.4f}): no simple rule explains it")


def _ratio(found: Tensor, wanted: Tensor) -> float:
    square = float(wanted @ wanted)
    return float(found @ wanted) / square if square else 0.0


def _is_round(number: float) -> bool:
    return abs(number - round(number)) < _ROUND * abs(number)


def _near_round(number: float, tolerance: float) -> float:
    """Return the whole number, or one over it, that `number` is near to, or 0."""
    for tried in (float(round(number)), 1 / round(1 / number) if number and abs(1 / number) > 0.5 else 0.0):
        if tried and abs(number / tried - 1) < tolerance:
            return tried
    return 0.0


def _sets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield each name, each pair, and so on."""
    for count in range(1, len(names) + 1):
        yield from itertools.combinations(names, count)


def _groups(mesh: MeshSizes, names: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks that differ along some dimensions only."""
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(mesh.ranks):
        place = mesh.coordinates(rank)
        key = tuple((name, number) for name, number in place.items() if name not in names)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _subsets(micro_batches: int, ranks: int) -> Iterator[tuple[str, str, Tensor]]:
    """Yield which contributions could be there: a code, a phrase, and a mask of shape (micro-batches, data ranks)."""
    everything = torch.ones(micro_batches, ranks, dtype=torch.float64)

    def without(row: slice | int = slice(None), column: slice | int = slice(None)) -> Tensor:
        mask = everything.clone()
        mask[row, column] = 0
        return mask

    if micro_batches > 1:
        yield "only-last", "only the last micro-batch", without(slice(0, micro_batches - 1))
        yield "only-first", "only the first micro-batch", without(slice(1, micro_batches))
        if micro_batches > 2:
            yield "without-last", "the last micro-batch is missing", without(micro_batches - 1)
            yield "without-first", "the first micro-batch is missing", without(0)
    if ranks > 1:
        for rank in range(ranks):
            yield "rank-missing", f"the data of data rank {rank} is not in the sum", without(column=rank)
        for rank in range(ranks if ranks > 2 else 0):
            yield "only-rank", f"only the data of data rank {rank}", everything - without(column=rank)
    if micro_batches > 1 and ranks > 1:
        for rank in range(ranks):
            yield (
                "rank-missing",
                f"the data of data rank {rank} is in the last micro-batch only",
                without(slice(0, micro_batches - 1), rank),
            )
            yield (
                "rank-missing",
                f"the last micro-batch of data rank {rank} is missing",
                without(micro_batches - 1, rank),
            )


def _grouped(found: dict[int, Diagnosis]) -> dict[Diagnosis, list[int]]:
    """Return the ranks of each diagnosis."""
    grouped: dict[Diagnosis, list[int]] = {}
    for rank in sorted(found):
        grouped.setdefault(found[rank], []).append(rank)
    return grouped
