"""Training with Lightning's Trainer, as its users write it: `lightning_trainer.py FOLDER FORM`.

It saves after each epoch of two steps on six rows, and has two epochs, or as many as with `--epochs=3`. With `--resume=1` it
goes on after the first one. FORM is `sharded` or `full`, or `ddp` for no FSDP. With `--bf16`, `--checkpointing`, `--accumulate`, `--clip` (by
value), and `--ranks=3`. With `--average` it validates with Lightning's moving average of the weights, and with
`--sharded-average` with flatparam's.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning_on_cpu import TrainerStrategy

import flatparam


def number(name: str, default: int) -> int:
    """The value of an argument such as `--ranks=3`."""
    prefix = f"--{name}="
    return next((int(each.removeprefix(prefix)) for each in sys.argv if each.startswith(prefix)), default)


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    """As many rows as an epoch takes."""

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
            f"\nloss {self.global_rank} {self.current_epoch * batches + number} {loss.item()!r}\n",
            end="",
            flush=True,
        )
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        loss = self.net(batch).square().mean()
        print(f"\nvalidation {self.global_rank} {self.current_epoch} {loss.item()!r}\n", end="", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class ShardedAverage(Callback):
    """Validate with a moving average of the weights, of which each rank keeps its part."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = flatparam.ShardedEMA(trainer.strategy.model, decay=0.9)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > self.average.updates:
            self.average.update()

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        self.applied = self.average.applied(trainer.strategy.model)
        self.applied.__enter__()

    def on_validation_end(self, *_: Any) -> None:
        self.applied.__exit__(None, None, None)


def main() -> None:
    folder, form = Path(sys.argv[1]), sys.argv[2]
    resumed, ranks = number("resume", 0), number("ranks", 2)
    seed_everything(0, verbose=False)
    options: dict[str, Any] = {}
    if "--checkpointing" in sys.argv:
        options["activation_checkpointing_policy"] = {torch.nn.Linear}
    strategy: Any = "ddp"
    if form != "ddp":
        strategy = TrainerStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type=form, **options)
    if "--clip" in sys.argv:
        # By norm is refused by Lightning with FSDP.
        options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    precision: Any = "bf16-mixed" if "--bf16" in sys.argv else "32-true"
    parts = 2 if "--accumulate" in sys.argv else 1
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        precision=precision,
        max_epochs=number("epochs", 2),
        accumulate_grad_batches=parts,
        callbacks=[
            ModelCheckpoint(folder / f"after-{resumed}", filename="{epoch}", save_top_k=-1),
            *([EMAWeightAveraging(decay=0.9)] if "--average" in sys.argv else []),
            *([ShardedAverage()] if "--sharded-average" in sys.argv else []),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(options if "--clip" in sys.argv else {}),
    )
    rows = torch.utils.data.DataLoader(Rows(12 * parts), batch_size=6 // ranks)
    # What a run that was resumed one epoch before has saved, too.
    saved = folder / f"after-{max(0, resumed - 1)}" / f"epoch={resumed - 1}.ckpt"
    validated = rows if {"--average", "--sharded-average"} & set(sys.argv) else None
    trainer.fit(Net(), rows, validated, ckpt_path=saved if resumed else None)
    print(f"\nclass {type(trainer.strategy.model).__module__}\n", end="", flush=True)


if __name__ == "__main__":
    main()
