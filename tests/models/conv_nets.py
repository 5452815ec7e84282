"""Random small convolutional nets: chains of blocks that end in a classifier, each made from a seed.

Between them the blocks have what makes Inductor choose other strides than it was given: convolutions (grouped, dilated,
strided, transposed), pooling, resizing, norms over channels in either order, views and shuffles of channels.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, SIDE, CLASSES = 8, 8, 5  # what each block gets and gives, but for the side, which pooling halves


class Fn(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


class Around(nn.Module):
    """``x + inner(x)``, or both beside each other and mixed."""

    def __init__(self, inner: nn.Module, concatenate: bool) -> None:
        super().__init__()
        self.inner = inner
        self.mix = nn.Conv2d(2 * CHANNELS, CHANNELS, 1) if concatenate else None

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(self.inner(x), size=x.shape[2:])
        return x + y if self.mix is None else self.mix(torch.cat((x, y), 1))


class LastNorm(nn.Module):
    """ConvNext's: channels last, a layer norm and two linear layers there, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 2 * CHANNELS)
        self.down, self.scale = nn.Linear(2 * CHANNELS, CHANNELS), nn.Parameter(torch.ones(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x.permute(0, 2, 3, 1)))))
        return (self.scale * y).permute(0, 3, 1, 2)


class Attend(nn.Module):
    """Every position looks at every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(CHANNELS, 3 * CHANNELS, 1), nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.flatten(2).transpose(1, 2).unsqueeze(1) for part in self.qkv(x).chunk(3, 1))
        y = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2)
        return x + self.out(y.unflatten(2, x.shape[2:]))


class Squeeze(nn.Module):
    """A channel's weight is made from all channels' means."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc(x.mean((2, 3))).sigmoid()[:, :, None, None]


def _shuffle(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, CHANNELS // 2)).transpose(1, 2).flatten(1, 2)


def _fold(x: Tensor) -> Tensor:
    return F.pixel_unshuffle(F.pixel_shuffle(x.relu(), 2), 2)


def _conv(rng: random.Random) -> nn.Module:
    how = rng.choice(({}, {"groups": 2}, {"groups": CHANNELS}, {"dilation": 2, "padding": 2}, {"stride": 2}))
    return nn.Conv2d(CHANNELS, CHANNELS, 3, **{"padding": 1, "bias": rng.random() < 0.5, **how})


BLOCKS: dict[str, Callable[[random.Random], nn.Module]] = {
    "conv": _conv,
    "conv, norm, relu": lambda rng: nn.Sequential(_conv(rng), nn.BatchNorm2d(CHANNELS), nn.ReLU()),
    "point": lambda rng: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), nn.SiLU()),
    "transposed": lambda rng: nn.ConvTranspose2d(CHANNELS, CHANNELS, 4, 2, 1, groups=rng.choice((1, 2))),
    "group norm": lambda rng: nn.GroupNorm(rng.choice((1, 2, CHANNELS)), CHANNELS),
    "last norm": lambda rng: LastNorm(),
    "max pool": lambda rng: nn.MaxPool2d(3, 2, 1),
    "small max pool": lambda rng: nn.MaxPool2d(2, 2, ceil_mode=True),
    "mean pool": lambda rng: nn.AvgPool2d(2, 2, ceil_mode=True),
    "adaptive pool": lambda rng: nn.AdaptiveAvgPool2d(rng.choice((3, (2, 4)))),
    "resize": lambda rng: nn.Upsample(scale_factor=2, mode=rng.choice(("nearest", "bilinear"))),
    "attend": lambda rng: Attend(),
    "squeeze": lambda rng: Squeeze(),
    "shuffle": lambda rng: Fn(_shuffle),
    "fold": lambda rng: Fn(_fold),
    "pad": lambda rng: nn.Sequential(nn.ReplicationPad2d(1), _conv(rng)),
    "rows": lambda rng: Fn(lambda x: x.transpose(2, 3).contiguous().relu()),
    "cumulate": lambda rng: Fn(lambda x: x + x.flatten(2).cumsum(2).view_as(x) / 16),
}


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        names = ["conv", *(rng.choice(tuple(BLOCKS)) for _ in range(rng.randint(2, 4)))]
        blocks = [BLOCKS[name](rng) for name in names]
        if rng.random() < 0.4:
            blocks[1] = Around(blocks[1], concatenate=rng.random() < 0.5)
        self.what = ", ".join(names)
        self.stem = nn.Conv2d(3, CHANNELS, rng.choice((1, 3)), padding=1)
        self.blocks = nn.Sequential(*blocks)
        self.flat = rng.random() < 0.5  # the positions of a 2 x 2 grid are features, or one mean of all is
        self.head = nn.Linear(CHANNELS * (4 if self.flat else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        return self.head(F.adaptive_avg_pool2d(x, 2).flatten(1) if self.flat else x.mean((2, 3)))
