"""torchrun --nproc-per-node 2 docs/examples/with_accelerate.py --out out/accelerate [--resume]"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zc.integrations.accelerate import prepare

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()

accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2)
set_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)

# model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler, stage=2)

if args.resume:
    accelerator.load_state(args.out)
for epoch in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    losses = accelerator.gather(loss.detach())
    accelerator.print(f"epoch {epoch}: loss {losses.mean().item():.4f}")
accelerator.save_state(args.out)
accelerator.save_model(model, args.out + "/model")
accelerator.end_training()
