"""What a steady step runs: how many functions, from how many files of how many lines; zc beside FSDP2.

    python -m bench.path            # two CPU ranks; every function that is called on any thread, in one step
    python -m bench.path --list     # the same, and their names by file

Functions are those of a system's own folders: zc/, passes/ and kernels/, or torch's folder of FSDP2. Lambdas and
comprehensions count as their function. What Dynamo and Inductor have generated belongs to neither.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.measure import ROOT, launch

SYSTEMS = ("zc, stage 2", "zc, stage 3", "FSDP2")
WARM_UP = 6
BLOCKS, WIDTH = 4, 64


class Calls:
    """The code of every function that any thread calls while `is_on`. Threads inherit it when they are made, so it is
    there before the system is."""

    def __init__(self) -> None:
        self.is_on = False
        self.codes: set[CodeType] = set()
        threading.setprofile(self.note)
        sys.setprofile(self.note)

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.is_on and event == "call":
            self.codes.add(frame.f_code)


def make_step(system: str) -> Callable[[], None]:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
    model: nn.Module = nn.Sequential(*blocks)
    x = torch.randn(8, WIDTH)
    if system == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.children():
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model.compile()
    else:
        import zc

        optimizer = torch.optim.AdamW(model.parameters())
        zc.compile(model, optimizer, stage=int(system[-1]), bucket_nbytes=2 * 4 * WIDTH * (WIDTH + 1))

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def folders_of(system: str) -> tuple[Path, ...]:
    if system == "FSDP2":
        return ((Path(torch.__file__).parent / "distributed" / "fsdp").resolve(),)
    return tuple((ROOT / name).resolve() for name in ("zc", "passes", "kernels"))


def counted(system: str) -> dict[str, Any]:
    """Runs on each rank: what one step after `WARM_UP` calls."""
    calls, step = Calls(), make_step(system)
    for _ in range(WARM_UP):
        step()
    calls.is_on = True
    step()
    calls.is_on = False
    paths = {code: Path(code.co_filename).resolve() for code in calls.codes if not code.co_name.startswith("<")}
    own = {code: path for code, path in paths.items() if any(path.is_relative_to(f) for f in folders_of(system))}
    names: dict[str, list[str]] = {}
    for code, path in own.items():
        names.setdefault(str(path), []).append(getattr(code, "co_qualname", code.co_name))  # of Python 3.11
    lines = sum(len(Path(file).read_text().splitlines()) for file in names)
    return {"functions": len(own), "files": len(names), "lines": lines, "names": names}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.path", description=__doc__.split("\n")[0])
    parser.add_argument("--system", choices=SYSTEMS, help="what a rank runs; without it: all of them")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", action="store_true", help="the functions, too")
    args = parser.parse_args(argv)
    if args.system:
        dist.init_process_group("gloo")
        result = counted(args.system)
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        return 0
    print(f"{'system':<12} {'functions':>9} {'files':>5} {'lines':>6}")
    with tempfile.TemporaryDirectory(prefix="path-") as folder:
        for system in SYSTEMS:
            out = Path(folder) / "out.json"
            launch("bench.path", ["--system", system, "--out", str(out)], ranks=2)
            found = json.loads(out.read_text())
            print(f"{system:<12} {found['functions']:>9} {found['files']:>5} {found['lines']:>6,}", flush=True)
            for file, names in sorted(found["names"].items()) if args.list else ():
                print(f"    {file}: {', '.join(sorted(names))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
