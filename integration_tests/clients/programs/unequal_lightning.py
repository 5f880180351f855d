"""Train on micro-batches of different sizes with Lightning: `unequal_lightning.py fabric|trainer`; prints the output."""

import sys
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy as OfFabric
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

SIZES = [5, 2, 9, 4, 1]
DATA = [torch.randn(size, 8, generator=torch.Generator().manual_seed(size)) for size in SIZES]
MINE = [[0, 1, 2], [3, 4]]


def build() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def sharded(model: Any, mesh: Any) -> Any:
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


class Model(lightning.LightningModule):
    """Lightning's own loop calls the backward pass behind the strategy; here the step does it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = build()

    def configure_model(self) -> None:
        sharded(self.model, self.device_mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, batch: torch.Tensor, number: int) -> None:
        for each in MINE[self.global_rank]:
            with self.model.accumulate(weight=SIZES[each]):
                self.manual_backward(self.model(DATA[each]).square().mean())
        self.model.reduce_gradients()
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


def by_fabric() -> tuple[int, Any]:
    strategy = OfFabric(parallelize_fn=sharded, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model: Any = fabric.setup(build())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        for each in MINE[fabric.global_rank]:
            with model.accumulate(weight=SIZES[each]):
                fabric.backward(model(DATA[each]).square().mean())
        model.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return fabric.global_rank, model


def by_trainer() -> tuple[int, Any]:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    off: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=2, **off)
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader([0] * 8, batch_size=1))
    return trainer.global_rank, model.model


rank, trained = {"fabric": by_fabric, "trainer": by_trainer}[sys.argv[1]]()
alone = build()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
for _ in range(2):
    (sum(alone(DATA[each]).square().sum() for each in range(5)) / sum(SIZES)).backward()
    optimizer.step()
    optimizer.zero_grad()
ones = torch.ones(1, 8)
print(f"\noutput {rank} {trained(ones).item()} {alone(ones).item()}\n", end="", flush=True)
