"""The two oracles against each other: what zc is measured with has to be right first, and has to notice a fault."""

from __future__ import annotations

import torch
from harness import run_cases
from models import CASES, NAMES
from oracle import full_gradients, relative, widen, worst
from torch.nn.parallel import DistributedDataParallel

MICROBATCHES = 2
FAULTS = ("last microbatch dropped", "scaled by world size", "not reduced")


def _ddp_gradients(rank: int, world_size: int, name: str, fault: str) -> tuple[float, str]:
    """DDP's gradients in float64 against the oracle's, with DDP's own rules broken where ``fault`` says so."""
    case = CASES[name]
    model = case.model().double()
    wrapped = DistributedDataParallel(model, find_unused_parameters=bool(case.unused))
    batches = [[case.batch(r, 0, m) for m in range(MICROBATCHES)] for r in range(world_size)]
    wanted = full_gradients(case.model(), case.loss, batches)
    own = batches[rank][:-1] if fault == "last microbatch dropped" else batches[rank]
    for batch in own:
        if fault == "not reduced":
            case.loss(model, widen(batch)).backward()
        else:
            case.loss(wrapped, widen(batch)).backward()
    got = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters() if p.requires_grad}
    if fault == "scaled by world size":
        got = {n: g * world_size for n, g in got.items()}
    return worst(got, wanted)


def test_ddp_and_the_float64_oracle_agree() -> None:
    """Mean over ranks, sum over backwards: both oracles must mean the same, to float64 rounding."""
    names = [name for name in NAMES if name not in ("mixed_dtypes", "probe")]
    for case, ranks in run_cases(_ddp_gradients, 2, [(name, "none") for name in names]):
        for error, where in ranks:
            assert error < 1e-12, (case, where)


def test_the_comparison_notices_a_fault() -> None:
    """The negative controls of everything else here: faults that real systems had are far outside every tolerance."""
    for case, ranks in run_cases(_ddp_gradients, 2, [("gpt_tied", fault) for fault in FAULTS]):
        assert all(error > 0.05 for error, _ in ranks), case


def test_relative_does_not_hide_a_nan_or_an_infinity() -> None:
    """A maximum over comparisons with NaN would report the other parameters' small numbers."""
    good, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert relative(good, good) == 0.0
    assert relative(good, torch.zeros(3)) == float("inf")
    error, name = worst({"a": good, "b": nan, "c": good + 1}, {"a": good, "b": good, "c": good})
    assert name == "b" and error != error
