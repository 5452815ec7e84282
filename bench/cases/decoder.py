"""Decoders of today's shape for the benchmark: RMS norms, rotary positions, grouped queries, SwiGLU; plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes. ``qk_norm`` and ``tied`` as Qwen3 has them, neither as Llama has them."""

    vocab: int
    seq: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    qk_norm: bool = False
    tied: bool = False


class DecoderBlock(nn.Module):
    """x + attention(norm(x)), then x + swiglu(norm(x)). [batch, seq, width] -> the same."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.heads, config.kv_heads, config.width // config.heads
        self.norm_attn, self.norm_mlp = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.q = nn.Linear(config.width, config.heads * self.dim, bias=False)
        self.k = nn.Linear(config.width, config.kv_heads * self.dim, bias=False)
        self.v = nn.Linear(config.width, config.kv_heads * self.dim, bias=False)
        self.out = nn.Linear(config.heads * self.dim, config.width, bias=False)
        self.norm_q = nn.RMSNorm(self.dim) if config.qk_norm else nn.Identity()
        self.norm_k = nn.RMSNorm(self.dim) if config.qk_norm else nn.Identity()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape
        normed = self.norm_attn(x)
        q = self.norm_q(self.q(normed).view(batch, seq, self.heads, self.dim))
        k = self.norm_k(self.k(normed).view(batch, seq, self.kv_heads, self.dim))
        v = self.v(normed).view(batch, seq, self.kv_heads, self.dim)
        q, k = (rotate(t.transpose(1, 2), cos, sin) for t in (q, k))
        groups = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v.transpose(1, 2)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        normed = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864). ``x`` [batch, heads, seq, dim]; cos and sin [seq, dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Decoder(nn.Module):
    """Embedding, blocks, a head that is the embedding (tied) or a matrix of its own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        dim = config.width // config.heads
        angle = torch.outer(torch.arange(config.seq), 1e4 ** (-torch.arange(0, dim, 2) / dim))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:  # each residual branch starts small, so that depth does not scale the sum
            for last in (block.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens`` [batch, seq] -> logits [batch, seq, vocab]; with ``targets`` [batch, seq] the mean loss, 0-d."""
        x, seq = self.tokens(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:seq], self.sin[:seq])
        return self.head_loss(x, targets)

    def head_loss(self, x: Tensor, targets: Tensor | None) -> Tensor:
        """[batch, seq, width] -> logits or loss. A method of its own, so that it is compiled apart from the blocks."""
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class NormBlock(nn.Module):
    """Three layer norms around a running mean over positions: six small tensors, no matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.norms
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        mixed = second(first(x).cumsum(dim=1) / count)
        return x + third(F.gelu(mixed, approximate="tanh"))


class NormStack(nn.Module):
    """147 parameter tensors, 146 of them vectors: as in deepspeed#7886, where a step costs what its tensors' number
    does."""

    def __init__(self, vocab: int, width: int, layers: int = 24) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(NormBlock(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens`` [batch, seq] -> logits [batch, seq, vocab]; with ``targets`` [batch, seq] the mean loss, 0-d."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head_loss(x, targets)

    def head_loss(self, x: Tensor, targets: Tensor | None) -> Tensor:
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
