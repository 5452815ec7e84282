"""Reduced gradients against the float64 one-process oracle, and what ``param.grad`` is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import CASES, NAMES
from oracle import full_gradients, widen, worst
from tiers import FULL
from torch import Tensor, nn
from training_runs import Run, adamw

import zc
from zc.engine.accumulators import Accumulators
from zc.engine.operations import TABLE
from zc.schedule.spec import ReduceRows

MICROBATCHES = 2


def gradients(rank: int, run: Run, double: bool = False) -> dict[str, Tensor | None]:
    """All reduced gradients of one update, on this rank."""
    case = run.of
    model = case.model().double() if double else case.model()
    zc.compile(model, adamw(model), stage=run.stage, backend=run.backend, **{"bucket_nbytes": 8192, **run.options})
    for m in range(MICROBATCHES):
        batch = case.batch(rank, 0, m)
        case.loss(model, widen(batch) if double else batch).backward()
    return zc.full_grad(model)


def _error(rank: int, world_size: int, run: Run, double: bool, fault: str = "") -> tuple[float, str]:
    """Job: the largest relative difference to the oracle. ``fault`` breaks zc on purpose."""
    reduce_rows = TABLE[ReduceRows]
    if fault == "twice":

        def broken(self: Accumulators, *args: Any) -> None:
            reduce_rows(self, *args)
            reduce_rows(self, *args)

        TABLE[ReduceRows] = broken
    elif fault == "first bucket lost":
        TABLE[ReduceRows] = lambda self, b, *a: reduce_rows(self, b, *a) if b else None
    try:
        got = gradients(rank, run, double)
    finally:
        TABLE[ReduceRows] = reduce_rows
    case = run.of
    batches = [[case.batch(r, 0, m) for m in range(MICROBATCHES)] for r in range(world_size)]
    wanted = full_gradients(case.model(), case.loss, batches)
    for name in case.unused:
        assert got.pop(name) is None, f"{name} got no gradient"
        del wanted[name]
    assert all(g is not None and g.dtype == (torch.float64 if double else torch.float32) for g in got.values())
    return worst(got, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("case", [n for n in NAMES if n not in ("mixed_dtypes", "probe")])
def test_float64_models_agree_with_the_oracle(case: str, backend: str) -> None:
    """Mean over ranks, sum over backwards (transformers#34191, transformers#34242). In float64 nothing can hide in
    rounding: what is left is 1e-16 times the depth of the sums, so 1e-12 shows even a single lost or doubled
    element. Compiled ones in stage 2 are in test_against_ddp.py; here by ZC_TESTS=full."""
    for stage in (1, 2) if FULL or backend == "eager" else (1,):
        for error, name in run_ranks(_error, 2, Run(case, stage=stage, backend=backend), True):
            assert error < 1e-12, (stage, name)


@pytest.mark.parametrize("fault", ["twice", "first bucket lost"])
def test_the_oracle_notices_a_broken_accumulation(fault: str) -> None:
    """Negative controls: deepspeed#7981 lost all but the last, megatron-lm#6357 added twice. Each must be far outside
    1e-12.

    What was never written holds whatever lay in its memory, NaN as well, which compares as neither: far outside."""
    for error, _ in run_ranks(_error, 2, Run("gpt_tied"), True, fault):
        assert not error <= 0.1


# --- param.grad ---


def _norms(rank: int, world_size: int, stage: int, backend: str) -> tuple[float, float, float]:
    """Job: zc's norm, a second call's, and the oracle's."""
    case = CASES["gpt_tied"]
    model = case.model()
    zc.compile(model, adamw(model), stage=stage, backend=backend, bucket_nbytes=4096)
    case.loss(model, case.batch(rank, 0, 0)).backward()
    norm = zc.clip_grad_norm_(model, 0.5)
    assert norm.dim() == 0 and norm.dtype == torch.float32
    wanted = full_gradients(case.model(), case.loss, [[case.batch(r, 0, 0)] for r in range(world_size)])
    joint = math.sqrt(sum(g.square().sum().item() for g in wanted.values()))
    return norm.item(), zc.clip_grad_norm_(model, 0.5).item(), joint


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_norm_is_the_one_process_norm(world_size: int, stage: int) -> None:
    """deepspeed#7302, pytorch#149768, pytorch#88955: replicas or a tied weight counted twice give a norm that is wrong
    by a few per cent. A second call sees the clipped gradients."""
    for result, again, wanted in run_ranks(_norms, world_size, stage, "eager"):
        assert result == pytest.approx(wanted, rel=1e-6)
        assert again == pytest.approx(min(0.5, wanted), rel=1e-4)


# --- not a number ---


def _with_nan(rank: int, world_size: int, stage: int, backend: str, value: float) -> dict[str, Any]:
    case = CASES["mlp"]
    model = case.model()
    model, optimizer = zc.compile(model, adamw(model), stage=stage, backend=backend, bucket_nbytes=512)
    x, y = case.batch(rank, 0, 0)
    if rank == 1:
        x[0, 0] = value
    case.loss(model, (x, y)).backward()
    grads = zc.full_grad(model)
    norm = zc.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return {
        "grad": {n: bool(g.isfinite().all()) for n, g in grads.items()},
        "norm": norm.item(),
        "weight": bool(model[0].weight.isnan().any()),
    }


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_nan_on_one_rank_is_a_nan_on_all(stage: int, backend: str) -> None:
    """One rank's bad batch must not be averaged away, dropped or clipped to a number: users find such batches by
    it."""
    for seen in run_ranks(_with_nan, 2, stage, backend, float("nan")):
        assert not any(seen["grad"].values()) and math.isnan(seen["norm"]) and seen["weight"]


# --- what goes past a compiled backward in silence ---


def _explained(rank: int, world_size: int, case: str, backend: str) -> dict[str, str]:
    gradients(rank, run := Run(case, backend=backend))
    model = run.of.model()
    zc.compile(model, adamw(model), backend=backend, bucket_nbytes=8192)
    for step in range(2):
        run.of.loss(model, run.of.batch(rank, step, 0)).backward()
    return zc.explain(model).sections


@pytest.mark.parametrize("case", ["gpt_tied", "graph_break"])
def test_compiled_backends_do_compile(case: str) -> None:
    """What compares aot_eager and inductor with an oracle says nothing if everything came in by hooks: every
    parameter is covered by a compiled schedule that has run and was proved. tests/backend/test_segments.py has more
    graphs of one class than Dynamo's default limit."""
    sections = run_ranks(_explained, 2, case, "aot_eager")[0]
    assert sections["not covered by a schedule"] == "nothing"
    schedules = [body for name, body in sections.items() if name.startswith("schedule backward")]
    assert len(schedules) == {"gpt_tied": 1, "graph_break": 2}[case]
    assert all("run 2 times" in body and "NOT VERIFIED" not in body for body in schedules)
    eager = run_ranks(_explained, 2, case, "eager")[0]
    assert not any(name.startswith("schedule backward") for name in eager), "the control"


def _plain_sequential(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    zc.compile(model, adamw(model), backend="aot_eager")
    model(torch.ones(2, 16)).sum().backward()
    return zc.explain(model).sections["not covered by a schedule"]


def test_a_plain_sequential_is_compiled() -> None:
    """Dynamo skips the forward of torch.nn's own classes: ``model.compile()`` of a bare nn.Sequential would be the
    eager path under the name of the compiled one."""
    assert run_ranks(_plain_sequential, 2) == ["nothing", "nothing"]


def _after_plain_compile(rank: int, world_size: int) -> tuple[float, str, bool]:
    """torch.compile has cached this model's AOTAutograd result, without our hook in it."""
    case = CASES["mlp"]
    plain = case.model()
    plain.compile()
    case.loss(plain, case.batch(rank, 0, 0)).backward()
    torch._dynamo.reset()
    model = case.model()
    zc.compile(model, adamw(model), backend="inductor", bucket_nbytes=512)
    case.loss(model, case.batch(rank, 0, 0)).backward()
    wanted = full_gradients(case.model(), case.loss, [[case.batch(r, 0, 0)] for r in range(world_size)])
    covered = zc.explain(model).sections["not covered by a schedule"] == "nothing"
    return (*worst(zc.full_grad(model), wanted), covered)  # type: ignore[arg-type]


def test_a_cached_plain_compilation_is_not_taken() -> None:
    """The AOTAutograd cache's key ignores the hook: an entry of a plain run would leave whole gradients and no
    reduction."""
    for error, name, covered in run_ranks(_after_plain_compile, 2, timeout=120):
        assert error < 1e-6 and covered, name


def test_nn_module_is_all_that_is_needed() -> None:
    """The class and the state_dict's keys stay, and both objects are the caller's: nothing downstream has to know
    of zc."""
    case = CASES["gpt_tied"]
    model = case.model()
    keys, kind, optimizer = list(model.state_dict()), type(model), adamw(model)
    same_model, same_optimizer = zc.compile(model, optimizer, backend="eager")
    assert same_model is model and same_optimizer is optimizer
    assert type(model) is kind and list(model.state_dict()) == keys
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad for p in model.parameters())
    assert model.head.weight is model.embed.weight, "tied weights stay one object (megatron-lm#656)"
