"""Training with Lightning's `ModelParallelStrategy`, as its users write it: `fsdp2_lightning.py FOLDER`; four steps, and a save."""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Model(lightning.LightningModule):
    """Two layers, each a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
        mesh = self.device_mesh["data_parallel"]
        for module in (self.model[0], self.model[2], self.model):
            fully_shard(module, mesh=mesh)

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        print(f"\nloss {self.global_rank} {self.global_step} {loss.item()!r}\n", end="", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    model = Model()
    rows = torch.linspace(0, 1, 64).view(16, 4)
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=2))
    trainer.save_checkpoint(folder / "saved.ckpt")
    kinds = [kind.__module__ for kind in type(model.model).__mro__ if kind.__name__ == "FSDPModule"]
    print(f"\nclass {kinds[0]}\n", end="", flush=True)


if __name__ == "__main__":
    main()
