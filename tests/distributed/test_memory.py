"""The bytes that a rank holds, with gradients and between steps, against DESIGN's formula, computed here from the
shapes alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from harness import run_cases
from live_memory import nbytes_since, storages
from models import mean_square, mlp, vectors
from tiers import FULL, full_cases
from training_runs import adamw

import zc

DIM, DEPTH, BUCKET = 48, 3, 20_000


def formula(world_size: int, stage: int, reduce: str, dtype: torch.dtype, num_buffers: int) -> dict[str, int]:
    """docs/design.md's table with padding: P and S by bucket, from its rules and not from zc's code.

    Weights 48 * 48 and biases 48, reverse order of registration; a bucket closes before it would pass BUCKET bytes;
    slots start at multiples of 128 bytes of the narrower of the parameter's and the wire's dtype; P is a multiple
    of W of these.
    """
    size = dtype.itemsize
    wire = 4 if stage == 1 else size
    align = 128 // min(size, wire)
    buckets: list[list[int]] = [[]]
    for numel in [DIM, DIM * DIM] * DEPTH:
        if buckets[-1] and (sum(buckets[-1]) + numel) * size > BUCKET:
            buckets.append([])
        buckets[-1].append(numel)
    padded = []
    for members in buckets:
        offset = 0
        for numel in members:
            offset = math.ceil((offset + numel) / align) * align
        padded.append(math.ceil(offset / (world_size * align)) * world_size * align)
    total, largest = sum(padded), max(padded)
    shard = total // world_size
    ring = min(num_buffers, len(buckets))
    scratch = 0 if world_size == 1 or reduce == "exact" else largest // world_size  # ranks of a host read
    return {
        "flat_param": total * size,
        "master_shard": shard * 4 if size < 4 else 0,
        "acc": 4 * (total if stage == 1 else shard),
        "flat_grad": largest * wire * ring if stage == 2 else 0,
        "scratch": scratch * wire,
    }


def _held(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> dict[str, Any]:
    before = storages()
    model = mlp(DIM, DEPTH)
    model, optimizer = zc.compile(
        model, adamw(model), stage=stage, backend="eager", bucket_nbytes=BUCKET, **{"num_buffers": 2, **options}
    )
    dtype = options.get("param_dtype") or torch.float32
    for step in range(2):
        x, y = vectors(DIM)(rank, step, 0)
        mean_square(model, (x.to(dtype), y)).backward()
        optimizer.step()
        del x, y
        alive = nbytes_since(before)
        optimizer.zero_grad()
    nbytes = {"claimed": zc.persistent_nbytes(model), "alive": alive, "between": nbytes_since(before)}
    return {**nbytes, "numel": sum(p.numel() for p in model.parameters())}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@full_cases("2")
def test_persistent_bytes_are_the_formula(world_size: int) -> None:
    """The reason to use ZeRO at all, asserted to the byte; and nothing else may stay alive beside what is claimed."""
    native, one_buffer = {"reduce": "native"}, {"num_buffers": 1}
    others: list[dict[str, Any]] = [{}, native, one_buffer] if world_size == 2 else [{}]
    options = [{"param_dtype": dtype, **other} for dtype in (None, torch.bfloat16) for other in others]
    ways = list(itertools.product((1, 2), options))
    if not FULL:  # the ring is stage 2's, and each dtype meets each stage with two ranks
        pairs = [(1, None), (2, torch.bfloat16), *([(1, torch.bfloat16), (2, None)] if world_size == 2 else [])]
        ways = [(stage, {"param_dtype": dtype}) for stage, dtype in pairs]
        if world_size == 2:
            ways += [(stage, {"param_dtype": torch.bfloat16, **native}) for stage in (1, 2)]
            ways += [(2, {"param_dtype": None, **one_buffer})]
    for (stage, option), results in run_cases(_held, world_size, ways):
        dtype = option["param_dtype"] or torch.float32
        wanted = formula(world_size, stage, option.get("reduce", "exact"), dtype, option.get("num_buffers", 2))
        moments = 0
        for seen in results:
            claimed = dict(seen["claimed"])
            state = claimed.pop("optimizer_state")
            assert claimed == wanted, option
            assert state <= 8 * wanted["flat_param"] // dtype.itemsize // world_size, (
                "two fp32 moments of S elements at most"
            )
            moments += state
            # beside it: the optimizer's step counters, a few bytes for each parameter
            assert 0 <= seen["alive"] - sum(seen["claimed"].values()) <= 1024, seen
            gone = sum(claimed[kind] for kind in ("acc", "flat_grad", "scratch"))
            assert seen["alive"] - seen["between"] == gone, "zero_grad gives the gradients' memory back, and no other"
        assert moments == 8 * results[0]["numel"], "two fp32 moments for each element, once over all ranks"


def _peak(rank: int, world_size: int, options: dict[str, Any]) -> tuple[int, int, int, int]:
    """Job: bytes of the parameters, of the largest of them, at most while a model is made and compiled, and at the end,
    by torch's allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = mlp(256, 12)
        sizes = [p.nbytes for p in model.parameters()]
        model, optimizer = zc.compile(model, adamw(model), backend="eager", bucket_nbytes=1, **options)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = list(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    del optimizer
    return sum(sizes), max(sizes), max(in_use), in_use[-1]


def test_compiling_takes_a_bucket_more_than_what_stays() -> None:
    """A model of half the memory can be compiled."""
    for options, ranks in run_cases(_peak, 2, [{}, {"param_dtype": torch.bfloat16}, {"offload": "cpu"}]):
        for params, largest, peak, final in ranks:
            assert final >= params * 0.99, "the allocator's events are there"
            # a bucket's flat_param, its masters and accumulator; 64 KiB for whatever else a compilation makes
            assert peak <= max(params, final) + 2 * largest + 2**16, options
