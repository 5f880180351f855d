"""Let DeepSpeed write small real checkpoints, and beside each what DeepSpeed itself says is in it.

    python tools/make_deepspeed_fixture.py DIRECTORY [NAME ...]

It needs DeepSpeed (`nox -s run -- deepspeed` has it) and no GPU: the ranks are processes on CPU
that talk through gloo. Each checkpoint is DIRECTORY/NAME, and DIRECTORY/NAME.safetensors holds the full tensors, by the
paths `model/<name>` and `optimizer/state/<name>/<state>`:

- trained parameters and their states as the living engine returns them after the last step, through
  `safe_get_full_fp32_param` and `safe_get_full_optimizer_state`; stages 1 and 2 too;
- frozen ones as `GatheredParameters` returns them, and buffers as the module has them.

The weights must be those of DeepSpeed's own zero_to_fp32, where it reads the checkpoint, or the script stops. Of what
DeepSpeed wrote, only its copies of zero_to_fp32.py and zero_to_torch.py are removed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

CLIENT_STATE: Final = {"epoch": 3, "note": "written by the test", "permutation": torch.arange(7).flip(0)}

# name -> number of ranks, stage, dtype, and what differs in the stage's configuration
CHECKPOINTS: Final[dict[str, tuple[int, int, str, dict[str, Any]]]] = {
    "stage3-fp32": (2, 3, "fp32", {"sub_group_size": 60}),
    "stage3-bf16": (2, 3, "bf16", {}),
    "stage3-one-rank": (1, 3, "bf16", {}),
    "stage3-three-ranks": (3, 3, "fp32", {}),
    "stage2-elastic": (2, 2, "bf16", {"elastic_checkpoint": True}),
    "stage2-aligned": (2, 2, "bf16", {"parameter_alignment": True}),
    "stage1-fp32": (2, 1, "fp32", {}),
    "stage1-bf16": (2, 1, "bf16", {"grad_accum_dtype": "fp32"}),  # by another optimizer of DeepSpeed's
}


class Odd(nn.Module):
    """A model whose sizes two and three ranks do not divide: tied, frozen and buffered."""

    running: Tensor
    calls: Tensor

    def __init__(self) -> None:
        """Make the layers from one seed."""
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(11, 5)
        self.hidden = nn.Linear(5, 7)
        self.adapter = nn.Linear(7, 3)
        self.out = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("running", torch.linspace(0, 1, 13))
        self.register_buffer("calls", torch.tensor(4))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        for parameter in self.adapter.parameters():
            parameter.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting `tokens` from themselves."""
        hidden = torch.tanh(self.hidden(self.embedding(tokens)))
        logits = self.head(self.out(hidden) * self.scale) + self.adapter(hidden).sum(-1, keepdim=True)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def configuration(stage: int, dtype: str, more: dict[str, Any]) -> dict[str, Any]:
    """Return what DeepSpeed calls its config."""
    more = dict(more)
    gradients = {"grad_accum_dtype": more.pop("grad_accum_dtype")} if "grad_accum_dtype" in more else {}
    config: dict[str, Any] = {
        "data_types": gradients,
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # it clips to 1 where nothing is said
        "zero_optimization": {"stage": stage, **more},
    }
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with weights in one group and the rest of what is trained in another."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim != 2], "weight_decay": 0.0, "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def tokens_of(step: int, rank: int) -> Tensor:
    """Return what a rank trains on in a step."""
    return torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def train(directory: Path, name: str, steps: int, rank: int) -> None:
    """Be one rank: train, save the checkpoint, and, on rank 0, what must be read from it."""
    import deepspeed  # type: ignore[import-not-found, unused-ignore]  # only where this is called

    _, stage, dtype, more = CHECKPOINTS[name]
    model = Odd()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=configuration(stage, dtype, more)
    )
    for step in range(steps):
        engine.backward(engine(tokens_of(step, rank)))
        engine.step()
    engine.save_checkpoint(str(directory / name), client_state=CLIENT_STATE)
    if stage < 3:
        # 0.19.8 links states to parameters after the first group's first step, when the other groups have none yet.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    expected = full_tensors(model, steps)
    if rank == 0:
        if "grad_accum_dtype" not in more:  # its tool refuses what that optimizer writes
            check_against_deepspeeds_tool(directory / name, expected)
        save_file(expected, directory / f"{name}.safetensors")
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (directory / name / script).unlink(missing_ok=True)


def full_tensors(model: nn.Module, steps: int) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint by path, from the living engine; collective."""
    from deepspeed.runtime.zero import GatheredParameters  # type: ignore[import-not-found, unused-ignore]
    from deepspeed.utils import (  # type: ignore[import-not-found, unused-ignore]
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensors[f"model/{name}"] = safe_get_full_fp32_param(parameter)
            for state in ("exp_avg", "exp_avg_sq"):
                path = f"optimizer/state/{name}/{state}"
                tensors[path] = safe_get_full_optimizer_state(parameter, state)
            tensors[f"optimizer/state/{name}/step"] = torch.tensor(float(steps))
        else:
            with GatheredParameters([parameter]):
                tensors[f"model/{name}"] = parameter.detach().clone()
    tensors["model/head.weight"] = tensors["model/embedding.weight"]
    tensors |= {f"model/{name}": getattr(model, name) for name in ("running", "calls")}
    return {path: tensor.detach().clone().contiguous() for path, tensor in tensors.items()}


def check_against_deepspeeds_tool(checkpoint: Path, expected: dict[str, Tensor]) -> None:
    """Stop unless zero_to_fp32 finds the same weights."""
    from deepspeed.utils.zero_to_fp32 import (  # type: ignore[import-not-found, unused-ignore]
        get_fp32_state_dict_from_zero_checkpoint,
    )

    found = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    for name, tensor in found.items():
        if not torch.equal(tensor.float(), expected[f"model/{name}"].float()):
            sys.exit(f"zero_to_fp32 says something else about {name} of {checkpoint} than the engine did.")
    missing = {path.removeprefix("model/") for path in expected if path.startswith("model/")} - set(found)
    if missing - {"adapter.weight", "adapter.bias"}:  # of stage 1 zero_to_fp32 leaves out what is frozen
        sys.exit(f"zero_to_fp32 does not find {sorted(missing)} in {checkpoint}.")


def be_rank(rank: int, world_size: int, port: int, directory: Path, name: str, steps: int) -> None:
    """Join the process group and train."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    train(directory, name, steps, rank)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # the groups that DeepSpeed holds on to abort at an orderly exit, on gloo


def make(directory: Path, name: str, steps: int) -> None:
    """Write one checkpoint and its expected tensors into the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(directory / name, ignore_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world_size = CHECKPOINTS[name][0]
    arguments = (world_size, port, directory, name, steps)
    spawn(be_rank, arguments, nprocs=world_size)  # type: ignore[no-untyped-call]


def main() -> None:
    """Make the named checkpoints, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CHECKPOINTS))
    parser.add_argument("--steps", type=int, default=2, help="of training before the checkpoint (2)")
    arguments = parser.parse_args()
    for name in arguments.names or CHECKPOINTS:
        make(arguments.directory.resolve(), name, arguments.steps)


if __name__ == "__main__":
    main()
