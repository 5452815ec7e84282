"""torchrun --nproc-per-node 2 docs/examples/train_fsdp2.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
for layer in (model[0], model[2], model[4], model):
    fully_shard(layer, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())  # every rank has data of its own
for step in range(51):
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        x = torch.randn(32, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(dim=1))
        (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save(weights, "weights.pt")
dist.destroy_process_group()
