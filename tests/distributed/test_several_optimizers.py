"""`zc.compile(model, [muon, adamw])`: each parameter in one optimizer, each optimizer on its own schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_cases, run_ranks
from oracle import weights, worst
from tiers import COMPILED, full_cases
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from training_runs import message_of
from two_optimizers import CASE, MAKE, Loop, is_matrix, on_ranks, reference, split, two_adamw, wide_muon

import zc

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _run(rank: int, world_size: int, loop: Loop, options: dict[str, Any], own_clip: bool = False) -> dict[str, Any]:
    dtype = torch.float32 if loop.make == "Muon" else torch.float64
    twin, _, wanted_norms = reference(loop, world_size, dtype)
    model = CASE.model()
    optimizers: Any = MAKE[loop.make](model)
    model, optimizers = zc.compile(model, optimizers, **{"bucket_nbytes": 8192, **options})
    norms = on_ranks(loop, model, optimizers, rank, own_clip=own_clip)
    zc.synchronize(model)
    return {
        "error": worst(weights(model), weights(twin)),
        "norms": max((abs(a - b) / b for a, b in zip(norms, wanted_norms, strict=True)), default=0.0),
        "weights": weights(model),
    }


def check(world_size: int, loop: Loop, tolerance: float = 2e-5, own_clip: bool = False, **options: Any) -> None:
    results = run_ranks(_run, world_size, loop, options, own_clip)
    for seen in results:
        assert seen["error"][0] < tolerance, seen["error"]
        assert seen["norms"] < tolerance
        assert all(torch.equal(w, results[0]["weights"][n]) for n, w in seen["weights"].items()), "ranks differ"


ALL = Loop(updates=4, microbatches=2, max_norm=0.5, scheduled=True)


@pytest.mark.parametrize(("stage", "backend", "own_clip"), [(1, "eager", True), (2, COMPILED, False)])
@full_cases("1-eager-True")
def test_matrices_and_the_rest(stage: int, backend: str, own_clip: bool) -> None:
    """Clipping over all, torch's and zc's, a scheduler each, accumulation: one process's weights."""
    check(3, ALL, own_clip=own_clip, stage=stage, backend=backend)


@pytest.mark.parametrize("stage", [1, 2])
def test_with_overlap_gather_and_with_offload(stage: int) -> None:
    """The second optimizer steps in every second update. tests/compatibility has each option in a plain loop."""
    if stage == 1:
        check(2, Loop(max_norm=0.5, every=(1, 2)), stage=1, backend=COMPILED, overlap_gather=True)
    else:
        check(2, Loop("two AdamW", every=(1, 2)), stage=2, backend="eager", offload="cpu", offload_accumulate="device")


# --- what comes back ---


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "alone"])
def test_what_was_given_comes_back(kind: str) -> None:
    model = CASE.model()
    pair = two_adamw(model)
    argument: Any = {"list": pair, "tuple": tuple(pair), "dict": {"matrices": pair[0], "rest": pair[1]}}.get(kind)
    if kind == "alone":
        argument = AdamW(model.parameters())
    same, back = zc.compile(model, argument, backend="eager")
    assert same is model and back is argument and type(back).__name__ in (kind, "AdamW")


def test_one_bucket_one_optimizer() -> None:
    model = CASE.model()
    zc.compile(model, wide_muon(model), backend="eager", bucket_nbytes=8192)
    plan = zc.registry.sharded(model).runtime.plan
    for bucket in plan.buckets:
        assert {is_matrix(s.name, torch.empty(s.shape)) for s in bucket.slots} == {bucket.optimizer == 0}
    firsts = [list(dict(model.named_parameters())).index(b.slots[-1].name) for b in plan.buckets]
    assert len({b.optimizer for b in plan.buckets[: len(plan.buckets) // 2]}) == 2, "they alternate as gradients arrive"
    assert firsts[0] > firsts[-1]


# --- what is refused ---


def _lacks(model: nn.Module) -> Any:
    matrices, rest = split(model)
    return [AdamW(matrices), AdamW(rest[1:])]


def _twice(model: nn.Module) -> Any:
    matrices, rest = split(model)
    return {"a": AdamW(matrices), "b": SGD([*rest, matrices[0]], lr=0.1)}


def _same(model: nn.Module) -> Any:
    single = AdamW(model.parameters())
    return [single, single]


def _foreign(model: nn.Module) -> Any:
    return [AdamW(model.parameters()), AdamW([nn.Parameter(torch.ones(2))])]


REFUSED = {
    "a parameter in none": (_lacks, "PlanError", "none of the 2 optimizers has 1 trainable parameter(s) of the model"),
    "those that another rank has": (_lacks, "PlanError", "give all to each rank: zc shares them out"),
    "a parameter in two": (_twice, "PlanError", "blocks.0.attention.qkv.weight is in two optimizers, number 0 (AdamW)"),
    "an optimizer twice": (_same, "PlanError", "optimizer[0] and optimizer[1] are the same AdamW"),
    "none at all": (lambda model: [], "PlanError", "optimizer is an empty list"),
    "something else": (lambda model: [AdamW(model.parameters()), 3], "TypeError", "[1] of it must be a torch.optim"),
    "a parameter of another model": (_foreign, "PlanError", "that the model lacks"),
    "alone, and lacks some": (
        lambda model: AdamW(split(model)[0]), "PlanError", "zc.compile(model, [first, second])"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_anything_changes(what: str) -> None:
    make, kind, text = REFUSED[what]
    model = CASE.model()
    optimizers = make(model)
    before, hooks = weights(model), [len(p._backward_hooks or ()) for p in model.parameters()]
    message = message_of(lambda: zc.compile(model, optimizers, backend="eager"))
    assert message[0] == kind and text in message[1], message
    assert all(torch.equal(before[n], w) for n, w in weights(model).items())
    assert [len(p._backward_hooks or ()) for p in model.parameters()] == hooks
    zc.compile(model, AdamW(model.parameters()), backend="eager")  # as if nothing had been


def _differ(rank: int, world_size: int) -> tuple[str, str]:
    model = CASE.model()
    matrices, rest = split(model)
    optimizers = [AdamW(matrices), AdamW(rest)] if rank == 0 else [AdamW(matrices[1:]), AdamW([*rest, matrices[0]])]
    return message_of(lambda: zc.compile(model, optimizers, backend="eager"))


def test_ranks_that_share_out_parameters_differently() -> None:
    for kind, text in run_ranks(_differ, 2):
        assert kind == "RankMismatchError" and "blocks.0.attention.qkv.weight of optimizer 0" in text


# --- zero_grad of one ---


def _zero_one(rank: int, world_size: int, stage: int, how: str) -> dict[str, Any]:
    """Clears the first optimizer's gradients between two backwards, in one of many ways."""
    model, twin = CASE.model(), CASE.model().double()
    sharded_pair, plain = two_adamw(model), two_adamw(twin)
    model, optimizers = zc.compile(model, sharded_pair, stage=stage, backend="eager", bucket_nbytes=8192)

    def clear(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
        if how == "its zero_grad":
            optimizer.zero_grad()
        elif how == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif how == "its class's":
            type(optimizer).zero_grad(optimizer)
        else:
            for param in params:
                param.grad = None

    for step in range(4):
        for r in range(world_size):
            (CASE.loss(twin, CASE.batch(r, step, 0)) / world_size).backward()
        CASE.loss(model, CASE.batch(rank, step, 0)).backward()
        if step % 2 == 0:
            clear(plain[0], split(twin)[0])
            clear(optimizers[0], split(model)[0])
            continue
        for mine, its in zip(optimizers, plain, strict=True):
            mine.step()
            its.step()
        model.zero_grad()
        twin.zero_grad()
    is_none = [p.grad is None for p in model.parameters()]
    return {"error": worst(weights(model), weights(twin)), "none": all(is_none)}


def test_clearing_one_leaves_the_others() -> None:
    ways = ("its zero_grad", "zeros", "its class's", "by hand")
    for case, ranks in run_cases(_zero_one, 2, [(1, ways[0]), (1, ways[1]), *((2, way) for way in ways)]):
        for seen in ranks:
            assert seen["error"][0] < 2e-5 and seen["none"], (case, seen["error"])


def _memory(rank: int, world_size: int) -> tuple[int, int, int]:
    model = CASE.model()
    model, (first, second) = zc.compile(model, two_adamw(model), backend="eager", bucket_nbytes=8192)
    buffers = zc.registry.sharded(model).runtime.buffers
    CASE.loss(model, CASE.batch(rank, 0, 0)).backward()
    first.step()
    second.step()
    nbytes = [sum(a.nbytes for a in buffers.acc)]
    for optimizer in (first, second):
        optimizer.zero_grad()
        nbytes.append(sum(a.nbytes for a in buffers.acc))
    assert not buffers.has_ring
    return nbytes[0], nbytes[1], nbytes[2]


def test_the_accumulators_of_what_is_cleared_go() -> None:
    for both, one, none in run_ranks(_memory, 2):
        assert both > one > none == 0


# --- GradScaler, hooks, recompile ---


def _scaler(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """An infinite gradient in one optimizer's parameters alone: that one skips its step, on every rank."""
    model, twin = CASE.model(), CASE.model().double()
    model, optimizers = zc.compile(model, two_adamw(model), stage=stage, backend="eager", bucket_nbytes=8192)
    plain = two_adamw(twin)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    moved = []
    for step in range(3):
        for r in range(world_size):
            (CASE.loss(twin, CASE.batch(r, step, 0)) / world_size).backward()
        loss = CASE.loss(model, CASE.batch(rank, step, 0))
        if step == 1 and rank == 1:
            loss = loss + (model.head.weight.flatten()[0] * torch.inf)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers[0])
        before = weights(model)
        for k, (mine, its) in enumerate(zip(optimizers, plain, strict=True)):
            scaler.step(mine)
            if not (step == 1 and k == 1):
                its.step()
        scaler.update()
        moved.append([not torch.equal(before[n], w) for n, w in weights(model).items() if "blocks" in n or "head" in n])
        for mine, its in zip(optimizers, plain, strict=True):
            mine.zero_grad()
            its.zero_grad()
    return {"error": worst(weights(model), weights(twin)), "scale": scaler.get_scale()}


def test_a_grad_scaler_skips_one_of_them() -> None:
    for stage, ranks in run_cases(_scaler, 2, (1, 2)):
        for seen in ranks:
            assert seen["error"][0] < 2e-5 and seen["scale"] == 32.0, (stage, seen["error"])


def _explained(rank: int, world_size: int) -> str:
    model = CASE.model()
    model, optimizers = zc.compile(model, wide_muon(model), backend="eager")
    on_ranks(Loop(updates=1), model, optimizers, rank)
    return zc.explain(model).sections["optimizers"]


def test_explain_says_who_updates_what() -> None:
    results = run_ranks(_explained, 2)
    numel = sum(p.numel() for p in split(CASE.model())[0])
    for text in results:
        assert text.startswith("0: WideMuon, buckets ") and f" {numel:,} elements; this rank updates 4 whole" in text
        assert "1: AdamW, buckets " in text and "an equal shard" in text


def test_disk_offload_takes_one_optimizer(tmp_path: Any) -> None:
    model = CASE.model()
    with pytest.raises(zc.PlanError, match="offload='disk' takes one optimizer, and was given AdamW, AdamW"):
        zc.compile(model, two_adamw(model), backend="eager", offload="disk", offload_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_closing_gives_both_back() -> None:
    model = CASE.model()
    model, optimizers = zc.compile(model, two_adamw(model), backend="eager")
    CASE.loss(model, CASE.batch(0, 0, 0)).backward()
    zc.close(model)
    for optimizer in optimizers:
        with pytest.raises(zc.ZcError, match="has released"):
            optimizer.step()
    zc.compile(model, two_adamw(model), backend="eager")
