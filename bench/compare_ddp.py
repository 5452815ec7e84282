"""zc against DDP + torch.compile and a compiled step with no communication at all: the same GPT, text and AdamW.

    python -m bench.compare_ddp --layers 8 --rounds 3

Runs are interleaved (A B C A B C ...), each in fresh processes. Round 0 starts each system cold, with an inductor cache
of its own; later rounds restart warm from it. A row is written as soon as its run ends; a run whose losses are not
those of the first system shows the reason in place of times. bench/tables.py makes the README's tables from these rows.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import ROOT, launch

RESULTS = ROOT / "bench" / "results" / "compare_ddp.csv"
LOSS_TOLERANCE = 2e-3  # nats, each step: fp32 in another order of summation
FIRST_LOSS_TOLERANCE = 1e-4  # nats, before any update
COLUMNS = (
    "session", "round", "start", "system", "status", "p20_ms", "p50_ms", "p80_ms", "first_step_s", "peak_steady_mb",
    "peak_mb", "persistent_mb", "final_loss", "num_params", "layers", "width", "vocab", "seq", "batch", "ranks",
    "steps", "device", "torch", "python", "commit", "command",
)  # fmt: skip


class Case(NamedTuple):
    """One system of the comparison."""

    flags: tuple[str, ...]
    communicates: bool = True  # else its losses agree before the first update only


CASES = {
    "DDP + torch.compile": Case(("--system", "ddp")),
    "zc stage 2": Case(("--system", "zc", "--stage", "2")),
    "no communication": Case(("--system", "local"), communicates=False),
    "zc stage 1": Case(("--system", "zc", "--stage", "1")),
    "zc stage 2, gradients copied": Case(("--system", "zc", "--stage", "2", "--copy-gradients")),
    "zc stage 1, gradients copied": Case(("--system", "zc", "--stage", "1", "--copy-gradients")),
    "DDP, gradient_as_bucket_view": Case(("--system", "ddp-view")),
    "zc stage 2, eager": Case(("--system", "zc", "--stage", "2", "--backend", "eager")),
    "DDP, eager": Case(("--system", "ddp", "--backend", "eager")),
}
DEFAULT = ("DDP + torch.compile", "zc stage 2", "no communication")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.compare_ddp", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--systems", nargs="+", choices=CASES, default=DEFAULT, help="the first is what the others are compared with")
    add("--layers", type=int, default=8)
    add("--width", type=int, default=512)
    add("--heads", type=int, default=8)
    add("--vocab", type=int, default=8192)
    add("--seq", type=int, default=256)
    add("--batch", type=int, default=4)
    add("--ranks", type=int, default=2)
    add("--steps", type=int, default=20)
    add("--settle", type=int, default=4, help="first steps that no time and no steady-state memory is taken from")
    add("--rounds", type=int, default=3, help="round 0 is cold")
    add("--csv", type=Path, default=RESULTS)
    given = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(given)
    args.command = shlex.join(["python", "-m", "bench.compare_ddp", *given])
    if args.steps <= args.settle:
        parser.error(f"--steps {args.steps} must be more than --settle {args.settle}")
    return args


def run_once(args: argparse.Namespace, case: Case, cache: Path) -> dict[str, Any]:
    """One training run in fresh processes; what bench.train wrote about it."""
    names = ("layers", "width", "heads", "vocab", "seq", "batch", "steps", "settle")
    sizes = [flag for name in names for flag in (f"--{name}", str(getattr(args, name)))]
    with tempfile.TemporaryDirectory() as out:
        # no clipping: its collective differs between systems, and a step is what is compared
        fixed = ["--clip", "0", "--eval-batches", "0", "--lr", "3e-4", "--quiet", "--out", out]
        env = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        launch("bench.train", [*case.flags, *sizes, *fixed], ranks=args.ranks, env=env)
        record: dict[str, Any] = json.loads((Path(out) / "run.json").read_text())
    return record


def losses_of(run: dict[str, Any]) -> list[float]:
    """Mean over ranks of each step's loss, nats a token."""
    return [statistics.fmean(step) for step in zip(*(r["losses"] for r in run["ranks"]), strict=True)]


def disagreement(losses: list[float], reference: list[float], communicates: bool) -> str | None:
    """Why no time of this run may be shown, or None. Every step is compared, or the first one without communication."""
    pairs = list(zip(losses, reference, strict=True))
    for step, (loss, expected) in enumerate(pairs if communicates else pairs[:1]):
        tolerance = LOSS_TOLERANCE if step else FIRST_LOSS_TOLERANCE
        if not abs(loss - expected) <= tolerance:
            return f"loss at step {step} is {loss:.6f}, not {expected:.6f}"
    if not all(math.isfinite(loss) for loss in losses):
        return "a loss is not finite"
    return None


def percentiles(values: list[float]) -> tuple[float, float, float]:
    """p20, p50 and p80, interpolated."""
    if len(values) < 2:
        return (values[0],) * 3
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[1], tenths[4], tenths[7]


def make_row(args: argparse.Namespace, name: str, run: dict[str, Any], reason: str | None) -> dict[str, Any]:
    """A row of COLUMNS but session, round and start. Memory is the largest over ranks; times are rank 0's."""
    ranks = run["ranks"]
    row = {n: getattr(args, n) for n in ("layers", "width", "vocab", "seq", "batch", "ranks", "steps")}
    row |= {n: run[n] for n in ("device", "torch", "python", "commit")}
    row |= {"system": name, "status": reason or "ok", "num_params": ranks[0]["num_params"]}
    row |= {"final_loss": f"{losses_of(run)[-1]:.6f}", "command": args.command}
    if reason is None:
        p20, p50, p80 = (1000 * s for s in percentiles(ranks[0]["step_s"][args.settle :]))
        row |= {"p20_ms": f"{p20:.1f}", "p50_ms": f"{p50:.1f}", "p80_ms": f"{p80:.1f}"}
        row |= {"first_step_s": f"{max(r['first_step_s'] for r in ranks):.2f}"}
        if all(r["peak_is_steady"] for r in ranks):
            row |= {"peak_steady_mb": f"{max(r['peak_steady_nbytes'] for r in ranks) / 1e6:.1f}"}
        row |= {"peak_mb": f"{max(r['peak_nbytes'] for r in ranks) / 1e6:.1f}"}
        row |= {"persistent_mb": f"{max(sum(r['persistent_nbytes'].values()) for r in ranks) / 1e6:.3f}"}
    return row


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a row, and the header to a new file."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    session = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    reference: list[float] | None = None
    with tempfile.TemporaryDirectory(prefix="inductor-") as caches:
        for number in range(args.rounds):
            for index, name in enumerate(args.systems):
                case = CASES[name]
                start = "cold" if number == 0 else "warm"
                base = {"session": session, "round": number, "start": start}
                try:
                    run = run_once(args, case, Path(caches) / str(index))
                except subprocess.CalledProcessError as error:
                    print(f"{start:>4} {name}: failed with exit status {error.returncode}", flush=True)
                    append(args.csv, base | {"system": name, "status": f"failed: exit {error.returncode}"})
                    continue
                if reference is None:
                    if index:
                        sys.exit(f"{args.systems[0]} failed, so there is nothing to compare {name} with")
                    reference = losses_of(run)
                reason = disagreement(losses_of(run), reference, case.communicates)
                row = make_row(args, name, run, reason)
                append(args.csv, base | row)
                shown = reason or "p50 {p50_ms} ms, first step {first_step_s} s, peak {peak_steady_mb} MB".format(
                    **{"peak_steady_mb": "?", **row}
                )
                print(f"{start:>4} {name}: {shown}", flush=True)
    from bench.tables import compare_ddp

    print(compare_ddp(args.csv, {"session": session}))


if __name__ == "__main__":
    main()
