"""zc.kernels against a copy that moves the same bytes: Triton on one GPU, the references on one thread of a CPU.

    OMP_NUM_THREADS=1 python -m bench.kernels [--csv FILE] [--sizes 1 4 16 64] [--rounds 21] [--only NAME] [--sweep]
    python -m bench.kernels --device cuda --sizes 1 16 64 256 1024 --rounds 50

Each case is checked against plain torch first: no number without a passing check. All runs of a case take turns, so
that a slow spell of a shared machine falls on all of them. ``fraction`` is the copy's median time over the run's: 1.0
is as fast as the memory copies, higher is better. A run that raises has its error in place of numbers. ``--sweep``
varies the piece size of the references.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.measure import commit, device_name
from bench.report.rows import percentiles
from zc import kernels
from zc.kernels import _common

Run = Callable[[], object]
SPIN = 4_000_000  # clock cycles, some 2 ms
F32, B16 = torch.float32, torch.bfloat16
ALIGN = 64  # elements between slot starts, as zc.planning.layout packs them for bf16


class Case(NamedTuple):
    """One kernel at one size: the bytes that it must move, zc's own run first among ``runs``, and a check of its
    result."""

    name: str
    nbytes_moved: int
    runs: dict[str, Run]
    check: Callable[[], bool]


def shapes_of(numel: int) -> list[tuple[int, ...]]:
    """Parameters of decoder layers (norm, qkv, out, up, down, biases): ``numel`` elements or more, 768 wide at most."""
    hidden = min(768, max(1, math.ceil((numel / 12.0) ** 0.5 / 64)) * 64)
    layer: list[tuple[int, ...]] = [
        (hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,),
        (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,),
    ]  # fmt: skip
    return layer * max(1, math.ceil(numel / (12 * hidden * hidden)))


class Bucket(NamedTuple):
    """A decoder's gradients, where each begins in a bucket, and a second bucket with a view per gradient."""

    grads: list[torch.Tensor]
    offsets: list[int]
    flat: torch.Tensor
    slots: list[torch.Tensor]


def bucket_of(numel: int, src: torch.dtype, dst: torch.dtype, device: torch.device) -> Bucket:
    grads = [torch.randn(shape, device=device).to(src) for shape in shapes_of(numel)]
    offsets, stop = [], 0
    for grad in grads:
        offsets.append(stop)
        stop += -(-grad.numel() // ALIGN) * ALIGN
    flat = torch.zeros(stop, dtype=dst, device=device)
    slots = [flat[offset : offset + g.numel()].view(g.shape) for g, offset in zip(grads, offsets, strict=True)]
    return Bucket(grads, offsets, flat, slots)


def flatten_case(nbytes: int, src: torch.dtype, dst: torch.dtype, device: torch.device) -> Case:
    """``nbytes`` of the bucket."""
    grads, offsets, flat, slots = bucket_of(nbytes // dst.itemsize, src, dst, device)
    out = torch.empty_like(flat)

    def check() -> bool:
        out.fill_(torch.nan)
        for slot, grad in zip(slots, grads, strict=True):
            slot.copy_(grad)
        kernels.flatten_cast(out, grads, offsets)
        return torch.equal(out, flat)

    runs: dict[str, Run] = {
        "zc": lambda: kernels.flatten_cast(out, grads, offsets),
        "foreach_copy": lambda: torch._foreach_copy_(slots, grads),
        "cat+to": lambda: torch.cat([grad.view(-1) for grad in grads]).to(dst),
    }
    if device.type == "cuda":
        numel_chunk = sum(-(-g.shape[0] // 8) * (g.numel() // g.shape[0]) for g in grads)
        chunks = torch.empty(8, numel_chunk, dtype=dst, device=device)
        runs["chunk_cat"] = lambda: torch._chunk_cat(grads, dim=0, num_chunks=8, out=chunks)
    return Case(f"flatten_cast {src}->{dst}", sum(g.nbytes for g in grads) + out.nbytes, runs, check)


def accumulate_case(nbytes: int, src: torch.dtype, device: torch.device) -> Case:
    """``nbytes`` of the accumulator."""
    grads, offsets, flat, slots = bucket_of(nbytes // 4, src, F32, device)
    acc = torch.zeros_like(flat)

    def check() -> bool:
        for each in (acc, flat):
            each.zero_()
        kernels.accumulate_cast(acc, grads, offsets)
        torch._foreach_add_(slots, grads)
        return torch.equal(acc, flat)

    runs: dict[str, Run] = {
        "zc": lambda: kernels.accumulate_cast(acc, grads, offsets),
        "foreach_add": lambda: torch._foreach_add_(slots, grads),
    }
    return Case(f"accumulate_cast {src}", sum(g.nbytes for g in grads) + 2 * acc.nbytes, runs, check)


def reduce_case(nbytes: int, wire: torch.dtype, world_size: int, add: bool, device: torch.device) -> Case:
    """``nbytes`` of received rows, the whole bucket in the wire dtype."""
    rows = torch.randn(world_size, nbytes // wire.itemsize // world_size, device=device).to(wire)
    out, theirs = (torch.zeros(rows.shape[1], device=device) for _ in range(2))
    scale = 1 / world_size

    def torch_sum() -> None:
        total = rows.sum(0, dtype=F32)
        _ = theirs.add_(total, alpha=scale) if add else torch.mul(total, scale, out=theirs)

    def check() -> bool:
        out.zero_()
        total = rows[0].to(F32, copy=True)
        for row in rows[1:]:
            total += row
        kernels.reduce_rows(rows, out, scale=scale, add=add)
        return torch.equal(out, total * scale)

    runs: dict[str, Run] = {"zc": lambda: kernels.reduce_rows(rows, out, scale=scale, add=add), "sum": torch_sum}
    if device.type == "cuda":  # not the reference: its pieces, sized for a CPU's cache, are a graph of a thousand nodes
        runs["compiled sum"] = torch.compile(torch_sum, dynamic=False)
    name = f"reduce_rows {wire} W={world_size} {'add' if add else 'write'}"
    return Case(name, rows.nbytes + out.nbytes * (2 if add else 1), runs, check)


def norm_case(tensors: list[torch.Tensor], name: str) -> Case:
    expected = torch.stack([x.double().square().sum() for x in tensors])
    runs: dict[str, Run] = {
        "zc": lambda: kernels.sums_of_squares(tensors),
        "foreach_norm": lambda: torch._foreach_norm(tensors),
    }
    return Case(
        f"sums_of_squares fp32{name}",
        sum(x.nbytes for x in tensors),
        runs,
        lambda: torch.allclose(kernels.sums_of_squares(tensors), expected, rtol=1e-12, atol=0),
    )


def cases(nbytes: int, device: torch.device) -> Iterator[Callable[[], Case]]:
    """Built one at a time: a case of 1 GB holds several GB. Sizes are the least: layers are whole."""
    for src, dst in ((F32, F32), (B16, B16), (B16, F32), (F32, B16)):
        yield partial(flatten_case, nbytes, src, dst, device)
    for src in (F32, B16):
        yield partial(accumulate_case, nbytes, src, device)
    for world_size, wire, add in ((2, F32, False), *((w, dtype, True) for w in (2, 8, 64) for dtype in (F32, B16))):
        yield partial(reduce_case, nbytes, wire, world_size, add, device)
    yield partial(norm_case, [torch.randn(nbytes // 4, device=device)], "")
    if nbytes == 2**20:  # of a size of its own, as the norms of a large decoder: once
        yield partial(norm_case, list(torch.randn(147, 256, device=device).unbind()), ", 147 small")


def copy_of(nbytes_moved: int, device: torch.device) -> Run:
    """A copy that reads half of ``nbytes_moved`` and writes the other half; on a CPU memcpy, of one thread."""
    src = torch.ones(nbytes_moved // 2, dtype=torch.uint8, device=device)
    dst = torch.zeros_like(src)
    if device.type == "cuda":
        return lambda: dst.copy_(src)
    return lambda: ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel())


def on_cpu(run: Run) -> Callable[[], float]:
    """Runs once. Returns a function that returns the milliseconds of it."""
    start = time.perf_counter()
    run()
    took = (time.perf_counter() - start) * 1e3
    return lambda: took


def on_cuda(run: Run) -> Callable[[], float]:
    """As `on_cpu`, by two events; the function may be called when the device has run all of it. The device spins
    first, so that all launches are queued before it begins: else its time is the host's, which took ten times as long
    on an H200."""
    new_event: Any = partial(torch.cuda.Event, enable_timing=True)  # untyped in torch
    start, stop = new_event(), new_event()
    torch.cuda._sleep(SPIN)
    start.record()
    run()
    stop.record()
    return lambda: float(start.elapsed_time(stop))


def host_ms(run: Run, num_rounds: int) -> float:
    """How long the host takes to queue a run, in ms."""
    took = []
    for _ in range(num_rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        took.append((time.perf_counter() - began) * 1e3)
    return percentiles(took)[1]


def times_of(runs: dict[str, Run], num_rounds: int, device: torch.device) -> dict[str, tuple[float, ...] | str]:
    """p20, p50 and p80 of each run in ms; the text of the error where one can't run."""
    result: dict[str, tuple[float, ...] | str] = {}
    timed: dict[str, list[Callable[[], float]]] = {}
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for name, run in runs.items():
        try:
            for _ in range(3):  # compiles, and warms the allocator
                run()
            synchronize()
            timed[name] = []
        except Exception as error:  # noqa: BLE001  a rival's failure is a result
            result[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    for _ in range(num_rounds):
        for name, times in timed.items():
            times.append((on_cuda if device.type == "cuda" else on_cpu)(runs[name]))
        synchronize()
    return {**result, **{name: percentiles([time() for time in times]) for name, times in timed.items()}}


COPY = "copy of the bytes"


def rows(
    sizes: list[int], num_rounds: int, device: torch.device, only: str = "", *, check_only: bool = False
) -> Iterator[dict[str, object]]:
    """One row per case, size in MiB and run. Raises SystemExit where a kernel's result is wrong."""
    about = {"chunk": _common.CHUNK, "threads": torch.get_num_threads(), "device": device_name(device)}
    about |= {"torch": torch.__version__, "commit": commit()}
    for mebibytes in sizes:
        for build in cases(mebibytes * 2**20, device):
            case = build()
            if only not in case.name:
                continue
            if not case.check():
                raise SystemExit(f"{case.name} at {mebibytes} MiB gives a wrong result: no number")
            if check_only:
                continue
            times = times_of({COPY: copy_of(case.nbytes_moved, device)} | case.runs, num_rounds, device)
            copy = times.pop(COPY)
            for name in case.runs:
                time_ms = times[name]
                row: dict[str, object] = {"case": case.name, "MiB": mebibytes, "run": name}
                if isinstance(time_ms, str) or isinstance(copy, str):
                    row |= {"p20_ms": "", "p50_ms": "", "p80_ms": "", "GB/s": "", "fraction": "", "note": time_ms}
                else:
                    row |= dict(zip(("p20_ms", "p50_ms", "p80_ms"), (round(t, 5) for t in time_ms), strict=True))
                    row["GB/s"] = round(case.nbytes_moved / time_ms[1] / 1e6, 1)
                    row |= {"fraction": round(copy[1] / time_ms[1], 3), "note": ""}
                is_on_device = device.type == "cuda" and not row["note"]
                row["host_ms"] = round(host_ms(case.runs[name], num_rounds), 5) if is_on_device else ""
                yield row | about
            torch.compiler.reset()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--csv", type=Path)
    add("--sizes", type=int, nargs="+", default=[1, 4, 16, 64], help="MiB of a bucket")
    add("--rounds", type=int, default=21)
    add("--only", default="", help="a part of the case's name")
    add("--sweep", action="store_true", help="several piece sizes of the references")
    add("--check-only", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    reason = kernels.why_reference() if args.device == "cuda" else None
    if reason is not None:
        print(f"no GPU numbers: {reason}")
        return 0
    written: list[dict[str, object]] = []
    for chunk in [1 << exponent for exponent in range(13, 20)] if args.sweep else [_common.CHUNK]:
        _common.CHUNK = chunk
        device = torch.device(args.device)
        for row in rows(args.sizes, args.rounds, device, args.only, check_only=args.check_only):
            written.append(row)
            print(f"{row['case']:52} {row['MiB']:>5} MiB  {row['run']:18} p50 {row['p50_ms']:>10} ms  {row['GB/s']:>8} "
                  f"GB/s  of a copy {row['fraction']:>6}  chunk {row['chunk']} {row['note']}", flush=True)  # fmt: skip
    if args.csv and written:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(written[0]))
            writer.writeheader()
            writer.writerows(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
