"""A training loop with accelerate, as its users write it: `loop.py FOLDER OPTIMIZER`.

It has four steps on six rows, and saves after the first two. With `--resume=2` it goes on from there, and saves one step
later; with `--resume=3` it has the last step.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    folder, kind = Path(sys.argv[1]), getattr(torch.optim, sys.argv[2])
    first = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    set_seed(0)
    accelerator = Accelerator()
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(module, kind(module.parameters(), lr=0.1))
    if first:
        accelerator.load_state(folder / f"saved-{first}")
    rows = torch.linspace(1, 2, 24).view(6, 4)[accelerator.process_index :: accelerator.num_processes]
    for step in range(first, 4):
        if step == max(2, first + 1):
            accelerator.save_state(folder / f"saved-{step}")
        x = rows * (step + 1)
        loss = model(x).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"\nloss {accelerator.process_index} {step} {loss.item()!r} {norm.item()!r}\n", end="", flush=True
        )
    print(f"\nclass {type(model).__module__}\n", end="", flush=True)


if __name__ == "__main__":
    main()
