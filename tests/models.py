"""Tiny models, one for each thing that training scripts do to a gradient path, with their data and their loss.

A `Case` makes a model, a batch for (rank, step, microbatch), and the scalar loss of a model on a batch. Everything is
seeded by its arguments alone, so each rank, the DDP run and the float64 oracle see the same numbers without sending
any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Batch = Any
VOCAB, SEQ = 64, 16


def seeded(*key: int) -> torch.Generator:
    """A generator that depends on ``key`` alone."""
    generator = torch.Generator()
    generator.manual_seed(sum((k + 1) * 7919**i for i, k in enumerate(key)) % 2**63)
    return generator


# --- modules ---


class Stack(nn.Sequential):
    """A Sequential whose forward is not in torch.nn: Dynamo skips torch's own files, and with them plain
    Sequentials."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # no bias: a key's bias has a gradient of exactly zero, and Adam would turn its rounding into whole steps
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """``tied`` shares the head with the embedding, ``use_checkpoint`` recomputes each block in the backward."""

    def __init__(
        self, dim: int = 32, layers: int = 2, tied: bool = True, use_checkpoint: bool = False, reentrant: bool = False
    ) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed, self.position = nn.Embedding(VOCAB, dim), nn.Embedding(SEQ, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        self.use_checkpoint = use_checkpoint
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant) if self.use_checkpoint else block(x)
        return self.head(self.norm(x))


class Heads(nn.Module):
    """A trunk and a head for each task; ``forward(x, tasks)`` uses only the heads of ``tasks`` (deepspeed#7579's
    model)."""

    def __init__(self, dim: int = 16, num_tasks: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.heads = nn.ModuleList(nn.Linear(dim, 4) for _ in range(num_tasks))

    def forward(self, x: Tensor, tasks: tuple[int, ...]) -> list[Tensor]:
        shared = self.trunk(x)
        return [self.heads[task](shared) for task in tasks]


class Broken(nn.Module):
    """A graph break in the middle: two compiled graphs, and ``shared`` is used by both of them."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(F.gelu(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(F.gelu(self.shared(x)))


class PartlyEager(nn.Module):
    """A layer under torch.compiler.disable between two that compile."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first, self.eager, self.last = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        return self.eager(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.outside(F.gelu(self.first(x)))))


class InsideAndOutside(nn.Module):
    """``shared`` is used in a compiled graph and under torch.compiler.disable: two ways in for one gradient."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(dim, dim), nn.Linear(dim, dim)

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        return self.shared(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.outside(F.gelu(self.shared(x)))))


class ManyGraphs(nn.Module):
    """Twelve blocks of one class with a graph break after each: one compiled graph could serve them all."""

    def __init__(self, dim: int = 16, num: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stack(nn.Linear(dim, dim), nn.Tanh()) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()  # in a loop: Dynamo skips this frame and compiles the blocks one by one
        return x


class WithUnused(nn.Module):
    """``unused`` is trainable and never used; ``empty`` has no elements."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.empty = nn.Parameter(torch.zeros(0, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.first(x))) + self.empty.sum()


def mlp(dim: int = 16, depth: int = 2) -> Stack:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(dim, dim), nn.GELU()]
    return Stack(*layers[:-1])


def frozen() -> Stack:
    model = mlp(depth=3)
    model[2].requires_grad_(False)
    return model


class CastingNorm(nn.LayerNorm):
    """A LayerNorm kept in fp32 inside a narrower model."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def mixed_dtypes() -> Stack:
    model = Stack(nn.Linear(16, 32), CastingNorm(32), nn.GELU(), nn.Linear(32, 16)).bfloat16()
    model[1].float()
    return model


def batch_norm() -> Stack:
    # no bias before the norm: its gradient is exactly zero, and Adam would turn its rounding into whole steps
    return Stack(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))


def probe() -> Stack:
    """The model of deepspeed#7985's probe, in bf16."""
    return Stack(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()


# --- data and losses ---


def vectors(dim: int = 16, num: int = 4) -> Callable[[int, int, int], Batch]:
    def make(rank: int, step: int, microbatch: int) -> Batch:
        generator = seeded(rank, step, microbatch)
        return torch.randn(num, dim, generator=generator), torch.randn(num, dim, generator=generator)

    return make


def tokens(num: int = 2) -> Callable[[int, int, int], Batch]:
    def make(rank: int, step: int, microbatch: int) -> Batch:
        drawn = torch.randint(0, VOCAB, (num, SEQ + 1), generator=seeded(rank, step, microbatch))
        return drawn[:, :-1], drawn[:, 1:]

    return make


def _like(x: Tensor, model: Callable[..., Any]) -> Tensor:
    # the oracle's model is float64, and the bf16 models take bf16
    params = getattr(model, "parameters", None)
    dtype = next(params()).dtype if params is not None else x.dtype
    return x.to(dtype)


def mean_square(model: Callable[..., Any], batch: Batch) -> Tensor:
    x, y = (_like(part, model) for part in batch)
    out = model(x)
    return F.mse_loss(
        out.to(torch.promote_types(out.dtype, torch.float32)), y.to(torch.promote_types(y.dtype, torch.float32))
    )


def cross_entropy(model: Callable[..., Any], batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def all_tasks(model: Callable[..., Any], batch: Batch) -> Tensor:
    x, y = (_like(part, model) for part in batch)
    return torch.stack([F.mse_loss(out, y[:, :4]) for out in model(x, (0, 1, 2))]).sum()


@dataclass(frozen=True)
class Case:
    """``make()`` uses the global seed of the caller; ``loss(model, batch)`` is a mean over the batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[Callable[..., Any], Batch], Tensor]
    unused: tuple[str, ...] = ()  # trainable parameters that get no gradient

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()


CASES: dict[str, Case] = {
    "mlp": Case(mlp, vectors(), mean_square),
    "gpt_tied": Case(lambda: GPT(tied=True), tokens(), cross_entropy),
    "gpt_untied": Case(lambda: GPT(tied=False), tokens(), cross_entropy),
    "gpt_checkpointed": Case(lambda: GPT(layers=1, use_checkpoint=True), tokens(), cross_entropy),
    "gpt_reentrant": Case(lambda: GPT(layers=1, use_checkpoint=True, reentrant=True), tokens(), cross_entropy),
    "unused": Case(WithUnused, vectors(), mean_square, ("unused.weight", "unused.bias")),
    "heads": Case(Heads, vectors(), all_tasks),
    "graph_break": Case(Broken, vectors(), mean_square),
    "partly_eager": Case(PartlyEager, vectors(), mean_square),
    "inside_and_outside": Case(InsideAndOutside, vectors(), mean_square),
    "many_graphs": Case(ManyGraphs, vectors(), mean_square),
    "frozen": Case(frozen, vectors(), mean_square),
    "mixed_dtypes": Case(mixed_dtypes, vectors(), mean_square),
    "batch_norm": Case(batch_norm, vectors(num=8), mean_square),
    "probe": Case(probe, vectors(64), mean_square),
}

# of this file: other test files add cases of their own when they are imported
NAMES = tuple(CASES)
