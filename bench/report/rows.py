"""Rows of results: one a run, in a CSV that is only ever appended to."""

from __future__ import annotations

import csv
import datetime
import hashlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import ROOT

COLUMNS = (
    "session", "time", "case", "provider", "version", "repeat", "start", "status", "p20_ms", "p50_ms", "p80_ms",
    "host_ms", "tokens_per_s_rank", "first_step_s", "peak_steady_mb", "peak_mb", "held_mb", "loss_before",
    "loss_after_5", "final_loss", "num_params", "ranks", "network", "steps", "device", "torch", "python", "commit",
    "command",
)  # fmt: skip
# What a run says only when its losses are right
NUMBERS = (
    "p20_ms", "p50_ms", "p80_ms", "host_ms", "tokens_per_s_rank", "first_step_s", "peak_steady_mb", "peak_mb",
    "held_mb",
)  # fmt: skip
# What a time depends on; a change in a table's words does not make a new session.
MEASURED = (
    *("zc/**/*.py", "passes/*.py", "kernels/*.py", "bench/train.py", "bench/measure.py"),
    *(f"bench/{room}/*.py" for room in ("cases", "systems", "network")),
)
Row = dict[str, str]


class Ratio(NamedTuple):
    """A provider's step relative to zc's in one session. ``in_turn``: both ran in the same processes."""

    time: str
    commit: str
    provider: str
    value: float
    in_turn: bool


def fingerprint(root: Path = ROOT) -> str:
    """Eight digits of the sources that a time depends on: the default name of a session, so that a run which was cut
    off goes on, and changed code starts anew."""
    digest = hashlib.sha256()
    for pattern in MEASURED:
        for path in sorted(root.glob(pattern)):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def read(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def append(path: Path, row: Mapping[str, Any], columns: Sequence[str] = COLUMNS) -> None:
    """Adds a row, and the header to a new file. ValueError where the file has other columns."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_new:
        with path.open(newline="") as file:
            header = tuple(next(csv.reader(file), ()))
        if header != tuple(columns):
            raise ValueError(f"{path} has columns {header}, not {tuple(columns)}: name another file")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def losses_of(run: dict[str, Any]) -> list[float]:
    """Mean over ranks of each step's loss, nats a token."""
    return [statistics.fmean(step) for step in zip(*(r["losses"] for r in run["ranks"]), strict=True)]


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """p20, p50 and p80, interpolated."""
    if len(values) < 2:
        return (values[0],) * 3
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]


def measured(run: dict[str, Any], reason: str | None) -> dict[str, Any]:
    """What a run says: losses always, times and bytes only where there is no ``reason`` against them.

    Memory is the largest over ranks; times are rank 0's, over the steps after ``settle``.
    """
    ranks, settle = run["ranks"], run["flags"]["settle"]
    losses = losses_of(run)
    row: dict[str, Any] = {n: run[n] for n in ("device", "torch", "python", "commit")}
    row |= {"status": reason or "ok", "num_params": ranks[0]["num_params"], "ranks": run["world_size"]}
    row["loss_before"] = f"{losses[0]:.6f}"
    row |= {"loss_after_5": f"{losses[min(5, len(losses) - 1)]:.6f}", "final_loss": f"{losses[-1]:.6f}"}
    row["steps"] = len(losses)
    if reason is not None:
        return row
    p20, p50, p80 = percentiles(ranks[0]["step_s"][settle:])
    row |= {"p20_ms": f"{p20 * 1e3:.2f}", "p50_ms": f"{p50 * 1e3:.2f}", "p80_ms": f"{p80 * 1e3:.2f}"}
    row["tokens_per_s_rank"] = f"{ranks[0]['tokens_per_step'] / run['world_size'] / p50:.0f}"
    row["first_step_s"] = f"{max(r['first_step_s'] for r in ranks):.2f}"
    on_device = "peak_device_nbytes" in ranks[0]
    if on_device:
        row["host_ms"] = f"{percentiles(ranks[0]['host_s'][settle:])[1] * 1e3:.2f}"
        row["peak_mb"] = row["peak_steady_mb"] = f"{max(r['peak_device_nbytes'] for r in ranks) / 1e6:.1f}"
    else:
        row["peak_mb"] = f"{max(r['peak_nbytes'] for r in ranks) / 1e6:.1f}"
        if all(r["peak_is_steady"] for r in ranks):
            row["peak_steady_mb"] = f"{max(r['peak_steady_nbytes'] for r in ranks) / 1e6:.1f}"
    row["held_mb"] = f"{max(r['held_nbytes'] for r in ranks) / 1e6:.2f}"
    return row


def median_of(rows: list[Row], column: str, **chosen: str) -> float | None:
    """Median of a column over the rows that have it."""
    values = [float(r[column]) for r in rows if r[column] and all(r[k] == v for k, v in chosen.items())]
    return statistics.median(values) if values else None
