"""The scripts of docs/recipes.md: each trains as the one that it replaces, and the page's figures are theirs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from documents import ROOT
from harness import run_ranks
from tiers import full_only
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training_runs import environment

import zc

EXAMPLES = ROOT / "docs" / "examples"
PAGE = ROOT / "docs" / "recipes.md"
PAIRS = (("train_ddp", "train"), ("train_fsdp2", "from_fsdp2"), ("train_muon", "from_muon"), ("train", "slow_link"))
SCRIPTS = tuple(dict.fromkeys([*(name for pair in PAIRS for name in pair), "from_deepspeed"]))


class Run(NamedTuple):
    """Losses that a script printed, bytes of weights and optimizer state on its rank, and the files that it wrote."""

    losses: list[float]
    nbytes: int
    written: list[str]


def nbytes_of(names: dict[str, Any], compiled: nn.Module | None) -> int:
    """Weights, masters and optimizer state, of which this rank has them."""
    if compiled is not None:
        kinds = zc.persistent_nbytes(compiled)
        return sum(kinds.get(kind, 0) for kind in ("flat_param", "weight", "master_shard", "optimizer_state"))
    optimizers = names.get("optimizers", [names["optimizer"]])
    states = [v for o in optimizers for state in o.state.values() for v in state.values() if isinstance(v, Tensor)]
    tensors = [*names["model"].parameters(), *(v for v in states if v.dim() > 0)]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def compiles(name: str) -> bool:
    """Whether the script calls `zc.compile`, which needs torch's."""
    return "zc.compile" in (EXAMPLES / f"{name}.py").read_text()


def _scripts(rank: int, world_size: int, folder: str, names: Sequence[str], backend: str) -> dict[str, Run]:
    """Job: these scripts in one group."""
    stock, nothing = zc.compile, mock.Mock()
    runs = {}
    for name in names:
        Path(folder, name).mkdir(exist_ok=True)
        printed = io.StringIO()
        compiled: list[nn.Module] = []

        def compile_(*args: Any, compiled: list[nn.Module] = compiled, **options: Any) -> Any:
            compiled.append(args[0])
            return stock(*args, backend=backend, **options)

        with (
            environment(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)),
            mock.patch.multiple(dist, init_process_group=nothing, destroy_process_group=nothing),
            mock.patch.object(zc, "compile", compile_),
            mock.patch.object(torch, "compile", torch.compile if compiles(name) else lambda model: model),
            contextlib.chdir(f"{folder}/{name}"),
            contextlib.redirect_stdout(printed),
        ):
            variables = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        losses = [float(text) for text in re.findall(r"loss (\S+)", printed.getvalue())]
        runs[name] = Run(losses, nbytes_of(variables, *compiled or (None,)), sorted(os.listdir(f"{folder}/{name}")))
        for model in compiled:
            zc.close(model)
        dist.barrier()
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """All of them, op by op: compiling takes half a minute each, and changes no digit that is printed."""
    folder = str(tmp_path_factory.mktemp("scripts"))
    first: dict[str, Run] = run_ranks(_scripts, 2, folder, SCRIPTS, "eager", timeout=240.0)[0]
    return first


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_script_trains_as_the_one_before(runs: dict[str, Run], before: str, after: str) -> None:
    assert len(runs[after].losses) >= 3 and runs[after].losses[-1] < 0.9 * runs[after].losses[0]
    assert runs[after].losses == pytest.approx(runs[before].losses, abs=2e-3)


@full_only  # tests/distributed/test_against_ddp.py has Inductor in such a loop
def test_the_script_of_the_readme_trains_as_ddp_does(runs: dict[str, Run], tmp_path: Path) -> None:
    """Through Inductor."""
    compiled = run_ranks(_scripts, 2, str(tmp_path), ["train"], "inductor", timeout=300.0)[0]["train"]
    assert len(compiled.losses) == 5 and compiled.losses == pytest.approx(runs["train_ddp"].losses, abs=2e-3)


def test_the_figures_of_the_page_are_the_scripts_own(runs: dict[str, Run]) -> None:
    rows = re.findall(r"^\| \[\w+\.py\]\(examples/(\w+)\.py\) \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), flags=re.M)
    table = {name: (f"{run.losses[-1]:.3f}", f"{run.nbytes / 1e6:.2f}") for name, run in runs.items()}
    assert {name: megabytes for name, _, megabytes in rows} == {name: cell for name, (_, cell) in table.items()}, table
    for name, loss, _ in rows:
        assert float(loss) == pytest.approx(runs[name].losses[-1], abs=2e-3), name


def test_what_the_scripts_save_can_be_loaded(runs: dict[str, Run]) -> None:
    assert runs["train_fsdp2"].written == runs["from_fsdp2"].written == ["weights.pt"]
    assert runs["from_deepspeed"].written == ["checkpoints"]


def test_the_bytes_of_a_slow_link_are_those_of_zc_plan() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
        )
    options: list[dict[str, Any]] = [{}, {"reduce_dtype": torch.int8, "gather_dtype": torch.int8}]
    plans = [zc.plan(model, world_size=2, ranks_per_host=1, **chosen) for chosen in options]
    leaves = [f"{sum(plan.host_wire.values()) / 1000:,.0f}" for plan in plans]
    assert re.search(rf"{leaves[0]} KB leave a host per step, with both options {leaves[1]}", PAGE.read_text())
