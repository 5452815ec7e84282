"""Unmodified models train as under DDP: transformers' own modelling code and loss, and plain PyTorch's modules.

By default eight of the models run once each in stage 2, op by op or by compiled schedules (aot_eager), and three in
stage 3. ZC_TESTS=full runs all models in all ways. With ZC_MODELS_TABLE=docs/models.md the table is written, too, from
this run's rows and those that lie in build/models.json from runs before (`make models-table`).
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from harness import run_cases, run_ranks
from oracle import weights
from tiers import FULL
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from zoo import ZOO

import zc

STEPS = 5
TOLERANCE = 2e-5
STAGES = (1, 2) if FULL else (2,)
SECTIONS = ("notes", "not covered by a schedule", "compilation")
OP_BY_OP = ("Llama", "T5", "DETR", "ResNet-like", "diffusion U-Net")  # GPT-2, BERT and ViT are Llama to zc
SAMPLE = ("Mixtral", "U-Net", "nn.LSTM")
BACKENDS = ("eager", "aot_eager", "inductor")
# not by Inductor: tests/backend/test_many_models.py has the sizes that DCGAN had shown to be wrong
COMPILED = [(name, 2, "aot_eager") for name in SAMPLE]
IN_STAGE_3 = [("Llama", 2, "aot_eager"), ("diffusion U-Net", 2, "eager"), ("DCGAN", 2, "aot_eager")]
CAPS = ("smallest", "default", "all")  # of gathered weights


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


class Outcome(NamedTuple):
    """After the run: weights, this rank's losses, and what explain says."""

    weights: dict[str, Tensor]
    losses: list[float]
    num_params: int
    notes: str
    uncovered: str
    num_schedules: int
    compilation: str


def weight_nbytes(part: nn.Module, cap: str) -> int:
    """Bytes: enough for the largest bucket, or as much as all buckets together."""
    sizes = [param.nbytes for param in part.parameters()]
    return 2 * sum(sizes) if cap == "all" else max(2**16, 4 * max(sizes))


def train(rank: int, world_size: int, name: str, stage: int, backend: str, cap: str = "default") -> Outcome:
    """Job: ``STEPS`` updates with zc; stage 0 is DDP, plain PyTorch."""
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.make().train()
    parts: list[Any] = [model.get_submodule(part) for part in entry.parts]
    optimizers = [sgd(part) for part in parts]
    if stage == 0:
        models = [DistributedDataParallel(part, find_unused_parameters=True) for part in parts]
    else:
        models = parts
        for part, optimizer in zip(parts, optimizers, strict=True):
            options = {} if cap == "default" else {"weight_nbytes": weight_nbytes(part, cap)}
            zc.compile(part, optimizer, stage=stage, backend=backend, bucket_nbytes=2**15, **options)
    losses = [entry.update(models, optimizers, entry.batch(rank, step)) for step in range(STEPS)]
    num_params = sum(p.numel() for p in model.parameters())
    if stage == 0:
        return Outcome(weights(model), losses, num_params, "", "", 0, "")
    reports = [zc.explain(part).sections for part in parts]
    schedules = sum(title.startswith("schedule backward") for report in reports for title in report)
    notes, uncovered, said = ("\n".join(report[title] for report in reports) for title in SECTIONS)
    for part in parts:
        zc.close(part)
    return Outcome(weights(model), losses, num_params, notes, uncovered, schedules, said)


@cache
def ddp(name: str) -> list[Outcome]:
    return run_ranks(train, 2, name, 0, "", timeout=300)


def difference(got: Outcome, wanted: Outcome) -> tuple[float, str]:
    """The largest relative difference of a parameter, and its name. The scale is that of the parameter, but never less
    than a ten-thousandth of the largest one's: a key's bias starts at zero and has a gradient of zero, so all that it
    ever holds is rounding."""
    assert got.weights.keys() == wanted.weights.keys()
    floor = 1e-4 * max(float(w.norm()) for w in wanted.weights.values())
    pairs = (
        (float((got.weights[n] - w).double().norm()) / max(float(w.double().norm()), floor), n)
        for n, w in wanted.weights.items()
    )
    return max(pairs, key=lambda pair: (pair[0] != pair[0], pair[0]))


ROWS = Path(__file__).parents[2] / "build" / "models.json"


def keep_row(name: str, stage: int, backend: str, worst: float, outcome: Outcome) -> None:
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    numbers = [worst, outcome.num_params, outcome.num_schedules]
    rows[f"{name}, {stage}, {backend}"] = [*numbers, outcome.notes, outcome.uncovered]
    ROWS.parent.mkdir(exist_ok=True)
    ROWS.write_text(json.dumps(rows, indent=1))


def check(name: str, stage: int, backend: str) -> None:
    wanted = ddp(name)
    results = run_ranks(train, 2, name, stage, backend, timeout=600)
    worst, where = difference(results[0], wanted[0])
    for other in results[1:]:
        for param, value in results[0].weights.items():
            assert torch.equal(value, other.weights[param]), f"ranks ended with different {param}"
    assert worst <= TOLERANCE, f"{where} differs by {worst:.1e}"
    for mine, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(theirs.losses), rtol=1e-4, atol=1e-5)
    assert results[0].losses[0] != results[0].losses[-1]
    if backend != "eager" and ZOO[name].why_eager is None:
        assert results[0].num_schedules > 0, f"nothing was compiled: {results[0].compilation}"
    elif backend != "eager":
        assert "nothing of the model was compiled" in results[0].notes and ZOO[name].why_eager in results[0].compilation
    if os.environ.get("ZC_MODELS_TABLE"):
        keep_row(name, stage, backend, worst, results[0])


@pytest.mark.parametrize("name", ZOO if FULL else OP_BY_OP)
def test_op_by_op(name: str) -> None:
    """backend="eager": every gradient through hooks."""
    for stage in STAGES:
        check(name, stage, "eager")


@pytest.mark.parametrize(
    ("name", "stage", "backend"),
    [(name, stage, backend) for name in ZOO for stage in STAGES for backend in BACKENDS[1:]] if FULL else COMPILED,
)
def test_compiled(name: str, stage: int, backend: str) -> None:
    check(name, stage, backend)


@pytest.mark.parametrize(
    ("name", "world_size", "backend"),
    [(name, ranks, backend) for name in ZOO for ranks in (1, 2, 3, 4) for backend in BACKENDS] if FULL else IN_STAGE_3,
)
def test_stage_3_has_the_bits_of_stage_2(name: str, world_size: int, backend: str) -> None:
    cases = [(name, 2, backend), *((name, 3, backend, cap) for cap in (CAPS if FULL else CAPS[:1]))]
    (_, wanted), *others = run_cases(train, world_size, cases, timeout=600)
    for case, ranks in others:
        for mine, theirs in zip(ranks, wanted, strict=True):
            assert mine.losses == theirs.losses, case
            assert all(torch.equal(mine.weights[key], value) for key, value in theirs.weights.items()), case


@pytest.mark.skipif(not os.environ.get("ZC_MODELS_TABLE"), reason="ZC_MODELS_TABLE names no file to write")
def test_write_the_table() -> None:
    """Last in the file: the rows of the tests above, as docs/models.md."""
    Path(os.environ["ZC_MODELS_TABLE"]).write_text(table())


def table() -> str:
    import transformers

    runs = [(stage, backend) for backend in BACKENDS for stage in (1, 2)]
    hooks = "; ".join(f"{name}: {entry.why_eager}" for name, entry in ZOO.items() if entry.why_eager)
    rows: dict[str, list[Any]] = json.loads(ROWS.read_text())
    is_partial = any(f"{name}, {stage}, {backend}" not in rows for name in ZOO for stage, backend in runs)
    lines = [
        "# Models",
        "",
        "Written by `make models-table`; don't edit. Tiny random configurations, unmodified modelling code, the",
        f"model's own loss; 2 gloo ranks on CPU, fp32, SGD with momentum, {STEPS} updates, torch {torch.__version__},",
        f"transformers {transformers.__version__}. Each cell: the largest relative difference of a parameter to DDP's",
        f"(the tests allow {TOLERANCE:.0e}). In brackets: the schedules that the backward graphs became, where not 1.",
        "No model is refused. *hooks*: Dynamo compiles none of it, as zc.explain says, and gradients come in through",
        f"hooks ({hooks})." + " *not run*: the tests do not have that row in this table yet." * is_partial,
        "",
        "| model | parameters | " + " | ".join(f"{backend}, stage {stage}" for stage, backend in runs) + " |",
        "|---|---|" + "---|" * len(runs),
    ]
    for name in ZOO:
        entries = [rows.get(f"{name}, {stage}, {backend}") for stage, backend in runs]
        cells = [
            "not run" if row is None else f"{row[0]:.0e}" + _schedules(row[2], backend)
            for row, (_, backend) in zip(entries, runs, strict=True)
        ]
        num_params = next((row[1] for row in entries if row is not None), 0)
        lines.append(f"| {name} | {num_params:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _schedules(count: int, backend: str) -> str:
    if backend == "eager" or count == 1:
        return ""
    return f" ({count})" if count else " (hooks)"
