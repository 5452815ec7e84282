"""CPU references of zc.kernels against a memcpy that moves the same bytes: medians of interleaved runs, one thread.

    OMP_NUM_THREADS=1 python -m bench.kernels [--csv FILE] [--sizes 1 4 16 64] [--rounds 21] [--sweep]

Each row is checked against plain torch first: no number without a passing check. ``ratio`` is the memcpy's median time
over the reference's (1.0: as fast as memory allows a copy to be; higher is better). ``--sweep`` varies the piece size.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from bench.measure import commit, device_name
from zc import kernels
from zc.kernels import _chunks

Run = Callable[[], object]
ALIGN = 64  # elements between slot starts, as zc.planning.layout packs them for bf16


class Case(NamedTuple):
    """One row: what runs, what it is compared with, how many bytes it must move at least."""

    name: str
    nbytes_moved: int
    run: Run
    rivals: dict[str, Run]
    check: Callable[[], bool]


def shapes_of(numel: int) -> list[tuple[int, ...]]:
    """Parameters of decoder layers (norm, qkv, out, up, down, biases): ``numel`` elements or more, 768 wide at most."""
    hidden = min(768, max(1, math.ceil((numel / 12.0) ** 0.5 / 64)) * 64)
    layer: list[tuple[int, ...]] = [
        (hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,),
        (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,),
    ]  # fmt: skip
    return layer * max(1, math.ceil(numel / (12 * hidden * hidden)))


def packed(shapes: list[tuple[int, ...]]) -> tuple[list[int], int]:
    offsets, stop = [], 0
    for shape in shapes:
        offsets.append(stop)
        stop += -(-torch.Size(shape).numel() // ALIGN) * ALIGN
    return offsets, stop


def memcpy_of(nbytes_moved: int) -> Run:
    """A memcpy that reads half of ``nbytes_moved`` and writes the other half."""
    half = nbytes_moved // 2
    src, dst = torch.ones(half, dtype=torch.uint8), torch.zeros(half, dtype=torch.uint8)
    return lambda: ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.numel())


def flatten_case(numel: int, src: torch.dtype, dst: torch.dtype, scale: float) -> Case:
    shapes = shapes_of(numel)
    offsets, total = packed(shapes)
    grads = [torch.randn(shape).to(src) for shape in shapes]
    out, flat = torch.empty(total, dtype=dst), torch.empty(total, dtype=dst)
    slots = [flat[offset : offset + grad.numel()].view(grad.shape) for grad, offset in zip(grads, offsets, strict=True)]

    def run() -> None:
        kernels.flatten_cast(out, grads, offsets, scale=scale)

    def check() -> bool:
        out.fill_(torch.nan)
        expected = torch.zeros(total, dtype=dst)
        for grad, offset in zip(grads, offsets, strict=True):
            expected[offset : offset + grad.numel()] = (grad.float().flatten() * scale).to(dst)
        run()
        return torch.equal(out, expected)

    def cat_to() -> None:
        torch.cat([grad.view(-1) for grad in grads]).to(dst).mul_(scale)

    def foreach() -> None:
        torch._foreach_copy_(slots, grads)
        if scale != 1.0:
            flat.mul_(scale)

    name = f"flatten_cast {_short(src)}->{_short(dst)} scale={scale:g}"
    nbytes = sum(grad.nbytes for grad in grads) + out.nbytes
    return Case(name, nbytes, run, {"foreach_copy": foreach, "cat_to": cat_to}, check)


def accumulate_case(numel: int, src: torch.dtype) -> Case:
    shapes = shapes_of(numel)
    offsets, total = packed(shapes)
    grads = [torch.randn(shape).to(src) for shape in shapes]
    acc, flat = torch.zeros(total), torch.zeros(total)
    slots = [flat[offset : offset + grad.numel()].view(grad.shape) for grad, offset in zip(grads, offsets, strict=True)]

    def run() -> None:
        kernels.accumulate_cast(acc, grads, offsets)

    def check() -> bool:
        acc.zero_()
        run()
        pairs = zip(grads, offsets, strict=True)
        return all(torch.equal(acc[offset : offset + g.numel()], g.float().flatten()) for g, offset in pairs)

    nbytes = sum(grad.nbytes for grad in grads) + 2 * acc.nbytes
    return Case(
        f"accumulate_cast {_short(src)}", nbytes, run, {"foreach_add": lambda: torch._foreach_add_(slots, grads)}, check
    )


def reduce_case(numel: int, wire: torch.dtype, world_size: int, add: bool) -> Case:
    rows, out = torch.randn(world_size, numel).to(wire), torch.zeros(numel)
    scale = 1 / world_size

    def run() -> None:
        kernels.reduce_rows(rows, out, scale=scale, add=add)

    def check() -> bool:
        out.zero_()
        expected = rows[0].to(torch.float32, copy=True)
        for row in rows[1:]:
            expected += row
        run()
        return torch.equal(out, expected * scale)

    def torch_sum() -> None:
        total = rows.sum(0, dtype=torch.float32).mul_(scale)
        _ = out.add_(total) if add else out.copy_(total)

    nbytes = rows.nbytes + out.nbytes * (2 if add else 1)
    return Case(
        f"reduce_rows {_short(wire)} W={world_size} {'add' if add else 'write'}", nbytes, run, {"sum": torch_sum}, check
    )


def norm_case(numel: int) -> Case:
    x = torch.randn(numel)

    def check() -> bool:
        return abs(kernels.sums_of_squares([x]).item() / x.double().square().sum().item() - 1) < 1e-12

    return Case(
        "sums_of_squares fp32", x.nbytes, lambda: kernels.sums_of_squares([x]), {"vector_norm": lambda: x.norm()}, check
    )


def small_norms(device: torch.device) -> tuple[list[torch.Tensor], Callable[[], bool]]:
    """147 tensors of 256 elements, as the norms of a large decoder, and the check of their sums of squares."""
    tensors = list(torch.randn(147, 256, device=device).unbind())
    expected = torch.stack(tensors).double().square().sum(1)
    return tensors, lambda: torch.allclose(kernels.sums_of_squares(tensors), expected, rtol=1e-12, atol=0)


def small_norms_case() -> Case:
    tensors, check = small_norms(torch.device("cpu"))
    rivals: dict[str, Run] = {"foreach_norm": lambda: torch._foreach_norm(tensors)}
    nbytes = sum(x.nbytes for x in tensors)
    return Case("sums_of_squares fp32, 147 small", nbytes, lambda: kernels.sums_of_squares(tensors), rivals, check)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "f32", torch.bfloat16: "b16", torch.float16: "f16"}[dtype]


def cases(mebibytes: int) -> Iterator[Case]:
    """Sizes count the fp32 output, or the fp32 gradients, and are the least: layers are whole."""
    numel, f32, b16 = mebibytes * 2**20 // 4, torch.float32, torch.bfloat16
    yield flatten_case(numel, f32, f32, 1.0)
    yield flatten_case(numel, f32, f32, 0.5)
    yield flatten_case(2 * numel, b16, b16, 1.0)
    yield flatten_case(numel, b16, f32, 1.0)
    yield flatten_case(numel, f32, b16, 1.0)
    yield flatten_case(numel, f32, b16, 0.5)
    yield accumulate_case(numel, f32)
    yield accumulate_case(numel, b16)
    for world_size, wire, add in ((2, f32, False), (2, f32, True), (2, b16, True), (8, f32, True), (8, b16, True)):
        yield reduce_case(numel, wire, world_size, add)
    yield norm_case(numel)
    if mebibytes == 1:  # of a size of its own: once
        yield small_norms_case()


def median_ms(runs: dict[str, Run], num_rounds: int) -> dict[str, float]:
    """Medians; the runs take turns, so that a slow spell of a shared machine falls on all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(num_rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def rows(sizes: list[int], num_rounds: int, only: str) -> Iterator[dict[str, object]]:
    for mebibytes in sizes:
        for case in cases(mebibytes):
            if only not in case.name:
                continue
            if not case.check():
                raise SystemExit(f"{case.name} at {mebibytes} MiB gives a wrong result: no number")
            ms = median_ms({"zc": case.run, "memcpy": memcpy_of(case.nbytes_moved)} | case.rivals, num_rounds)
            rivals = " ".join(f"{name}={ms[name]:.3f}" for name in case.rivals)
            yield {
                "case": case.name, "MiB": mebibytes, "MB_moved": round(case.nbytes_moved / 1e6, 2),
                "zc_ms": round(ms["zc"], 4), "memcpy_ms": round(ms["memcpy"], 4),
                "ratio": round(ms["memcpy"] / ms["zc"], 3), "rivals_ms": rivals, "chunk": _chunks.CHUNK,
                "threads": torch.get_num_threads(), "torch": torch.__version__,
                "device": device_name(torch.device("cpu")),
                "commit": commit(),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--only", default="", help="a part of the case's name")
    parser.add_argument("--sweep", action="store_true", help="several piece sizes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    writer = None
    with open(options.csv, "w", newline="") if options.csv else open("/dev/null", "w") as file:
        for exponent in range(13, 20) if options.sweep else (None,):
            if exponent is not None:
                _chunks.CHUNK = 1 << exponent
            for row in rows(options.sizes, options.rounds, options.only):
                writer = writer or csv.DictWriter(file, list(row))
                if file.tell() == 0:
                    writer.writeheader()
                writer.writerow(row)
                print(f"{row['case']:38} {row['MiB']:>4} MiB  zc {row['zc_ms']:>9} ms  memcpy {row['memcpy_ms']:>9} ms "
                      f" ratio {row['ratio']:>6}  {row['rivals_ms']}  chunk {row['chunk']}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
