"""Train with accelerate and save after two steps; with `--resume`, take the last two steps only."""

import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
done = 0
if "--resume" in sys.argv:
    accelerator.load_state("saved")
    done = 2
for step in range(done, 4):
    x = torch.full((2, 4), accelerator.process_index + 1.0) * (step + 1)
    loss = model(x).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(step, loss.item())
    if step == 1:
        accelerator.save_state("saved")
accelerator.end_training()
