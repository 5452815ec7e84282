"""``make demo``: a small Qwen3-like decoder learns real text on two ranks with three systems, which take turns.

    python -m bench.demo --out out/demo [--stage 3]

Prints what each system costs and why they differ, writes demo.png, and ends with the table of `zc.check` for the same
model. It fails where the losses are not what they must be, and where the check finds a fault. It trains in bf16, or in
fp32 on a processor that is slow in bf16. Further flags go to bench.train.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.baton import Seat, new_store, wait_for
from bench.measure import ROOT, end_on_sigterm, start
from bench.report.progress import Progress

Run = dict[str, Any]

LARGEST_LOSS = 5.2  # nats per token, held out: below what the tokens' frequencies alone give (about 5.7)
# Nats per token between any two, which round at different places. In bf16 twice what was seen, 0.037 on a processor
# with bf16 instructions: DDP under autocast has fp32 weights, zc has bf16 ones.
LARGEST_DIFFERENCE = {"bf16": 0.08, "fp32": 0.004}
NUM_SKIPPED = 5  # first steps, which compile
STEPS_PER_TURN = 5
# A microbatch has 1,024 tokens: with few, the work per parameter (accumulation in fp32, the update) hides what
# compiling gains per token (docs/decisions.md). A token is a pair of bytes, one of 4,096.
MODEL = "--model qwen3-6m --vocab 4096 --seq 128 --batch 8 --lr 1e-3 --warmup 10 --eval-batches 8"
DTYPES = {"bf16": "--compute-dtype bfloat16 --accum 4", "fp32": "--accum 2"}  # within 5 minutes on 2 cores with AVX2
SLOW = 3.0  # times fp32's; with AVX2 alone a matmul in bf16 takes 3 to 50 times as long, by its layout
WARNINGS = "ignore:Mismatch dtype between input and weight"  # autocast leaves a norm's weight in fp32
DDP, EAGER, COMPILED = "DDP, op by op", "zc, op by op", "zc, compiled"
FLAGS = {  # in the order of their turns: what compiles for half a minute says so first
    COMPILED: ("--system", "zc", "--backend", "inductor"),
    EAGER: ("--system", "zc", "--backend", "eager"),
    DDP: ("--system", "ddp-view", "--backend", "eager"),
}
NAMES = (DDP, EAGER, COMPILED)
KINDS = {  # row of the table -> what the systems call it; the rest is gradients and their buffers
    "weights": ("params", "flat_param", "gathered", "weight"),
    "fp32 masters": ("master_shard",),
    "optimizer state": ("optimizer_state",),
}


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="bench.demo", description="Further flags go to bench.train.")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the runs and the pictures")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, default=1, help="of zc: 1 is for several microbatches")
    return parser.parse_known_args(argv)


def matmul_s(dtype: torch.dtype) -> float:
    a = torch.ones(256, 256, dtype=dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return min(times)


def fast_dtype(seconds: Callable[[torch.dtype], float] = matmul_s) -> str:
    """bf16, or fp32 where a matmul in bf16 takes ``SLOW`` times as long here. ``seconds``: of a matmul."""
    return "bf16" if seconds(torch.bfloat16) < SLOW * seconds(torch.float32) else "fp32"


def train_all(args: argparse.Namespace, dtype: str, train_flags: list[str]) -> dict[str, Run]:
    """Each system in processes of its own, in turn; their records by name."""
    store, jobs = new_store(), []
    common = f"{MODEL} {DTYPES[dtype]} --stage {args.stage} --steps {args.steps}".split()
    folders = {name: args.out / name.replace(", ", "-").replace(" ", "-") for name in FLAGS}
    with Progress(len(FLAGS) * args.steps, "demo", shown=True) as progress:
        for job, (name, flags) in enumerate(FLAGS.items()):
            seat = Seat(store.port, job, len(FLAGS), STEPS_PER_TURN)
            own = [*flags, *common, *train_flags, "--baton", str(seat), "--out", str(folders[name])]
            jobs.append(start("bench.train", own, ranks=args.ranks, env={"PYTHONWARNINGS": WARNINGS}))
        wait_for(jobs, store, progress)
    return {name: json.loads((folders[name] / "run.json").read_text()) for name in NAMES}


# --- what a run has shown, of the rank that says most ---


def steady(run: Run) -> list[float]:
    """Seconds of each step after those that compile, of rank 0."""
    return list(run["ranks"][0]["step_s"][NUM_SKIPPED:] or run["ranks"][0]["step_s"])


def tokens_per_s(run: Run) -> float:
    return float(run["ranks"][0]["tokens_per_step"] / statistics.median(steady(run)))


def cpu_ms(run: Run) -> float:
    """CPU time of a step, of the rank that takes more: other programs change it less than they change tokens/s."""
    return 1e3 * max(statistics.median(r["cpu_s"][NUM_SKIPPED:] or r["cpu_s"]) for r in run["ranks"])


def gain(run: Run, other: Run) -> float:
    """Tokens/s of ``run`` over those of ``other``: the median over turns, which lie next to each other in time."""
    pairs = zip(_turns(run), _turns(other), strict=True)
    return statistics.median(theirs / own for own, theirs in pairs)


def _turns(run: Run) -> list[float]:
    steps = steady(run)
    return [statistics.median(steps[k : k + STEPS_PER_TURN]) for k in range(0, len(steps), STEPS_PER_TURN)]


def held_by_kind(run: Run) -> dict[str, int]:
    """Bytes of the tensors that live between steps, of the rank that holds most."""
    rank = max(run["ranks"], key=lambda r: r["held_nbytes"])
    nbytes = {row: sum(rank["persistent_nbytes"].get(kind, 0) for kind in kinds) for row, kinds in KINDS.items()}
    return {**nbytes, "gradients": max(0, rank["held_nbytes"] - sum(nbytes.values()))}


def held_mb(run: Run) -> float:
    return sum(held_by_kind(run).values()) / 1e6


def peak_mb(run: Run) -> float:
    """Held between steps, and the most that a step adds: without the interpreter, libraries and the compiler."""
    return max(float(r["held_nbytes"] + r["added_nbytes"]) for r in run["ranks"]) / 1e6


def first_step_s(run: Run) -> float:
    return float(run["ranks"][0]["first_step_s"])


def held_out_loss(run: Run) -> float:
    return float(run["ranks"][0]["held_out_loss"])


def mean_losses(run: Run) -> list[float]:
    """Training loss of each step, mean over ranks, nats per token."""
    return [statistics.fmean(values) for values in zip(*(r["losses"] for r in run["ranks"]), strict=True)]


# --- what is printed ---


def table(runs: dict[str, Run], stage: int, dtype: str) -> Table:
    first = next(iter(runs.values()))
    size = f"{first['world_size']} ranks, {first['ranks'][0]['num_params']:,} parameters"
    result = Table(title=f"Qwen3-like decoder, {dtype}, {size}, zc stage {stage}")
    for name in ("", *NAMES, "/ DDP", "/ zc"):
        result.add_column(name.replace(", ", ",\n"), justify="right" if name else "left")

    def row(label: str, show: str, value: Callable[[Run], float], compare: Callable[[Run, Run], str]) -> None:
        """``compare``: the compiled run with each of the others."""
        ratios = (compare(runs[COMPILED], runs[name]) for name in (DDP, EAGER))
        result.add_row(label, *(show.format(value(run)) for run in runs.values()), *ratios)

    def ratio(value: Callable[[Run], float]) -> Callable[[Run, Run], str]:
        return lambda run, other: f"{value(run) / value(other):.2f}" if value(other) else ""

    row("tokens/s", "{:,.0f}", tokens_per_s, lambda run, other: f"{gain(run, other):.2f}")
    row("CPU per step, ms", "{:,.0f}", cpu_ms, ratio(cpu_ms))
    row("held-out loss, nats", "{:.4f}", held_out_loss, lambda a, b: f"{held_out_loss(a) - held_out_loss(b):+.4f}")
    for kind in (*KINDS, "gradients"):
        in_mb = partial(_kind_mb, kind=kind)
        row(f"  {kind}, MB", "{:,.1f}", in_mb, ratio(in_mb))
    row("held by a rank, MB", "{:,.1f}", held_mb, ratio(held_mb))
    row("peak of a step, MB", "{:,.1f}", peak_mb, ratio(peak_mb))
    row("first step, s", "{:.1f}", first_step_s, ratio(first_step_s))
    return result


def _kind_mb(run: Run, kind: str) -> float:
    return held_by_kind(run)[kind] / 1e6


def causes(runs: dict[str, Run], dtype: str) -> list[str]:
    """One line on each difference, from what was measured."""
    ddp, eager, compiled = (runs[name] for name in NAMES)
    ranks = compiled["world_size"]
    speedup, against_ddp = gain(compiled, eager), gain(compiled, ddp)
    cpu = cpu_ms(compiled) / cpu_ms(eager)
    fused = "Inductor fuses norms, rotary positions, SwiGLU and the loss; matmuls and attention stay as they are"
    if speedup > 1:
        why = f"{speedup:.2f} of zc op by op: {fused}"
    elif cpu < 1:
        why = f"{speedup:.2f} of zc op by op in {cpu:.2f} of its CPU time: other programs took the processor"
    else:
        why = f"{speedup:.2f} of zc op by op: compiling gained nothing in this run"
    cast = "casts fp32 weights to bf16 in each forward, and " if dtype == "bf16" else "is op by op, and "
    slower = f"DDP {cast}each rank updates all weights instead of 1/{ranks}"
    rounded = "they round to bf16 at different places" if dtype == "bf16" else "fused code rounds at different places"
    num_params = compiled["ranks"][0]["num_params"]

    def per_param(run: Run) -> str:
        kinds = ((kind, nbytes / num_params) for kind, nbytes in held_by_kind(run).items())
        return " + ".join(f"{n:.0f} {kind}" for kind, n in kinds if n >= 0.5)

    added = ", ".join(f"{name} {peak_mb(run) - held_mb(run):,.0f}" for name, run in runs.items())
    return [
        f"tokens/s: {why}. {against_ddp:.2f} of DDP{f': {slower}' if against_ddp > 1 else ''}",
        f"loss: all three add gradients up and update in fp32; {rounded}",
        f"held: bytes per parameter are, with DDP, {per_param(ddp)}; with zc, {per_param(compiled)}: each rank has "
        f"1/{ranks} of masters and optimizer state, and gradients only until they are cleared",
        f"peak: a step adds MB: {added}; activations, gradients and casts. Fused code saves fewer activations",
        "first step: only the compiled run compiles, equal blocks once; a second run finds them in Inductor's cache",
    ]


def draw(runs: dict[str, Run], path: Path) -> None:
    """Loss curves, tokens/s, memory by kind and first steps: one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    curves, speed, memory, first = axes.flat
    for (name, run), style in zip(runs.items(), ("-", "--", ":"), strict=True):
        losses = mean_losses(run)
        (line,) = curves.plot(range(1, len(losses) + 1), losses, style, label=name)
        curves.plot(len(losses), held_out_loss(run), "o", color=line.get_color())
    curves.set(title="training loss (dots: held out)", xlabel="step", ylabel="nats per token")
    names = list(runs)
    bars = speed.bar(names, [tokens_per_s(run) for run in runs.values()], color=["C0", "C1", "C2"])
    speed.bar_label(bars, fmt="{:,.0f}")
    speed.set(title="tokens/s, all ranks")
    bottom = [0.0] * len(names)
    parts = {kind: [_kind_mb(run, kind) for run in runs.values()] for kind in (*KINDS, "gradients")}
    parts["during a step"] = [peak_mb(run) - held_mb(run) for run in runs.values()]
    for kind, heights in parts.items():
        hatch = "//" if kind == "during a step" else None
        memory.bar(names, heights, bottom=bottom, label=kind, hatch=hatch, alpha=0.4 if hatch else 1.0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    memory.set(title="memory of a rank at the peak of a step, MB")
    bars = first.bar(names, [first_step_s(run) for run in runs.values()], color=["C0", "C1", "C2"])
    first.bar_label(bars, fmt="{:.1f}")
    first.set(title="first step, s (the compiled one compiles)")
    for ax in (curves, memory):
        ax.legend()
    for ax in axes.flat:
        ax.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def problems(runs: dict[str, Run], dtype: str) -> list[str]:
    """What the runs fail to show, a line each; empty where all is well. NaN fails."""
    losses = {name: held_out_loss(run) for name, run in runs.items()}
    lines = [
        f"{name}: held-out loss {loss:.4f} is not below {LARGEST_LOSS} nats per token"
        for name, loss in losses.items()
        if not loss < LARGEST_LOSS
    ]
    for name in (DDP, EAGER):
        difference = abs(losses[name] - losses[COMPILED])
        if not difference <= (largest := LARGEST_DIFFERENCE[dtype]):
            lines.append(f"{COMPILED} and {name}: losses differ by {difference:.5f}, more than {largest}")
    return lines


def check_on_one_device(args: argparse.Namespace, dtype: str) -> list[str]:
    """Prints whether zc trains the demo's model on these ranks as one device does. What it finds, a line; or none."""
    flags = [f"bench.demo_check:make_{dtype}", "--ranks", str(args.ranks), "--stage", str(args.stage)]
    done = subprocess.run([sys.executable, "-m", "zc", "check", *flags], cwd=ROOT, check=False)
    return [f"zc.check ended with status {done.returncode}; what it found is above"] if done.returncode else []


def next_steps(python: str) -> str:
    """What to try after the demo; each is one command from the root of the repository."""
    run = f"{python} -m torch.distributed.run --standalone --nproc-per-node 2"
    return "\n".join(
        [
            "",
            "[bold]What to try next[/bold]",
            f"  a script of 30 lines, to make your own:  {run} docs/examples/train.py",
            f"  the same loop by hand, with DDP:         {run} docs/examples/train_ddp.py",
            f"  what a model of yours would hold:        {python} docs/examples/plan.py",
            "  your own loop, step by step:             docs/guide.md",
            f"  the check above, of a loop of your own:  {python} -m zc check docs/examples/check.py:make",
        ]
    )


def main(argv: list[str] | None = None) -> None:
    args, train_flags = parse(argv)
    console = Console()
    end_on_sigterm()
    started = time.perf_counter()
    dtype = fast_dtype()
    if dtype == "fp32":
        console.print(f"in fp32: a matmul in bf16 takes more than {SLOW:.0f} times as long on this processor")
    console.print(f"{' | '.join(NAMES)}: {args.ranks} ranks each, one thread per rank, {STEPS_PER_TURN} steps per turn")
    try:
        runs = train_all(args, dtype, train_flags)
    except subprocess.CalledProcessError as error:
        sys.exit(f"a run failed with status {error.returncode}; its own error is above")
    picture = args.out / "demo.png"
    draw(runs, picture)
    console.print(table(runs, args.stage, dtype))
    for line in causes(runs, dtype):
        console.print(line, soft_wrap=True)
    console.print(
        f"held-out losses may differ by {LARGEST_DIFFERENCE[dtype]}; load of the machine: {os.getloadavg()[0]:.1f}"
    )
    console.print(f"\npictures: {picture}", soft_wrap=True)
    page = args.out / "zc-compiled" / "explain.html"
    console.print(f"the compiled run's report, in a browser: {page}\n", soft_wrap=True)
    failed = [*problems(runs, dtype), *check_on_one_device(args, dtype)]
    console.print(f"all of it took {time.perf_counter() - started:.0f} s")
    for problem in failed:
        console.print(f"[red]failed:[/red] {problem}")
    if failed:
        sys.exit(1)
    console.print(next_steps(sys.executable), soft_wrap=True)


if __name__ == "__main__":
    main()
