"""The core trains without a wing: in a copy of the package a wing's modules are gone, and with them each line of the
modules that put features together which names something of theirs. Two ranks train there as under DDP."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import arrows
import pytest
from tiers import full_only

ROOT = Path(__file__).resolve().parents[2]
TOGETHER = ("zc/__init__.py", "zc/api.py", "zc/config.py", "zc/prepare.py", "passes/pipeline.py")
# Wings that nothing else needs, or a part of one. `tests/arrows.py` has the modules of the others.
PARTS = {"disk": "zc.offload.disk"}
NAMES = (
    "disk", "wire", "in_place", "report", "integrations", "host", "watch", "checking", "agree",
)  # fmt: skip

TRAIN = """
import os, sys, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import zc

warnings.simplefilter("ignore")
assert zc.__file__.startswith(os.getcwd()), zc.__file__
rank = int(not os.fork())
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=rank, world_size=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.often, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, has_all):
        x = self.first(x).tanh()
        return self.last(self.often(x).tanh() if has_all else x)


def train(**options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if options:
        zc.compile(model, optimizer, bucket_nbytes=700, **options)
    run = model if options else DistributedDataParallel(model, find_unused_parameters=True)
    torch.manual_seed(rank + 1)
    for _ in range(3):
        for k in range(2):
            run(torch.randn(4, 8), k == 0).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    zc.close(model)
    return [param.detach().clone() for param in model.parameters()]


plain = train()
for options in ({"stage": 1, "backend": "eager"}, {"stage": 2, "backend": "aot_eager"}):
    for ours, theirs in zip(train(**options), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
dist.destroy_process_group()
if rank == 0:
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def modules_of(names: tuple[str, ...]) -> list[str]:
    return " ".join(PARTS.get(name) or arrows.WINGS[name] for name in names).split()


def without(folder: Path, names: tuple[str, ...]) -> Path:
    """A copy of the package in which these wings are gone."""
    for top in ("zc", "passes", "kernels"):
        shutil.copytree(ROOT / top, folder / top, symlinks=True)  # bytecode, too
    gone = modules_of(names)
    for module in gone:
        place = folder / module.replace("zc.passes", "passes").replace(".", "/")
        shutil.rmtree(place) if place.is_dir() else place.with_suffix(".py").unlink()
    for file in TOGETHER:
        _cut(folder / file, gone)
    return folder


def _cut(file: Path, gone: list[str]) -> None:
    """Deletes each line that names what comes from these modules."""
    text = file.read_text()
    named = {
        alias.asname or alias.name
        for node in ast.parse(text).body  # what type checkers alone see does no harm
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if any(f"{node.module}.{alias.name}.".startswith(f"{module}.") for module in gone)
    }
    if named:
        words = re.compile(rf"\b({'|'.join(named)})\b")
        file.write_text("".join(line for line in text.splitlines(keepends=True) if not words.search(line)))


def train(folder: Path) -> None:
    """Two ranks train in both stages, and compare their weights with those of DistributedDataParallel."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN, port]
    done = subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_core_trains_without_all_of_them(tmp_path: Path) -> None:
    train(without(tmp_path, NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_what_stays_loads_nothing_of_one(name: str) -> None:
    """`zc.report` loaded a module of `agree`: without that wing alone, `import zc` failed."""
    trees = arrows.modules(ROOT)
    gone = tuple(f"{module}." for module in modules_of((name,)))
    names = (file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in TOGETHER)
    together = {name if name.startswith("zc") else f"zc.{name}" for name in names}
    stays = {module for module in trees if not f"{module}.".startswith(gone)} - together
    loads = [(module, what) for module in stays for what, _, how in arrows.imports(trees[module]) if how == "load"]
    assert [(module, what) for module, what in loads if f"{what}.".startswith(gone)] == []


@full_only
@pytest.mark.parametrize("name", NAMES)
def test_the_core_trains_without_one(tmp_path: Path, name: str) -> None:
    train(without(tmp_path, (name,)))
