"""What `tools/gpu` writes: the page of a device, the list of devices, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu.contenders import REFERENCE, told
from gpu.facts import Facts
from gpu.losses import compared
from gpu.main import MEASUREMENTS, MOST_SECONDS, RESULTS, measure_all
from gpu.measurement import Measurement, not_on_cpu
from gpu.page import BEGIN, END, NONE, page, with_devices
from gpu.place import Plan
from gpu.results import outcomes

FACTS = Facts("Made Up 9000", "cuda", 2, "nccl", "1.2", 10**9, 2 * 10**9, 10**9, {"torch": "2.13"})
PLAN = Plan("cuda", 2)
MADE = {"date": "2026-01-01", "where": "here", "tiny": False, "versions": {"torch": "2.13"}, "driver": "1.2"}


def measurement(name: str, found: Any = None, *, seconds: float = 1.0, **more: Any) -> Measurement:
    """One that finds this, or raises it."""

    def run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
        if isinstance(found, Exception):
            raise found
        return dict(found)

    return Measurement(name, f"What {name} is about.", seconds, 10.0, run, **more)


SAME = {"reference": "x", "same": True, "rows": {}}
DIFFERENT = {**SAME, "same": False}


def results_of(file: Path) -> dict[str, Any]:
    """What is in the file of results."""
    found: dict[str, Any] = json.loads(file.read_text())["measurements"]
    return found


def test_a_failure_is_written_down_and_the_others_go_on(tmp_path: Path) -> None:
    """What one raises stands in its place, and the status is that of the losses; the page has everything."""
    file = tmp_path / "made-up.json"
    failing = measurement("capture", ArithmeticError("as planned"))
    elsewhere = measurement("overlap", SAME, why_not=not_on_cpu)
    status = measure_all([failing, elsewhere, measurement("losses", SAME)], Plan("cpu", 2), FACTS, file)
    found = results_of(file)
    assert status == 0
    assert found["capture"]["error"] == "ArithmeticError: as planned"
    assert found["overlap"]["reason"].startswith("not on this device")
    assert found["losses"]["same"]
    text = file.with_suffix(".md").read_text()
    assert "Failed: ArithmeticError: as planned" in text
    assert "Not measured: not on this device" in text
    assert "python tools/gpu --only losses --device cpu" in text


@pytest.mark.parametrize("found", [DIFFERENT, ArithmeticError("no losses")], ids=["different", "failed"])
def test_the_status_is_not_0_without_the_same_losses(tmp_path: Path, found: Any) -> None:
    """Losses that differ fail the run, and so do losses that nobody knows."""
    assert measure_all([measurement("losses, threads", found)], PLAN, FACTS, tmp_path / "x.json") == 1


def test_what_has_no_time_left_says_so(tmp_path: Path) -> None:
    """A measurement that would take more than twice of what is left of ten minutes is not begun."""
    file = tmp_path / "x.json"
    long = measurement("capture", ArithmeticError("begun"), seconds=2 * MOST_SECONDS + 10)
    measure_all([long], PLAN, FACTS, file)
    assert "ten minutes" in results_of(file)["capture"]["reason"]


def test_all_together_take_less_than_ten_minutes() -> None:
    """What is estimated leaves room, each limit is longer than its estimate, and names are given once."""
    assert sum(each.seconds for each in MEASUREMENTS) < 0.8 * MOST_SECONDS
    assert all(each.limit > each.seconds for each in MEASUREMENTS)
    assert len({each.name for each in MEASUREMENTS}) == len(MEASUREMENTS)


def test_another_run_keeps_what_it_does_not_measure(tmp_path: Path) -> None:
    """Results of one kind are replaced, and the others stay in their places."""
    file = tmp_path / "x.json"
    measure_all(
        [measurement("losses", SAME), measurement("capture", ArithmeticError("1"))], PLAN, FACTS, file
    )
    measure_all([measurement("losses", DIFFERENT)], PLAN, FACTS, file)
    found = results_of(file)
    assert list(found) == ["losses", "capture"]
    assert (found["losses"]["same"], found["capture"]["error"]) == (False, "ArithmeticError: 1")


def test_losses_are_compared_on_every_rank() -> None:
    """Equal is who has the reference's losses on all ranks; of ours nobody may differ or fail, others may."""
    first = {REFERENCE: [3.0, 2.0], "flatparam": [3.0, 2.0], "torch FSDP2": [3.0, 2.5]}
    second = {REFERENCE: [4.0, 1.0], "flatparam": [4.0, 1.0], "torch FSDP2": [4.0, 1.0]}
    found = compared([first, second], REFERENCE)
    assert found["same"]
    assert found["rows"]["torch FSDP2"] == {"losses": [3.0, 2.5], "equal": False, "difference": 0.5}
    off = compared([first, {**second, "flatparam": [4.0, 1.0000001]}], REFERENCE)
    assert not off["same"]
    failed = compared([{**first, "flatparam": "ValueError: no"}] * 2, REFERENCE)
    assert not failed["same"]
    assert failed["rows"]["flatparam"] == {"error": "ValueError: no"}
    unknown = compared([{**first, REFERENCE: "ValueError: no"}] * 2, REFERENCE)
    assert not unknown["same"]


def test_a_page_by_hand() -> None:
    """Each kind of figure stands in a table, with what reproduces it."""
    hidden = {"total": 2000.0, "hidden": 1500.0}
    none = {"total": 0.0, "hidden": 0.0}
    timeline = {
        "length": 9000.0,
        "computing": 8000.0,
        "communication": hidden,
        "to_device": none,
        "to_host": none,
    }
    found = {
        "steps, fp32": {
            "workload": "GPT",
            "reference": "torch FSDP1",
            "rows": {"x": {"ms": 12.3456, "rounds": 9, "ratio": [0.9, 0.95, 1.0]}, "y": {"error": "A: b|c"}},
        },
        "overlap": {
            "workload": "GPT",
            "precision": "bf16",
            "rows": {"x": {**timeline, "waits_of_host": {"cudaEventSynchronize": 1}}},
        },
        "memory": {
            "workload": "layers",
            "formulas": {name: {"rest": 10**6, "forward": 2 * 10**6, "backward": 4 * 10**6} for name in KEPT},
            "rows": {"x": {"rest": 10**6, "forward": 10**6, "backward": 5 * 10**6, "keeps": False}},
        },
        "host": {"workload": "units", "rows": {"x": {"us": 1234.5, "us_per_unit": 6.78, "waits": 2}}},
        "capture": {"workload": "GPT", "rows": {"x": {"captured": False, "reason": "RuntimeError: no"}}},
        "tests": {"passed": 5, "failed": 1, "skipped": 2, "failures": ["a::b"]},
    }
    entries = {name: {"command": "python tools/gpu", "made": MADE, **entry} for name, entry in found.items()}
    device = {"name": "Made Up", "count": 1, "backend": "nccl", "bytes": 8 * 10**9}
    text = page({"device": device, "measurements": entries})
    for line in (
        "| x | 12.35 | 0.950 (0.900-1.000) | 9 |",
        "| y | failed: A: b\\|c |  |  |",
        "| x | 9.00 | 8.00 | 1.50 of 2.00 | - | - | 1 cudaEventSynchronize |",
        "| x | 1.0 (1.00) | 1.0 (0.50) | 5.0 (1.25) |",
        "| formula of FULL_SHARD | 1.0 | 2.0 | 4.0 |",
        "| x | 1234 | 6.8 | 2 |",
        "| x | no |  | RuntimeError: no |",
        "5 passed, 1 failed, 2 skipped.",
        "* `a::b`",
    ):
        assert f"\n{line}\n" in text, line


KEPT = ("FULL_SHARD", "SHARD_GRAD_OP")


def test_the_list_of_devices(tmp_path: Path) -> None:
    """The README lists the devices of which there are results; without any it says so, and without a place it is refused."""
    text = f"before\n{BEGIN}\nold\n{END}\nafter"
    assert with_devices(text, tmp_path) == f"before\n{BEGIN}\n\n{NONE}\n\n{END}\nafter"
    (tmp_path / "made-up.json").write_text(json.dumps({"device": {"name": "Made Up"}}))
    assert "* [Made Up](made-up.md)" in with_devices(text, tmp_path)
    with pytest.raises(LookupError, match="begin devices"):
        with_devices("nothing", tmp_path)


def test_the_pages_are_those_of_the_results() -> None:
    """Nothing in docs/gpu but the text around the list is edited by hand."""
    readme = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert with_devices(readme, RESULTS) == readme
    for file in RESULTS.glob("*.json"):
        assert page(json.loads(file.read_text(encoding="utf-8"))) == file.with_suffix(".md").read_text(
            encoding="utf-8"
        )


def test_tests_are_counted(tmp_path: Path) -> None:
    """pytest's report says how many of the tests marked gpu passed, failed and were skipped."""
    cases = '<testcase name="a"/><testcase name="b"><skipped/></testcase>'
    failing = '<testcase classname="m" name="c"><failure/></testcase>'
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}{failing}</testsuite></testsuites>")
    assert outcomes(report) == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["m::c"]}


def test_the_first_error_is_told() -> None:
    """Of errors that led to others the first is told, in a line."""

    def fails() -> None:
        try:
            raise ValueError("the cause\nand more")
        except ValueError as error:
            raise RuntimeError("what it led to") from error

    with pytest.raises(RuntimeError) as caught:
        fails()
    assert told(caught.value) == "ValueError: the cause"
