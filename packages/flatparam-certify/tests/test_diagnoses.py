"""Diagnoses of gradients that are made of known contributions, and meshes, without any process."""

from __future__ import annotations

import itertools

import torch
from each_row import each_row
from torch import Tensor

from flatparam_certify.certificate import Certificate, CertifiedRun, Finding
from flatparam_certify.diagnosis import Diagnosis, Doctor, agreement
from flatparam_certify.meshes import MeshSizes
from flatparam_certify.reference import Expected
from flatparam_certify.settings import all_settings, few_settings, micro_batches_beside

TWO = MeshSizes.of({"dp_shard": 2})


def expected(micro_batches: int = 3, ranks: int = 2, numel: int = 40, inside: float = 1e-9) -> Expected:
    parts = torch.randn(micro_batches, ranks, numel).double() / (micro_batches * ranks)
    return Expected(parts, torch.Size([numel]), True, micro_batches * ranks + ranks + 4, inside, 0.1)


def told(found: dict[Diagnosis, list[int]]) -> list[tuple[str, str, list[int]]]:
    return [(each.code, each.text, ranks) for each, ranks in found.items()]


def test_any_order_of_a_sum_is_right() -> None:
    """Sums in fp32 in every order, divided before or after, agree within the order of sums."""
    wanted = expected()
    parts = (wanted.parts.reshape(6, -1) * 6).float()
    for order in itertools.permutations(range(6)):
        after = torch.zeros(40)
        before = torch.zeros(40)
        for at in order:
            after += parts[at]
            before += parts[at] / 6
        for each in (after / 6, before, after / 2 / 3):
            found = agreement(each, wanted)
            assert found is not None
            assert found.how in ("equal", "order")


@each_row(
    ("make", "code", "text"),
    [
        (lambda parts: 2 * parts.sum((0, 1)), "factor", "2 (the size of dp_shard) times the right one"),
        (
            lambda parts: parts.sum((0, 1)) / 3,
            "factor",
            "1/3 (1/the number of micro-batches) times the right one",
        ),
        (lambda parts: -parts.sum((0, 1)), "factor", "-1 times the right one"),
        (lambda parts: 0.37 * parts.sum((0, 1)), "factor", "0.37 times the right one"),
        (lambda parts: parts[2].sum(0), "only-last", "only the last micro-batch"),
        (
            lambda parts: 3 * parts[2].sum(0),
            "only-last",
            "only the last micro-batch, times 3 (the number of micro-batches)",
        ),
        (lambda parts: parts[:2].sum((0, 1)), "without-last", "the last micro-batch is missing"),
        (lambda parts: parts[1:].sum((0, 1)), "without-first", "the first micro-batch is missing"),
        (lambda parts: parts[:, 0].sum(0), "rank-missing", "the data of data rank 1 is not in the sum"),
        (
            lambda parts: parts.sum((0, 1)) - parts[2, 1],
            "rank-missing",
            "the last micro-batch of data rank 1 is missing",
        ),
        (
            lambda parts: parts.sum((0, 1)) + parts[1, 0],
            "weights",
            "micro-batch 1 of data rank 0 counts 2 times",
        ),
        (
            lambda parts: (parts * torch.tensor([4.0, 2, 1])[:, None, None]).sum((0, 1)),
            "weights",
            "the micro-batches count 4, 2, 1 times, and not once each",
        ),
        (lambda parts: 0 * parts.sum((0, 1)), "zero", "zero"),
        (lambda parts: parts.sum((0, 1)) / 0, "not-finite", "infinite, or not a number"),
        (lambda parts: parts.sum((0, 1))[:8], "shape", "shape (8,), and the parameter has (40,)"),
    ],
)
def test_gradients_that_are_wrong(make: object, code: str, text: str) -> None:
    """Each is told by the weights that its contributions have, alike on all ranks."""
    wanted = expected()
    gradient = make(wanted.parts).float()  # type: ignore[operator]
    found = Doctor(wanted, TWO).diagnoses([gradient, gradient], [True, True])
    assert told(found) == [(code, text, [0, 1])]


@each_row(("dtype", "shown"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_formats_of_sums_are_told_apart(dtype: torch.dtype, shown: str) -> None:
    """By values that are numbers of the format, and by the error if a division has hidden them."""
    wanted = expected(3, 4, numel=400)
    short = torch.zeros(400, dtype=dtype)
    for each in wanted.parts.reshape(12, -1):
        short += each.to(dtype)
    mesh = MeshSizes.of({"dp_shard": 4})
    text = f"summed in {shown}: too far off for fp32, and what rounding to {shown} explains"
    if dtype == torch.bfloat16:
        assert told(Doctor(wanted, mesh).diagnoses([short.float()] * 4, [True] * 4)) == [
            ("low-precision", text, [0, 1, 2, 3])
        ]
    once = (wanted.total * 3).to(dtype).float() / 3
    assert told(Doctor(wanted, mesh).diagnoses([once] * 4, [True] * 4)) == [("low-precision", text, [0, 1, 2, 3])]


def test_a_dimension_that_is_not_reduced() -> None:
    """Parts whose sum is right, and means of each rank's own, are told apart, with the dimension."""
    mesh = MeshSizes.of({"dp_shard": 2, "tp": 2})
    wanted = expected()
    noise = torch.randn(40)
    parts = [wanted.total.float() / 2 + sign * noise for sign in (1, -1, 1, -1)]
    (found,) = told(Doctor(wanted, mesh).diagnoses(parts, [True] * 4))
    assert found == (
        "not-reduced",
        "not reduced over tp: each rank has a part, and their sum is right",
        [0, 1, 2, 3],
    )
    own = [2 * wanted.parts[:, mesh.data_rank(rank)].sum(0).float() for rank in range(4)]
    (found,) = told(Doctor(wanted, mesh).diagnoses(own, [True] * 4))
    assert found == (
        "not-reduced",
        "not reduced over dp_shard: each rank has its own, and their mean is right",
        [0, 1, 2, 3],
    )


def test_part_of_a_gradient() -> None:
    """Some elements that are wrong alike are told with their place."""
    wanted = expected()
    gradient = wanted.total.float()
    gradient[10:20] *= 2
    (found,) = told(Doctor(wanted, TWO).diagnoses([gradient, wanted.total.float()], [True, True]))
    assert found == (
        "factor",
        "2 (the size of dp_shard) times the right one, in 10 of 40 elements, from 10 to 19",
        [0],
    )


def test_gradients_of_others_and_of_before() -> None:
    """The gradient of another parameter, and that of the step before, are recognised."""
    wanted, other, before = expected(), torch.randn(40).double(), torch.randn(40)
    doctor = Doctor(wanted, TWO, before, {"other.weight": other})
    assert [each.text for each in doctor.diagnoses([other.float()] * 2, [True] * 2)] == ["the gradient of other.weight"]
    stale = (wanted.total + before).float()
    assert [each.code for each in doctor.diagnoses([stale] * 2, [True] * 2)] == ["stale"]


def test_unused_parameters() -> None:
    """None and zeros are right, if one process has no gradient; nothing else is."""
    nothing = Expected(torch.zeros(1, 2, 3, dtype=torch.float64), torch.Size([3]), False, 8, 0.0, 0.0)
    doctor = Doctor(nothing, TWO)
    assert doctor.diagnoses([None, torch.zeros(3)], [True, True]) == {}
    assert [ranks for *_, ranks in told(doctor.diagnoses([None, torch.ones(3)], [True, True]))] == [[1]]


def test_what_nothing_explains() -> None:
    """The distance and the cosine are told."""
    wanted = expected()
    noise: Tensor = torch.randn(40)
    (found,) = told(Doctor(wanted, TWO).diagnoses([noise, noise], [True, True]))
    assert found[0] == "unknown"
    assert "no simple rule explains it" in found[1]


def test_places_on_a_mesh() -> None:
    """Ranks are in row-major order, and those that share data have one data rank."""
    mesh = MeshSizes.read("dp_replicate=2, dp_shard=2, tp=2")
    assert str(mesh) == "dp_replicate=2,dp_shard=2,tp=2"
    assert (mesh.ranks, mesh.data_ranks) == (8, 4)
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.along("tp", 5) == [4, 5]
    assert mesh.along("dp_replicate", 5) == [1, 5]
    assert [str(each) for each in mesh.shrunk()] == [
        "dp_shard=2,tp=2",
        "dp_replicate=2,tp=2",
        "dp_replicate=2,dp_shard=2",
        "1 rank",
    ]
    assert mesh.named(2.0, 3) == "the size of dp_replicate or the size of dp_shard or the size of tp"
    assert mesh.named(1 / 3, 3) == "1/the number of micro-batches"
    assert mesh.named(2**0.5, 1).startswith("the root of the size of dp_replicate")
    assert mesh.named(1.7, 3) == ""


def test_settings() -> None:
    """Every combination is there once, and micro-batches are no number of ranks."""
    every = all_settings()
    assert len(every) == len(set(every)) == 24
    assert {(each.micro_batches, each.no_sync) for each in every} == {(1, False), (3, False), (3, True)}
    assert [str(each) for each in few_settings(every)] == [
        "1 micro-batch, fp32, adamw",
        "3 micro-batches without no_sync, clipped, fp32, adamw",
        "3 micro-batches with no_sync, clipped, fp32, adamw",
    ]
    assert [micro_batches_beside([ranks]) for ranks in (1, 2, 3, 4, 15)] == [3, 3, 5, 3, 7]


def test_a_certificate_of_nothing() -> None:
    """If no setting was run, it says so, and is not right."""
    nothing = Certificate("mine", "case", 0, {"weight": (2, 3)}, (CertifiedRun("dp_shard=2", "bf16", "for a reason"),))
    assert not nothing.is_right
    assert "not run for a reason (1)" in nothing.table()
    assert nothing.table().endswith("nothing was run: this says nothing\n")


def test_marks_of_a_table() -> None:
    """Findings in the same runs share a mark, which says how many runs, and the first."""
    runs = [
        CertifiedRun(
            "dp_shard=2",
            f"{number}",
            findings=tuple(
                Finding("gradient", "zero", "zero", name, (1,), "dp_shard=2", f"{number}", 0, 1.0)
                for name in ("a", "b")
            ),
        )
        for number in range(2)
    ]
    table = Certificate("mine", "case", 0, {"a": (2,), "b": ()}, tuple(runs)).table()
    assert "a          2      1.0e+00  WRONG rank 1: zero [a]" in table.splitlines()
    assert "b          1      1.0e+00  WRONG rank 1: zero [a]" in table.splitlines()
    assert "[a] 2 of 2 runs, first: dp_shard=2; 0; step 0" in table
    assert "wrong: gradients of 2 of 2 parameters, 2 of 2 runs" in table


def test_what_was_not_reached_is_not_called_right() -> None:
    """If each run has ended with an error, nothing is said of losses, norms and weights; one that ended is enough."""
    failed = CertifiedRun("dp_shard=2", "fp32", findings=(Finding("run", "raised", "raised: no"),))
    ended = CertifiedRun("dp_shard=2", "bf16", agreements={"a": ("equal", 0.0)})
    table = Certificate("mine", "case", 0, {"a": (2,)}, (failed,)).table()
    assert "dp_shard=2: 1 of 1 settings run, 1 ended early" in table
    for about in ("loss", "clip norm", "clipped gradient", "weights"):
        assert f"{about}: not seen" in table
        assert f"{about}: right" in Certificate("mine", "case", 0, {"a": (2,)}, (failed, ended)).table()
