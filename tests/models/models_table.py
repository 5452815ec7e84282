"""The rows of docs/models.md, kept in build/models.json from run to run, and the page made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from zoo import ZOO

BACKENDS = ("eager", "aot_eager", "inductor")
ROWS = Path(__file__).parents[2] / "build" / "models.json"


def keep_row(name: str, stage: int, backend: str, numbers: list[float], notes: str, uncovered: str) -> None:
    """``numbers``: the largest difference, the parameters, the schedules."""
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    rows[f"{name}, {stage}, {backend}"] = [*numbers, notes, uncovered]
    ROWS.parent.mkdir(exist_ok=True)
    ROWS.write_text(json.dumps(rows, indent=1))


def table(num_steps: int, tolerance: float) -> str:
    import transformers

    runs = [(stage, backend) for backend in BACKENDS for stage in (1, 2)]
    hooks = "; ".join(f"{name}: {entry.why_eager}" for name, entry in ZOO.items() if entry.why_eager)
    rows: dict[str, list[Any]] = json.loads(ROWS.read_text())
    is_partial = any(f"{name}, {stage}, {backend}" not in rows for name in ZOO for stage, backend in runs)
    lines = [
        "# Models",
        "",
        "Written by `make models-table`; don't edit. Tiny random configurations, unmodified modelling code, the",
        "model's own loss; 2 gloo ranks on CPU, fp32, SGD with momentum, "
        f"{num_steps} updates, torch {torch.__version__},",
        f"transformers {transformers.__version__}. Each cell: the largest relative difference of a parameter to DDP's",
        f"(the tests allow {tolerance:.0e}). In brackets: the schedules that the backward graphs became, where not 1.",
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
