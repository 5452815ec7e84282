"""zc against DistributedDataParallel: fp32, AdamW, 20 updates, every parameter within 2e-5 relative.

Why 2e-5: fp32 gradients of these models agree to some 1e-7 between two orders of summation; AdamW divides by the root
of the second moment, which turns that into a relative error of an update, and 20 updates add up. Elements whose
gradient is near zero are amplified most. DDP against itself with another bucket size stays below 1e-6 here.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_cases, run_ranks
from models import NAMES
from oracle import worst
from tiers import FULL, full_only
from training_runs import Run, against_ddp, ddp_weights, sgd, zc_weights

from zc.prepare import RANKS
from zc.ranks.group import Group

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
    # test_accumulation.py has what was not declared, by both backends and in both stages
    return [*SMOKE, (4, "eager", 1, "declared")]


CASES = [pytest.param(*c, marks=pytest.mark.check if c in SMOKE else ()) for c in combinations()]


@pytest.mark.parametrize(("world_size", "backend", "stage", "loop"), CASES)
def test_the_same_weights_as_ddp(world_size: int, backend: str, stage: int, loop: str) -> None:
    """The promise of the first line of the README. Accumulation: each microbatch enters exactly once, declared or not
    (deepspeed#6550, deepspeed#7718, deepspeed#7981, pytorch#73784, pytorch#187732)."""
    microbatches, declared = LOOPS[loop]
    # Inductor compiles each segment: by default it gets those of three heads, and of attention in test_bitwise.py
    is_short = backend == "inductor" and not FULL
    case, options = ("heads", {"bucket_nbytes": 2048}) if is_short else ("gpt_tied", {})
    updates = 20 if FULL or world_size == 2 else 6
    run = Run(
        case, stage=stage, backend=backend, updates=updates, microbatches=microbatches, declared=declared,
        options=options,
    )  # fmt: skip
    error, name = against_ddp(world_size, run)
    assert error < TOLERANCE * updates / 20, name


def assert_all_as_ddp(runs: list[Run]) -> None:
    trained, wanted = (run_cases(job, 2, runs, timeout=400.0) for job in (zc_weights, ddp_weights))
    for (run, ranks), (_, (theirs, _)) in zip(trained, wanted, strict=True):
        assert all(torch.equal(ranks[1][name], value) for name, value in ranks[0].items()), f"{run.case}: ranks differ"
        error, name = worst(ranks[0], theirs)
        assert error < TOLERANCE, (run.case, name)


# "frozen" has the layers of "mlp"
MODELS = [name for name in NAMES if name not in ("gpt_tied", "probe", "mixed_dtypes", "gpt_untied", "mlp")]


# the other combinations, in float64, are in test_gradients.py
def test_every_kind_of_model() -> None:
    """Graph breaks, eager parts, unused and frozen parameters, heads, checkpointing, BatchNorm: none may change a
    number (the result does not depend on how many hooks fire: deepspeed#988, deepspeed#627, pytorch#81296,
    transformers#18330)."""
    assert_all_as_ddp([Run(case, backend="aot_eager", microbatches=2, updates=3) for case in MODELS])


@full_only  # gpt_tied above has Inductor's segments
def test_every_kind_of_model_under_inductor() -> None:
    """The same schedules with Inductor's segments: its fusions must not reach over a gradient's write."""
    assert_all_as_ddp([Run(case, backend="inductor", microbatches=2, updates=5) for case in MODELS])


# four ranks with reduce="native" are in test_bitwise.py
@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (2, 2), (4, 1), (4, 2)] if FULL else [(2, 2)])
def test_native_reduction(world_size: int, stage: int) -> None:
    """``reduce="native"`` sums in the backend's own order: other rounding, the same mean."""
    backend = "aot_eager" if FULL else "eager"  # how gradients are sent is no part of a graph
    updates = 10 if FULL else 4
    run = Run("gpt_tied", stage=stage, backend=backend, microbatches=2, updates=updates, options={"reduce": "native"})
    error, name = against_ddp(world_size, run)
    assert error < TOLERANCE * updates / 10, name


def test_clipping_and_momentum() -> None:
    """The norm is that of the mean gradient over all elements once, so clipped runs agree as well; at
    0.1 every update is clipped."""
    updates = 10 if FULL else 4
    error, name = against_ddp(2, Run("gpt_tied", updates=updates, max_norm=0.1, make_optimizer=sgd))
    assert error < TOLERANCE * updates / 10, name


def _two_devices(rank: int, world_size: int) -> list[float]:
    group = Group(None, RANKS)
    group.open_data(torch.device("cpu"))
    group.data = "takes a GPU's tensors only, as NCCL does"  # type: ignore[assignment]
    table = torch.full((3,), float(rank + 1))
    group.broadcast_(table)
    return table.tolist()


def test_a_buffer_in_host_memory_needs_no_group_of_the_gpu() -> None:
    """A table of positions left on the CPU beside a model on a GPU: rank 0's on every rank, as in DDP."""
    assert run_ranks(_two_devices, 2) == [[1.0, 1.0, 1.0]] * 2
