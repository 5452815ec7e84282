"""python -m zc check docs/examples/check.py:make --stage 2 --backend eager"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def make():
    """What zc.check takes: each rank makes its own."""
    torch.manual_seed(0)  # the same weights on all ranks
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # data and dropout of its own on each
    batches = [(torch.randn(8, 32), torch.randint(10, (8,))) for _ in range(3)]
    return step, model, optimizer, batches


def step(model, batch):
    """What a loop has between a batch and loss.backward()."""
    x, y = batch
    return F.cross_entropy(model(x), y)
