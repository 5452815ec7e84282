"""Offload against DDP, against no offload bit by bit, and against the public reports of gradients that got lost."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from harness import run_cases, run_ranks
from late_gathers import Delayed
from models import Heads, mean_square, mlp, seeded, vectors
from oracle import weights, worst
from tiers import FULL, full_cases
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zc
from zc.engine.buffers import Acc
from zc.schedule.buffer import COPY, HOST

DIM, TASKS, STEPS = 16, 3, 3
LARGE, SMALL = 50_000_000 * 4, 500 * 4  # bytes: the report's buckets, and many of this model
FORMS = ("backward per task", "summed", "accumulated")
OFFLOADS: tuple[dict[str, Any], ...] = (
    {}, {"offload": "cpu"}, {"offload": "cpu", "overlap": False}, {"offload": "cpu", "offload_accumulate": "device"},
)  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With a step so large that a lost gradient shows at once."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)


def batch(rank: int, step: int, task: int) -> tuple[Tensor, Tensor]:
    generator = seeded(rank, step, task)
    return torch.randn(8, DIM, generator=generator), torch.randn(8, 4, generator=generator)


def run_form(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, form: str, inside: Any) -> None:
    """The report's loop in one of its forms; zero_grad once an iteration."""
    backwards = [(0, 1, 2)] if form == "summed" else [(task,) for task in range(TASKS)]
    for step in range(STEPS):
        for number, tasks in enumerate(backwards):
            outputs = zip(tasks, model(batch(rank, step, tasks[0])[0], tasks), strict=True)
            losses = [nn.functional.mse_loss(out, batch(rank, step, task)[1]) for task, out in outputs]
            with inside(form == "accumulated" and number < len(backwards) - 1):
                torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def zc_runs(rank: int, world_size: int, form: str, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for choice in options:
        torch.manual_seed(0)
        model: nn.Module = Heads(DIM, TASKS)
        model, optimizer = zc.compile(model, adamw(model), **choice)
        run_form(
            model, optimizer, rank, form, lambda inner, m=model: zc.no_sync(m) if inner else contextlib.nullcontext()
        )
        rows = zc.explain(model).sections["buckets"].splitlines()
        counts = [int(row.split()[-2]) for row in rows if " at end " in row or " inline " in row]
        runs.append({"weights": weights(model), "times": counts, "explain": str(zc.explain(model))})
    return runs


def ddp_run(rank: int, world_size: int, form: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(Heads(DIM, TASKS), find_unused_parameters=True)
    optimizer = adamw(wrapped)
    run_form(wrapped, optimizer, rank, form, lambda inner: contextlib.nullcontext())
    return weights(wrapped.module)


def test_ds7579_the_reported_script() -> None:
    """deepspeed#7579 (buckets that stay empty in silence): DDP's weights, bitwise those without offload, and every
    bucket is filled, which explain says."""
    cases = []
    for form in FORMS:  # test_ranks_apart.py compiles such loops with offload
        backend = "aot_eager" if FULL and form == "summed" else "eager"  # the others have a graph per task
        bases = ({"backend": backend, "bucket_nbytes": LARGE}, {"stage": 1, "backend": "eager", "bucket_nbytes": SMALL})
        cases.append((form, [{**base, **way} for base in bases for way in OFFLOADS]))
    references = dict(run_cases(ddp_run, 2, FORMS))
    trained = run_cases(zc_runs, 2, cases, timeout=300.0)
    for form, options, runs in ((*case, runs) for case, ranks in trained for runs in ranks):
        for number, run in enumerate(runs):
            plain = runs[number - number % 4]["weights"]
            assert all(torch.equal(run["weights"][name], plain[name]) for name in plain), (form, options[number])
            assert worst(run["weights"], references[form][0])[0] < 2e-5, (form, options[number])
            assert all(times >= 1 for times in run["times"]) and run["times"], run["explain"]
            if "offload" in options[number]:
                assert "over the bus in the last step: to_host" in run["explain"]
                assert "update(0, master[0], host[0])" in run["explain"], "the update's schedule is shown"


def bitwise(
    rank: int, world_size: int, backend: str, options: list[dict[str, Any]], delays: list[dict[str, float]]
) -> list[bool]:
    """Job: whether each run ends with the first one's weights, to the bit; of several streams' speeds."""
    runs: list[dict[str, Tensor]] = []
    for choice, slow in zip(options, delays, strict=True):
        torch.manual_seed(0)
        model: nn.Module = mlp(32, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = zc.compile(model, optimizer, backend=backend, bucket_nbytes=5000, **choice)
        sharded = zc.registry.sharded(model)
        sharded.runtime.streams = sharded.runtime.deposits.streams = Delayed(slow)
        for step in range(3):
            for m in range(2):  # not declared
                mean_square(model, vectors(32)(rank, step, m)).backward()
            if step == 1:
                zc.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        runs.append(weights(model))
        sharded.runtime.streams.close()
    return [all(torch.equal(one[name], runs[0][name]) for name in one) for one in runs]


@pytest.mark.parametrize("stage", [1, 2])
@full_cases("2")
def test_bitwise_the_same_whichever_stream_is_late(stage: int) -> None:
    """Each stream in turn slower than all others; with clipping, zeros for gradients, and narrow parameters."""
    base = {"stage": stage, "param_dtype": torch.bfloat16}
    cpu = {**base, "offload": "cpu"}
    device = {**cpu, "offload_accumulate": "device"}
    options = [base, cpu, cpu, cpu, device, device, {**device, "num_buffers": 1}]
    late = [{}, {COPY: 0.004}, {HOST: 0.004}, {"comm": 0.004}, {COPY: 0.004}, {HOST: 0.004}, {COPY: 0.004, HOST: 0.002}]
    backend = "aot_eager" if FULL or stage == 2 else "eager"
    if backend != "eager" and not FULL:
        options, late = options[:1] + options[-2:], late[:1] + late[-2:]
    for same in run_ranks(bitwise, 2, backend, options, late):
        assert all(same), same


def offloaded(mode: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = Heads(DIM, TASKS)
    return zc.compile(
        model, adamw(model), backend="eager", bucket_nbytes=SMALL, offload="cpu", offload_accumulate=mode
    )


def accumulated(rank: int, world_size: int, mode: str) -> tuple[float, float]:
    """Job: the gradient norm, and a head's update."""
    model, optimizer = offloaded(mode)
    before = model.heads[0].weight.detach().clone()
    for task in range(TASKS):  # heads 0 and 1 get no gradient from the last microbatch
        x, y = batch(rank, 0, task)
        nn.functional.mse_loss(model(x, (task,))[0], y).backward()
    norm = float(zc.clip_grad_norm_(model, 1e9))
    optimizer.step()
    return norm, float((model.heads[0].weight - before).norm())


def one_process() -> dict[str, Tensor]:
    """The mean gradients over the ranks of the first step, plain PyTorch in float64."""
    torch.manual_seed(0)
    model = Heads(DIM, TASKS).double()
    for rank in range(2):
        for task in range(TASKS):
            x, y = (t.double() for t in batch(rank, 0, task))
            (nn.functional.mse_loss(model(x, (task,))[0], y) / 2).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def joint(grads: dict[str, Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads.values()])))


def test_ds7981_ds6550_every_microbatch_counts_and_the_norm_is_ddps() -> None:
    """deepspeed#7981 (offload kept only the last microbatch), deepspeed#6550, deepspeed#7967 (gradients dropped)."""
    wanted = joint(one_process())
    for mode, ranks in run_cases(accumulated, 2, ("cpu", "device")):
        for norm, moved in ranks:  # Adam moves each weight by lr
            assert norm == pytest.approx(wanted, rel=1e-6) and moved > 0.005, mode


def edited(rank: int, world_size: int, mode: str) -> tuple[float, float, bool]:
    """Job: the norm, the norm after one gradient was scaled by hand, and whether the update took the scaled one."""
    model, optimizer = offloaded(mode)
    for task in range(TASKS):
        x, y = batch(rank, 0, task)
        nn.functional.mse_loss(model(x, (task,))[0], y).backward()
    first = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    bias = model.heads[0].bias
    before = bias.detach().clone()
    for param in model.parameters():
        param.grad.mul_(0.0 if param is bias else 0.5)
    second = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    optimizer.step()
    return first, second, torch.equal(bias, before)


def test_ds7302_the_norm_is_that_of_the_gradients_as_they_are_now() -> None:
    """deepspeed#7302, deepspeed#7292: gradients that the script had changed had their old norm."""
    grads = one_process()
    changed = {name: grad * (0.0 if name == "heads.0.bias" else 0.5) for name, grad in grads.items()}
    for mode, ranks in run_cases(edited, 2, ("cpu", "device")):
        for first, second, stays in ranks:
            assert first == pytest.approx(joint(grads), rel=1e-6), mode
            assert second == pytest.approx(joint(changed), rel=1e-6), mode
            assert stays, "the update of a gradient of zeros moved something"


def hooked(rank: int, world_size: int) -> list[bool]:
    """Job: a step pre-hook that is registered after zc's scales the gradients, with offload and without."""
    norms = []
    for offload in (None, "cpu"):
        torch.manual_seed(0)
        model: nn.Module = mlp(16, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = zc.compile(model, optimizer, backend="eager", offload=offload)

        def halve(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for param in opt.param_groups[0]["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)

        handle = optimizer.register_step_pre_hook(halve)
        for step in range(2):
            mean_square(model, vectors(16)(rank, step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        handle.remove()
        mean_square(model, vectors(16)(rank, 9, 0)).backward()
        optimizer.step()
        norms.append(weights(model))
    return [torch.equal(norms[0][name], norms[1][name]) for name in norms[0]]


def test_a_later_step_hook_still_changes_the_update() -> None:
    """The update starts before the optimizer's own step does, unless somebody may still want to change a gradient."""
    assert all(all(same) for same in run_ranks(hooked, 2))


def accumulators(rank: int, world_size: int) -> list[str]:
    """Job: what is in host memory after a backward that was not declared the last, one that was, and zero_grad."""
    torch.manual_seed(0)
    model: nn.Module = mlp(16, 2)
    model, optimizer = zc.compile(
        model, adamw(model), stage=1, backend="eager", offload="cpu", offload_accumulate="device"
    )
    ops = zc.registry.sharded(model).runtime.accumulators
    seen = []
    with zc.no_sync(model):
        mean_square(model, vectors(16)(rank, 0, 0)).backward()
    seen.append(f"{ops.state[0].value} {ops.landed[0]}")
    optimizer.step()  # a boundary, though no backward was one
    seen.append(f"{ops.landed[0]}")
    optimizer.zero_grad()
    seen.append(f"{ops.state[0] is Acc.EMPTY}")
    return seen


def test_a_step_after_declared_microbatches_alone_takes_them_to_host_memory() -> None:
    for seen in run_ranks(accumulators, 2):
        assert seen == ["partial False", "True", "True"]


@pytest.mark.parametrize("mode", ["cpu", "device"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_changes_nothing(fused: bool, mode: str) -> None:
    """A fused optimizer skips it itself, and the update bucket by bucket is not that optimizer's own."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    model, optimizer = zc.compile(model, optimizer, backend="eager", offload="cpu", offload_accumulate=mode)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = weights(model)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        x = torch.ones(2, next(model.parameters()).shape[1])
        scaler.scale(model(x).sum() * factor).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert same == (factor != 1.0)
    assert all(p.isfinite().all() for p in model.parameters())
