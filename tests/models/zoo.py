"""Real models, tiny and random: transformers' own modelling code with its own loss, and plain PyTorch's modules.

An `Entry` makes a model and a batch for (rank, step); ``loss(model, batch)`` is what the model's authors compute.
Dropout is off: DDP and a compiled run draw other random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

VOCAB, SEQ, BATCH = 96, 12, 2


def seeded(rank: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * rank + step)


def tokens(rank: int, step: int, length: int = SEQ) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, length), generator=seeded(rank, step))


def causal(rank: int, step: int) -> dict[str, Tensor]:
    ids = tokens(rank, step)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def own_loss(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """What transformers computes where it is given labels."""
    loss: Tensor = model(**batch).loss
    return loss


@dataclass(frozen=True)
class Entry:
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Any] = causal
    loss: Callable[[Callable[..., Any], Any], Tensor] = own_loss
    why_eager: str | None = None  # Dynamo's words, where it compiles none of the model
    needs: str | None = None  # a package that the tests don't install: without it the model is skipped
    parts: tuple[str, ...] = ("",)  # modules that are models of their own, each with its optimizer; "": the whole

    def update(self, models: Sequence[Callable[..., Any]], optimizers: Sequence[Optimizer], batch: Any) -> float:
        """One turn of the loop; the loss."""
        loss = self.loss(models[0], batch)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        return loss.item()


class Adversaries(Entry):
    """A GAN's loop: the discriminator learns from real images, then from made ones; then the generator from it."""

    def update(self, models: Sequence[Callable[..., Any]], optimizers: Sequence[Optimizer], batch: Any) -> float:
        (make, judge), (made_by, judged_by) = models, optimizers
        judged_by.zero_grad()
        F.softplus(-judge(batch["pixel_values"])).mean().backward()
        made = make(batch["noise"])
        F.softplus(judge(made.detach())).mean().backward()
        judged_by.step()
        made_by.zero_grad()
        loss = F.softplus(-judge(made)).mean()
        loss.backward()
        made_by.step()
        return loss.item()


# --- transformers ---


def _decoder(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 32}
    return {**sizes, **heads, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, **more}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False, **none)
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder()))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_decoder(head_dim=8, tie_word_embeddings=True)))


def gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**_decoder(head_dim=8)))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**_decoder(**experts)))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(vocab_size=VOCAB, **sizes, **none))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = T5Config(vocab_size=VOCAB, decoder_start_token_id=0, use_cache=False, **sizes)
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **sizes, **none))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(num_labels=5, **sizes))


def regnet() -> nn.Module:
    from transformers import RegNetConfig, RegNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4, "layer_type": "y"}
    return RegNetForImageClassification(RegNetConfig(num_labels=5, **sizes))


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [2, 2], "patch_size": 2, "drop_path_rate": 0.0}
    return ConvNextForImageClassification(ConvNextConfig(num_labels=5, **sizes))


def segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32]}
    patches = {"patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    none = {"hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    return SegformerForSemanticSegmentation(
        SegformerConfig(num_labels=5, decoder_hidden_size=16, **sizes, **patches, **none)
    )


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


def diffusers_unet() -> nn.Module:
    from diffusers import UNet2DModel

    sizes = {"layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4, "attention_head_dim": 8}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    return UNet2DModel(sample_size=16, down_block_types=down, up_block_types=up, **sizes)


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    encoder = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64, "max_source_positions": 16}
    decoder = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "max_target_positions": 32}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=8, d_model=32, dropout=0.0, use_cache=False, **encoder, **decoder, **special
    )
    return WhisperForConditionalGeneration(config)


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
    pixels, found = torch.randn(BATCH, 3, 32, 32, generator=generator), torch.rand(BATCH, 2, 4, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(5, (BATCH, 2), generator=generator), "boxes": found}


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


def translation(rank: int, step: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(rank, step), "labels": tokens(rank, step + 500, 8)}


def speech(rank: int, step: int) -> dict[str, Tensor]:
    features = torch.randn(BATCH, 8, 32, generator=seeded(rank, step))
    return {"input_features": features, "labels": tokens(rank, step, 8)}


# --- plain PyTorch ---


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


class PooledConvNet(nn.Module):
    """A ResNet's real stem, as torchvision has it: a strided convolution, batch norm, max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.pool, self.blocks = nn.MaxPool2d(3, 2, 1), nn.Sequential(Residual(8, 1), Residual(16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.norm(self.conv(x)))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


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


class Translator(nn.Module):
    """torch.nn.Transformer with embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32, padding_idx=0)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True))


class Recurrent(nn.Module):
    """Two layers of nn.LSTM between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCAB, 16), nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def classify(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def detect(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """DETR's loss with the first queries matched in order (its own matcher needs scipy); the others find nothing."""
    found, labels = model(batch["pixel_values"]), batch["labels"]
    num_free = found.logits.shape[1] - labels.shape[1]
    wanted = F.pad(labels, (0, num_free), value=5)
    placed = F.l1_loss(found.pred_boxes[:, : labels.shape[1]], batch["boxes"])
    return F.cross_entropy(found.logits.flatten(0, 1), wanted.flatten()) + placed


def denoise(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    kept = 1 - batch["time"][:, None, None, None] / 20.0
    noisy = kept.sqrt() * batch["pixel_values"] + (1 - kept).sqrt() * batch["noise"]
    found = model(noisy, batch["time"])
    return F.mse_loss(getattr(found, "sample", found), batch["noise"])


def translate(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    target = batch["labels"]
    return F.cross_entropy(model(batch["input_ids"], target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


def next_token(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


ZOO: dict[str, Entry] = {
    "GPT-2": Entry(gpt2),
    "Llama": Entry(llama),
    "Qwen3": Entry(qwen3),
    "Gemma": Entry(gemma),
    "Mixtral": Entry(mixtral),
    "BERT": Entry(bert),
    "T5": Entry(t5, translation),
    "ViT": Entry(vit, images),
    "Whisper": Entry(whisper, speech),
    "ResNet": Entry(resnet, images),
    "RegNet": Entry(regnet, images),
    "ConvNeXt": Entry(convnext, images),
    "SegFormer": Entry(segformer, masks),
    "DETR": Entry(detr, boxes, detect),
    "ResNet-like": Entry(ConvNet, images, classify),
    "ResNet-like, pooled": Entry(PooledConvNet, images, classify),
    "U-Net": Entry(UNet, masks, classify),
    "diffusion U-Net": Entry(Diffusion, noise, denoise),
    "diffusers' UNet2DModel": Entry(diffusers_unet, noise, denoise, needs="diffusers"),
    "DCGAN": Adversaries(Gan, latents, parts=("generator", "discriminator")),
    "nn.Transformer": Entry(Translator, translation, translate),
    "nn.LSTM": Entry(Recurrent, causal, next_token, why_eager="Dynamo does not support RNN, GRU, or LSTM"),
}
