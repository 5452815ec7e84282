"""torch.distributed.checkpoint.state_dict on a compiled model: what it gives and takes, on other numbers of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_cases, run_ranks
from models import CASES
from save_and_load import Job, joined, parts
from test_reshard import OPTIMIZERS, assert_same
from test_ways_out_and_in import plain_steps
from tiers import full_cases
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from training_runs import adamw, message_of

import zc


def _first(rank: int, world_size: int, job: Job, path: Path) -> dict[str, Any]:
    """Job: trains, saves as torch's tutorial has it, and goes on."""
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 3)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    before = parts(model, optimizer)
    return {"saved": before, "losses": job.steps(model, optimizer, 3, 5)}


def _again(rank: int, world_size: int, job: Job, path: Path) -> dict[str, Any]:
    """Job: a fresh model of another seed loads it, and goes on."""
    model, optimizer = Job(**{**vars(job), "seed": 7}).compiled()
    optimizer.param_groups[0]["lr"] = 0.5
    before = parts(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    after = parts(model, optimizer)
    assert before.keys() == after.keys() and all(torch.equal(before[n][1], after[n][1]) for n in before)
    assert optimizer.param_groups[0]["lr"] == 0.5, "asking changes nothing"
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    zc.state_dict(model, optimizer)  # the masters take what was written into the parameters
    return {"loaded": parts(model, optimizer), "losses": job.steps(model, optimizer, 3, 5)}


CHAINS = {"AdamW": ("gpt_tied", adamw, (2, 3, 1)), "Adafactor": ("matrices", OPTIMIZERS["Adafactor"], (2, 3))}


@pytest.mark.parametrize("name", CHAINS)
@full_cases("AdamW")
def test_saved_by_2_ranks_and_resumed_by_others(name: str, tmp_path: Path) -> None:
    """KeyError: 0."""
    case, make, widths = CHAINS[name]
    job = Job(case, make)
    first = run_ranks(_first, widths[0], job, tmp_path / "a")
    for width in widths[1:]:
        results = run_ranks(_again, width, job, tmp_path / "a")
        assert_same(joined([rank["loaded"] for rank in results]), joined([rank["saved"] for rank in first]))
        torch.testing.assert_close(results[0]["losses"], first[0]["losses"], rtol=1e-5, atol=0)


def _whole(rank: int, world_size: int) -> None:
    job = Job("mlp")
    model, optimizer = job.compiled()
    job.steps(model, optimizer, 0, 2, rank)
    before = parts(model, optimizer)
    wanted = [zc.full_optimizer_state(model, optimizer)]
    dist.broadcast_object_list(wanted, 0)
    names = [name for name, _ in model.named_parameters()]
    full = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert set(full["state"]) == set(names) and full["param_groups"][0]["params"] == names
    for number, name in enumerate(names):
        for key, value in wanted[0]["state"][number].items():
            assert torch.equal(full["state"][name][key], value), (name, key)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    on_one = get_optimizer_state_dict(model, optimizer, options=options)
    assert (on_one == {}) == (rank > 0)

    fresh, its = Job("mlp", options={"bucket_nbytes": 64}, seed=3).compiled()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(fresh, its, on_one, options=options)
    again = get_optimizer_state_dict(fresh, its, options=StateDictOptions(full_state_dict=True))
    for name in names:
        assert all(torch.equal(again["state"][name][key], value) for key, value in full["state"][name].items())

    # of no update
    new, its_own = Job("mlp", seed=3).compiled()
    first = get_optimizer_state_dict(new, its_own, options=StateDictOptions(full_state_dict=True))
    assert set(first["state"]) == set(names)
    assert all(not value.any() for items in first["state"].values() for value in items.values())

    # written into narrow weights, and no update since: no older master comes back
    narrow, its_own = Job("mlp", options={"param_dtype": torch.bfloat16}).compiled()
    with torch.no_grad():
        for param in narrow.parameters():
            param.fill_(0.5)
    set_optimizer_state_dict(narrow, its_own, full)
    assert all(bool((param == 0.5).all()) for param in narrow.parameters())

    # what is refused changes nothing
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    wrong = copy.deepcopy(full)
    wrong["state"]["nobody.weight"] = wrong["state"].pop(names[0])
    for what, words in (
        (lambda: get_optimizer_state_dict(model, optimizer, options=flat), "flatten_optimizer_state_dict"),
        (lambda: get_optimizer_state_dict(torch.nn.Sequential(model), optimizer), "give the compiled one"),
        (lambda: set_optimizer_state_dict(model, optimizer, wrong), "nobody.weight, which is in no parameter group"),
        (lambda: set_optimizer_state_dict(model, [optimizer, its], full), "was compiled with"),
    ):
        said = message_of(what)
        assert said[0] in ("PlanError", "CheckpointError") and words in said[1], said
    after = parts(model, optimizer)
    assert all(torch.equal(before[n][1], after[n][1]) for n in before)

    # DDP's, and a plain model's, go on as ever
    plain = CASES["mlp"].model(0)
    other = adamw(plain)
    plain_steps(plain, other, "mlp", 0, 2)
    _, states = get_state_dict(plain, other)
    set_optimizer_state_dict(model, optimizer, states)
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    for name in names:
        assert torch.equal(state["state"][name]["exp_avg"], states["state"][name]["exp_avg"])
    set_optimizer_state_dict(plain, other, states)


def test_whole_states_and_what_is_refused() -> None:
    run_ranks(_whole, 2)


KEPT = [{"stage": 1}, {"stage": 2, "bucket_nbytes": 256}, {"stage": 3}, {"stage": 2, "offload": "cpu"}]


def _loads_beside_gradients(rank: int, options: dict[str, Any] | None, by: str) -> dict[str, Tensor]:
    """The weights after two backwards, each with a load of older states behind it, and a step. DDP without options."""
    case, full = CASES["mlp"], StateDictOptions(full_state_dict=True)
    model = case.model(0)
    optimizer, trained = adamw(model), model
    if options is None:
        trained = nn.parallel.DistributedDataParallel(model)
    else:
        zc.compile(model, optimizer, backend="eager", **options)
    states: list[Any] = []
    for step in range(2):
        case.loss(trained, case.batch(rank, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        states = states or [copy.deepcopy(each) for each in get_state_dict(trained, optimizer, options=full)]
    for step in (2, 3):
        case.loss(trained, case.batch(rank, step, 0)).backward()
        if by == "zc" and options is not None:
            zc.load_state_dict(model, optimizer, {"model": states[0], "optimizer": states[1]})
        elif by != "optimizer":
            given = {"model_state_dict": dict(states[0]), "optim_state_dict": states[1]}
            set_state_dict(trained, optimizer, **given, options=full)
        else:
            set_optimizer_state_dict(trained, optimizer, states[1], options=full)
    optimizer.step()
    return dict(model.state_dict()) if options is None else {n: w.clone() for n, w in zc.iter_weights(model)}


def _as_ddp(rank: int, world_size: int, options: dict[str, Any], by: str) -> None:
    wanted = _loads_beside_gradients(rank, None, by)
    for name, weight in _loads_beside_gradients(rank, options, by).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-5, atol=1e-6)


def test_gradients_that_await_their_step_stay() -> None:
    """As in DDP. They were dropped in silence, and step() did nothing."""
    run_cases(_as_ddp, 2, [(options, by) for options in KEPT for by in ("optimizer", "both", "zc")])


def test_asking_for_first_states_leaves_all_random_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed also seeds the generators of GPUs, which a trial on the CPU would not restore."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    zc.compile(model, optimizer, backend="eager")
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    before = torch.get_rng_state()
    states = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(states) == {"weight", "bias"} and float(states["weight"]["step"]) == 0.0
    assert not seeds and torch.equal(torch.get_rng_state(), before)
