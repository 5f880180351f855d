"""Plant faults of one line in the sources of a layer, run its tests, and say whether they find them; one by one.

`nox -s run -- planted` runs the tests of `tests` this way, without those marked `long`. A fault that the tests of its
own layer do not find is looked for by those above it (`ABOVE`). Nothing in the working tree changes: a copy does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).resolve().parent.parent
Fault: TypeAlias = "tuple[str, str, str]"
"""A file below the layer's sources, the text that it has once, and what is put in its place."""
ABOVE: Final = (
    *(f"packages/{name}/tests" for name in ("flatparam-runtime", "flatparam-state", "flatparam")),
    *(f"integration_tests/{name}" for name in ("parity", "fsdp1", "fsdp2", "state")),
)
PATIENCE: Final = 1800

FAULTS: Final[dict[str, tuple[Fault, ...]]] = {
    "core": (
        (
            "geometry/layout.py",
            "rounded = world_size * pace if world_size > 1",
            "rounded = world_size if world_size > 1",
        ),
        ("geometry/layout.py", "if end < self.numel:\n            gaps", "if end < self.numel - 1:\n            gaps"),
        ("geometry/layout.py", "return self.world_size > 1 and self.slots[0]", "return self.slots[0]"),
        ("storage/gradients.py", "missing.extend(() if self._has_zeros else self.buffer.gaps())", "missing.extend(())"),
        ("storage/gradients.py", "slot.add_(gradient, alpha=1 / divisor)", "slot.add_(gradient)"),
        ("storage/gradients.py", "        self._kept.clear()\n        self._has_zeros", "        self._has_zeros"),
        ("storage/buffer.py", "self._blocks.get(nbytes, ())) >= most", "self._blocks.get(nbytes, ())) > most"),
        ("storage/full_form.py", "and self.leaves[0]._version != self._version", "and False"),
        ("handle.py", "return self.exposure.stamp() + self._shard.moves", "return self.exposure.stamp()"),
        ("handle.py", "not (copied or self.is_offloaded or", "not (self.is_offloaded or"),
        ("exposure/flat.py", "elif follower.given and follower.parameter.grad is None:", "elif False:"),
    ),
    "comm": (
        ("transfer/reduction.py", "else self.divide_factor * size / self._ranks", "else self.divide_factor"),
        ("transfer/reduction.py", "part.output += before.gradient", "part.output = before.gradient"),
        ("transfer/reduction.py", "        handle.gradients.drop(indices)\n", ""),
        ("transfer/reduction.py", "if topology.shard.size == 1 or hooks.all_reduce", "if hooks.all_reduce"),
        ("transfer/gather.py", "errors.append(error)", "raise"),
        ("transfer/gather.py", "            handle.unreserve()\n", ""),
        ("transfer/uneven.py", "output.add_(other)", "output.add_(first)"),
        ("process_group/engine.py", "            self.tensors = ()\n", ""),
        ("checks.py", "and not 0 <= part.data_ptr() - whole.data_ptr() + part.nbytes < whole.nbytes + part.nbytes", ""),
        ("broadcasting.py", "return -(-nbytes // _ALIGNMENT) * _ALIGNMENT", "return nbytes"),
        ("topology/resolving.py", "if len(both) != 1:", "if not both:"),
    ),
    "runtime": (
        (
            "passes/backward.py",
            "        self._hook_the_rest(record)\n        if not record.leaves",
            "        if not record.leaves",
        ),
        ("passes/backward.py", "return not call.is_top and next", "return next"),
        (
            "passes/freeing.py",
            "if unit.is_needed or unit in call.returned:\n        return False\n    if not",
            "if not",
        ),
        ("passes/freeing.py", "(unit.reducer.synchronises or plan.free_after_unsynced_backward)", "True"),
        ("passes/record.py", "range(turn + 1, len(self._backwards))", "range(turn + 2, len(self._backwards))"),
        ("passes/reductions.py", "if all(arrived) and reduced.landed is None:", "if reduced.landed is None:"),
        ("passes/tree.py", "self.keeps_unsharded = not synced", "self.keeps_unsharded = False"),
        ("passes/forward.py", "if unit.held.calls and _was_interrupted(unit, module):", "if False:"),
        ("unit/unit.py", "        self.reducer.unsynced.clear()\n", ""),
        ("unit/unit.py", "if (not fit or (stale and self.is_stale))", "if (not fit)"),
        ("optimizers/clip.py", "if g.numel()\n", "\n"),
    ),
    "state": (
        ("forms/flat_tensor.py", "found = shard.new_zeros(self.held_span", "found = shard.new_empty(self.held_span"),
        ("forms/flat_tensor.py", "Span(min(shard.start, self.numel), min(", "Span(shard.start, min("),
        ("forms/chunker.py", "if rank < len(chunks) else full[:0]", "if rank < len(chunks) else chunks[0]"),
        (
            "optimizer/optimizer_load.py",
            "elif current is not None and key in current",
            "elif current is None and key in current",
        ),
        ("optimizer/optimizer_load.py", "for name in names if item.has_own(name)}", "for name in names}"),
        ("averages.py", "        self._updates += 1\n", ""),
        (
            "averages.py",
            "except BaseException:\n            self.updates = before",
            "except ZeroDivisionError:\n            self.updates = before",
        ),
        ("model/load.py", "            place.unit.take_over()\n            if shows_full", "            if shows_full"),
        ("model/load.py", "(tensor.detach(), tensor.detach().clone())", "(tensor.detach(), tensor.detach())"),
        (
            "model/collect.py",
            "    if not place.unit.showing.pins:\n        return gather(",
            "    if True:\n        return gather(",
        ),
    ),
}


def planted(layer: str, fault: Fault, folder: Path) -> Path:
    """Copy the sources of the layer into `folder`, with the fault; return what goes before all on the path.

    Raises:
        LookupError: if the text is not there, or more than once.
    """
    name, before, after = fault
    shutil.copytree(ROOT / "packages" / f"flatparam-{layer}" / "src", folder, dirs_exist_ok=True)
    file = folder / f"flatparam_{layer}" / name
    text = file.read_text(encoding="utf-8")
    if text.count(before) != 1:
        raise LookupError(f"{layer}, {name}: expected {before!r} once, found it {text.count(before)} times")
    file.write_text(text.replace(before, after), encoding="utf-8")
    return folder


def found_by(layer: str, fault: Fault, workers: str) -> str | None:
    """Return the first test that fails with the fault: of the layer's own, or of those above; None if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        sources = [planted(layer, fault, Path(folder)), *sorted(ROOT.glob("packages/*/src"))]
        path = os.pathsep.join(map(str, [*sources, ROOT, ROOT / "tools"]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        for tests in (f"packages/flatparam-{layer}/tests", *ABOVE):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", workers, "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, "-m", "not gpu and not long", tests],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
            if done.returncode:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return failed[1] if failed else f"{tests}: {(done.stdout + done.stderr).strip()[-200:]}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults of the named layers, or of all; return 1 if one is not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", help=f"some of {', '.join(FAULTS)}; by default all")
    parser.add_argument("--workers", default="2", help="how many tests run at once (2)")
    options = parser.parse_args(arguments)
    missed = 0
    for layer in options.layers or FAULTS:
        for fault in FAULTS[layer]:
            begun = time.monotonic()
            test = found_by(layer, fault, options.workers)
            missed += test is None
            told = f"{layer}, {fault[0]}: {fault[1].split(chr(10))[0].strip()!r}"
            print(
                f"{'NOT FOUND' if test is None else 'found'} {told}; {time.monotonic() - begun:.0f} s; {test}",
                flush=True,
            )
    print(f"{missed} of {sum(len(FAULTS[layer]) for layer in options.layers or FAULTS)} faults are not found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
