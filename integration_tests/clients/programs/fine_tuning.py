"""Train an adapter on two ranks; a process beside them generates with the newest average."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from flatparam import FullyShardedDataParallel as FSDP
from flatparam import Mailbox, Publisher, Receiver, ShardedEMA, load_pretrained
from flatparam.wrap import ModuleWrapPolicy

FOLDER = "somebodys"
STEPS = 6
LAYERS = ("q_proj", "v_proj")


def make() -> torch.nn.Module:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER))
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS)))


def in_the_model(name: str) -> str:
    """What PEFT calls a tensor of the files."""
    module, _, last = name.rpartition(".")
    inside = f"{module}.base_layer.{last}" if module.endswith(LAYERS) else name
    return f"base_model.model.{inside}"


def train() -> None:
    dist.init_process_group("gloo")
    model = load_pretrained(
        make,
        FOLDER,
        mapping=in_the_model,
        auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}),
        use_orig_params=True,
    )
    # The files lack the adapter, and `reset_parameters()` of its layers would not begin it at zero.
    torch.manual_seed(0)
    with FSDP.summon_full_params(model):
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.reset_lora_parameters("default", init_lora_weights=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ema = ShardedEMA(model, decay=0.5)
    publisher = Publisher(model, Mailbox("weights"), dtype=torch.bfloat16)
    for step in range(STEPS):
        tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        with ema.applied(model):
            published = publisher.publish()
        # As in reinforcement learning: the next step needs what these weights have written.
        while dist.get_rank() == 0 and not Path(f"answer-{published.version}.txt").exists():
            time.sleep(0.01)
        dist.barrier()
        sys.stdout.write(f"\nloss {dist.get_rank()} {step} {loss.item()!r} {published.nbytes}\n")
    dist.destroy_process_group()


@torch.no_grad()
def generate() -> None:
    model = make().bfloat16().eval()
    receiver = Receiver(model, Mailbox("weights"))
    while receiver.version < STEPS:
        if not receiver.receive():
            time.sleep(0.01)
            continue
        answer = model.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
        written = Path(f"answer-{receiver.version}.part")
        written.write_text(" ".join(map(str, answer[0].tolist())))
        written.rename(f"answer-{receiver.version}.txt")


if __name__ == "__main__":
    generate() if "generate" in sys.argv else train()
