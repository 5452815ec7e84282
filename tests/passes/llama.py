"""A Llama-like decoder for the tests of passes: RMSNorm, attention without biases, SwiGLU, nothing tied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """[batch, seq, width] -> the same."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        y = self.norm_attn(x)
        q, k, v = (f(y).view(batch, seq, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, seq, width))
        y = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """tokens [batch, seq] -> mean loss of the next ones, 0-d. The vocabulary has the share of Llama-2-7B: 2 %."""

    def __init__(self, vocab: int = 128, width: int = 128, layers: int = 4, hidden: int = 352) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, 4, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def tokens(rank: int, step: int, microbatch: int = 0, vocab: int = 128) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + microbatch)
    return torch.randint(0, vocab, (2, 16), generator=generator)
