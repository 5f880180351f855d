"""A training loop with accelerate, as its users write it: `loop.py FOLDER [OPTIMIZER]`, and `--resume` after two steps."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed


def main() -> None:
    folder, kind = Path(sys.argv[1]), getattr(torch.optim, sys.argv[2])
    resumes = "--resume" in sys.argv
    set_seed(0)
    accelerator = Accelerator()
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(module, kind(module.parameters(), lr=0.1))
    if resumes:
        accelerator.load_state(folder / "saved")
    for step in range(2 if resumes else 0, 4):
        if step == 2 and not resumes:
            accelerator.save_state(folder / "saved")
        x = torch.full((2, 4), accelerator.process_index + 1.0) * (step + 1)
        loss = model(x).square().mean()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        print(
            f"loss {accelerator.process_index} {step} {loss.item()!r} {norm.item()!r}\n", end="", flush=True
        )
    print(f"class {type(model).__module__}\n", end="", flush=True)


if __name__ == "__main__":
    main()
