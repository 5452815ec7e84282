"""python docs/examples/plan.py

What a rank would hold, and what it would send, before there is a machine for it: here 1.6 billion parameters in bf16,
on 8 ranks of one host. Nothing is allocated, and no process group is needed."""

import torch
from torch import nn

import zc

with torch.device("meta"):
    model = nn.Sequential(*(nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True) for _ in range(32)))
for stage in (1, 2):
    print(zc.plan(model, world_size=8, ranks_per_host=8, stage=stage, param_dtype=torch.bfloat16), end="\n\n")
