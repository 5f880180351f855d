"""Train an adapter of PEFT on weights of 4 bits (bitsandbytes), sharded: `pip install transformers peft bitsandbytes`.

    torchrun --standalone --nproc-per-node 2 examples/qlora.py

The model is a tiny Llama that this program makes; in real life, `from_pretrained("somebody/model")`.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from flatparam import FullyShardedDataParallel, publish
from flatparam.wrap import ModuleWrapPolicy

FOLDER = "tiny-llama"


def main() -> None:
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
    if rank == 0:
        torch.manual_seed(0)
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=4, **sizes)).save_pretrained(FOLDER)
    dist.barrier()

    # With torch's FSDP1 and FSDP2 a unit must hold one dtype; flatparam takes the default storage, too.
    storage = {"bnb_4bit_quant_storage": torch.bfloat16, "bnb_4bit_compute_dtype": torch.bfloat16}
    model = LlamaForCausalLM.from_pretrained(
        FOLDER,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, **storage),
        device_map={"": device},
    )
    torch.manual_seed(0)  # every rank draws the same adapter
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["up_proj", "down_proj"])).bfloat16()
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), use_orig_params=True
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    for step in range(40):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        first = torch.randint(0, 128, (4, 1), generator=generator)
        tokens = ((first + torch.arange(12)) % 128).to(device)  # they count upwards
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    catalogue = publish(model, "qlora-adapter", only=lambda name: ".lora_" in name)
    if rank == 0:
        print(f"qlora-adapter has {len(catalogue.tensors)} tensors, {catalogue.nbytes:,} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
