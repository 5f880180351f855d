"""Training with Lightning's Trainer, as its users write it: `lightning_trainer.py FOLDER FORM`, `--resume` after one epoch.

FORM is `sharded` or `full`. With `--bf16`, `--checkpointing`, `--accumulate` and `--clip` (by value).
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_on_cpu import TrainerStrategy


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """As many rows as an epoch of two steps takes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Net(LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        batches = int(self.trainer.num_training_batches)
        print(
            f"loss {self.global_rank} {self.current_epoch * batches + number} {loss.item()!r}\n",
            end="",
            flush=True,
        )
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def main() -> None:
    folder, form = Path(sys.argv[1]), sys.argv[2]
    resumes = "--resume" in sys.argv
    seed_everything(0, verbose=False)
    options: dict[str, Any] = {}
    if "--checkpointing" in sys.argv:
        options["activation_checkpointing_policy"] = {torch.nn.Linear}
    strategy = TrainerStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type=form, **options)
    if "--clip" in sys.argv:
        # By norm is refused by Lightning with FSDP.
        options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    precision: Any = "bf16-mixed" if "--bf16" in sys.argv else "32-true"
    parts = 2 if "--accumulate" in sys.argv else 1
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision=precision,
        max_epochs=2,
        accumulate_grad_batches=parts,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(options if "--clip" in sys.argv else {}),
    )
    rows = torch.utils.data.DataLoader(Rows(8 * parts), batch_size=2)
    trainer.fit(Net(), rows, ckpt_path=folder / "epoch=0.ckpt" if resumes else None)
    print(f"class {type(trainer.strategy.model).__module__}\n", end="", flush=True)


if __name__ == "__main__":
    main()
