"""Step by step in turn, in the same processes: ratios that a slow spell of a shared machine can't move.

    python -m bench.turns [--cases gpt30m-fp32 ...] [--providers "zc stage 2" "DDP + compile" ...] [--turns 12]
    python -m bench.turns --paced ethernet --world 8 --cases gpt30m-fp32

Between two fresh processes this machine's speed may change by some 5 % (bench/run.py has times and memory of processes
of their own). Here all systems of a case live in one set of processes and train in turn, A B C, C B A, each after a
barrier. A turn is one step that is not timed and then ``--steps`` that are: a gather that is still on its way when a
step ends falls into the system's own next step, not into another's. Its time is the slowest rank's, a step. *ratio*: to
the first provider's time in the same turn, the median over turns. The losses pass the same gate as there, but on a
paced network, where they mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench import train
from bench.cases import CASES, PROVIDERS, Case, data, version_of
from bench.cases.models import num_parameters
from bench.cases.reference import disagreement, reference
from bench.measure import ROOT, device_name, end_on_sigterm, launch, versions
from bench.network import NETWORKS
from bench.network.paced import init_paced
from bench.report import rows
from bench.report.progress import Progress

RESULTS = ROOT / "bench" / "results" / "turns.csv"
COLUMNS = (
    "session", "time", "case", "provider", "status", "turns", "p20_ms", "p50_ms", "p80_ms", "cpu_ms", "base", "ratio",
    "ratio_p20", "ratio_p80", "num_params", "ranks", "network", "device", "torch", "python", "commit", "command",
)  # fmt: skip
INTERFACE = "ZC_BENCH_INTERFACE"  # in the environment: see bench.hosts
SETTLE = 2  # turns: what is compiled in the first step, and again in the second
DEFAULT = ("zc stage 2", "zc stage 2, overlap_gather", "DDP + compile", "compiled, no communication")


def sent_nbytes() -> int:
    """Sent so far through this host's interface to the others, by all of its ranks; 0 where it has none of its own."""
    name = os.environ.get(INTERFACE, "")
    counter = Path("/sys/class/net", name, "statistics/tx_bytes")
    return int(counter.read_text()) if name else 0


def with_own_code(model: nn.Module) -> nn.Module:
    """``model``, with code objects that no other model has. Dynamo keeps what it compiles at the code object: without
    this, DDP runs the graph of a system without communication, which is not cut at DDP's buckets."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("bench."):
            if kind not in classes:
                methods = {name: f for name, f in vars(kind).items() if isinstance(f, types.FunctionType)}
                classes[kind] = type(kind.__name__, (kind,), {name: _copy(f) for name, f in methods.items()})
            module.__class__ = classes[kind]
    return model


def _copy(function: types.FunctionType) -> types.FunctionType:
    code, names = function.__code__.replace(), function.__globals__
    copy = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class Turn:
    """One system, its flags, and what its steps have shown on this rank."""

    def __init__(self, case: Case, provider: str, device: torch.device) -> None:
        self.args = args = train.parse([*PROVIDERS[provider].flags, *case.all_flags, "--out", "unused"])
        model = with_own_code(train.model_of(args, device))
        self.num_params, self.device = num_parameters(model), device
        self.system, self._scheduler = train.system_of(args, model)
        self.losses: list[float] = []
        self.step_s: list[float] = []  # a turn each, mean over its timed steps
        self.cpu_s: list[float] = []
        self.sent: list[int] = []  # bytes a step that left this host, where bench.hosts has given it an interface

    def take(self, tokens: torch.Tensor, rank: int, num_steps: int) -> None:
        """One turn: a step, and then ``num_steps`` that are timed."""
        self._step(tokens, rank)
        start, cpu, sent = time.perf_counter(), time.process_time(), sent_nbytes()
        for _ in range(num_steps):
            self._step(tokens, rank)
        self.step_s.append((time.perf_counter() - start) / num_steps)
        self.cpu_s.append((time.process_time() - cpu) / num_steps)
        self.sent.append((sent_nbytes() - sent) // num_steps)

    def _step(self, tokens: torch.Tensor, rank: int) -> None:
        loss, _ = train.one_step(self.args, self.system, tokens, len(self.losses), rank, self.device)
        self._scheduler.step()
        self.losses.append(float(loss))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def work(args: argparse.Namespace) -> None:
    """One rank: the providers of one case in turn; rank 0 writes what all saw."""
    case = CASES[args.cases[0]]
    device = torch.device(case.device, int(os.environ["LOCAL_RANK"]) if case.device == "cuda" else None)
    if args.paced:
        init_paced(args.paced, args.world)
    else:
        dist.init_process_group("nccl" if case.device == "cuda" else "gloo")
    record = take_turns(args, case, device, dist.get_rank())
    # DDP must not hold the group's last reference at the interpreter's end: its threads wait for the GIL, it for them
    gc.collect()
    records: list[Any] = [record]
    if not args.paced:
        records = [None] * dist.get_world_size()
        dist.all_gather_object(records, record)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(records))
    dist.destroy_process_group()


def take_turns(args: argparse.Namespace, case: Case, device: torch.device, rank: int) -> dict[str, Any]:
    """What this rank has seen. The systems are gone when it returns."""
    turns = {name: Turn(case, name, device) for name in args.providers}
    first = turns[args.providers[0]]
    tokens = data.load(vocab=first.args.vocab).train
    with Progress(args.turns, args.cases[0], shown=rank == 0) as progress:
        for number in range(args.turns):
            for turn in list(turns.values())[:: 1 if number % 2 else -1]:
                dist.barrier()
                turn.take(tokens, rank, args.steps)
            progress.tick(" ".join(f"{turn.step_s[-1] * 1e3:,.0f} ms" for turn in turns.values()))
    seen = {n: {k: getattr(t, k) for k in ("losses", "step_s", "cpu_s", "sent")} for n, t in turns.items()}
    return {"seen": seen, "num_params": first.num_params, "device": device_name(device)}


def made_rows(
    case: str, providers: list[str], records: list[dict[str, Any]], expected: list[float] | None
) -> list[dict[str, Any]]:
    """A row a provider. ``records``: of each rank the losses of each provider's steps, and the seconds a step of its
    turns, of which the first SETTLE do not count. ``expected``: losses of the reference, or None where there is nothing
    to compare."""

    def slowest(name: str, what: str) -> list[float]:
        ranks = (r["seen"][name][what] for r in records)
        return [max(step) * 1e3 for step in zip(*ranks, strict=True)][SETTLE:]

    base, made = providers[0], []
    for name in providers:
        losses = [statistics.fmean(s) for s in zip(*(r["seen"][name]["losses"] for r in records), strict=True)]
        provider, row = PROVIDERS[name], {"case": case, "provider": name, "base": base, "status": "ok"}
        row |= {"num_params": records[0]["num_params"], "device": records[0]["device"], "ranks": len(records)}
        steps = slowest(name, "step_s")
        row["turns"] = len(steps)
        reason = None
        if expected is not None:
            reason = disagreement(losses, expected, CASES[case].tolerance, provider.communicates)
        if reason is not None:
            made.append(row | {"status": reason})
            continue
        row |= dict(zip(("p20_ms", "p50_ms", "p80_ms"), (f"{v:.2f}" for v in rows.percentiles(steps)), strict=True))
        row["cpu_ms"] = f"{statistics.median(slowest(name, 'cpu_s')):.2f}"
        ratios = [own / other for own, other in zip(steps, slowest(base, "step_s"), strict=True)]
        p20, p50, p80 = rows.percentiles(ratios)
        made.append(row | {"ratio": f"{p50:.4f}", "ratio_p20": f"{p20:.4f}", "ratio_p80": f"{p80:.4f}"})
    if made[0]["status"] != "ok":  # nothing to compare the others with
        for row in made:
            row |= {c: "" for c in ("ratio", "ratio_p20", "ratio_p80") if c in row}
    return made


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.turns", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=["gpt30m-fp32"])
    add("--providers", nargs="+", choices=PROVIDERS, default=list(DEFAULT), help="ratios are to the first")
    add("--turns", type=int, default=12, help="of each provider, with those that settle")
    add("--steps", type=int, default=2, help="timed steps of a turn, behind one that is not")
    add("--paced", choices=NETWORKS, help="one process plays rank 0 of --world ranks (bench/network/paced.py)")
    add("--world", type=int, default=8, help="ranks that --paced pretends")
    add("--csv", type=Path, default=RESULTS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.turns < SETTLE + 3:
        parser.error(f"--turns must be at least {SETTLE + 3}: {SETTLE} settle, and three to count; got {args.turns}")
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    args = parse(arguments)
    if "RANK" in os.environ:
        work(args)
        return 0
    end_on_sigterm()
    missing = [p for p in args.providers if version_of(PROVIDERS[p]) is None]
    if missing:
        sys.exit(f"not installed: what {', '.join(missing)} needs")
    status, session = 0, rows.now()  # nothing is resumed: a session is one call
    for name in args.cases:
        case = CASES[name]
        expected = None if args.paced else reference(case)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            flags = [*arguments, "--cases", name, "--out", str(out)]  # of two options alike the later one counts
            launch("bench.turns", flags, ranks=1 if args.paced else case.ranks)
            records = json.loads(out.read_text())
        about = {"session": session, "time": rows.now(), "network": args.paced or "", **versions()}
        if args.paced:
            about["ranks"] = args.world
        about["command"] = shlex.join(["python", "-m", "bench.turns", *arguments])
        for row in made_rows(name, args.providers, records, expected):
            rows.append(args.csv, row | about, COLUMNS)
            times = f"{row['p50_ms']} ms, {row['ratio']} of {row['base']}" if row["status"] == "ok" else row["status"]
            print(f"{name}: {row['provider']}: {times}", flush=True)
            status |= row["status"] != "ok"
    return status


if __name__ == "__main__":
    sys.exit(main())
