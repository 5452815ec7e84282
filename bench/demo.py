"""``make demo``: ZeRO-2 trains a language model on real text on two ranks, op by op and compiled, from the same seed.

    python -m bench.demo --out out/demo

Prints a table and writes curves.png; ends with an error where the losses are not what they must be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import launch

LARGEST_LOSS = 2.6  # nats a byte, held out: below what byte frequencies alone give (about 3.2)
LARGEST_DIFFERENCE = 0.01  # nats a byte between op by op and compiled, fp32
NUM_SKIPPED = 5  # first steps, which compile
RUNS = {"eager": "op by op", "inductor": "compiled"}


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="bench.demo", description="Further flags go to bench.train.")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the runs and the pictures")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=140)
    return parser.parse_known_args(argv)


def steady(run: dict[str, Any]) -> list[float]:
    """Seconds of each step after those that compile, of rank 0."""
    return list(run["ranks"][0]["step_s"][NUM_SKIPPED:] or run["ranks"][0]["step_s"])


def mean_losses(run: dict[str, Any]) -> list[float]:
    """Training loss of each step, mean over ranks, nats a byte."""
    return [statistics.fmean(values) for values in zip(*(r["losses"] for r in run["ranks"]), strict=True)]


def table(runs: dict[str, dict[str, Any]]) -> Table:
    made = Table(title="ZeRO-2 with zc, {} ranks, {:,} parameters, fp32".format(*_size(runs)))
    made.add_column("")
    for name in runs:
        made.add_column(RUNS[name], justify="right")
    made.add_column("compiled / op by op", justify="right")

    def row(label: str, values: list[float], show: str, ratio: bool = True) -> None:
        shown = f"{values[1] / values[0]:.2f}" if ratio else f"{values[1] - values[0]:+.5f}"
        made.add_row(label, *(show.format(v) for v in values), shown)

    all_runs = list(runs.values())
    medians = [statistics.median(steady(run)) for run in all_runs]
    row("median step, ms", [1000 * m for m in medians], "{:,.0f}")
    row("tokens/s", [r["ranks"][0]["tokens_per_step"] / m for r, m in zip(all_runs, medians, strict=True)], "{:,.0f}")
    row("first step, s", [r["ranks"][0]["first_step_s"] for r in all_runs], "{:.1f}")
    row("held-out loss, nats a byte", [r["ranks"][0]["held_out_loss"] for r in all_runs], "{:.4f}", ratio=False)
    for rank in range(all_runs[0]["world_size"]):
        row(f"peak memory of rank {rank}, MB", [r["ranks"][rank]["peak_nbytes"] / 1e6 for r in all_runs], "{:,.0f}")
        steady_mb = [r["ranks"][rank]["peak_steady_nbytes"] / 1e6 for r in all_runs]
        row("  once it runs, MB", steady_mb, "{:,.0f}")
    return made


def _size(runs: dict[str, dict[str, Any]]) -> tuple[int, int]:
    run = next(iter(runs.values()))
    return run["world_size"], run["ranks"][0]["num_params"]


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Both loss curves and both step-time curves, one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    for (name, run), style in zip(runs.items(), ("-", "--"), strict=True):
        losses, label = mean_losses(run), RUNS[name]
        left.plot(range(1, len(losses) + 1), losses, style, label=label)
        left.plot(len(losses), run["ranks"][0]["held_out_loss"], "o", label=f"{label}, held out")
        right.plot(range(1, len(losses) + 1), [1000 * s for s in run["ranks"][0]["step_s"]], style, label=label)
    left.set(title="training loss, mean over ranks", xlabel="step", ylabel="nats a byte")
    right.set(title="time of a step (the first ones compile)", xlabel="step", ylabel="ms", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def problems(runs: dict[str, dict[str, Any]]) -> list[str]:
    """What the runs fail to show, a line each; empty where all is well. NaN fails."""
    losses = {RUNS[name]: run["ranks"][0]["held_out_loss"] for name, run in runs.items()}
    found = [
        f"{name}: held-out loss {loss:.4f} is not below {LARGEST_LOSS} nats a byte"
        for name, loss in losses.items()
        if not loss < LARGEST_LOSS
    ]
    first, second = losses.values()
    if not abs(first - second) <= LARGEST_DIFFERENCE:
        found.append(f"held-out losses differ by {abs(first - second):.5f}, more than {LARGEST_DIFFERENCE}: {losses}")
    return found


def next_steps(python: str) -> str:
    """What to try behind the demo; each is one command from the root of the repository."""
    run = f"{python} -m torch.distributed.run --standalone --nproc-per-node 2"
    return "\n".join(
        [
            "",
            "[bold]What to try next[/bold]",
            f"  a script of 30 lines, to make your own:  {run} docs/examples/train.py",
            f"  the same loop by hand, with DDP:         {run} docs/examples/train_ddp.py",
            f"  what a model of yours would hold:        {python} docs/examples/plan.py",
            "  your own loop, step by step:             docs/guide.md",
        ]
    )


def main(argv: list[str] | None = None) -> None:
    args, train_flags = parse(argv)
    console = Console()
    started = time.perf_counter()
    runs = {}
    for name, title in RUNS.items():
        out = args.out / name
        console.print(f"[bold]{title}[/bold]: {args.ranks} ranks, one thread each, which import torch first")
        flags = ["--system", "zc", "--stage", "2", "--backend", name, "--steps", str(args.steps), "--out", str(out)]
        launch("bench.train", [*flags, *train_flags], ranks=args.ranks)
        runs[name] = json.loads((out / "run.json").read_text())
    picture = args.out / "curves.png"
    draw(runs, picture)
    console.print(table(runs))
    before = next(iter(runs.values()))["ranks"][0]["held_out_loss_before"]
    console.print(f"held-out loss before training: {before:.4f} nats a byte")
    console.print(f"pictures: {picture}", soft_wrap=True)
    console.print(f"schedule of every graph: {args.out / 'inductor' / 'explain.txt'}", soft_wrap=True)
    console.print(f"both runs took {time.perf_counter() - started:.0f} s")
    found = problems(runs)
    for problem in found:
        console.print(f"[red]failed:[/red] {problem}")
    if found:
        sys.exit(1)
    console.print(next_steps(sys.executable), soft_wrap=True)


if __name__ == "__main__":
    main()
