"""Models of images, and what they learn from: transformers' and diffusers' own, and plain PyTorch's convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 2


def seeded(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + step)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes, **none))


def detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    backbone = ResNetConfig(out_features=["stage2"], **sizes)
    encoder = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32}
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "num_queries": 6}
    none = {"dropout": 0.0, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return DetrForObjectDetection(
        DetrConfig(backbone_config=backbone, d_model=16, num_labels=5, **encoder, **decoder, **none)
    )


def images(rank: int, step: int) -> dict[str, Tensor]:
    generator = seeded(rank, step)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(5, (BATCH,), generator=generator)}


def masks(rank: int, step: int) -> dict[str, Tensor]:
    generator = seeded(rank, step)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(5, (BATCH, 16, 16), generator=generator)}


def boxes(rank: int, step: int) -> dict[str, Tensor]:
    """Two objects an image: a class, and (centre, size) in units of the image's."""
    generator = seeded(rank, step)
    pixels, places = torch.randn(BATCH, 3, 32, 32, generator=generator), torch.rand(BATCH, 2, 4, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(5, (BATCH, 2), generator=generator), "boxes": places}


def noise(rank: int, step: int) -> dict[str, Tensor]:
    """Images and noise; a time for each, in the units of 20 steps."""
    generator = seeded(rank, step)
    drawn = {"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator)}
    drawn["noise"] = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {**drawn, "time": torch.randint(20, (BATCH,), generator=generator)}


def latents(rank: int, step: int) -> dict[str, Tensor]:
    generator = seeded(rank, step)
    pixels = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "noise": torch.randn(BATCH, 8, 1, 1, generator=generator)}


class Residual(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width // stride, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.skip = nn.Conv2d(width // stride, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ConvNet(nn.Module):
    """The shape of a ResNet: a stem, strided residual blocks with batch norm, pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(Residual(8, 1), Residual(16, 2), Residual(32, 2))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UNet(nn.Module):
    """Two levels down by max pooling, two up by transposed convolutions, each beside what came down."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.twice(n, m) for n, m in ((3, 8), (8, 16), (16, 32)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, 2) for n in (16, 8))
        self.beside = nn.ModuleList(self.twice(2 * n, n) for n in (16, 8))
        self.head = nn.Conv2d(8, 5, 1)

    @staticmethod
    def twice(n: int, m: int) -> nn.Module:
        first = (nn.Conv2d(n, m, 3, padding=1, bias=False), nn.BatchNorm2d(m), nn.ReLU())
        return nn.Sequential(*first, nn.Conv2d(m, m, 3, padding=1, bias=False), nn.BatchNorm2d(m), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for k, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if k else x)
            skips.append(x)
        for up, block, skip in zip(self.up, self.beside, reversed(skips[:-1]), strict=True):
            x = block(torch.cat((skip, up(x)), 1))
        return self.head(x)


class Timed(nn.Module):
    """A diffusion model's residual block: group norm, SiLU, and the time added in between."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, n), nn.Conv2d(n, m, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, m), nn.Conv2d(m, m, 3, padding=1)
        self.time, self.skip = nn.Linear(16, m), nn.Conv2d(n, m, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.skip(x)


class Diffusion(nn.Module):
    """A U-Net that tells noise from an image at a time: strided convolutions down, attention, resizing up."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.time = nn.Conv2d(3, 8, 3, padding=1), nn.Sequential(nn.Linear(8, 16), nn.SiLU())
        self.before, self.down = Timed(8, 8), nn.Conv2d(8, 16, 3, 2, 1)
        self.inside, self.norm = Timed(16, 16), nn.GroupNorm(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.after = nn.Conv2d(16, 8, 3, padding=1), Timed(16, 8)
        self.head = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        angle = time[:, None] / 20.0 * torch.arange(1, 5)
        time = self.time(torch.cat((angle.sin(), angle.cos()), 1))
        skip = self.before(self.stem(x), time)
        x = self.inside(self.down(skip), time)
        seen = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attention(seen, seen, seen, need_weights=False)[0].transpose(1, 2).view_as(x)
        x = self.up(F.interpolate(x, scale_factor=2.0))
        return self.head(F.silu(self.after(torch.cat((x, skip), 1), time)))


class Gan(nn.Module):
    """DCGAN: transposed convolutions make images, strided ones judge them."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 1, 4), nn.Flatten(0),
        )  # fmt: skip


def classify(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def detect(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """DETR's loss with the first queries matched in order (its own matcher needs scipy); the others find nothing."""
    predicted, labels = model(batch["pixel_values"]), batch["labels"]
    num_free = predicted.logits.shape[1] - labels.shape[1]
    wanted = F.pad(labels, (0, num_free), value=5)
    placed = F.l1_loss(predicted.pred_boxes[:, : labels.shape[1]], batch["boxes"])
    return F.cross_entropy(predicted.logits.flatten(0, 1), wanted.flatten()) + placed


def denoise(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    signal = 1 - batch["time"][:, None, None, None] / 20.0
    noisy = signal.sqrt() * batch["pixel_values"] + (1 - signal).sqrt() * batch["noise"]
    predicted = model(noisy, batch["time"])
    return F.mse_loss(getattr(predicted, "sample", predicted), batch["noise"])
