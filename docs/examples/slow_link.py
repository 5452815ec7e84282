"""torchrun --nproc-per-node 2 docs/examples/slow_link.py"""

import os

import torch
import torch.distributed as dist
from torch import nn

import zc

on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpus else "cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = zc.compile(model, optimizer, reduce_dtype=torch.int8, gather_dtype=torch.int8)
torch.manual_seed(1 + dist.get_rank())  # every rank has data of its own
for step in range(201):
    x = torch.randn(32, 64, device=device)
    loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
