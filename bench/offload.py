"""A training step without offload, with it, and with its state on a disk: time, bytes, and `zc.plan`'s floor.

    python -m bench.offload [--device cuda] [--layers 8] [--features 1024] [--folder DIR]

One rank, fp32, AdamW, interleaved in one process, the same data; losses must be the same within 1e-4. The floor is
made of what is measured here, in the same run: forward and backward without offload (compute), copies between the
device and page-locked memory (bus), and torch's fused AdamW alone on host memory (update). On a CPU nothing moves and
the update can't run beside the backward, so there the rows say what offload's copies cost where they are of no use.
Rows: bench/results/offload.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

import zc
from bench.measure import ROOT, device_name, versions
from zc.offload.host_step import HostMemory

RESULTS = ROOT / "bench" / "results" / "offload.csv"
MODES: dict[str, dict[str, Any]] = {
    "no offload": {},
    "offload='cpu'": {"offload": "cpu"},
    "offload='cpu', accumulate on device": {"offload": "cpu", "offload_accumulate": "device"},
    "offload='disk'": {"offload": "disk"},
}


def network(features: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(features, features, bias=False), nn.GELU())))


class Run:
    """One mode's model, and the seconds of its steps."""

    def __init__(self, args: argparse.Namespace, options: dict[str, Any]) -> None:
        self.device, self.batch, self.features = torch.device(args.device), args.batch, args.features
        model = network(args.features, args.layers).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        self.model, self.optimizer = zc.compile(model, optimizer, backend=args.backend, **options)
        self.seconds: list[float] = []
        self.compute: list[float] = []
        self.losses: list[float] = []
        self._before, self.device_nbytes = before, 0
        self.step(0)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(self.batch, self.features, generator=generator).to(self.device)
        self._wait()
        start = time.perf_counter()
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        if number == 0 and self.device.type == "cuda":  # gradients are there still, as `zc.plan` counts
            self.device_nbytes = torch.cuda.memory_allocated() - self._before
        self.optimizer.zero_grad()
        self._wait()
        self.seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        (self.model(x) - x).square().mean().backward()
        self.optimizer.zero_grad()
        self._wait()
        self.compute.append(time.perf_counter() - start)
        self.losses.append(float(loss))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def bus_bandwidth(device: torch.device, numel: int = 1 << 26) -> float:
    """Bytes/s from the device to page-locked memory, the slower way of the two."""
    memory = HostMemory(device)
    host, there = memory.zeros(numel, torch.float32), torch.zeros(numel, device=device)
    rates = []
    for out, src in ((host, there), (there, host)):
        for _ in range(4):
            if device.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            out.copy_(src, non_blocking=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        rates.append(4 * numel / seconds)
    return min(rates)


def update_bandwidth(numel: int) -> float:
    """Bytes/s of torch's fused AdamW at 28 an element, on the threads that an update has."""
    param = nn.Parameter(torch.randn(numel))
    param.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([param], fused=True)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return 28 * numel / statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", help="where the disk's files go; a temporary one if left out")
    args = parser.parse_args()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        runs = {
            name: Run(args, {**options, **({"offload_dir": folder} if options.get("offload") == "disk" else {})})
            for name, options in MODES.items()
        }
        for number in range(1, args.steps + 1):
            for run in runs.values():
                run.step(number)
        rows = rows_of(args, device, runs)
        del runs
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with open(RESULTS, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(f"{row['mode']:<38} p50 {row['ms_p50']:>9} ms, floor {row['floor_ms']:>9} ms")


def rows_of(args: argparse.Namespace, device: torch.device, runs: dict[str, Run]) -> list[dict[str, Any]]:
    reference = runs["no offload"].losses
    medians = {name: statistics.median(run.seconds[2:]) for name, run in runs.items()}
    compute = statistics.median(runs["no offload"].compute[2:])
    numel = args.layers * args.features**2
    bus, update = bus_bandwidth(device), update_bandwidth(numel)
    rows = []
    for name, run in runs.items():
        worst = max(abs(a - b) for a, b in zip(run.losses, reference, strict=True))
        if not worst < 1e-4:
            raise SystemExit(f"{name}: the losses are {worst} off those without offload")
        with torch.device("meta"):
            model = network(args.features, args.layers)
        planned = zc.plan(
            model, world_size=1, compute_seconds=compute, bus_bandwidth=bus, host_bandwidth=update,
            **MODES[name],
        )  # fmt: skip
        low, _, high = statistics.quantiles(run.seconds[2:], n=4)
        rows.append({
            "mode": name, "features": args.features, "layers": args.layers, "batch": args.batch, "params": numel,
            "ms_p25": f"{low * 1e3:.2f}", "ms_p50": f"{medians[name] * 1e3:.2f}", "ms_p75": f"{high * 1e3:.2f}",
            "floor_ms": f"{(planned.step_floor or 0.0) * 1e3:.2f}", "bus_GBps": f"{bus / 1e9:.2f}",
            "update_GBps": f"{update / 1e9:.2f}", "planned_device": planned.device_nbytes,
            "planned_host": planned.host_nbytes, "planned_disk": sum(planned.disk.values()),
            "device_growth": run.device_nbytes, "worst_loss_difference": f"{worst:.1e}",
            "threads": torch.get_num_threads(), "device": device_name(device), **versions(),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
