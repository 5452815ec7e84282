"""zc against DistributedDataParallel: fp32, AdamW, 20 updates, every parameter within 2e-5 relative.

Why 2e-5: fp32 gradients of these models agree to some 1e-7 between two orders of summation; AdamW divides by the root
of the second moment, which turns that into a relative error of an update, and 20 updates add up. Elements whose
gradient is near zero are amplified most. DDP against itself with another bucket size stays below 1e-6 here.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from models import NAMES
from tiers import FULL
from training_runs import Run, adamw, against_ddp, sgd

from zc.ranks.comm import Group

TOLERANCE = 2e-5
# microbatches, and whether they are declared with zc.no_sync
LOOPS = {"one": (1, True), "declared": (3, True), "undeclared": (3, False)}

SMOKE = ((2, "eager", 1, "declared"), (2, "aot_eager", 2, "one"), (2, "inductor", 2, "declared"))


def combinations() -> list[tuple[int, str, int, str]]:
    """World size, backend, stage, loop. By default, each loop with each backend or stage; ZC_TESTS=full has all."""
    loops = [(2, "one"), (2, "declared"), (2, "undeclared"), (4, "one"), (4, "declared")]
    chosen = [(w, b, s, loop) for b in ("eager", "aot_eager", "inductor") for s in (1, 2) for w, loop in loops]
    if FULL:
        return chosen
    four = [(4, "eager", 1, "declared"), (4, "aot_eager", 2, "declared")]
    two = [(2, "eager", 2, "undeclared"), (2, "aot_eager", 1, "undeclared")]
    return [*SMOKE, *four, *two]


CASES = [pytest.param(*c, marks=pytest.mark.check if c in SMOKE else ()) for c in combinations()]


@pytest.mark.parametrize(("world_size", "backend", "stage", "loop"), CASES)
def test_the_same_weights_as_ddp(world_size: int, backend: str, stage: int, loop: str) -> None:
    """The promise of the first line of the README. Accumulation: each microbatch enters exactly once, declared or not
    (deepspeed#6550, deepspeed#7718, deepspeed#7981, pytorch#73784, pytorch#187732)."""
    microbatches, declared = LOOPS[loop]
    run = Run("gpt_tied", stage=stage, backend=backend, microbatches=microbatches, declared=declared)
    error, name = against_ddp(world_size, run)
    assert error < TOLERANCE, name


MODELS = [name for name in NAMES if name not in ("gpt_tied", "probe", "mixed_dtypes", "gpt_untied")]


# the other combinations, in float64, are in test_gradients.py
@pytest.mark.parametrize("case", MODELS)
def test_every_kind_of_model(case: str) -> None:
    """Graph breaks, eager parts, unused and frozen parameters, heads, checkpointing, BatchNorm: none may change a
    number (the result does not depend on how many hooks fire: deepspeed#988, deepspeed#627, pytorch#81296,
    transformers#18330)."""
    error, name = against_ddp(2, Run(case, stage=2, backend="aot_eager", microbatches=2, updates=5))
    assert error < TOLERANCE, name


@pytest.mark.parametrize("case", ["graph_break", "partly_eager", "unused", "batch_norm"])
def test_every_kind_of_model_under_inductor(case: str) -> None:
    """The same schedules with Inductor's segments: its fusions must not reach over a gradient's write."""
    error, name = against_ddp(2, Run(case, backend="inductor", microbatches=2, updates=5))
    assert error < TOLERANCE, name


# four ranks with reduce="native" are in test_bitwise.py
@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (2, 2), (4, 1), (4, 2)] if FULL else [(2, 2)])
def test_native_reduction(world_size: int, stage: int) -> None:
    """``reduce="native"`` sums in the backend's own order: other rounding, the same mean."""
    run = Run("gpt_tied", stage=stage, backend="aot_eager", microbatches=2, updates=10, options={"reduce": "native"})
    error, name = against_ddp(world_size, run)
    assert error < TOLERANCE, name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_clipping_and_momentum(backend: str) -> None:
    """The norm is that of the mean gradient over all elements once, so clipped runs agree as well; at
    0.1 every update is clipped."""
    error, name = against_ddp(2, Run("gpt_tied", backend=backend, updates=10, max_norm=0.1, make_optimizer=sgd))
    assert error < TOLERANCE, name


def _two_devices(rank: int, world_size: int) -> list[float]:
    group = Group(None)
    group.open_data(torch.device("cpu"))
    group.data = "takes a GPU's tensors only, as NCCL does"  # type: ignore[assignment]
    table = torch.full((3,), float(rank + 1))
    group.broadcast_(table)
    return table.tolist()


def test_a_buffer_in_host_memory_needs_no_group_of_the_gpu() -> None:
    """A table of positions left on the CPU beside a model on a GPU: rank 0's on every rank, as in DDP."""
    assert run_ranks(_two_devices, 2) == [[1.0, 1.0, 1.0]] * 2


# stage 1's schedules with these options are compared bit by bit in test_bitwise.py
@pytest.mark.parametrize("stage", [1, 2] if FULL else [2])
def test_without_overlap_and_with_one_ring_buffer(stage: int) -> None:
    """deepspeed#5606, deepspeed#7805: with one buffer every bucket waits for the one before it to be read."""
    for options in ({"overlap": False}, {"num_buffers": 1}, {"bucket_nbytes": 1}):
        run = Run("gpt_tied", stage=stage, backend="aot_eager", updates=5, make_optimizer=adamw, options=options)
        error, name = against_ddp(2, run)
        assert error < TOLERANCE, (options, name)
