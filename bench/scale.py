"""How cost grows: with the number of ranks, of layers, and of buckets. Rows to bench/results/scale.csv.

    python -m bench.scale plan               # bytes a rank, plan seconds, modelled communication, W = 8 to 4,096
    python -m bench.scale pace               # the paced group's time against its model's
    python -m bench.scale paced --worlds 8 64 512 4096
    python -m bench.scale depth --depths 12 24 48 96 --processes 2   # the first step, cold and warm
    python -m bench.scale host               # microseconds of Python a step, by number of buckets
    python -m bench.scale exchange           # a few bytes from every rank to every other, on real processes

Points of ``paced`` and ``depth`` that the session has already are not measured again; where one has no number, the
command fails at its end. ``pace`` fails where the paced group is more than 3 % off its model. ``plan`` moves no byte:
it asks the plan and the network's model. ``paced`` runs bench.train as rank 0 of W.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from torch import nn

from bench.cases import CASES, PROVIDERS
from bench.cases.models import MODELS, GPTConfig, make_model
from bench.measure import ROOT, device_name, end_on_sigterm, launch, launch_quietly, versions
from bench.network import NETWORKS
from bench.network.paced import init_paced
from bench.report import rows

RESULTS = ROOT / "bench" / "results" / "scale.csv"
COLUMNS = ("session", "time", "kind", "series", "x", "value", "unit", "device", "torch", "python", "commit")
MB = 1e6
PACE_TOLERANCE = 3.0  # percent: beyond, what is measured on a paced network means nothing
Done = Callable[[str, str, int], bool]  # kind, series, x: whether this session has the point already


class Point(NamedTuple):
    """One measured or modelled number: ``value`` [unit] of ``series`` at ``x``."""

    kind: str
    series: str
    x: int
    value: float
    unit: str


def plan_points(model: str, worlds: list[int]) -> Iterator[Point]:
    """``model`` in bf16: persistent bytes of rank 0, seconds to plan, modelled seconds of communication an update."""
    from zc.config import Config
    from zc.planning.packing import ParamSpec, make_plan
    from zc.planning.plan import flat

    with torch.device("meta"):
        named = dict(make_model(model, GPTConfig(vocab=32768, seq=2048), 0, "meta").named_parameters())
    specs = [ParamSpec(n, tuple(p.shape), torch.bfloat16, torch.device("cuda")) for n, p in named.items()]
    for name, nbytes in (("by default", None), ("of 25 MiB", 25 * 2**20)):
        buckets = make_plan(specs, Config(bucket_nbytes=nbytes), flat(worlds[0])).buckets
        yield Point("number of buckets", f"{model}, {name}", worlds[0], len(buckets), "buckets")
        largest = max(b.numel * b.grad_dtype.itemsize for b in buckets)
        yield Point("largest bucket", f"{model}, {name}", worlds[0], largest / MB, "MB")
    for world in worlds:
        for reduce in ("exact", "native"):
            started = time.perf_counter()
            plan = make_plan(specs, Config(reduce=reduce), flat(world))
            seconds = time.perf_counter() - started
            kind = "all_to_all" if reduce == "exact" else "reduce_scatter"
            for network in NETWORKS.values():
                if network.name == "zero":
                    continue
                wire = sum(
                    network.seconds(kind, b.numel * b.grad_dtype.itemsize, world)
                    + network.seconds("all_gather", b.numel * b.param_dtype.itemsize, world)
                    for b in plan.buckets
                )
                yield Point("modelled communication", f"{reduce}, {network.name}", world, wire * 1e3, "ms/update")
        yield Point("plan", model, world, seconds * 1e3, "ms")
        # bf16 weights whole; master, accumulator and two moments in fp32, a shard each (docs/design.md's table)
        nbytes = sum(2 * b.numel + 16 * b.layout.numel_shard for b in plan.buckets)
        yield Point("persistent bytes without the ring", model, world, nbytes / MB, "MB/rank")
        padding = sum(b.layout.numel_padding for b in plan.buckets) / sum(b.numel for b in plan.buckets)
        yield Point("padding", model, world, 100 * padding, "%")


def pace_points(device: torch.device) -> Iterator[Point]:
    """How far a sequence of collectives on the real clock is from the model: percent of the model's time, 3 at most."""
    sizes = [1 << 20, 8 << 20, 1 << 18, 16 << 20, 4 << 20]  # elements of bf16
    for network in NETWORKS.values():
        if network.name == "zero" or (device.type == "cpu" and network.busbw > 5e9):
            continue  # faster than this processor copies: the line would be late, not the model wrong
        init_paced(network, 8)
        flats = [torch.zeros(numel, dtype=torch.bfloat16, device=device) for numel in sizes]
        shards = [torch.zeros(numel // 8, dtype=torch.bfloat16, device=device) for numel in sizes]
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        expected = sum(network.seconds("all_gather", f.nbytes, 8) for f in flats)
        seconds = []
        for _ in range(4):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            works = [gather(flat, shard, async_op=True) for flat, shard in zip(flats, shards, strict=True)]
            for work in works:
                work.wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        dist.destroy_process_group()
        yield Point("paced group against its model", network.name, 8, 100 * (min(seconds[1:]) / expected - 1), "%")


def train_once(
    provider: str, flags: list[str], timeout_s: float, cache: str | None = None, ranks: int = 1
) -> dict[str, object] | str:
    """One run of bench.train: rank 0's record, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="scale-") as out:
        env = {"TORCHINDUCTOR_CACHE_DIR": cache or f"{out}/cache"}
        line = [*PROVIDERS[provider].flags, *flags, "--out", out]
        ended = launch_quietly(
            "bench.train", line, ranks=ranks, env=env, log=Path(out) / "log.txt", timeout_s=timeout_s
        )
        record_path = Path(out) / "run.json"
        if not record_path.exists():
            print(ended.tail, file=sys.stderr, flush=True)
            return ended.reason
        record: dict[str, object] = json.loads(record_path.read_text())["ranks"][0]
        return record


def paced_points(
    case: str, worlds: list[int], providers: list[str], networks: list[str], done: Done, failed: list[str]
) -> Iterator[Point]:
    """Median step of rank 0 on each network, and on one that costs nothing: the difference is exposed communication.
    What has no number goes to ``failed``, with its reason."""
    with tempfile.TemporaryDirectory(prefix="scale-cache-") as cache:
        for world in worlds:
            for provider in providers:
                for network in ("zero", *networks):
                    if done(f"paced step, {case}", f"{provider}, {network}", world):
                        continue
                    flags = [*CASES[case].all_flags, "--paced", network, "--world", str(world)]
                    # numbered: the compiler that Inductor calls takes no folder with a space
                    record = train_once(provider, flags, 400, f"{cache}/{providers.index(provider)}")
                    if isinstance(record, str):
                        failed.append(f"{provider}, {network}, W={world}: {record}")
                        continue
                    step_s = statistics.median(record["step_s"][6:])  # type: ignore[index]
                    yield Point(f"paced step, {case}", f"{provider}, {network}", world, step_s * 1e3, "ms")


def depth_points(
    model: str, depths: list[int], providers: list[str], ranks: int, done: Done, failed: list[str]
) -> Iterator[Point]:
    """Seconds of the first step of a narrow GPT, or transformers' Llama, by depth: with every cache empty, and by new
    processes that find the caches of the first ones. What has no number goes to ``failed``, with its reason."""
    narrow = (
        "--vocab 256 --seq 32 --width 64 --heads 4 --batch 1 --steps 2 --settle 1 --clip 0 --eval-batches 0 --quiet "
        f"--model {model}"
    )
    among = "" if ranks == 1 else f" on {ranks} ranks"
    kinds = [f"first step{among}, {start}" for start in ("cold", "warm")]
    for depth in depths:
        for provider in providers:
            series = provider if model == "gpt" else f"{provider}, {model}"
            if all(done(kind, series, depth) for kind in kinds):
                continue
            with tempfile.TemporaryDirectory(prefix="scale-cache-") as cache:
                for kind in kinds:
                    record = train_once(provider, [*narrow.split(), "--layers", str(depth)], 850, cache, ranks)
                    if isinstance(record, str):
                        failed.append(f"{series}, {depth} layers: {record}")
                        break
                    yield Point(kind, series, depth, float(record["first_step_s"]), "s")  # type: ignore[arg-type]


def host_points(counts: list[int], world: int, num_steps: int = 40, layers: int = 64) -> Iterator[Point]:
    """Microseconds of a whole step of ``layers`` tiny matrices, by number of buckets; and the slope a bucket.

    The arithmetic is next to nothing and the network costs nothing: what is left is Python, dispatch and threads.
    """
    import zc

    width = 16
    nbytes = width * width * 4
    if world > 1:
        init_paced("zero", world)
    points: list[tuple[int, float]] = []
    for count in counts:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        zc.compile(model, optimizer, bucket_nbytes=nbytes * layers // count)
        x = torch.randn(1, width)
        seconds = []
        for _ in range(num_steps):
            started = time.perf_counter()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - started)
        points.append((count, statistics.median(seconds[5:]) * 1e6))
        yield Point("host time of a step", f"zc stage 2, W={world}", count, points[-1][1], "us")
    if len(points) > 1:
        slope = statistics.linear_regression(*zip(*points, strict=True)).slope
        yield Point("host time a bucket", f"zc stage 2, W={world}", max(counts), slope, "us/bucket")
    if world > 1:
        dist.destroy_process_group()


def exchange_points(ranks: list[int]) -> Iterator[Point]:
    """What ranks tell each other at a boundary, in two ways (bench/network/exchange.py)."""
    for num in ranks:
        with tempfile.TemporaryDirectory(prefix="exchange-") as folder:
            out = Path(folder) / "out.json"
            launch("bench.network.exchange", ["--out", str(out)], ranks=num)
            for way, milliseconds in json.loads(out.read_text()).items():
                yield Point("exchange of 300 bytes", way, num, milliseconds, "ms")


def append(path: Path, session: str, point: Point) -> None:
    about = {"session": session, "time": rows.now(), "device": device_name(torch.device("cpu")), **versions()}
    rows.append(path, {**point._asdict(), **about, "value": f"{point.value:.6g}"}, COLUMNS)


def draw(path: Path, folder: Path) -> None:
    """One chart per kind that has more than one x. Each series shows one commit, the newest; later rows win."""
    from bench.report.charts import lines

    kinds: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    table = rows.read(path)
    newest = {(row["kind"], row["series"]): row["commit"] for row in table}
    for row in (row for row in table if row["commit"] == newest[row["kind"], row["series"]]):
        series = kinds.setdefault((row["kind"], row["unit"]), {}).setdefault(row["series"], {})
        series[int(row["x"])] = float(row["value"])
    for (kind, unit), series in kinds.items():
        if max(len(points) for points in series.values()) > 1:
            x = {"first step, cold": "layers", "host time of a step": "buckets"}.get(kind, "ranks")
            slug = "".join(c if c.isalnum() else "-" for c in kind)
            points_of = {name: list(points.items()) for name, points in series.items()}
            lines(kind, points_of, folder / f"scale-{slug}.png", x=x, y=unit, log=x != "layers")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.scale", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("kinds", nargs="+", choices=("plan", "pace", "paced", "depth", "host", "exchange"))
    add("--device", choices=("cpu", "cuda"), default="cpu", help="pace")
    add("--model", choices=MODELS, default="llama-3b", help="plan")
    add("--case", choices=CASES, default="tiny", help="paced")
    add("--worlds", type=int, nargs="+", default=[8, 32, 128, 512, 2048, 4096], help="plan, paced")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8, 16], help="exchange: processes of this machine")
    add("--networks", nargs="+", choices=NETWORKS, default=["ethernet"], help="paced")
    add("--deep-model", choices=("gpt", "llama-transformers"), default="gpt", help="depth")
    add("--depths", type=int, nargs="+", default=[12, 24, 48, 96])
    add("--processes", type=int, default=1, help="depth: ranks of a run")
    add("--buckets", type=int, nargs="+", default=[1, 4, 16, 64], help="host")
    add("--providers", nargs="+", choices=PROVIDERS, default=["zc stage 2", "compiled, no communication"])
    add("--csv", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    end_on_sigterm()
    session = rows.fingerprint()
    measured = {(r["kind"], r["series"], int(r["x"])) for r in rows.read(args.csv) if r["session"] == session}
    done: Done = lambda *point: point in measured  # noqa: E731
    failed: list[str] = []
    makers: dict[str, Callable[[], Iterator[Point]]] = {
        "plan": lambda: plan_points(args.model, args.worlds),
        "pace": lambda: pace_points(torch.device(args.device)),
        "paced": lambda: paced_points(args.case, args.worlds, args.providers, args.networks, done, failed),
        "depth": lambda: depth_points(
            args.deep_model, args.depths, args.providers, args.processes, done, failed
        ),
        "exchange": lambda: exchange_points(args.ranks),
        "host": lambda: (p for world in (1, 8) for p in host_points(args.buckets, world)),
    }
    console = Console()
    off: list[str] = []
    for kind in args.kinds:
        for point in track(makers[kind](), description=kind, console=console):
            append(args.csv, session, point)
            if kind == "pace" and abs(point.value) > PACE_TOLERANCE:
                off.append(f"{point.series}: {point.value:+.2f} %, more than {PACE_TOLERANCE:g} % off its model")
            console.print(f"{point.kind}: {point.series}: {point.x}: {point.value:.4g} {point.unit}", soft_wrap=True)
    draw(args.csv, ROOT / "docs" / "benchmarks")
    wrong = [f"paced group: {text}" for text in off] + [f"no number for {text}" for text in failed]
    if wrong:
        sys.exit("; ".join(wrong))
    return 0


if __name__ == "__main__":
    sys.exit(main())
