"""A training loop with Lightning Fabric and its `ModelParallelStrategy`, as its users write it: `fsdp2_fabric.py FOLDER`.

It has four steps on six rows, and saves after the first two; with `--resume=2` it goes on from there, and saves one step
later; with `--resume=3` it has the last step. With `--full` for full states, `--bf16`, `--checkpointing`,
`--accumulate`, and `--ranks=3`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parallelize(model: Any, mesh: DeviceMesh) -> Any:
    """Shard each layer, and the model."""
    options: dict[str, Any] = {"mesh": mesh["data_parallel"]}
    if "--bf16" in sys.argv:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number in (0, 2):
        if "--checkpointing" in sys.argv:
            model[number] = checkpoint_wrapper(model[number])
        fully_shard(model[number], **options)
    return fully_shard(model, **options)


def main() -> None:
    folder = Path(sys.argv[1])
    first = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    ranks = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--ranks=")), 2)
    strategy = ModelParallelStrategy(
        parallelize_fn=parallelize,
        data_parallel_size=ranks,
        tensor_parallel_size=1,
        save_distributed_checkpoint="--full" not in sys.argv,
    )
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    module: Any = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
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
            with fabric.no_backward_sync(model, enabled=part < parts - 1):
                loss = model(rows * (step + 1) / (part + 1)).float().square().mean()
                fabric.backward(loss / parts)
            losses.append(loss.item())
        norm: Any = fabric.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        numbers = " ".join(map(repr, [*losses, norm.item()]))
        print(f"\nloss {fabric.global_rank} {step} {numbers}\n", end="", flush=True)
        state["step"] = step + 1
    kinds = [kind.__module__ for kind in type(module).__mro__ if kind.__name__ == "FSDPModule"]
    print(f"\nclass {kinds[0]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
