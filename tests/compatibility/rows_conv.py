"""Item 3: convolutions, whose saved activations Inductor lays out as it likes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from models import seeded
from rows import STEPS, Script, adamw, row
from torch import Tensor, nn


class PooledConvNet(nn.Module):
    """[N, 192] as images: a convolution, group norm, max pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.after, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 192)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.silu(self.norm(self.conv(x.unflatten(1, (3, 8, 8))))), 3, 2, 1)
        return self.head(self.after(x).mean((2, 3)))


@row(3, "convolutions and max pooling: an evaluation between, a smaller last batch", make=PooledConvNet)
def pooled(s: Script) -> None:
    for step in range(STEPS):
        x, y = s.batch(step, num=3 if step == STEPS - 1 else 4, dim=192)
        F.mse_loss(s.model(x), y).backward()
        s.update()
        if step % 2:
            s.model.eval()
            with torch.no_grad():
                s.note(f"evaluated {step}", s.model(x).mean())
            s.model.train()


def generator() -> nn.Module:
    first = (nn.ConvTranspose2d(8, 16, 4, bias=False), nn.GroupNorm(2, 16), nn.ReLU())
    return nn.Sequential(*first, nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh())


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten(0))


@row(3, "DCGAN's loop: real images, noise, then the generator", make=discriminator)
def dcgan(s: Script) -> None:
    torch.manual_seed(1)
    maker = generator().to(s.dtype)
    optimizer = adamw(maker.parameters())
    s.compile_too(maker, optimizer)
    for step in range(STEPS):
        noise = torch.randn(4, 8, 1, 1, generator=seeded(s.rank, step, 0)).to(s.dtype)
        real = torch.randn(4, 3, 8, 8, generator=seeded(s.rank, step, 1)).to(s.dtype)
        s.optimizer.zero_grad()
        F.softplus(-s.model(real)).mean().backward()
        images = maker(noise)
        F.softplus(s.model(images.detach())).mean().backward()
        s.optimizer.step()
        optimizer.zero_grad()
        F.softplus(-s.model(images)).mean().backward()
        optimizer.step()
    for name, param in maker.named_parameters():
        s.note(f"the generator's {name}", param)
