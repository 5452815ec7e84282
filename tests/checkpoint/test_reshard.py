"""Any W to any W, bitwise; what plain DCP reads; what comes back in another plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import run_cases, run_ranks
from models import CASES
from save_and_load import Job, joined, load_and_train, parts, train_and_save
from tiers import FULL, full_cases
from torch import Tensor, nn
from torch.optim import Optimizer

import zc
from zc.engine.operations import TABLE
from zc.schedule.spec import Gather


def run_chain(job: Job, widths: tuple[int, ...], folder: Path, steps: int = 5, **others: Any) -> list[dict[str, Any]]:
    """Trains and saves on widths[0] ranks, loads and saves on each other; rank 0's report of each."""
    (reports,) = run_chains([job], widths, folder, steps, **others)
    return reports


def run_chains(
    jobs: list[Job], widths: tuple[int, ...], folder: Path, steps: int, **others: Any
) -> list[list[dict[str, Any]]]:
    """Of several jobs, whose parts run in the same launches."""
    cases = [(job, folder / f"{number}-0", steps) for number, job in enumerate(jobs)]
    first = [ranks for _, ranks in run_cases(train_and_save, widths[0], cases)]
    reports = [[ranks[0]] for ranks in first]
    for k, width in enumerate(widths[1:]):
        later = [replace(job, seed=7, options={**job.options, **others}) for job in jobs]
        paths = [(folder / f"{number}-{k}", folder / f"{number}-{k + 1}") for number in range(len(jobs))]
        loaded = run_cases(load_and_train, width, [(job, *both) for job, both in zip(later, paths, strict=True)])
        for number, (_, ranks) in enumerate(loaded):
            pairs = [("loaded", "saved")] if width != widths[0] or others else [("loaded", "saved"), ("end", "end")]
            for now, before in pairs:
                wanted = joined([rank[before] for rank in first[number]])
                assert_same(joined([rank[now] for rank in ranks]), wanted, jobs[number])
            reports[number].append(ranks[0])
    return reports


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], what: object = "") -> None:
    assert got.keys() == wanted.keys()
    differing = [name for name in wanted if not torch.equal(got[name], wanted[name])]
    assert not differing, (what, differing)


def test_2_to_4_to_1_to_3_to_2_ranks(tmp_path: Path) -> None:
    """Masters and moments bitwise, padding poisoned before each save; losses as before, bitwise at the same W."""
    reports = run_chain(Job(), (2, 4, 1, 3, 2), tmp_path)
    wanted = reports[0]["losses"][5:]
    for report in reports[1:]:
        torch.testing.assert_close(report["losses"], wanted, rtol=1e-5, atol=0)
        assert report["extra"] == {"step": 5, "rank": 0}
    assert reports[-1]["losses"] == wanted


def test_plain_dcp_reads_it_in_the_modules_own_shapes(tmp_path: Path) -> None:
    """Without zc: stock `dcp.load` into a plain model and plain tensors."""
    first = run_ranks(train_and_save, 3, Job("frozen"), tmp_path / "a", 3)
    model = CASES["frozen"].model(5)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True)
    wanted = joined([rank["saved"] for rank in first])
    target = CASES["frozen"].model(0).state_dict()
    for name, value in state["model"].items():
        expected = wanted.get(name, target[name].reshape(-1))  # frozen ones and buffers: as the seed made them
        assert torch.equal(value.reshape(-1), expected), name
    keys = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    name = next(n for n in wanted if n.endswith("weight"))
    assert keys[f"optimizer.state.{name}.exp_avg"].size == model.get_parameter(name).shape


# test_stages.py has other stages, and offload="cpu"
@pytest.mark.parametrize(
    "others",
    [{"bucket_nbytes": 64}, {"offload": "disk"}, {"overlap_gather": True}],
    ids=["bucket_nbytes", "disk", "overlap_gather"],
)
@full_cases("overlap_gather", "bucket_nbytes")
def test_into_another_plan(others: dict[str, Any], tmp_path: Path) -> None:
    if others.get("offload") == "disk":
        (tmp_path / "state").mkdir()
        others = {**others, "offload_dir": tmp_path / "state"}
    run_chain(Job("mlp"), (2, 2), tmp_path, **others)


def _late_gathers(rank: int, world_size: int, options: dict[str, Any], path: Path) -> dict[str, Any]:
    """Gathers are slow: the last step's are in flight when the save and the load begin, and the load's own when it
    ends, if it does not wait for them."""
    job = Job("mlp", options={"overlap_gather": True, **options})
    model, optimizer = job.compiled()
    gather = TABLE[Gather]

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return gather(*args, **kwargs)

    TABLE[Gather] = slow
    try:
        job.steps(model, optimizer, 0, 3)
        zc.save(path, model, optimizer)
        saved = parts(model, optimizer)
        job.steps(model, optimizer, 3, 5)
        zc.load(path, model, optimizer)
        values = {name: param.detach().clone() for name, param in model.named_parameters()}  # no zc.synchronize before
        return {"saved": saved, "loaded": parts(model, optimizer), "weights": values}
    finally:
        TABLE[Gather] = gather


@pytest.mark.parametrize("options", [{}, {"param_dtype": torch.bfloat16}], ids=["fp32", "bf16"])
def test_gathers_in_flight(options: dict[str, Any], tmp_path: Path) -> None:
    results = run_ranks(_late_gathers, 2, options, tmp_path / "a")
    wanted = joined([rank["saved"] for rank in results])
    assert_same(joined([rank["loaded"] for rank in results]), wanted)
    for rank in results:
        for name, weight in rank["weights"].items():
            assert torch.equal(weight.reshape(-1), wanted[name].to(weight.dtype)), name


def test_an_uneven_vocabulary(tmp_path: Path) -> None:
    run_chain(Job("vocabulary"), (2, 3), tmp_path, steps=1)


def test_bf16_parameters_keep_their_fp32_masters(tmp_path: Path) -> None:
    reports = run_chain(Job("mlp", options={"param_dtype": torch.bfloat16}), (2, 3), tmp_path)
    assert all(w.dtype == torch.bfloat16 for w in reports[1]["weights"].values())
    saved = {"model": {n: torch.empty(w.shape) for n, w in reports[1]["weights"].items()}}
    dcp.load(saved, checkpoint_id=tmp_path / "0-1", no_dist=True)
    for name, weight in reports[1]["weights"].items():
        assert torch.equal(saved["model"][name].bfloat16(), weight), name


def _written(rank: int, world_size: int, path: Path) -> list[float]:
    """A caller writes a bf16 weight between the update and the save: the fp32 master that is saved has it."""
    job = Job("mlp", options={"param_dtype": torch.bfloat16})
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 1)
    with torch.no_grad():
        next(model.parameters()).fill_(0.5)
    zc.save(path, model, optimizer)
    zc.load(path, model, optimizer)
    job.step(model, optimizer, 1)
    return next(model.parameters()).detach().float().unique().tolist()


def test_written_weights_are_saved(tmp_path: Path) -> None:
    for values in run_ranks(_written, 2, tmp_path / "a"):
        assert max(abs(v - 0.5) for v in values) < 0.01


def build(kind: type[Optimizer], options: dict[str, Any], model: nn.Module) -> Optimizer:
    return kind(model.parameters(), **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": partial(build, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "SGD_plain": partial(build, torch.optim.SGD, {"lr": 1e-2}),
    "AdamW_fused": partial(build, torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "Adam_amsgrad": partial(build, torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "Muon": partial(build, torch.optim.Muon, {"lr": 1e-3}),
    "Adafactor": partial(build, torch.optim.Adafactor, {"lr": 1e-3}),
    **{
        name: partial(build, getattr(torch.optim, name), {})
        for name in ("Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")
    },
}


SAMPLE = OPTIMIZERS if FULL else ("SGD", "SGD_plain", "AdamW_fused", "NAdam", "Muon", "Adafactor", "ASGD")


def test_every_optimizer(tmp_path: Path) -> None:
    """Matrices only: Muon takes no others. Adafactor has states of other shapes than the parameter."""
    jobs = [Job("matrices", OPTIMIZERS[name]) for name in SAMPLE]
    run_chains(jobs, (2, 3, 1, 2) if FULL else (2, 3), tmp_path, steps=2)
