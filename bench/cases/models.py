"""The models that the demo and the comparisons train, the GPT first: plain PyTorch, nothing of zc in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases.decoder import Decoder, DecoderConfig, NormStack


@dataclass(frozen=True)
class GPTConfig:
    """Sizes. The defaults give 10.8 M parameters over a vocabulary of bytes."""

    vocab: int = 256
    seq: int = 128
    layers: int = 6
    width: int = 384
    heads: int = 6
    mlp_ratio: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"GPTConfig.{name} must be at least 1, got {value}")
        if self.width % self.heads:
            raise ValueError(f"GPTConfig.width {self.width} must be a multiple of heads {self.heads}")


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x)). [batch, seq, width] -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attn = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, config.mlp_ratio * width)
        self.down = nn.Linear(config.mlp_ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm_attn(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """Token and position embeddings, pre-norm blocks, a head tied to the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for block in self.blocks:  # GPT-2: each residual branch starts small, so that depth does not scale the sum
            for last in (block.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens`` [batch, seq] -> logits [batch, seq, vocab]; with ``targets`` [batch, seq] the mean loss, 0-d."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head_loss(x, targets)

    def head_loss(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """[batch, seq, width] -> logits or loss. A method of its own, so that it is compiled apart from the blocks."""
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TransformersLlama(nn.Module):
    """transformers' Llama, its code unchanged, under the calls of the models here."""

    def __init__(self, config: GPTConfig) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab,
                hidden_size=config.width,
                intermediate_size=config.mlp_ratio * config.width,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                max_position_embeddings=config.seq,
            )
        )

    @property
    def blocks(self) -> nn.ModuleList:
        return self.llama.model.layers

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens`` [batch, seq] -> logits [batch, seq, vocab]; with ``targets`` [batch, seq] the mean loss, 0-d."""
        return self.head_loss(self.llama.model(input_ids=tokens, use_cache=False).last_hidden_state, targets)

    def head_loss(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """[batch, seq, width] -> logits or loss. A method of its own, so that it is compiled apart from the blocks."""
        logits: Tensor = self.llama.lm_head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


DECODERS = {
    # the report's (deepspeed#7985): Qwen3's shape, 64 M parameters
    "qwen3-64m": {"layers": 15, "width": 512, "heads": 8, "kv_heads": 4, "hidden": 1536, "qk_norm": True, "tied": True},
    # the demo's: the width of the small models of TinyStories (arXiv:2305.07759), the blocks of Qwen3
    "qwen3-6m": {"layers": 6, "width": 256, "heads": 4, "kv_heads": 2, "hidden": 768, "qk_norm": True, "tied": True},
    "llama-0.3b": {"layers": 16, "width": 1024, "heads": 16, "kv_heads": 8, "hidden": 4096},
    "llama-1.3b": {"layers": 24, "width": 2048, "heads": 16, "kv_heads": 8, "hidden": 5632},
    "llama-3b": {"layers": 28, "width": 3072, "heads": 24, "kv_heads": 8, "hidden": 8192},
}
MODELS = ("gpt", *DECODERS, "norms-147", "llama-transformers")


def make_model(name: str, sizes: GPTConfig, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """The model ``name`` of MODELS, its weights set by ``seed`` alone. Of ``sizes``, a decoder takes vocab and seq, the
    stack of norms vocab and width; the GPT and the Llama of transformers take all."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "gpt":
            return GPT(sizes).to(device)
        if name == "norms-147":
            return NormStack(sizes.vocab, sizes.width).to(device)
        if name == "llama-transformers":
            return TransformersLlama(sizes).to(device)
        if name not in DECODERS:
            raise ValueError(f"no model is named {name!r}; there are {', '.join(MODELS)}")
        return Decoder(DecoderConfig(sizes.vocab, sizes.seq, **DECODERS[name])).to(device)  # type: ignore[arg-type]


def make_gpt(config: GPTConfig, seed: int, device: torch.device | str = "cpu") -> GPT:
    """A GPT whose weights are set by ``seed`` alone, the same on every rank and device."""
    made = make_model("gpt", config, seed, device)
    assert isinstance(made, GPT)
    return made


def num_parameters(model: nn.Module) -> int:
    """Elements over all parameters, a shared one counted once."""
    return sum(p.numel() for p in model.parameters())


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two optimizer groups: matrices decay, norms and biases do not."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
