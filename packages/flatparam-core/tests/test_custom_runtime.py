"""The program in docs/custom-runtime.md: it is what the guide says, and it trains what it says."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flatparam_core

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "custom-runtime.md"

pytestmark = pytest.mark.skipif(
    not GUIDE.exists(),
    reason=f"the guide {GUIDE.name} is not beside this package, so its program cannot be run",
)


@pytest.fixture(scope="module")
def program() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return str(block)


def final_losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"final loss (\S+)", output)]


def train_locally(ranks: int) -> float:
    """The model of the guide, unsharded, on the mean of the losses of ``ranks`` equal parts of each batch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    mean = 0.0
    for step in range(10):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        losses = [(model(part) - part.flip(1)).square().mean() / ranks for part in batch.chunk(ranks)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).sum().item()
    return mean


def test_is_about_45_lines(program: str) -> None:
    """The program has at most 50 lines of code, none of them longer than the project allows."""
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 120


def test_needs_core_and_torch_only(program: str) -> None:
    """The program imports flatparam_core, torch and the standard library, and of flatparam nothing else."""
    imported = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"flatparam_core", "torch"}
    assert "fsdp" not in program


@pytest.mark.filterwarnings("error")
def test_alone(program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without RANK it runs as a world of one, without a warning, and has the loss of the local model."""
    monkeypatch.delenv("RANK", raising=False)
    assert not dist.is_initialized()
    try:
        exec(compile(program, str(GUIDE), "exec"), {"__name__": "runtime"})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert final_losses(capsys.readouterr().out) == [train_locally(1)]


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_accumulation_without_communication(
    program: str, micro_batches: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's recipe, `if not last: return` after the reshard, in the guide's own program, has the local loss."""
    monkeypatch.delenv("RANK", raising=False)
    recipe = program.replace(
        "            output, full =",
        "            if not last:\n                return\n            output, full =",
    ).replace(
        """    loss = (model(batch) - batch.flip(1)).square().mean()
    loss.backward()
""",
        f"""    loss = torch.zeros(())
    for number, part in enumerate(batch.chunk({micro_batches})):
        last = number == len(batch.chunk({micro_batches})) - 1
        share = (model(part) - part.flip(1)).square().mean() * len(part) / len(batch)
        share.backward()
        loss = loss + share.detach()
""",
    )
    assert recipe.count("last") == 3
    try:
        exec(compile(recipe, str(GUIDE), "exec"), {"__name__": "runtime"})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert final_losses(capsys.readouterr().out) == pytest.approx([train_locally(1)], rel=1e-6)


@pytest.mark.long
@pytest.mark.processes
def test_under_torchrun(program: str, tmp_path: Path) -> None:
    """Two processes under torchrun print, bit for bit, the loss of the local model on the mean of their losses."""
    script = tmp_path / "runtime.py"
    script.write_text(program, encoding="utf-8")
    source = str(Path(flatparam_core.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    for _ in range(3):
        run = subprocess.run(
            [sys.executable, *launch],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "error::UserWarning:__main__",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        # On a busy machine gloo's own threads now and then abort a process that is at its end; then nothing was tested.
        if run.returncode == 0 or "terminate called without an active exception" not in run.stderr:
            break
    assert run.returncode == 0, run.stderr
    assert final_losses(run.stdout) == [train_locally(2)]
