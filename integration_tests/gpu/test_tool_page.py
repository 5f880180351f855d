"""What `tools/gpu` writes: the page of a device, the list of devices, and its exit status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from each_row import each_row
from gpu import page as pages
from gpu.backend import judged
from gpu.contenders import REFERENCE
from gpu.facts import Facts
from gpu.losses import compared
from gpu.main import BUDGET, MEASUREMENTS, RESULTS, measure_all
from gpu.measurement import Measurement, not_on_cpu
from gpu.page import NONE, page, with_devices
from gpu.place import Plan, told
from gpu.tests import end, places, start
from pages import marks

FACTS = Facts("Made Up 9000", "cuda", 2, "nccl", "1.2", 10**9, 2 * 10**9, {"torch": "2.13"})
PLAN = Plan("cuda", 2)
MADE = {"date": "2026-01-01", "where": "here", "tiny": False, "versions": {"torch": "2.13"}, "driver": "1.2"}


def measurement(name: str, found: Any = None, *, seconds: float = 1.0, **more: Any) -> Measurement:
    """One that finds this, or raises it."""

    def run(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
        if isinstance(found, Exception):
            raise found
        return dict(found)

    decides = name.startswith("losses")
    return Measurement(name, f"What {name} is about.", seconds, 10.0, run, decides=decides, **more)


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
    elsewhere = measurement("compiled", SAME, why_not=not_on_cpu)
    status = measure_all([failing, elsewhere, measurement("losses", SAME)], Plan("cpu", 2), FACTS, file)
    found = results_of(file)
    assert status == 0
    assert found["capture"]["error"] == "ArithmeticError: as planned"
    assert found["compiled"]["reason"].startswith("not on this device")
    assert found["losses"]["same"]
    text = file.with_suffix(".md").read_text()
    assert "Failed: ArithmeticError: as planned" in text
    assert "Not measured: not on this device" in text
    assert "python tools/gpu --only losses --device cpu" in text


@each_row("found", [DIFFERENT, ArithmeticError("no losses")], ids=["different", "failed"])
def test_the_status_is_not_0_without_the_same_losses(tmp_path: Path, found: Any) -> None:
    """Losses that differ fail the run, and so do losses that nobody knows."""
    assert measure_all([measurement("losses, threads", found)], PLAN, FACTS, tmp_path / "x.json") == 1


def test_what_has_no_time_left_says_so(tmp_path: Path) -> None:
    """A measurement that would take more than twice of what is left of the budget is not begun, and fails nothing."""
    file = tmp_path / "x.json"
    long = measurement("losses", ArithmeticError("begun"), seconds=2 * BUDGET + 10)
    assert measure_all([long], PLAN, FACTS, file, time.monotonic() + BUDGET) == 0
    assert "--budget" in results_of(file)["losses"]["reason"]


def test_whoever_is_killed_leaves_what_was_found(tmp_path: Path) -> None:
    """Results and page are there before the next measurement begins."""
    file = tmp_path / "x.json"

    def killed(plan: Plan, facts: Facts, limit: float) -> dict[str, Any]:
        raise SystemExit

    second = evolve(measurement("capture"), run=killed)
    with pytest.raises(SystemExit):
        measure_all([measurement("losses", SAME), second], PLAN, FACTS, file)
    assert results_of(file)["losses"]["same"]
    assert "As they have to be." in file.with_suffix(".md").read_text()


def test_a_page_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page cannot show is in the results all the same, and so is what comes after it; the status tells it."""

    def broken(entry: object) -> Iterator[str]:
        raise KeyError("no such figure")

    monkeypatch.setitem(pages._RENDER, "host", broken)
    file = tmp_path / "x.json"
    found: dict[str, Any] = {"rows": {}}
    assert measure_all([measurement("host", found), measurement("losses", SAME)], PLAN, FACTS, file) == 1
    assert list(results_of(file)) == ["host", "losses"]


def test_all_together_fit_into_the_budget() -> None:
    """All that comes before the steps is begun in 560 seconds, each limit is longer than its estimate, and names differ."""
    estimated = sum(each.seconds for each in MEASUREMENTS if each.module not in ("steps", "others"))
    assert estimated < 0.9 * 560
    assert all(each.limit > each.seconds for each in MEASUREMENTS)
    assert len({each.name for each in MEASUREMENTS}) == len(MEASUREMENTS)


def test_another_run_keeps_what_it_does_not_measure(tmp_path: Path) -> None:
    """Results of one kind are replaced, and the others stay in their places."""
    file = tmp_path / "x.json"
    measure_all([measurement("losses", SAME), measurement("capture", ArithmeticError("1"))], PLAN, FACTS, file)
    measure_all([measurement("losses", DIFFERENT)], PLAN, FACTS, file)
    found = results_of(file)
    assert list(found) == ["losses", "capture"]
    assert (found["losses"]["same"], found["capture"]["error"]) == (False, "ArithmeticError: 1")


def test_what_an_earlier_version_measured_is_dropped(tmp_path: Path) -> None:
    """Results under names that are gone, of another form, do not keep the page from being written."""
    file = tmp_path / "made-up.json"
    old = {
        "overlap": {"what": "?", "rows": {"x": {}}},
        "losses": {**SAME, "what": "?", "command": "?", "made": MADE},
    }
    file.write_text(json.dumps({"measurements": old}))
    assert measure_all([measurement("capture", ArithmeticError("1"))], Plan("cpu", 2), FACTS, file) == 0
    assert {*results_of(file)} == {"losses", "capture"}
    assert (tmp_path / "made-up.md").exists()


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
    still = [3.0, 3.0]
    assert not compared([{name: still for name in first}], REFERENCE)["same"]
    unknown = compared([{**first, REFERENCE: "ValueError: no"}] * 2, REFERENCE)
    assert not unknown["same"]


def test_a_page_by_hand() -> None:
    """Each kind of figure stands in a table, with what reproduces it."""
    found: dict[str, dict[str, Any]] = {
        "memory": {
            "workload": "layers",
            "formulas": {name: {"rest": 10**6, "forward": 2 * 10**6, "backward": 4 * 10**6} for name in KEPT},
            "rows": {"x": {"rest": 10**6, "forward": 10**6, "backward": 5 * 10**6, "reserved": 7.0, "retries": 0}},
        },
        "host, 4 parameters": {"rows": {"plain": PARTS, "torch FSDP1": {**PARTS, "backward": 1234.5}}},
        "others": {
            "note": "A note.",
            "columns": {"ms": "milliseconds", "right": "right", "waits": "waits"},
            "rows": {"x": {"ms": 1234.56, "right": False, "waits": None}},
        },
        "capture": {
            "workload": "GPT",
            "columns": {"captured": "captured", "reason": "because"},
            "rows": {"x": {"captured": False, "reason": "RuntimeError: no|yes"}, "y": {"error": "A: b|c"}},
        },
        "tests": {"passed": 5, "failed": 1, "skipped": 2, "failures": ["a::b"]},
    }
    entries = {name: {"command": "python tools/gpu", "made": MADE, **entry} for name, entry in found.items()}
    device = {"name": "Made Up", "count": 1, "backend": "nccl", "bytes": 8 * 10**9}
    text = page({"device": device, "measurements": entries})
    for line in (
        "| y | failed: A: b\\|c |  |",
        "| x | 1.0 (1.00) | 1.0 (0.50) | 5.0 (1.25) | 7 | 0 |",
        "| formula of FULL_SHARD | 1.0 | 2.0 | 4.0 | | |",
        "| torch FSDP1 | 10 | 1234 | 5 | 1224 | 1.00 |",
        "A note.",
        "| x | 1235 | **no** |  |",
        "| x | **no** | RuntimeError: no\\|yes |",
        "5 passed, 1 failed, 2 skipped.",
        "* `a::b`",
    ):
        assert f"\n{line}\n" in text, line


PARTS = {"forward": 10.0, "backward": 10.0, "update": 5.0}
KEPT = ("FULL_SHARD", "SHARD_GRAD_OP")


def test_the_list_of_devices(tmp_path: Path) -> None:
    """The README lists the devices of which there are results; without any it says so, and without a place it is refused."""
    first, last = marks("devices")
    text = f"before\n{first}\nold\n{last}\nafter"
    assert with_devices(text, tmp_path) == f"before\n{first}\n\n{NONE}\n\n{last}\nafter"
    (tmp_path / "made-up.json").write_text(json.dumps({"device": {"name": "Made Up"}}))
    assert "* [Made Up](made-up.md)" in with_devices(text, tmp_path)
    with pytest.raises(LookupError, match="begin devices"):
        with_devices("nothing", tmp_path)


def test_the_pages_are_those_of_the_results() -> None:
    """Nothing in docs/gpu but the text around the list is edited by hand."""
    readme = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert with_devices(readme, RESULTS) == readme
    for file in RESULTS.glob("*.json"):
        assert page(json.loads(file.read_text(encoding="utf-8"))) == file.with_suffix(".md").read_text(encoding="utf-8")


def test_a_fault_of_torch_is_told_and_decides_nothing() -> None:
    """A product of torch's that is wrong is named; a gradient of ours that is wrong fails the run."""
    wrong = {"expected": 0.25, "found": 0.0, "right": False}
    right = {"expected": 0.25, "found": 0.25, "right": True}
    found = judged({"PREMUL_SUM": wrong | {"ours": False}, "x": right | {"ours": True}}, on_cpu=False)
    assert found["same"]
    assert "fault of this torch" in found["note"]
    assert "PREMUL_SUM" in found["note"]
    assert not judged({"PREMUL_SUM": right | {"ours": False}, "x": wrong | {"ours": True}}, on_cpu=False)["same"]
    assert not judged({"x": {"error": "ValueError: no", "ours": True}}, on_cpu=False)["same"]


def test_tests_that_take_too_long_report_what_has_run(tmp_path: Path) -> None:
    """They are interrupted, as somebody at the keyboard would, and can write before they end."""
    program = (
        "import pathlib, time\ntry:\n pathlib.Path('ready').touch(); time.sleep(900)\n"
        "except KeyboardInterrupt:\n pathlib.Path('report').touch()"
    )
    with start([sys.executable, "-c", program], cwd=tmp_path) as process:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        end(process, 0.0)
    assert (tmp_path / "report").exists()


def test_the_tests_that_need_a_gpu_are_found() -> None:
    """Files that mark tests are named, and folders whose fixtures do; nothing twice."""
    found = places()
    assert "integration_tests/gpu/test_nccl_alone.py" in found
    assert "packages/flatparam-comm/tests" in found
    assert not [each for each in found if each.startswith("packages/flatparam-comm/tests/")]


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
