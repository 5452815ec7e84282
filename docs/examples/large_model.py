"""torchrun --nproc-per-node 2 docs/examples/large_model.py FOLDER

Trains a model that no rank ever holds as a whole. FOLDER has a checkpoint as transformers writes it; without one there,
rank 0 makes a small one."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
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
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="100KB")
dist.barrier()

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = zc.compile(model, optimizer, stage=3, device=device)
zc.load_pretrained(model, folder)  # each rank reads its own elements
torch.manual_seed(1 + dist.get_rank())
for step in range(11):
    x = torch.randint(0, 8, (8, 16), device=device)  # eight of 64 tokens
    loss = model(input_ids=x, labels=x, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
with zc.whole_parameters(model):  # once for all tokens
    tokens = model.generate(x[:1, :4], max_new_tokens=4, do_sample=False)
zc.save(folder / "trained", model, optimizer)
if dist.get_rank() == 0:
    print(f"generated {tokens[0].tolist()}")
    zc.export(folder / "exported", folder / "trained")  # from_pretrained reads it
dist.destroy_process_group()
