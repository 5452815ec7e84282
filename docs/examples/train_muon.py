"""torchrun --nproc-per-node 2 docs/examples/train_muon.py

As nanochat trains: a compiled model, Muon for matrices and AdamW for the rest, a schedule by hand, accumulation."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
matrices = [p for p in model.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if p.dim() != 2]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
for group in (group for optimizer in optimizers for group in optimizer.param_groups):
    group["initial_lr"] = group["lr"]
model = torch.compile(model)
torch.manual_seed(1 + dist.get_rank())  # every rank has data of its own
for step in range(51):
    for _micro in range(2):
        x = torch.randn(32, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        (loss / 2).backward()
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 51)
        optimizer.step()
    model.zero_grad(set_to_none=True)
    if step % 25 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
