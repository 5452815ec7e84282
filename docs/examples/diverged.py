"""In one step rank 1 leaves out clipping: torchrun --nproc-per-node 2 docs/examples/diverged.py"""

import torch
import torch.distributed as dist
from torch import nn

import zc

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
zc.compile(model, optimizer, backend="eager")
for step in range(4):
    model(torch.randn(6, 8)).square().mean().backward()
    if dist.get_rank() == 0 or step != 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
