"""The update in host memory, on one shard and one thread: torch's AdamW in its forms and DeepSpeed's CPUAdam, against
the time that the memory needs for the 28 bytes an element that any of them must read and write.

    python -m bench.host_adamw [--mebi 32] [--folder DIR]

One element's update reads weight, gradient and two moments (16 bytes) and writes weight and moments (12). The floor is
those bytes at the best rate that any plain in-place kernel reaches on this thread, measured in the same run. All run
interleaved, on the same numbers, and there is no time for one whose weights are not those of torch's single-tensor
form.
``--folder``: the moments in memory-mapped files there, as offload="disk" has them; warm (in the page cache) and cold
(dropped from it before each update, and waited for on the disk after it), beside what reading and writing those bytes
takes without an update. Rows: bench/results/host_adamw.csv.

DeepSpeed is an extra (``DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed``, and a C++ compiler).
"""

from __future__ import annotations

import argparse
import csv
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.measure import ROOT, device_name, versions
from zc.offload.disk import StateFile, place

RESULTS = ROOT / "bench" / "results" / "host_adamw.csv"
COLUMNS = ("what", "numel", "threads", "ms_p20", "ms_p50", "ms_p80", "floor_ms", "of_floor", "max_error", "device",
           "torch", "python", "commit")  # fmt: skip
LR, NUM_TENSORS = 1e-3, 32


class Timed(NamedTuple):
    before: Callable[[], None]
    run: Callable[[], object]


def shard(numel: int) -> list[nn.Parameter]:
    """Slices of one flat master shard, with gradients that are slices of another."""
    generator = torch.Generator().manual_seed(0)
    master, grad = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    params = [nn.Parameter(part) for part in master.chunk(NUM_TENSORS)]
    for param, part in zip(params, grad.chunk(NUM_TENSORS), strict=True):
        param.grad = part
    return params


def deepspeed_adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=LR, adamw_mode=True, weight_decay=0.01)  # type: ignore[no-any-return]


MAKERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "torch fused (what zc takes)": lambda p: torch.optim.AdamW(p, lr=LR, fused=True),
    "torch foreach": lambda p: torch.optim.AdamW(p, lr=LR, foreach=True),
    "torch single-tensor": lambda p: torch.optim.AdamW(p, lr=LR, foreach=False),
    "DeepSpeed CPUAdam": deepspeed_adam,
}


def nothing() -> None:
    pass


def times(tasks: dict[str, Timed], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, interleaved."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for k in range(repeats + 1):
        for name, task in tasks.items():
            task.before()
            start = time.perf_counter()
            task.run()
            if k:  # the first touches pages
                seconds[name].append(time.perf_counter() - start)
    return seconds


def memory_rate(numel: int, repeats: int) -> dict[str, float]:
    """Bytes/s of plain in-place kernels over [numel] fp32, read and written together."""
    a, b, c = (torch.ones(numel) for _ in range(3))
    kernels = {
        "a *= s": (8, lambda: a.mul_(1.0)),
        "a += b": (12, lambda: a.add_(b, alpha=0.0)),
        "a += b * c": (16, lambda: a.addcmul_(b, c, value=0.0)),
    }
    times_of = times({name: Timed(nothing, run) for name, (_, run) in kernels.items()}, repeats)
    return {name: kernels[name][0] * numel / min(seconds) for name, seconds in times_of.items()}


def on_disk(folder: Path, numel: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer, StateFile]:
    """The fused update with its moments in a state file."""
    params = shard(numel)
    optimizer = torch.optim.AdamW(params, lr=LR, fused=True)
    optimizer.step()
    file = StateFile(folder, 0, 1, place({"exp_avg": (numel, torch.float32), "exp_avg_sq": (numel, torch.float32)}), [])
    for key in file.regions:
        for param, part in zip(params, file.tensor(key).chunk(NUM_TENSORS), strict=True):
            part.copy_(optimizer.state[param][key])
            optimizer.state[param][key] = part
    return params, optimizer, file


def drop(file: StateFile) -> None:
    """What the file holds is on the disk, and nowhere else."""
    file._map.flush()
    file._map.madvise(mmap.MADV_DONTNEED)
    os.fsync(file._fd)
    os.posix_fadvise(file._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def through(file: StateFile) -> None:
    """The file's bytes read and written once, without mapping and without an update."""
    block = 8 << 20
    for offset in range(0, file.nbytes, block):
        os.pwrite(file._fd, os.pread(file._fd, min(block, file.nbytes - offset), offset), offset)
    os.fsync(file._fd)


def rows_of(
    times_of: dict[str, list[float]], floors: dict[str, float], numel: int, errors: dict[str, float]
) -> list[dict[str, Any]]:
    rows = []
    for name, seconds in times_of.items():
        low, middle, high = (statistics.quantiles(seconds, n=10)[k] for k in (1, 4, 7))
        rows.append({
            "what": name, "numel": numel, "threads": torch.get_num_threads(), "ms_p20": f"{low * 1e3:.2f}",
            "ms_p50": f"{middle * 1e3:.2f}", "ms_p80": f"{high * 1e3:.2f}", "floor_ms": f"{floors[name] * 1e3:.2f}",
            "of_floor": f"{floors[name] / middle:.2f}", "max_error": f"{errors.get(name, 0.0):.1e}",
            "device": device_name(torch.device("cpu")), **versions(),
        })  # fmt: skip
    return rows


def compare(numel: int, repeats: int, left_out: list[str]) -> list[dict[str, Any]]:
    rates = memory_rate(numel, repeats)
    print(", ".join(f"{name}: {rate / 1e9:.2f} GB/s" for name, rate in rates.items()))
    floor = 28 * numel / max(rates.values())
    tasks: dict[str, Timed] = {}
    held: dict[str, list[nn.Parameter]] = {}
    for name, make in MAKERS.items():
        if name in left_out:
            continue
        try:
            params = shard(numel)
            optimizer = make(params)
            optimizer.step()
        except (ImportError, RuntimeError, OSError, AttributeError) as error:  # not installed, or does not build
            print(f"{name}: left out, {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            continue
        held[name] = params
        tasks[name] = Timed(nothing, optimizer.step)
    errors = difference(held)
    bad = [name for name, error in errors.items() if not error < 1e-5]
    if bad:
        raise SystemExit(f"after one update the weights of {bad} are not those of the single-tensor form: {errors}")
    return rows_of(times(tasks, repeats), dict.fromkeys(tasks, floor), numel, errors)


def difference(held: dict[str, list[nn.Parameter]]) -> dict[str, float]:
    reference: list[Tensor] = [p.detach() for p in held["torch single-tensor"]]
    return {
        name: max(float((p.detach() - r).abs().max()) for p, r in zip(params, reference, strict=True))
        for name, params in held.items()
    }


def compare_disk(folder: Path, numel: int, repeats: int) -> list[dict[str, Any]]:
    _, optimizer, file = on_disk(folder, numel)

    def step() -> None:
        optimizer.step()

    def ahead() -> None:
        for name in file.regions:
            file.prefetch(name)
        optimizer.step()
        file._map.flush()
        os.fsync(file._fd)

    warm = Timed(nothing, step)
    cold = {
        "fused, moments on disk, cold": Timed(lambda: drop(file), ahead),
        "the same bytes read and written, cold": Timed(lambda: drop(file), lambda: through(file)),
    }
    times_of = times({"fused, moments on disk, in the page cache": warm}, repeats)
    times_of.update(times(cold, max(4, repeats // 3)))
    floor = statistics.median(times_of["the same bytes read and written, cold"])
    memory = 28 * numel / max(memory_rate(numel, repeats).values())
    floors = dict.fromkeys(cold, floor)
    return rows_of(times_of, {**floors, "fused, moments on disk, in the page cache": memory}, numel, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebi", type=int, default=32, help="elements of the shard, in Mi")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="measure the moments in files under it as well")
    parser.add_argument("--without", action="append", default=[], choices=list(MAKERS)[3:], help="leaves one out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numel = args.mebi * 2**20
    rows = compare(numel, args.repeats, args.without)
    if args.folder is not None:
        rows += compare_disk(args.folder, numel, args.repeats)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with open(RESULTS, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for row in rows:
        print(f"{row['what']:<44} p50 {row['ms_p50']:>9} ms   floor {row['floor_ms']:>9} ms   {row['of_floor']} of it")


if __name__ == "__main__":
    main()
