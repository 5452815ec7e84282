"""The Triton kernels of zc.kernels on one GPU: fraction of a copy's bandwidth, and what else torch has for the job.

    python -m bench.gpu_kernels --csv bench/results/gpu_kernels.csv [--sizes 1 16 64 256 1024] [--rounds 50]

Not yet run on a GPU: written and type-checked where there is none. ``fraction`` is the median time of a
device-to-device copy that moves the same bytes, over the case's median: 1.0 is as fast as the memory copies. Runs take
turns, each timed by a pair of events; a row counts only after its result was checked. A rival that raises is written
down as such.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.kernels import packed, shapes_of, small_norms
from bench.measure import commit, device_name
from zc import kernels
from zc.kernels._triton import triton
from zc.kernels.flatten_cast import flatten_cast_reference

Run = Callable[[], object]
F32, B16 = torch.float32, torch.bfloat16


class Case(NamedTuple):
    """One kernel at one size: the bytes it must move, itself first among ``runs``, and a check of its result."""

    name: str
    nbytes_moved: int
    runs: dict[str, Run]
    check: Callable[[], bool]


def flatten_case(nbytes: int, src: torch.dtype, dst: torch.dtype, device: torch.device) -> Case:
    """``nbytes`` of bucket, a decoder's list of gradients."""
    shapes = shapes_of(nbytes // dst.itemsize)
    offsets, total = packed(shapes)
    grads = [torch.randn(shape, device=device).to(src) for shape in shapes]
    out = torch.empty(total, dtype=dst, device=device)
    theirs = torch.zeros(total, dtype=dst, device=device)
    slots = [theirs[offset : offset + g.numel()].view(g.shape) for g, offset in zip(grads, offsets, strict=True)]
    numel_chunk = sum(-(-g.shape[0] // 8) * (g.numel() // g.shape[0]) for g in grads)
    chunks = torch.empty(8, numel_chunk, dtype=dst, device=device)
    compiled = torch.compile(flatten_cast_reference, dynamic=False)

    def check() -> bool:
        out.fill_(torch.nan)
        for slot, grad in zip(slots, grads, strict=True):
            slot.copy_(grad)
        kernels.flatten_cast(out, grads, offsets)
        return torch.equal(out, theirs)

    def copy_loop() -> None:
        for slot, grad in zip(slots, grads, strict=True):
            slot.copy_(grad)

    runs: dict[str, Run] = {
        "zc": lambda: kernels.flatten_cast(out, grads, offsets),
        "foreach_copy": lambda: torch._foreach_copy_(slots, grads),
        "cat+to": lambda: torch.cat([grad.view(-1) for grad in grads]).to(dst),
        "chunk_cat": lambda: torch._chunk_cat(grads, dim=0, num_chunks=8, out=chunks),
        "copy loop": copy_loop,
        "compiled reference": lambda: compiled(out, grads, offsets, 1.0),
    }
    return Case(f"flatten_cast {src}->{dst}", sum(g.nbytes for g in grads) + out.nbytes, runs, check)


def accumulate_case(nbytes: int, device: torch.device) -> Case:
    shapes = shapes_of(nbytes // 4)
    offsets, total = packed(shapes)
    grads = [torch.randn(shape, device=device).to(B16) for shape in shapes]
    acc, theirs = torch.zeros(total, device=device), torch.zeros(total, device=device)
    slots = [theirs[offset : offset + g.numel()].view(g.shape) for g, offset in zip(grads, offsets, strict=True)]

    def check() -> bool:
        acc.zero_()
        theirs.zero_()
        kernels.accumulate_cast(acc, grads, offsets)
        torch._foreach_add_(slots, grads)
        return torch.equal(acc, theirs)

    runs: dict[str, Run] = {
        "zc": lambda: kernels.accumulate_cast(acc, grads, offsets),
        "foreach_add": lambda: torch._foreach_add_(slots, grads),
    }
    return Case("accumulate_cast bf16", sum(g.nbytes for g in grads) + 2 * acc.nbytes, runs, check)


def reduce_case(nbytes: int, wire: torch.dtype, world_size: int, device: torch.device) -> Case:
    """``nbytes`` of received rows, the whole bucket in the wire dtype."""
    rows = torch.randn(world_size, nbytes // wire.itemsize // world_size, device=device).to(wire)
    out, theirs = torch.zeros(rows.shape[1], device=device), torch.zeros(rows.shape[1], device=device)
    scale = 1 / world_size

    # not the reference: its pieces, sized for a CPU's cache, are a graph of a thousand nodes here
    @torch.compile(dynamic=False)
    def compiled() -> None:
        theirs.add_(rows.sum(0, dtype=F32), alpha=scale)

    def check() -> bool:
        out.zero_()
        total = rows[0].to(F32, copy=True)
        for row in rows[1:]:
            total += row
        kernels.reduce_rows(rows, out, scale=scale, add=True)
        return torch.equal(out, total * scale)

    runs: dict[str, Run] = {
        "zc": lambda: kernels.reduce_rows(rows, out, scale=scale, add=True),
        "sum+add": lambda: theirs.add_(rows.sum(0, dtype=F32), alpha=scale),
        "compiled sum+add": compiled,
    }
    return Case(f"reduce_rows {wire} W={world_size}", rows.nbytes + 2 * out.nbytes, runs, check)


def norm_case(nbytes: int, device: torch.device) -> Case:
    x = torch.randn(nbytes // 4, device=device)

    def check() -> bool:
        return abs(kernels.sums_of_squares([x]).item() / x.double().square().sum().item() - 1) < 1e-12

    runs: dict[str, Run] = {
        "zc": lambda: kernels.sums_of_squares([x]),
        "vector_norm": lambda: torch.linalg.vector_norm(x),
    }
    return Case("sums_of_squares fp32", x.nbytes, runs, check)


def small_norms_case(device: torch.device) -> Case:
    tensors, check = small_norms(device)
    runs: dict[str, Run] = {
        "zc": lambda: kernels.sums_of_squares(tensors),
        "foreach_norm": lambda: torch._foreach_norm(tensors),
    }
    return Case("sums_of_squares fp32, 147 small", sum(x.nbytes for x in tensors), runs, check)


def cases(nbytes: int, device: torch.device) -> Iterator[Callable[[], Case]]:
    """Built one at a time: a case of 1 GB holds several GB."""
    for src, dst in ((B16, B16), (B16, F32), (F32, F32), (F32, B16)):
        yield partial(flatten_case, nbytes, src, dst, device)
    yield partial(accumulate_case, nbytes, device)
    for wire in (B16, F32):
        for world_size in (2, 8, 64):
            yield partial(reduce_case, nbytes, wire, world_size, device)
    yield partial(norm_case, nbytes, device)
    if nbytes == 2**20:  # of a size of its own: once
        yield partial(small_norms_case, device)


def quantiles_ms(runs: dict[str, Run], num_rounds: int) -> dict[str, tuple[float, float, float] | str]:
    """p20, p50, p80 of each run in turn; the text of the error where one can't run."""
    result: dict[str, tuple[float, float, float] | str] = {}
    working: dict[str, Run] = {}
    for name, run in runs.items():
        try:
            for _ in range(3):  # compiles, and warms the allocator
                run()
            torch.cuda.synchronize()
            working[name] = run
        except Exception as error:  # noqa: BLE001  a rival's failure is a result
            result[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in working}
    new_event: Any = partial(torch.cuda.Event, enable_timing=True)  # untyped in torch
    for _ in range(num_rounds):
        for name, run in working.items():
            pair = new_event(), new_event()
            pair[0].record()
            run()
            pair[1].record()
            events[name].append(pair)
        torch.cuda.synchronize()
    for name, pairs in events.items():
        times = torch.tensor([start.elapsed_time(end) for start, end in pairs])
        low, middle, high = torch.quantile(times, torch.tensor([0.2, 0.5, 0.8])).tolist()
        result[name] = low, middle, high
    return result


def copy_of(nbytes_moved: int, device: torch.device) -> Run:
    """A device-to-device copy that reads half of ``nbytes_moved`` and writes the other half."""
    src = torch.ones(nbytes_moved // 2, dtype=torch.uint8, device=device)
    dst = torch.empty_like(src)
    return lambda: dst.copy_(src)


def rows(sizes: list[int], num_rounds: int, check_only: bool) -> Iterator[dict[str, object]]:
    device = torch.device("cuda")
    about = {"device": device_name(device), "torch": torch.__version__, "triton": triton.__version__}
    about["commit"] = commit()
    for mebibytes in sizes:
        for build in cases(mebibytes * 2**20, device):
            case = build()
            if not case.check():
                raise SystemExit(f"{case.name} at {mebibytes} MiB gives a wrong result: no number")
            if check_only:
                continue
            times = quantiles_ms({"copy of the bytes": copy_of(case.nbytes_moved, device)} | case.runs, num_rounds)
            copy = times.pop("copy of the bytes")
            for name, time in times.items():
                row: dict[str, object] = {"case": case.name, "MiB": mebibytes, "run": name}
                if isinstance(time, str) or isinstance(copy, str):
                    row |= {"p20_ms": "", "p50_ms": "", "p80_ms": "", "GB/s": "", "fraction": "", "note": time}
                else:
                    numbers = [round(t, 5) for t in time]
                    row |= dict(zip(("p20_ms", "p50_ms", "p80_ms"), numbers, strict=True))
                    row["GB/s"] = round(case.nbytes_moved / time[1] / 1e6, 1)
                    row |= {"fraction": round(copy[1] / time[1], 3), "note": ""}
                yield row | about
            torch.compiler.reset()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="MiB of a bucket")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--check-only", action="store_true")
    options = parser.parse_args()
    reason = kernels.why_reference()
    if reason is not None:
        print(f"no GPU numbers: {reason}")
        return 0
    written: list[dict[str, object]] = []
    for row in rows(options.sizes, options.rounds, options.check_only):
        written.append(row)
        print(f"{row['case']:44} {row['MiB']:>5} MiB  {row['run']:20} p50 {row['p50_ms']:>10} ms"
              f"  {row['GB/s']:>8} GB/s  of a copy {row['fraction']:>6}  {row['note']}", flush=True)  # fmt: skip
    if options.csv and written:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(written[0]))
            writer.writeheader()
            writer.writerows(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
