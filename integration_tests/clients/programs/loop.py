"""A training loop with accelerate, as its users write it: `loop.py FOLDER OPTIMIZER`.

It has four steps on six rows, and saves after the first two. With `--resume=2` it goes on from there, and saves one step
later; with `--resume=3` it has the last step. With `--bf16` it trains in bfloat16, with `--accumulate` each step has two
micro-batches, and with `--generate` it looks at the full parameters at the end.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed.fsdp import FullyShardedDataParallel


def main() -> None:
    folder, kind = Path(sys.argv[1]), getattr(torch.optim, sys.argv[2])
    first = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    set_seed(0)
    parts = 2 if "--accumulate" in sys.argv else 1
    accelerator = Accelerator(
        mixed_precision="bf16" if "--bf16" in sys.argv else "no", gradient_accumulation_steps=parts
    )
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    model, optimizer = accelerator.prepare(module, kind(module.parameters(), lr=0.1))
    if first:
        accelerator.load_state(folder / f"saved-{first}")
    rows = torch.linspace(1, 2, 24).view(6, 4)[accelerator.process_index :: accelerator.num_processes]
    for step in range(first, 4):
        if step == max(2, first + 1):
            accelerator.save_state(folder / f"saved-{step}")
        norm = torch.zeros(())
        for part in range(parts):
            with accelerator.accumulate(model):
                loss = model(rows * (step + 1 + part)).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        print(f"\nloss {accelerator.process_index} {step} {loss.item()!r} {norm.item()!r}\n", end="", flush=True)
    if "--generate" in sys.argv:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False), torch.no_grad():
            value = accelerator.unwrap_model(model)(rows).sum().item()
        print(f"\nloss {accelerator.process_index} 4 {value!r}\n", end="", flush=True)
    print(f"\nclass {type(model).__module__}\n", end="", flush=True)


if __name__ == "__main__":
    main()
