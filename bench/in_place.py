"""Gradients made in their place against gradients made apart and copied: the same GPT, step by step in turn.

    python -m bench.in_place [--ranks 2] [--stage 2] [--layers 3] [--steps 12] [--csv FILE]
    python -m bench.in_place --paced ethernet --world 8 --systems "copied" "in place" "in place, delayed"

The models live in the same processes and take turns (A B B A A B ...), so that a slow spell of a shared machine falls
on all; their losses must be bitwise equal in stage 2, or there is no number. ``backward_ms`` is the part that differs:
from the loss to the end of the backward, reductions included. Memory is taken in processes of their own (``--memory``),
one system each: the largest resident set of a rank after the first steps. ``--paced``: one process plays rank 0 of
``--world`` ranks on a modelled network (bench/paced.py); there the processor does not also carry the messages, so an
order of matmuls that covers a reduction can show what it gains.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import data
from bench.measure import ROOT, device_name, launch, peak_rss_nbytes, reset_peak_rss, versions
from bench.models import GPTConfig, make_gpt, num_parameters
from bench.network import NETWORKS
from bench.paced import init_paced
from bench.rows import percentiles

RESULTS = ROOT / "bench" / "results" / "in_place.csv"
SYSTEMS = {
    "copied": {},
    "in place": {"write_in_place": True},
    "in place, delayed": {"write_in_place": True, "delay_weight_grads": True},
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.in_place", description=__doc__.split("\n")[0])
    add = parser.add_argument
    for name, value in (("ranks", 2), ("stage", 2), ("layers", 3), ("width", 512), ("heads", 8), ("vocab", 8192),
                        ("seq", 256), ("batch", 4), ("steps", 12), ("settle", 3), ("accum", 1)):  # fmt: skip
        add(f"--{name}", type=int, default=value)
    add("--param-dtype", choices=("float32", "bfloat16"), default="float32")
    add("--bucket-mb", type=float, default=25.0)
    add("--csv", type=Path, default=RESULTS)
    add("--memory", action="store_true", help="one system a process, for its memory, in place of times")
    add("--systems", nargs="+", choices=SYSTEMS, default=["copied", "in place"])
    add("--paced", choices=tuple(NETWORKS), help="one process plays rank 0 of --world ranks on a modelled network")
    add("--world", type=int, default=8, help="ranks that --paced pretends")
    add("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.paced and args.memory:
        parser.error("--memory is taken on real ranks, without --paced")
    if "copied" not in args.systems and args.out is None:
        parser.error("--systems needs copied, which the others are compared with")
    return args


def compiled(args: argparse.Namespace, options: dict[str, bool]) -> tuple[Any, Any]:
    import zc

    model = make_gpt(GPTConfig(args.vocab, args.seq, args.layers, args.width, args.heads), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    dtype = getattr(torch, args.param_dtype)
    return zc.compile(
        model, optimizer, stage=args.stage, bucket_nbytes=int(args.bucket_mb * 2**20),
        param_dtype=None if dtype == torch.float32 else dtype, **options,
    )  # fmt: skip


def step(
    args: argparse.Namespace, model: Any, optimizer: Any, tokens: torch.Tensor, rank: int, number: int
) -> dict[str, float]:
    import zc

    total, backward, start = 0.0, 0.0, time.perf_counter()
    for m in range(args.accum):
        x, y = data.train_batch(
            tokens, batch=args.batch, seq=args.seq, seed=0, step=number * args.accum + m, rank=rank
        )  # fmt: skip
        with zc.no_sync(model) if m < args.accum - 1 else nullcontext():
            loss = model(x, y)
            begun = time.perf_counter()
            (loss / args.accum).backward()
            backward += time.perf_counter() - begun
        total += float(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return {"step_ms": (time.perf_counter() - start) * 1e3, "backward_ms": backward * 1e3, "loss": total / args.accum}


def work(args: argparse.Namespace) -> None:
    """One rank: the systems in turn; rank 0 writes what all saw."""
    if args.paced:
        init_paced(args.paced, args.world)
    else:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokens = data.load(vocab=args.vocab).train
    pairs = {name: compiled(args, SYSTEMS[name]) for name in args.systems}
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in pairs}
    is_steady = False
    for number in range(args.steps):
        if number == args.settle:
            is_steady = reset_peak_rss()
        for name in list(pairs) if number % 2 else list(pairs)[::-1]:
            dist.barrier()
            seen[name].append(step(args, *pairs[name], tokens, rank, number))
    peak = peak_rss_nbytes() if is_steady else None
    record = {"seen": seen, "peak": peak}
    records: list[Any] = [record] if args.paced else [None] * dist.get_world_size()
    if not args.paced:
        dist.all_gather_object(records, record)
    if rank == 0:
        import zc
        from zc.api import sharded

        explained = {name: str(zc.explain(model)) for name, (model, _) in pairs.items()}
        num_params = num_parameters(pairs[args.systems[0]][0])
        orders = {name: sharded(model).runtime.programs[0].launched for name, (model, _) in pairs.items()}
        found = {"ranks": records, "explained": explained, "orders": orders, "num_params": num_params}
        args.out.write_text(json.dumps(found))
    dist.destroy_process_group()


def run(argv: list[str], ranks: int, systems: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        launch("bench.in_place", [*argv, "--systems", *systems, "--out", str(out)], ranks=ranks)  # the later one counts
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def rows(args: argparse.Namespace, argv: list[str]) -> list[dict[str, object]]:
    names = list(args.systems)
    runs = {n: run(argv, args.ranks, [n]) for n in names} if args.memory else dict.fromkeys(names)
    if not args.memory:
        together = run(argv, 1 if args.paced else args.ranks, names)
        runs = dict.fromkeys(names, together)
        losses = {n: [[s["loss"] for s in r["seen"][n]] for r in together["ranks"]] for n in names}
        if args.stage == 2 and any(losses[n] != losses["copied"] for n in names):
            raise SystemExit(f"losses differ, so there is no number: {losses}")
    made = []
    for name in names:
        found: Any = runs[name]
        steps = found["ranks"][0]["seen"][name][args.settle :]
        line = next(x for x in found["explained"][name].splitlines() if "gradients made in place" in x)
        row: dict[str, object] = {"system": name, "in_place": line.split("made in place: ")[1].replace(",", "")}
        if args.memory:
            row["peak_mb"] = round(max(r["peak"] or 0 for r in found["ranks"]) / 1e6, 1)
        else:
            for kind in ("step_ms", "backward_ms"):
                p20, p50, p80 = percentiles([s[kind] for s in steps])
                row |= {f"{kind}_p20": round(p20, 1), f"{kind}_p50": round(p50, 1), f"{kind}_p80": round(p80, 1)}
            other = found["ranks"][0]["seen"]["copied"][args.settle :]
            pairs = [s["step_ms"] / o["step_ms"] for s, o in zip(steps, other, strict=True)]
            row["step_over_copied"] = round(statistics.median(pairs), 4)
        if args.paced:
            row |= {"network": args.paced, "world": args.world, "reduced": " ".join(map(str, found["orders"][name]))}
        row |= {n: getattr(args, n) for n in ("stage", "ranks", "layers", "width", "vocab", "seq", "batch", "accum")}
        row |= {"param_dtype": args.param_dtype, "steps": args.steps, "num_params": found["num_params"]}
        row |= {"device": device_name(torch.device("cpu")), **versions()}
        made.append(row | {"command": shlex.join(["python", "-m", "bench.in_place", *argv])})
    return made


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    args = parse(given)
    if "RANK" in os.environ:
        work(args)
        return
    made = rows(args, given)
    kind = "_memory" if args.memory else "_paced" if args.paced else ""
    path = args.csv.with_stem(args.csv.stem + kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(made[0]), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(made)
    for row in made:
        print({k: v for k, v in row.items() if k not in ("command", "device")}, flush=True)


if __name__ == "__main__":
    main()
