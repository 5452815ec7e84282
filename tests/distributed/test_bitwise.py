"""What must not change a single bit: bucket size, ring, overlap, stage at one microbatch, and a second run.

The exact reduction adds the ranks' rows in rank order, so an element's sum does not depend on which bucket it lies in
or when it travels. Four ranks, because with two every order of a sum gives the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import Block, mean_square, mlp, vectors
from tiers import FULL, full_cases, full_only
from torch import nn
from training_runs import adamw

import zc

DIM, DEPTH = 256, 6  # 1.5 MiB of parameters: 64 KiB, 1 MiB and 25 MiB give 11, 2 and 1 buckets


def layers() -> nn.Module:
    return mlp(DIM, DEPTH)


def blocks() -> nn.Module:
    """Transformer blocks between matrices of their own, as a decoder has them."""
    number = 6 if FULL else 2  # Inductor compiles each of them
    return nn.Sequential(nn.Linear(DIM, 32), *(Block(32) for _ in range(number)), nn.LayerNorm(32), nn.Linear(32, DIM))


def _train(
    rank: int,
    backend: str,
    updates: int = 2,
    microbatches: int = 2,
    make: Callable[[], nn.Module] = layers,
    **options: Any,
) -> tuple[str, int]:
    """Hash of the weights after some updates, and the number of buckets."""
    torch.manual_seed(0)
    model = make()
    batch = vectors(DIM, 8)
    model, optimizer = zc.compile(model, adamw(model), backend=backend, **options)
    for step in range(updates):
        for m in range(microbatches):
            mean_square(model, batch(rank, step, m)).backward()
        zc.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    digest = hashlib.sha256()
    for param in model.parameters():
        assert param.isfinite().all()
        digest.update(param.detach().view(torch.uint8).numpy().tobytes())
    num_buckets = zc.explain(model).sections["buckets"].count(" at 0\n")
    return digest.hexdigest(), num_buckets


def _hashes(rank: int, world_size: int, backend: str, runs: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [_train(rank, backend, **options) for options in runs]


def same(world_size: int, backend: str, runs: list[dict[str, Any]]) -> list[int]:
    """Asserts that all runs, on all ranks, end with the same weights; the number of buckets of each run."""
    results = run_ranks(_hashes, world_size, backend, runs, timeout=240)
    assert {h for ranks in results for h, _ in ranks} == {results[0][0][0]}, results
    return [n for _, n in results[0]]


@pytest.mark.parametrize(
    ("stage", "backend"),
    [(1, "eager"), (2, "aot_eager"), *(pytest.param(*c, marks=full_only) for c in ((2, "eager"), (1, "aot_eager")))],
)
@full_cases("2-aot_eager")
def test_bucket_size_overlap_and_ring(stage: int, backend: str) -> None:
    """deepspeed#6351 (the bucket size changed convergence), deepspeed#5606, deepspeed#7805 (a bucket overwritten while
    it was read), deepspeed#8061 (an overlap that read too early)."""
    runs = [
        {"bucket_nbytes": 64 * 2**10},
        {"bucket_nbytes": 2**20},
        {"bucket_nbytes": 25 * 2**20},
        {"bucket_nbytes": 64 * 2**10, "overlap": False},
        {"bucket_nbytes": 64 * 2**10, "num_buffers": 1},
        {"bucket_nbytes": 64 * 2**10},  # and the first again: two runs
    ]
    is_short = backend != "eager" and not FULL  # to compile takes ten times as long
    if is_short:  # the smallest buckets, and all in one without overlap; the eager run has the sums of four ranks
        runs = [runs[0], {**runs[2], "overlap": False}]
    num_buckets = same(2 if is_short else 4, backend, [{"stage": stage, **options} for options in runs])
    assert num_buckets[0] == 11 and 1 in num_buckets, "the sizes do differ"


def test_bucket_size_and_overlap_of_blocks_in_bf16_under_inductor() -> None:
    """Inductor rounds to bf16 where a fused kernel ends. So the cuts may not depend on the bucket's size, which is half
    a block here, one, and four; nor on overlap_gather (ZC_TESTS=full). By default one rank: where a graph is cut does
    not depend on their number."""
    sizes = [{"bucket_nbytes": nbytes} for nbytes in ((16_000, 27_000, 110_000) if FULL else (16_000, 110_000))]
    runs = [*sizes, *({**size, "overlap_gather": True} for size in sizes if FULL)]
    common = {"make": blocks, "param_dtype": torch.bfloat16, "microbatches": 1}
    num_buckets = same(2 if FULL else 1, "inductor", [{**common, **options} for options in runs])
    assert sorted(set(num_buckets), reverse=True) == num_buckets[: len(sizes)], "the sizes do differ"


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=full_only)])
def test_stages_at_one_microbatch(backend: str) -> None:
    """With one backward an update, stage 1 reduces the same gradients in the same order as stage 2."""
    same(4, backend, [{"stage": stage, "microbatches": 1} for stage in (1, 2)])


def test_native_reduction_is_not_promised_to_be_bitwise_but_repeats() -> None:
    """Two runs of one configuration are the same even where the backend chooses the order of the sum."""
    same(4, "eager", [{"reduce": "native"}, {"reduce": "native"}])
