"""A training loop with Lightning Fabric, as its users write it: `fabric_loop.py FOLDER FORM`.

It has four steps on six rows, and saves after the first two. With `--resume=2` it goes on from there, and saves one step
later; with `--resume=3` it has the last step. FORM is `sharded` or `full`. With `--bf16`, `--checkpointing`, `--accumulate`, `--flat` (`use_orig_params=False`), and
`--ranks=3`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning_on_cpu import FabricStrategy


def main() -> None:
    folder, form = Path(sys.argv[1]), sys.argv[2]
    flat = "--flat" in sys.argv
    first = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    options: dict[str, Any] = {"use_orig_params": False} if flat else {}
    if "--checkpointing" in sys.argv:
        options["activation_checkpointing_policy"] = {torch.nn.Linear}
    strategy = FabricStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type=form, **options)
    precision: Any = "bf16-mixed" if "--bf16" in sys.argv else "32-true"
    ranks = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--ranks=")), 2)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, precision=precision)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    module: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    if flat:
        model = fabric.setup_module(module)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
    else:
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if first:
        fabric.load(folder / f"saved-{first}", state)
    rows = torch.linspace(1, 2, 24).view(6, 4)[fabric.global_rank :: ranks]
    parts = 2 if "--accumulate" in sys.argv else 1
    while state["step"] < 4:
        step = state["step"]
        if step == max(2, first + 1):
            folder.mkdir(parents=True, exist_ok=True)
            fabric.save(folder / f"saved-{step}", state)
        losses = []
        for part in range(parts):
            x = rows * (step + 1) / (part + 1)
            with fabric.no_backward_sync(model, enabled=part < parts - 1):
                loss = model(x).square().mean()
                fabric.backward(loss / parts)
            losses.append(loss.item())
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        numbers = " ".join(map(repr, [*losses, norm.item()]))
        print(f"\nloss {fabric.global_rank} {step} {numbers}\n", end="", flush=True)
        state["step"] = step + 1
    print(f"\nclass {type(model._forward_module).__module__}\n", end="", flush=True)


if __name__ == "__main__":
    main()
