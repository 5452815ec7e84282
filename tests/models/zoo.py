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
import vision
from torch import Tensor, nn
from torch.optim import Optimizer
from vision import BATCH, seeded

VOCAB, SEQ = 96, 12


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
        fakes = make(batch["noise"])
        F.softplus(judge(fakes.detach())).mean().backward()
        judged_by.step()
        made_by.zero_grad()
        loss = F.softplus(-judge(fakes)).mean()
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


def translation(rank: int, step: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(rank, step), "labels": tokens(rank, step + 500, 8)}


# --- plain PyTorch ---


class Recurrent(nn.Module):
    """Two layers of nn.LSTM between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCAB, 16), nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(ids))[0])


def next_token(model: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


ZOO: dict[str, Entry] = {
    "GPT-2": Entry(gpt2),
    "Llama": Entry(llama),
    "Mixtral": Entry(mixtral),
    "BERT": Entry(bert),
    "T5": Entry(t5, translation),
    "ViT": Entry(vision.vit, vision.images),
    "DETR": Entry(vision.detr, vision.boxes, vision.detect),
    "ResNet-like": Entry(vision.ConvNet, vision.images, vision.classify),
    "U-Net": Entry(vision.UNet, vision.masks, vision.classify),
    "diffusion U-Net": Entry(vision.Diffusion, vision.noise, vision.denoise),
    "DCGAN": Adversaries(vision.Gan, vision.latents, parts=("generator", "discriminator")),
    "nn.LSTM": Entry(Recurrent, causal, next_token, why_eager="Dynamo does not support RNN, GRU, or LSTM"),
}
