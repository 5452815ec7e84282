"""Optimizers that read whole parameters: each has one owner, gradients come to it and weights go out again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_cases, run_ranks
from oracle import weights, worst
from tiers import FULL, full_cases
from torch import nn
from torch.optim import Optimizer
from training_runs import message_of
from two_optimizers import CASE, WideMuon, split, torch_muon

import zc
from zc.registry import sharded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class AuxMuon(WideMuon):
    """One optimizer with groups of two kinds, as SingleDeviceMuonWithAuxAdam has them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = [group for group in groups if group["matrix"]]
        super().step()
        self.param_groups = groups
        for group in (group for group in groups if not group["matrix"]):
            for param in (p for p in group["params"] if p.grad is not None):
                mean = self.state[param].setdefault("exp_avg", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                square = self.state[param].setdefault("exp_avg_sq", torch.zeros_like(param))
                square.lerp_(param.grad.square(), 0.05)
                param.sub_(1e-3 * mean / (square.sqrt() + 1e-3))


def aux_muon(model: nn.Module) -> list[Optimizer]:
    matrices, rest = split(model)
    return [AuxMuon([{"params": rest, "matrix": False}, {"params": matrices, "matrix": True}])]


def bits(rank: int, world_size: int, make: Any, stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """Every rank has the same batch, so that means over 2 and 4 ranks are exact: one process's bits must come out."""
    twin, model = CASE.model(), CASE.model()
    alone = make(twin)
    chosen = make(model)
    model, optimizers = zc.compile(model, chosen, stage=stage, backend="eager", bucket_nbytes=8192, **options)
    for step in range(2):
        for one, its in ((twin, alone), (model, optimizers)):
            CASE.loss(one, CASE.batch(0, step, 0)).backward()
            for optimizer in its:
                optimizer.step()
                optimizer.zero_grad()
    zc.synchronize(model)
    mine = weights(twin)
    plan = sharded(model).runtime.plan
    with zc.whole_parameters(model):
        theirs = weights(model)
    return {
        "differ": [n for n, w in theirs.items() if not torch.equal(w, mine[n])],
        "runs": [dict(b.layout.runs) for b in plan.buckets if b.layout.owners is not None],
        "padding": sum(b.layout.numel_padding for b in plan.buckets),
        "slots": sum(len(b.slots) for b in plan.buckets),
        "buckets": len(plan.buckets),
    }


WAYS: dict[int, list[tuple[int, dict[str, Any]]]] = {  # stages and options, by number of ranks
    2: [(1, {}), (2, {}), (2, {"offload": "cpu"}), (1, {"offload": "cpu"}), (3, {"offload": "cpu"}),
        (1, {"offload": "cpu", "offload_accumulate": "device"})],
    4: [(2, {"reduce": "native"}), (1, {}), (3, {"offload": "cpu"}), (2, {"overlap_gather": True})],
}  # fmt: skip


@pytest.mark.parametrize("world_size", WAYS)
@full_cases("4")
def test_the_bits_of_a_single_process(world_size: int) -> None:
    """bf16 iteration and all: an optimizer sees whole gradients, weights and states, and none of the ranks. By default
    groups of two kinds in one optimizer train in every second way: whole parameters take the same ways."""
    ways = WAYS[world_size]
    cases = [(torch_muon, *way) for way in ways] + [(aux_muon, *way) for way in (ways if FULL else ways[::2])]
    for case, results in run_cases(bits, world_size, cases, timeout=300.0):
        for seen in results:
            assert not seen["differ"], case
            assert seen["runs"] == results[0]["runs"], case
            # nothing but alignment: 32 elements a parameter, and a rank's shard of a bucket
            assert seen["padding"] <= 32 * seen["slots"] + 32 * world_size * seen["buckets"], case
        assert len({rank for runs in results[0]["runs"] for rank in runs}) == world_size, "each rank updates something"


def _planned(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    model = CASE.model()
    options = {"param_dtype": torch.bfloat16, "bucket_nbytes": 8192, **options}
    model, optimizers = zc.compile(model, torch_muon(model), stage=stage, backend="eager", **options)
    for step in range(2):
        CASE.loss(model, CASE.batch(rank, step, 0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return zc.persistent_nbytes(model), dict(sharded(model).runtime.ledger.last.nbytes_sent)


@pytest.mark.parametrize(("world_size", "stages"), [(2, (1,)), (3, (2, 3))])
def test_zc_plan_says_what_the_heaviest_rank_holds_and_sends(world_size: int, stages: tuple[int, ...]) -> None:
    """To the byte; only states have no padding."""
    rest = ("embed*", "position*", "head*", "*norm*", "*bias")
    names = {**dict.fromkeys(rest, "AdamW"), "*": "Muon"}
    cases = [(stage, options) for stage in stages for options in ({}, {"offload": "cpu"})]
    for (stage, options), ranks in run_cases(_planned, world_size, cases):
        plan = zc.plan(
            CASE.model(), world_size=world_size, stage=stage, param_dtype=torch.bfloat16, bucket_nbytes=8192,
            optimizer=names, ranks_per_host=world_size, **options,
        )  # fmt: skip
        for kind, nbytes in {**plan.device, **plan.host}.items():
            measured = max(seen.get(kind, 0) for seen, _ in ranks)
            assert 0.9 * nbytes <= measured <= nbytes if kind == "optimizer_state" else measured == nbytes, kind
        sent = [(s["reduce"] + s["to owners"], s["gather weights"] + s["from owners"]) for _, s in ranks]
        assert max(out for out, _ in sent) == plan.wire["gradients"]
        assert max(back for _, back in sent) == plan.wire["parameters"]


def _few(rank: int, world_size: int, stage: int) -> Any:
    """Two matrices on four ranks: two ranks own nothing, and step all the same, under a GradScaler too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.GELU(), nn.Linear(24, 16, bias=False))
    twin = nn.Sequential(nn.Linear(16, 24, bias=False), nn.GELU(), nn.Linear(24, 16, bias=False)).double()
    twin.load_state_dict(model.state_dict())
    plain = WideMuon(twin.parameters())
    model, optimizer = zc.compile(model, WideMuon(model.parameters()), stage=stage, backend="eager")
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def data(r: int, step: int) -> torch.Tensor:
        return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + r))

    for step in range(4):
        for r in range(world_size):
            (twin(data(r, step).double()).square().mean() / world_size).backward()
        loss = model(data(rank, step)).square().mean()
        if step == 1 and rank == 3:  # a rank that owns nothing
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            plain.step()
        plain.zero_grad(set_to_none=False)
        if step % 2:
            optimizer.zero_grad(set_to_none=False)
        else:
            type(optimizer).zero_grad(optimizer, set_to_none=False)  # asks each slice by itself
    return worst(weights(model), weights(twin)), scaler.get_scale(), len(optimizer.state)


def test_ranks_that_own_nothing() -> None:
    for stage, ranks in run_cases(_few, 4, (1, 2)):
        for error, scale, _ in ranks:
            assert error[0] < 2e-5 and scale == 8.0, stage
        assert [num for _, _, num in ranks] == [2, 2, 2, 2], "states are found under the parameters on all ranks"


class Gathering(WideMuon):
    """Shares out its parameters by itself, as the first Muon did: each rank updates every other one and gathers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for k, param in enumerate(group["params"]):
                if k % dist.get_world_size() == dist.get_rank() and param.grad is not None:
                    param.sub_(group["lr"] * param.grad)
                dist.broadcast(param.data, k % dist.get_world_size())


def _gathers(rank: int, world_size: int) -> tuple[str, str]:
    model = CASE.model()
    return message_of(lambda: zc.compile(model, Gathering(model.parameters()), backend="eager"))


def test_an_optimizer_that_communicates_by_itself_is_refused() -> None:
    """Ranks hold different parameters under zc: its own exchange would mix them up."""
    for kind, text in run_ranks(_gathers, 2):
        assert kind == "PlanError" and "Gathering exchanges tensors between ranks in its own step" in text, text
