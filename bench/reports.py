"""The three public reports that zc was created from, rebuilt, in DeepSpeed and in zc, against a float64 oracle.

    python -m bench.reports [--system zc] [--system deepspeed] [--timeout 180]

Two gloo ranks, SGD with lr 1, so an update *is* a gradient: for each part of the model ``update`` is its length over
the oracle's, and ``norm`` is the norm of the gradient that the system reports over the oracle's. Every loop runs in
processes of its own; one that fails or does not end has its reason in place of figures. Rows go to
bench/results/reports.csv, and docs/reports.md is made from that file.

DeepSpeed is an extra: ``DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed``. A system that is not installed keeps
the rows it has.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor, nn

from bench.measure import ROOT, launch_quietly, versions
from bench.report.rows import read
from bench.report_loops import LOOPS, WORLD_SIZE, Loop, MultiTask, Outcome, make_model, oracle, weights_of

RESULTS, DOCUMENT = ROOT / "bench" / "results" / "reports.csv", ROOT / "docs" / "reports.md"
COLUMNS = ("report", "loop", "system", "version", "part", "update", "off_by", "norm", "reason", "torch", "commit")
PACKAGES = {"zc": "zero-compile", "deepspeed": "deepspeed"}


def zc(loop: Loop, rank: int) -> Outcome:
    import zc as _zc

    model = make_model(loop)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    _zc.compile(
        model,
        optimizer,
        stage=loop.stage,
        backend="inductor" if loop.compiled else "eager",
        bucket_nbytes=1024,
        overlap=loop.overlap,
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
    from zc.registry import sharded

    runtime = sharded(model).runtime
    weights = weights_of(model)
    for bucket in runtime.plan.buckets:
        if bucket.has_master:
            whole = torch.empty(bucket.numel)
            dist.all_gather_into_tensor(whole, runtime.buffers.master_shard[bucket.index].contiguous())
            weights.update({s.name: whole[s.offset : s.stop].view(s.shape).double() for s in bucket.slots})
    return weights


def deepspeed(loop: Loop, rank: int) -> Outcome:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as ds
    from deepspeed.utils import safe_get_full_fp32_param

    ds.comm.init_distributed(dist_backend="gloo") if not ds.comm.is_initialized() else None
    model = make_model(loop)
    zero: dict[str, Any] = {
        "stage": loop.stage,
        "overlap_comm": loop.overlap,
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
    masters = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    weights = {name: param.detach().double().clone() for name, param in masters.items()}
    return Outcome(weights, float("nan") if norm is None else float(norm))


SYSTEMS: dict[str, Callable[[Loop, int], Outcome]] = {"deepspeed": deepspeed, "zc": zc}


# --- rows ---


def compare(loop: Loop, found: Outcome, wanted: Outcome) -> list[dict[str, Any]]:
    """A row for each part of the model: trunk and heads, or layers."""
    start = weights_of(make_model(loop))
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


def work(system: str, loop: Loop, out: Path) -> None:
    """In a rank: one loop of one system; rank 0 writes the rows."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = compare(loop, SYSTEMS[system](loop, rank), oracle(loop))
    dist.barrier()
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured(system: str, number: int, timeout_s: float, extensions: str) -> list[dict[str, Any]]:
    """The rows of one loop, run now. ``extensions``: a folder for what DeepSpeed builds, not the user's own: a build
    that was cut off leaves a lock there, for which every later run waits."""
    loop = LOOPS[number]
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "rows.json", Path(folder) / "log"
        flags = ["--worker", system, "--loop", str(number), "--out", str(out)]
        env = {"TORCH_EXTENSIONS_DIR": extensions}
        ended = launch_quietly("bench.reports", flags, ranks=WORLD_SIZE, env=env, log=log, timeout_s=timeout_s)
        if ended.status:
            rows = [{"report": loop.report, "loop": loop.name, "part": "all", "reason": ended.reason}]
        else:
            rows = json.loads(out.read_text())
    version = importlib.metadata.version(PACKAGES[system])
    return [{**row, "system": system, "version": version, **versions()} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.reports", description=__doc__.split("\n")[0])
    parser.add_argument("--system", choices=SYSTEMS, action="append", default=None)
    parser.add_argument(
        "--document", action="store_true", help="run nothing, write docs/reports.md from the rows there are"
    )
    parser.add_argument("--timeout", type=float, default=180.0, metavar="S", help="of one loop (default 180)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--loop", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, LOOPS[args.loop], args.out)
        return
    rows = read(RESULTS)
    for system in [] if args.document else args.system or list(SYSTEMS):
        if importlib.util.find_spec(system) is None:
            print(f"{system} is not installed: its rows stay as they are")
            continue
        with tempfile.TemporaryDirectory() as built:
            new_rows = [r for k in track(range(len(LOOPS)), system) for r in measured(system, k, args.timeout, built)]
        rows = [r for r in rows if r["system"] != system] + new_rows
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
    "deepspeed#7579":
        "Several tasks an iteration, a trunk and a head each. With DeepSpeed's documented loop (engine.step() "
    "after each backward) a head that only an earlier backward of an iteration uses must still be updated. The "
    "report's own loop calls step() once an iteration; DeepSpeed counts microbatches by its calls, so three iterations "
    "are one update there. Each runs with overlap (DeepSpeed: overlap_comm, contiguous_gradients, buckets of 50 M "
    "elements, as reported) but for the row that says so.",
    "deepspeed#7985":
        "The boundary microbatch must be accumulated before the reduction. Both systems compute in bf16 and are "
    "compared by their fp32 masters, so bf16's rounding of activations is what is left.",
    "deepspeed#8061":
        "The race needs several GPU streams: a CPU runs each system's copies in order, so this row only shows "
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
            if r.get("reason"):
                cells = (r["loop"], f"{r['system']} {r['version']}", r["reason"], "", "", "")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    if rows:
        lines.append(
            f"torch {rows[0]['torch']}, zc at {next((r['commit'] for r in rows if r['system'] == 'zc'), 'unknown')}."
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
