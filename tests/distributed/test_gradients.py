"""Reduced gradients against the float64 one-process oracle, and what ``param.grad`` is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import run_cases
from models import CASES, NAMES
from oracle import full_gradients, widen, worst
from tiers import FULL
from torch import Tensor, nn
from training_runs import Run, adamw

import zc

MICROBATCHES = 2


def gradients(rank: int, run: Run) -> dict[str, Tensor | None]:
    """All reduced gradients of one update, on this rank."""
    case = run.of
    model = case.model().double()
    zc.compile(model, adamw(model), stage=run.stage, backend=run.backend, **{"bucket_nbytes": 8192, **run.options})
    for m in range(MICROBATCHES):
        case.loss(model, widen(case.batch(rank, 0, m))).backward()
    return zc.full_grad(model)


def _error(rank: int, world_size: int, run: Run) -> tuple[float, str]:
    """Job: the largest relative difference to the oracle."""
    got, case = gradients(rank, run), run.of
    batches = [[case.batch(r, 0, m) for m in range(MICROBATCHES)] for r in range(world_size)]
    wanted = full_gradients(case.model(), case.loss, batches)
    for name in case.unused:
        assert got.pop(name) is None, f"{name} got no gradient"
        del wanted[name]
    assert all(g is not None and g.dtype == torch.float64 for g in got.values())
    return worst(got, wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "stage"), [("eager", 2), ("aot_eager", 1), *([("eager", 1), ("aot_eager", 2)] if FULL else [])]
)
def test_float64_models_agree_with_the_oracle(backend: str, stage: int) -> None:
    """Mean over ranks, sum over backwards (transformers#34191, transformers#34242). In float64 nothing can hide in
    rounding: what is left is 1e-16 times the depth of the sums, so 1e-12 shows even a single lost or doubled
    element. Compiled ones of every kind in stage 2 are in test_against_ddp.py; here by ZC_TESTS=full, but for two."""
    names = [case for case in NAMES if case not in ("mixed_dtypes", "probe")]
    if backend != "eager" and not FULL:
        names = ["graph_break", "unused"]
    runs = [Run(case, stage=stage, backend=backend) for case in names]
    for run, ranks in run_cases(_error, 2, runs, timeout=300.0):
        for error, name in ranks:
            assert error < 1e-12, (run.case, name)


# --- param.grad ---


def _norms(rank: int, world_size: int, stage: int) -> tuple[float, float, float]:
    """Job: zc's norm, a second call's, and the oracle's."""
    case = CASES["gpt_tied"]
    model = case.model()
    zc.compile(model, adamw(model), stage=stage, backend="eager", bucket_nbytes=4096)
    case.loss(model, case.batch(rank, 0, 0)).backward()
    norm = zc.clip_grad_norm_(model, 0.5)
    assert norm.dim() == 0 and norm.dtype == torch.float32
    wanted = full_gradients(case.model(), case.loss, [[case.batch(r, 0, 0)] for r in range(world_size)])
    joint = math.sqrt(sum(g.square().sum().item() for g in wanted.values()))
    return norm.item(), zc.clip_grad_norm_(model, 0.5).item(), joint


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_norm_is_the_one_process_norm(world_size: int) -> None:
    """deepspeed#7302, pytorch#149768, pytorch#88955: replicas or a tied weight counted twice give a norm that is wrong
    by a few per cent. A second call sees the clipped gradients."""
    for stage, ranks in run_cases(_norms, world_size, (1, 2)):
        for result, again, wanted in ranks:
            assert result == pytest.approx(wanted, rel=1e-6), stage
            assert again == pytest.approx(min(0.5, wanted), rel=1e-4), stage


# --- not a number ---


def _with_nan(rank: int, world_size: int, stage: int, backend: str) -> dict[str, Any]:
    case = CASES["mlp"]
    model = case.model()
    model, optimizer = zc.compile(model, adamw(model), stage=stage, backend=backend, bucket_nbytes=512)
    x, y = case.batch(rank, 0, 0)
    if rank == 1:
        x[0, 0] = float("nan")
    case.loss(model, (x, y)).backward()
    grads = zc.full_grad(model)
    norm = zc.clip_grad_norm_(model, 1.0)
    optimizer.step()
    return {
        "grad": {n: bool(g.isfinite().all()) for n, g in grads.items()},
        "norm": norm.item(),
        "weight": bool(model[0].weight.isnan().any()),
    }


def test_a_nan_on_one_rank_is_a_nan_on_all() -> None:
    """One rank's bad batch must not be averaged away, dropped or clipped to a number: users find such batches by
    it."""
    for case, ranks in run_cases(_with_nan, 2, [(1, "eager"), (2, "eager"), (2, "aot_eager")]):
        for seen in ranks:
            assert not any(seen["grad"].values()) and math.isnan(seen["norm"]) and seen["weight"], case


# --- what goes past a compiled backward in silence ---


def _explained(rank: int, world_size: int, case: str, backend: str) -> dict[str, str]:
    run = Run(case, backend=backend)
    model = run.of.model()
    zc.compile(model, adamw(model), backend=backend, bucket_nbytes=8192)
    for step in range(2):
        run.of.loss(model, run.of.batch(rank, step, 0)).backward()
    return zc.explain(model).sections


def test_compiled_backends_do_compile() -> None:
    """What compares aot_eager and inductor with an oracle says nothing if everything came in by hooks: every
    parameter is covered by a compiled schedule that has run and was proved. tests/backend/test_segments.py has more
    graphs of one class than Dynamo's default limit."""
    num_schedules = {("gpt_short", "aot_eager"): 1, ("graph_break", "aot_eager"): 2, ("gpt_short", "eager"): 0}
    for case, (sections,) in run_cases(_explained, 1, num_schedules):
        schedules = [body for name, body in sections.items() if name.startswith("schedule backward")]
        assert len(schedules) == num_schedules[case], case
        assert all("run 2 times" in body and "NOT VERIFIED" not in body for body in schedules), case
        assert not schedules or sections["not covered by a schedule"] == "nothing", case


def test_a_plain_sequential_is_compiled() -> None:
    """Dynamo skips the forward of torch.nn's own classes: ``model.compile()`` of a bare nn.Sequential would be the
    eager path under the name of the compiled one."""
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    zc.compile(model, adamw(model), backend="aot_eager")
    model(torch.ones(2, 16)).sum().backward()
    assert zc.explain(model).sections["not covered by a schedule"] == "nothing"


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


def test_a_hook_on_the_node_that_adds_to_grad_sees_the_gradient() -> None:
    """As apex and Megatron register theirs, here before zc.compile, between two steps, and of a node that goes on
    without its hook. A compiled graph gave them None."""
    case = CASES["mlp"]
    model, twin = case.model(), case.model()
    params, of_twin = list(model.parameters()), list(twin.parameters())
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in params]  # type: ignore[union-attr]
    seen: list[Tensor] = []

    def hook(_: Any, grads: Any) -> None:
        seen.append(grads[0].clone())

    handle = nodes[0].register_hook(hook)
    zc.compile(model, adamw(model), stage=2, backend="aot_eager")
    for step in range(4):
        if step == 2:
            handle.remove()
            nodes[1].register_hook(hook)
        for net in (model, twin):
            case.loss(net, case.batch(0, step, 0)).backward()
        torch.testing.assert_close(seen[step], of_twin[step // 2].grad)
        model.zero_grad()
        twin.zero_grad()
    assert len(seen) == 4
