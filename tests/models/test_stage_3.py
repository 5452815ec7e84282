"""Stage 3 has the bits of stage 2, for caps of gathered weights from the smallest one to the whole model.

By default a few models on 2 ranks; with ZC_TESTS=full all of them, 20 updates on 1 to 4 ranks through every backend.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks
from oracle import weights
from tiers import FULL
from torch.optim import Adam
from zoo import ZOO

import zc

NUM_UPDATES = 20 if FULL else 3
SAMPLE = (("Llama", 2, "aot_eager"), ("diffusion U-Net", 2, "eager"), ("DCGAN", 2, "aot_eager"))
CELLS = [(n, w, b) for n in ZOO for w in (1, 2, 3, 4) for b in ("eager", "aot_eager", "inductor")] if FULL else SAMPLE


def train(rank: int, name: str, stage: int, backend: str, cap: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    entry = ZOO[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = entry.make().train()
    parts: list[Any] = [model.get_submodule(part) for part in entry.parts]
    optimizers = [Adam(part.parameters(), lr=1e-3) for part in parts]
    for part, optimizer in zip(parts, optimizers, strict=True):
        options = {} if stage == 2 else {"weight_nbytes": smallest(part, optimizer, backend, cap)}
        zc.compile(part, optimizer, stage=stage, backend=backend, bucket_nbytes=2**15, **options)
    values = []
    for step in range(NUM_UPDATES):
        values.append(entry.update(parts, optimizers, entry.batch(rank, step)))
    for part in parts:
        zc.close(part)
    return values, weights(model)


def smallest(part: Any, optimizer: Any, backend: str, cap: str) -> int | None:
    """Bytes: what the largest bucket takes, None, or as much as all buckets together."""
    if cap == "default":
        return None
    nbytes = [4 * sum(p.numel() for p in part.parameters())]
    largest = max(p.numel() * p.element_size() for p in part.parameters())
    return 2 * nbytes[0] if cap == "all" else max(2**16, 4 * largest)


def compare(rank: int, world_size: int, name: str, backend: str) -> list[str]:
    """Job: what differs from stage 2."""
    losses, wanted = train(rank, name, 2, backend, "default")
    different = []
    for cap in ("small", "default", "all") if FULL else ("small",):
        got, values = train(rank, name, 3, backend, cap)
        if got != losses:
            different.append(f"{cap}: losses {got} for {losses}")
        different += [f"{cap}: {key}" for key, value in wanted.items() if not values[key].equal(value)]
    return different


@pytest.mark.parametrize(("name", "world_size", "backend"), CELLS)
def test_the_bits_of_stage_2(name: str, world_size: int, backend: str) -> None:
    assert run_ranks(compare, world_size, name, backend, timeout=600.0) == [[]] * world_size
