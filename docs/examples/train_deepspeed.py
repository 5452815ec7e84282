"""deepspeed --num_gpus 2 docs/examples/train_deepspeed.py"""

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

deepspeed.init_distributed()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
torch.manual_seed(1 + dist.get_rank())  # every rank has data of its own
for step in range(51):
    for _micro in range(2):
        x = torch.randn(32, 64, device=engine.device)
        loss = nn.functional.cross_entropy(engine(x), x[:, :10].argmax(dim=1))
        engine.backward(loss)  # divides by the number of microbatches
        engine.step()  # updates, clips and clears after the last of them
    if step % 25 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
engine.save_checkpoint("checkpoints", tag=f"step_{step}")
dist.destroy_process_group()
