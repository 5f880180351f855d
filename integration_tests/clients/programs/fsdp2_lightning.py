"""Training with Lightning's `ModelParallelStrategy`, as its users write it: `fsdp2_lightning.py FOLDER`.

It has four steps on six rows, and saves after the first two; with `--resume=2` it goes on from there, and saves one step
later; with `--resume=3` it has the last step. With `--full` for full states, `--bf16`, `--checkpointing`,
`--accumulate`, and `--ranks=3`.
"""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

PARTS = 2 if "--accumulate" in sys.argv else 1


class Model(lightning.LightningModule):
    """Two layers, each a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
        options: dict[str, Any] = {"mesh": self.device_mesh["data_parallel"]}
        if "--bf16" in sys.argv:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for number in (0, 2):
            if "--checkpointing" in sys.argv:
                self.model[number] = checkpoint_wrapper(self.model[number])
            fully_shard(self.model[number], **options)
        fully_shard(self.model, **options)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        rows = torch.linspace(1, 2, 24).view(6, 4)[self.global_rank :: self.trainer.world_size]
        loss: torch.Tensor = self.model(rows * (self.global_step + 1) / (number % PARTS + 1)).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found: Any = torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])
        numbers = " ".join(map(repr, [*self.losses, found.full_tensor().item()]))
        print(f"\nloss {self.global_rank} {self.global_step} {numbers}\n", end="", flush=True)
        self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def main() -> None:
    folder = Path(sys.argv[1])
    first = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--resume=")), 0)
    ranks = next((int(each.partition("=")[2]) for each in sys.argv if each.startswith("--ranks=")), 2)
    strategy = ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint="--full" not in sys.argv
    )
    each_step = ModelCheckpoint(
        folder, "saved-{step}", every_n_train_steps=1, save_top_k=-1, auto_insert_metric_name=False
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=4,
        accumulate_grad_batches=PARTS,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[each_step],
        default_root_dir=folder,
    )
    model = Model()
    # The step says what its rows are.
    loader = torch.utils.data.DataLoader(torch.zeros(64), batch_size=1)
    trainer.fit(model, loader, ckpt_path=folder / f"saved-{first}.ckpt" if first else None)
    kinds = [kind.__module__ for kind in type(model.model).__mro__ if kind.__name__ == "FSDPModule"]
    print(f"\nclass {kinds[0]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
