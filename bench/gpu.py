"""`make gpu-bench`: what one GPU can show in one call of at most nine minutes, in one CSV; the next call goes on.

    python -m bench.gpu [--minutes 8.5] [--csv bench/results/gpu.csv] [--only kernels|pace|steps]
    python -m bench.gpu --dry-run     # on the CPU: the same cells, a tiny model, eager; to see that all of them run

1. the kernels (bench/kernels.py), each against a copy's bandwidth; 2. the paced group against its model;
3. training steps in the order of CELLS: W=1 real, then W=8 paced on NVLink and on a network that costs nothing, whose
difference is exposed communication.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import kernels, run
from bench.measure import ROOT, device_name, end_on_sigterm, versions
from bench.report import rows

RESULTS = ROOT / "bench" / "results" / "gpu.csv"
DRY = ROOT / "out" / "bench" / "gpu-dry-run.csv"  # a dry run's times mean nothing and are never committed
LONGEST_RUN_S = 240.0
SHORTEST_RUN_S = 60.0  # less time than this is not worth a start


class Cell(NamedTuple):
    """One provider on one network; None: one real rank."""

    case: str
    provider: str
    paced: tuple[str, int] | None


FLOOR = "compiled, no communication"
OFFLOADED = ("zc stage 2, offload", "DeepSpeed ZeRO-2, offload + compile")
DRY_FLAGS = ("--backend", "eager")
CELLS = [
    # the host's time, and a device that is busy throughout
    *(Cell(case, FLOOR, None) for case in ("llama-0.3b-512-ga1", "llama-1.3b-8192-ga1")),
    *(Cell("llama-0.3b-512-ga1", p, ("zero", 8)) for p in ("zc stage 2", "FSDP2 + compile", "zc stage 3")),
    *(
        Cell("llama-1.3b-8192-ga1", p, (network, 8))
        for network in ("nvlink", "zero")
        for p in ("zc stage 2", "FSDP2 + compile")
    ),
    *(Cell("llama-1.3b-2048-ga1", p, None) for p in (FLOOR, "zc stage 2", "zc stage 1")),
    *(
        Cell("llama-1.3b-2048-ga1", p, (network, 8))
        for p in (
            "zc stage 2",
            "zc stage 2, overlap_gather",
            "FSDP2 + compile",
            "DDP + compile",
            "DeepSpeed ZeRO-2 + compile",
        )
        for network in ("nvlink", "zero")
    ),
    Cell("llama-0.3b-512-ga1", "zc stage 2", None),
    *(Cell("llama-0.3b-2048-ga1", p, None) for p in (FLOOR, *OFFLOADED)),
    *(Cell("llama-0.3b-512-ga8", p, ("nvlink", 8)) for p in ("zc stage 2", "zc stage 1", "FSDP2 + compile")),
    *(Cell("llama-3b-8192-ga1", p, ("nvlink", 8)) for p in ("zc stage 2", "FSDP2 + compile")),
]


def kernel_rows() -> Iterator[dict[str, Any]]:
    """The kernels' own rows, in the columns of `rows`."""
    try:
        yield from map(as_row, kernels.rows([16, 256], 30, torch.device("cuda")))
    except SystemExit as wrong:  # a kernel's result was wrong
        yield {"case": "kernel", "provider": "zc", "repeat": 0, "status": str(wrong)}


def as_row(kernel: dict[str, Any]) -> dict[str, Any]:
    """A row of `bench.kernels`: the case is kernel and size, the provider one way to do it."""
    case, run_name = f"kernel {kernel['case']}, {kernel['MiB']} MiB", kernel["run"]
    row = {"case": case, "repeat": 0, "status": f"failed: {kernel['note']}" if kernel["note"] else "ok"}
    row["provider"] = f"{run_name} ({kernel['fraction']} of a copy)" if kernel["fraction"] else run_name
    return row | {c: kernel[c] for c in ("p20_ms", "p50_ms", "p80_ms", "host_ms", "device")}


def step_rows(
    deadline: float, session: str, known: list[rows.Row], *, is_dry: bool = False
) -> Iterator[dict[str, Any]]:
    """One run a cell, while there is time for it (as much as the longest so far). One that the deadline ends has no
    row: the next call runs it again."""
    done = {(r["case"], r["provider"], r["network"]) for r in known if r["session"] == session}
    longest = SHORTEST_RUN_S
    for cell in CELLS:
        network = cell.paced[0] if cell.paced else ""
        if (cell.case, cell.provider, network) in done:
            continue
        if time.monotonic() + longest > deadline:
            print(f"no time left for {cell.case}, {cell.provider} {network}: call it again", flush=True)
            return
        started = time.monotonic()
        timeout_s = min(LONGEST_RUN_S, deadline - started)
        world = cell.paced[1] if cell.paced else 1
        args = argparse.Namespace(world=world, timeout=timeout_s, ranks=1, extra=DRY_FLAGS if is_dry else ())
        wanted = run.Run("tiny" if is_dry else cell.case, cell.provider, 0, network)
        # one float64 pass over 1.3 B parameters would take the whole call: the losses of one real rank are compared
        # with the floor's, which is plain torch (`depart`)
        row = run.run_once(wanted, session, None, args) | wanted._asdict() | {"case": cell.case}
        longest = max(longest, time.monotonic() - started)
        if timeout_s < LONGEST_RUN_S and time.monotonic() >= deadline and row["status"].startswith("failed"):
            print(f"{cell.case}, {cell.provider} {network}: cut off by the deadline: call it again", flush=True)
            return
        yield row


def depart(row: dict[str, Any], known: list[rows.Row], tolerance: float = 3e-2) -> str | None:
    """Why a time may not be shown: its loss after five updates is not the floor's of the same session (bf16; on one
    rank the floor is the same training). On a paced network the first update makes up other ranks' weights: there the
    loss before it is compared, and none of who shards weights from the start."""
    if row["status"] != "ok" or row["provider"] == FLOOR:
        return None
    if row.get("network") and run.PROVIDERS[row["provider"]].shards_weights:
        return None
    column, when = ("loss_before", "before any update") if row.get("network") else ("loss_after_5", "after 5 updates")
    floors = [r for r in known if (r["case"], r["provider"], r["status"]) == (row["case"], FLOOR, "ok")]
    if not floors:
        return "no floor to compare its losses with"
    expected, found = float(floors[-1][column]), float(row[column])
    if not abs(found - expected) <= tolerance:
        return f"loss {when} is {found:.5f}, the floor's is {expected:.5f}"
    return None


def write(path: Path, session: str, row: dict[str, Any], device: torch.device) -> None:
    about = {"device": device_name(device)}
    rows.append(path, about | versions() | {"session": session, "time": rows.now(), **row})
    print(f"{row['case']}: {row['provider']}: {row.get('p50_ms', '')} ms {row['status']}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny and eager")
    parser.add_argument("--only", choices=("kernels", "pace", "steps"))
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        sys.exit(
            "bench.gpu: torch.cuda.is_available() is False: nothing is measured. `make gpu-bench ARGS=--dry-run` tries "
            "its parts on the CPU, `make bench` measures there"
        )
    end_on_sigterm()
    device = torch.device("cpu" if args.dry_run else "cuda")
    path = args.csv or (DRY if args.dry_run else RESULTS)
    deadline, session = time.monotonic() + 60 * args.minutes, rows.fingerprint()
    if args.dry_run:  # each time from the start
        session = "dry-" + session
        path.unlink(missing_ok=True)
        print("dry run: the kernels need a GPU and are left out", flush=True)
    done = [r for r in rows.read(path) if r["session"] == session]
    if not args.dry_run and args.only in (None, "kernels") and not any(r["case"].startswith("kernel ") for r in done):
        for row in kernel_rows():
            write(path, session, row, device)
            if time.monotonic() > deadline - SHORTEST_RUN_S:
                print("no time left for the other kernels", flush=True)
                break
    if args.only in (None, "pace") and not any(r["case"] == "pace" for r in done):
        from bench.scale import pace_points

        for point in pace_points(device):
            off = abs(point.value)
            status = f"{point.value:+.2f} % off its model" if off > 3 else "ok"
            row = {"case": "pace", "provider": point.series, "repeat": 0, "network": point.series, "status": status}
            about = {"p50_ms": f"{point.value:.3f}", "command": "p50_ms is percent here"}
            write(path, session, row | about, device)
    if args.only in (None, "steps"):
        for row in step_rows(deadline, session, rows.read(path), is_dry=args.dry_run):
            reason = depart(row, [r for r in rows.read(path) if r["session"] == session])
            if reason is not None:
                row = {k: v for k, v in row.items() if k not in rows.NUMBERS} | {"status": reason}
            write(path, session, row, device)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
