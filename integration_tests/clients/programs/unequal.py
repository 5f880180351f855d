"""Train with accelerate on micro-batches of different sizes, of which the first rank has most; prints norms."""

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.01))
sizes = [5, 2, 9, 4]
data = [torch.randn(size, 4, generator=torch.Generator().manual_seed(size)) for size in sizes]
last = accelerator.num_processes - 1
mine = {0: range(3), 1: [3]}[accelerator.process_index] if last else range(4)
for step in range(3):
    for number in mine:
        with model.accumulate(weight=sizes[number]):
            accelerator.backward(model(data[number]).square().mean())
    model.reduce_gradients()
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(step, float(norm))
accelerator.end_training()
