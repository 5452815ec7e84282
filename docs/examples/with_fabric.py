"""torchrun --nproc-per-node 2 docs/examples/with_fabric.py --out out/fabric [--resume]"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zc.integrations.lightning import ZcFabricStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()

fabric = lightning.Fabric(
    accelerator="cpu" if args.cpu else "gpu",
    devices=2,
    strategy=ZcFabricStrategy(stage=2),  # strategy="ddp"
)
fabric.launch()
fabric.seed_everything(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = fabric.setup(model, optimizer)
x = torch.randn(256, 8)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True))
state = {"model": model, "optimizer": optimizer, "epoch": 0}
if args.resume:
    fabric.load(args.out + "/state.ckpt", state)
for epoch in range(state["epoch"], state["epoch"] + 2):
    for number, (inputs, targets) in enumerate(loader):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.mse_loss(model(inputs), targets)
            fabric.backward(loss / 2)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    fabric.print(f"epoch {epoch}: loss {loss.item():.4f}")
    state["epoch"] = epoch + 1
fabric.save(args.out + "/state.ckpt", state)
