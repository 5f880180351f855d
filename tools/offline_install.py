"""Install the built wheels in a new environment without an index, and use them: `python tools/offline_install.py dist`.

What they need comes from wheels that pip collects before; so a wheel that lacks a dependency, or a file, is found.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
USE = """
import torch
from torch import nn
from flatparam import Checkpointer, FullyShardedDataParallel, Publisher, load_pretrained, plan, trace
from flatparam.optim import Muon
from flatparam_comm import run_threads

def train(world):
    model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=world, use_orig_params=True)
    optimizer = Muon(model.parameters(), lr=0.1, adamw_lr=0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    return {name: value.sum().item() for name, value in model.state_dict().items()}

first, second = run_threads(2, train)
assert first == second, (first, second)
"""


def main(dist: Path) -> None:
    """Raise CalledProcessError if something fails."""
    with tempfile.TemporaryDirectory() as folder:
        wheels, environment = Path(folder, "wheels"), Path(folder, "environment")
        ours = [str(path) for path in sorted(dist.glob("*.whl"))]
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        torch = f"torch=={subprocess.check_output([sys.executable, '-c', VERSION], text=True).strip()}"
        subprocess.run([*pip, "wheel", "--wheel-dir", str(wheels), torch, *ours], check=True)
        venv.create(environment, with_pip=True)
        python = str(environment / "bin" / "python")
        offline = ("-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels))
        subprocess.run([python, *offline, "flatparam[all]"], check=True)
        subprocess.run([python, "-W", "ignore", "-c", USE], cwd=folder, check=True)
        subprocess.run([str(environment / "bin" / "flatparam"), "--version"], cwd=folder, check=True)


VERSION = "from importlib.metadata import version; print(version('torch').partition('+')[0])"

if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
