"""torchrun --nproc-per-node 2 docs/examples/with_lightning.py --out out/lightning [--resume]"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from zc.integrations.lightning import ZcStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
trainer = lightning.Trainer(
    accelerator="cpu" if args.cpu else "gpu",
    devices=2,
    strategy=ZcStrategy(stage=2),  # strategy="ddp"
    max_epochs=3 if args.resume else 2,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint(args.out, monitor="val_loss", save_last=True)],
    default_root_dir=args.out,
    logger=False,
)
trainer.fit(Regression(), loader, loader, ckpt_path=args.out + "/last.ckpt" if args.resume else None)
