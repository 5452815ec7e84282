"""torchrun --nproc-per-node 2 docs/examples/lora.py FOLDER

Trains adapters (peft) on a frozen backbone in bf16, of which each rank holds its shard alone. FOLDER has the backbone
as transformers writes it; without one there, rank 0 makes a small one."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import zc

folder = Path(sys.argv[1])
on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpus else "cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4)
if dist.get_rank() == 0 and not folder.exists():
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
dist.barrier()

with torch.device("meta"):
    backbone = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = get_peft_model(backbone, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
trained = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
model, optimizer = zc.compile(model, optimizer, stage=3, device=device)


def name_in_folder(name: str) -> str | None:
    return None if "lora_" in name else name.removeprefix("base_model.model.").replace(".base_layer", "")


zeros = {module for name, module in model.named_modules() if ".lora_B." in name}
zc.load_pretrained(model, folder, rename=name_in_folder)
zc.initialize(model, lambda module: nn.init.zeros_(module.weight) if module in zeros else module.reset_parameters())
torch.manual_seed(1 + dist.get_rank())
for step in range(11):
    x = torch.randint(0, 8, (8, 16), device=device)  # eight of 64 tokens
    loss = model(input_ids=x, labels=x, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
held = zc.persistent_nbytes(model)
if dist.get_rank() == 0:
    numel = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    print(f"{numel:,} frozen parameters: {held['frozen']:,} bytes on a rank of {dist.get_world_size()}")
with zc.whole_parameters(model):  # what peft saves is small, and is gathered with the rest
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "adapter")
dist.destroy_process_group()
