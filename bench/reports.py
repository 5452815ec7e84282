"""The three public reports that zc was created from, rebuilt, in DeepSpeed and in zc, against a float64 oracle.

    python -m bench.reports [--system zc] [--system deepspeed]

DS#7579 (multi-task losses, ZeRO-2 with offload: buckets that stay empty), PR#7985 (the boundary microbatch that missed
the reduction) and DS#8061 (many producers of one bucket). Two gloo ranks, SGD with lr 1, so an update *is* a gradient:
for each part of the model ``update`` is its length over the oracle's, and ``norm`` is the norm of the gradient that the
system reports over the oracle's. Rows go to bench/results/reports.csv, and docs/reports.md is made from that file.

DeepSpeed is an extra: ``DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed``. A system that is not installed keeps
the rows it has.
"""

from __future__ import annotations

import argparse
import copy
import csv
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.measure import ROOT, launch, versions

RESULTS, DOCUMENT = ROOT / "bench" / "results" / "reports.csv", ROOT / "docs" / "reports.md"
COLUMNS = ("report", "loop", "system", "version", "part", "update", "off_by", "norm", "torch", "commit")
WORLD_SIZE, DIM, TASKS = 2, 16, 3
Batch = tuple[Tensor, Tensor]


class MultiTask(nn.Module):
    """A trunk and a head for each task (DS#7579)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.heads = nn.ModuleList(nn.Linear(DIM, 4) for _ in range(TASKS))

    def forward(self, x: Tensor, tasks: tuple[int, ...]) -> Tensor:
        shared = self.trunk(x)
        return torch.stack([self.heads[task](shared) for task in tasks])


class Probe(nn.Sequential):
    """The model of PR#7985's probe."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def task_batch(rank: int, update: int, microbatch: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * update + microbatch)
    return torch.randn(8, DIM, generator=generator), torch.randn(8, 4, generator=generator)


def probe_batch(rank: int, update: int, microbatch: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + rank)  # as the report seeds it
    x = torch.randn(4 * (microbatch + 1), 64, generator=generator)[-4:]
    return x, torch.zeros_like(x)


def task_loss(model: nn.Module, batch: Batch, tasks: tuple[int, ...]) -> Tensor:
    """The sum of the tasks' losses."""
    return (model(batch[0], tasks) - batch[1]).square().mean((1, 2)).sum()


def probe_loss(model: nn.Module, batch: Batch, tasks: tuple[int, ...]) -> Tensor:
    out = model(batch[0])
    return (out.float() if out.dtype is torch.bfloat16 else out).square().mean()


@dataclass(frozen=True)
class Loop:
    """One loop of a report. ``backwards``: the tasks of each backward of an update, whose losses are averaged.
    ``step_each``: DeepSpeed's documented loop calls engine.step() behind each backward, the reports' own once."""

    report: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch, tuple[int, ...]], Tensor]
    backwards: tuple[tuple[int, ...], ...]
    stage: int
    offload: bool = False
    step_each: bool = True
    updates: int = 1
    dtype: torch.dtype = torch.float32
    compiled: bool = False


def _tasks(name: str, backwards: tuple[tuple[int, ...], ...], **options: Any) -> Loop:
    return Loop("DS#7579", name, MultiTask, task_batch, task_loss, backwards, **options)


APART, SUMMED = ((0,), (1,), (2,)), ((0, 1, 2),)
LOOPS = (
    _tasks("a backward a task, ZeRO-2 with offload", APART, stage=2, offload=True),
    _tasks("a backward a task, one step() an iteration, ZeRO-2 with offload", APART, stage=2, offload=True,
           step_each=False, updates=3),
    _tasks("one backward of the summed losses, ZeRO-2 with offload", SUMMED, stage=2, offload=True),
    _tasks("a backward a task, ZeRO-2", APART, stage=2),
    _tasks("a backward a task, ZeRO-1", APART, stage=1),
    Loop("PR#7985", "4 microbatches, bf16 model, fp32 accumulation, ZeRO-1", Probe, probe_batch, probe_loss,
         ((),) * 4, stage=1, dtype=torch.bfloat16),
    Loop("DS#8061", "compiled, ZeRO-2, overlap_comm, on a CPU", MultiTask, task_batch, task_loss, SUMMED, stage=2,
         compiled=True),
)  # fmt: skip


class Outcome(NamedTuple):
    """What a system made of a loop: the weights after it, in fp32, and the gradient's norm at the last update (NaN
    where it says none)."""

    weights: dict[str, Tensor]
    norm: float


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().double().clone() for name, param in model.named_parameters()}


def _model(loop: Loop) -> nn.Module:
    torch.manual_seed(0)
    return loop.make().to(loop.dtype)


# --- systems ---


def oracle(loop: Loop, rank: int) -> Outcome:
    """One process, float64, all ranks' batches: no ranks, buckets or stages."""
    model = _model(loop).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norm = 0.0
    for update in range(loop.updates):
        optimizer.zero_grad()
        for every in range(WORLD_SIZE):
            for k, tasks in enumerate(loop.backwards):
                x, y = loop.batch(every, update, k)
                batch = x.to(loop.dtype).double(), y.double()
                (loop.loss(model, batch, tasks) / len(loop.backwards) / WORLD_SIZE).backward()  # type: ignore[no-untyped-call]
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
        optimizer.step()
    return Outcome(_weights(model), norm)


def zc(loop: Loop, rank: int) -> Outcome:
    import zc as _zc

    model = _model(loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _zc.compile(
        model,
        optimizer,
        stage=loop.stage,
        backend="inductor" if loop.compiled else "eager",
        bucket_nbytes=1024,
        offload="cpu" if loop.offload else None,
    )
    norm = 0.0
    for update in range(loop.updates):
        for k, tasks in enumerate(loop.backwards):
            x, y = loop.batch(rank, update, k)
            (loop.loss(model, (x.to(loop.dtype), y), tasks) / len(loop.backwards)).backward()  # type: ignore[no-untyped-call]
        norm = _zc.clip_grad_norm_(model, float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(_masters(model, _zc), norm)


def _masters(model: nn.Module, _zc: Any) -> dict[str, Tensor]:
    """The fp32 masters where the parameters are narrower: bf16 would round the update away."""
    from zc.api import sharded

    runtime = sharded(model).runtime
    found = _weights(model)
    for bucket in runtime.plan.buckets:
        if bucket.has_master:
            whole = torch.empty(bucket.numel)
            dist.all_gather_into_tensor(whole, runtime.buffers.master_shard[bucket.index].contiguous())
            found.update({s.name: whole[s.offset : s.stop].view(s.shape).double() for s in bucket.slots})
    return found


def deepspeed(loop: Loop, rank: int) -> Outcome:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds
    from deepspeed.utils import safe_get_full_fp32_param

    ds.comm.init_distributed(dist_backend="gloo") if not ds.comm.is_initialized() else None
    model = _model(loop)
    zero: dict[str, Any] = {
        "stage": loop.stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
    }
    if loop.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": len(loop.backwards),
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": loop.dtype is torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    engine, _, _, _ = ds.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    if loop.compiled:
        engine.compile(backend="inductor")
    for update in range(loop.updates):
        for k, tasks in enumerate(loop.backwards):
            x, y = loop.batch(rank, update, k)
            engine.backward(loop.loss(engine, (x.to(loop.dtype), y), tasks))
            if loop.step_each:
                engine.step()
        if not loop.step_each:
            engine.step()
    norm = engine.get_global_grad_norm()
    found = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    weights = {name: param.detach().double().clone() for name, param in found.items()}
    return Outcome(weights, float("nan") if norm is None else float(norm))


SYSTEMS: dict[str, Callable[[Loop, int], Outcome]] = {"deepspeed": deepspeed, "zc": zc}


# --- rows ---


def compare(loop: Loop, found: Outcome, wanted: Outcome) -> list[dict[str, Any]]:
    """A row for each part of the model: trunk and heads, or layers."""
    start = _weights(_model(loop))
    parts: dict[str, list[str]] = {}
    for name in start:
        head = name.split(".")
        parts.setdefault(
            " ".join(head[:2]) if head[0] == "heads" else "trunk" if loop.make is MultiTask else "all", []
        ).append(name)
    rows = []
    for part, names in parts.items():
        got = torch.cat([(found.weights[n] - start[n]).flatten() for n in names])
        oracle_update = torch.cat([(wanted.weights[n] - start[n]).flatten() for n in names])
        scale = oracle_update.norm().item()
        rows.append(
            {
                "report": loop.report,
                "loop": loop.name,
                "part": part,
                "update": f"{got.norm().item() / scale:.4f}",
                "off_by": f"{(got - oracle_update).norm().item() / scale:.1e}",
                "norm": "" if found.norm != found.norm else f"{found.norm / wanted.norm:.4f}",
            }
        )
    return rows


def work(system: str, out: str) -> None:
    """In a rank: all loops of one system; rank 0 writes the rows."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows: list[dict[str, Any]] = []
    package = importlib.import_module(system)
    for loop in LOOPS:
        torch._dynamo.reset()
        wanted = oracle(copy.copy(loop), rank)
        made = compare(loop, SYSTEMS[system](loop, rank), wanted)
        rows += [{**row, "system": system, "version": package.__version__, **versions()} for row in made]
        dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def read() -> list[dict[str, str]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.reports", description=__doc__.split("\n")[0])
    parser.add_argument("--system", choices=SYSTEMS, action="append", default=None)
    parser.add_argument(
        "--document", action="store_true", help="run nothing, write docs/reports.md from the rows there are"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.out)
        return
    rows = read()
    for system in [] if args.document else args.system or list(SYSTEMS):
        if importlib.util.find_spec(system) is None:
            print(f"{system} is not installed: its rows stay as they are")
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "rows.json")
            launch("bench.reports", ["--worker", system, "--out", out], ranks=WORLD_SIZE)
            rows = [r for r in rows if r["system"] != system] + json.loads(Path(out).read_text())
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    DOCUMENT.write_text(document(rows))


HEAD = """# The three reports, rebuilt

Two gloo ranks, SGD with learning rate 1, so an update is a gradient. *update*: the length of a part's update over that of
one process in float64: 1 is right, 0 means that the part never moved. *off by*: the relative distance between the two.
*norm*: the gradient norm that the system reports over the oracle's. Made by `python -m bench.reports` from
`bench/results/reports.csv`. Do not edit.
"""  # noqa: E501
TEXTS = {
    "DS#7579": "Several tasks an iteration, a trunk and a head each. With DeepSpeed's documented loop (engine.step() "
    "behind each backward) a head that only an earlier backward of an iteration uses must still be updated. The "
    "report's own loop calls step() once an iteration; DeepSpeed counts microbatches by its calls, so three iterations "
    "are one update there.",
    "PR#7985": "The boundary microbatch must be accumulated before the reduction. Both systems compute in bf16 and are "
    "compared by their fp32 masters, so bf16's rounding of activations is what is left.",
    "DS#8061": "The race needs several GPU streams: a CPU runs each system's copies in order, so this row only shows "
    "that the loop is right without them. What zc proves of its streams is in docs/proof.md, and tests/proof rebuilds "
    "the report under adversarial interleavings.",
}


def document(rows: list[dict[str, str]]) -> str:
    lines = [HEAD]
    for report, text in TEXTS.items():
        lines += [
            f"## {report}",
            "",
            text,
            "",
            "| loop | system | part | update | off by | norm |",
            "|---|---|---|--:|--:|--:|",
        ]
        order = {loop.name: k for k, loop in enumerate(LOOPS)}
        chosen = [r for r in rows if r["report"] == report]
        for r in sorted(chosen, key=lambda r: (order.get(r["loop"], 99), r["system"])):
            cells = (
                r["loop"],
                f"{r['system']} {r['version']}",
                r["part"],
                r["update"],
                r["off_by"],
                r["norm"] or "none given",
            )
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if rows:
        lines.append(
            f"torch {rows[0]['torch']}, zc at {next((r['commit'] for r in rows if r['system'] == 'zc'), 'unknown')}."
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
