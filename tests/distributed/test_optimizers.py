"""The caller's own optimizer on slices: groups, schedulers, masters, and parameters that get no gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_cases
from models import CASES, WithUnused, mean_square, vectors
from oracle import weights, worst
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from training_runs import DIFFERS_MOST, adamw

import zc

WAYS = [(1, "eager"), (1, "aot_eager"), (2, "eager"), (2, "aot_eager")]  # stages and backends

# --- parameters without a gradient ---


def _unused(rank: int, world_size: int, stage: int, backend: str) -> dict[str, Any]:
    model = CASES["unused"].model()
    before = weights(model)
    model, optimizer = zc.compile(model, adamw(model), stage=stage, backend=backend, bucket_nbytes=2048)
    for step in range(3):
        mean_square(model, vectors()(rank, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = weights(model)
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        "moved": [n for n in before if not torch.equal(before[n], after[n])],
        "with state": [names[id(p)] for p, state in optimizer.state.items() if p.numel() and "exp_avg" in state],
    }


def test_a_parameter_without_gradient_is_left_alone() -> None:
    """Zeros in place of None would let weight decay shrink it and momentum move it; PyTorch skips it (deepspeed#5639's
    opposite)."""
    for case, ranks in run_cases(_unused, 2, WAYS):
        for seen in ranks:
            assert seen["moved"] == ["first.weight", "first.bias", "last.weight", "last.bias"], case
            assert seen["with state"] == seen["moved"], "no moments for what is never trained"


# --- masters ---


def _masters(rank: int, world_size: int, stage: int, backend: str) -> dict[str, Any]:
    """One weight of 1.003 (1.0 in bf16), gradient 1, lr 1e-3: ten updates, each below bf16's half unit of 0.002."""
    model = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.003)
    model, optimizer = zc.compile(
        model, SGD(model.parameters(), lr=1e-3), stage=stage, backend=backend, param_dtype=torch.bfloat16
    )
    seen: dict[str, Any] = {"first": model.weight[0, 0].item(), "dtype": model.weight.dtype}
    steps = []
    for _ in range(10):
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(model.weight[0, 0].item())
    expected = [torch.tensor(1.003 - 1e-3 * (k + 1)).bfloat16().item() for k in range(10)]
    return {**seen, "steps": steps, "expected": expected}


def test_bf16_parameters_have_fp32_masters_from_the_given_values() -> None:
    """The masters are the given fp32 weights, not their bf16 rounding, and keep updates that bf16 alone would lose:
    with bf16 weights 1 - 0.001 is 1 for ever."""
    for case, ranks in run_cases(_masters, 2, WAYS):
        for seen in ranks:
            assert seen["first"] == 1.0 and seen["dtype"] == torch.bfloat16, case
            assert seen["steps"] == seen["expected"], case
            assert len(set(seen["steps"])) > 2, "the control: it does move"


def _bf16_training(rank: int, world_size: int, stage: int) -> DIFFERS_MOST:
    """The whole of mixed precision, written out in plain PyTorch: bf16 model, fp32 masters, mean in float64."""
    case = CASES["gpt_tied"]
    model, twin = case.model(), case.model()
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in twin.named_parameters()}
    plain = AdamW(masters.values(), lr=1e-3)
    twin.bfloat16()
    model, optimizer = zc.compile(
        model, AdamW(model.parameters(), lr=1e-3), stage=stage, backend="eager", param_dtype=torch.bfloat16,
        bucket_nbytes=4096,
    )  # fmt: skip
    for step in range(5):
        for one in (model, twin):
            case.loss(one, case.batch(rank, step, 0)).backward()
        for name, param in twin.named_parameters():
            assert param.grad is not None
            wide = param.grad.double()
            dist.all_reduce(wide)
            masters[name].grad = (wide / world_size).float()
            param.grad = None
        plain.step()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in twin.named_parameters():
                param.copy_(masters[name])
    return worst(weights(model), weights(twin))


def test_param_dtype_bf16_is_mixed_precision_as_written_by_hand() -> None:
    """bf16 gradients on the wire, fp32 in the sum, in the masters and in the moments: nothing else is rounded. The
    same kernels run in both, so single bf16 weights may differ by an ulp at most where a master lies on a
    boundary."""
    for stage, ranks in run_cases(_bf16_training, 2, (1, 2)):
        for error, name in ranks:
            assert error < 1e-4, (stage, name)


# --- rank 0's weights ---


def _broadcast(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    torch.manual_seed(100 + rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[2].requires_grad_(False)
    with torch.no_grad():
        model[1].running_mean.fill_(float(rank + 1))
        model[1].num_batches_tracked.fill_(rank + 5)
    own = {n: t.clone() for n, t in model.state_dict().items()}
    zc.compile(model, adamw(model), stage=stage, backend="eager")
    return {"own": own, "after": {n: t.clone() for n, t in model.state_dict().items()}}


def test_everything_starts_from_rank_0() -> None:
    """Ranks that were seeded apart: parameters, frozen ones and buffers of any dtype are rank 0's afterwards, as
    under DDP."""
    for stage, ranks in run_cases(_broadcast, 4, (1, 2)):
        wanted = ranks[0]["own"]
        assert not torch.equal(ranks[1]["own"]["0.weight"], wanted["0.weight"])
        for seen in ranks:
            assert all(torch.equal(seen["after"][name], wanted[name]) for name in wanted), stage


# --- padding ---


def _padding(rank: int, world_size: int, stage: int) -> bool:
    model = WithUnused(dim=3)
    model, optimizer = zc.compile(model, adamw(model), stage=stage, backend="eager", bucket_nbytes=64)
    for step in range(2):
        mean_square(model, vectors(3)(rank, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    is_zero = True
    count = 0
    for flat in zc.registry.sharded(model).runtime.buffers.flat_param:
        covered = torch.zeros(flat.numel(), dtype=torch.bool)
        for p in model.parameters():
            first = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
            if p.numel() and 0 <= first < flat.numel():
                covered[first : first + p.numel()] = True
                count += 1
        is_zero = is_zero and bool((flat[~covered] == 0).all()) and bool((~covered).any())
    return is_zero and count == sum(p.numel() > 0 for p in model.parameters())


def test_padding_stays_zero() -> None:
    """deepspeed#5105: padding came back as data. No update may write what belongs to no parameter, or a norm would
    count it."""
    assert all(all(ranks) for _, ranks in run_cases(_padding, 2, (1, 2)))


class Scale(nn.Module):
    """One number to train."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _one_number(rank: int, world_size: int, recompiled: bool) -> list[float]:
    model = Scale()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5, initial_accumulator_value=0.25)
    zc.compile(model, optimizer, backend="eager")
    norms = []
    for step in range(3):
        model(torch.ones(2) * (rank + 1)).sum().backward()  # gradients 2 and 4: 3 in the mean
        optimizer.step()
        optimizer.zero_grad()
        norms.append(model.scale.item())
        if recompiled and step == 0:
            zc.recompile(model)
    return norms


def test_state_of_one_number_that_a_rank_has_nothing_of() -> None:
    """Adagrad makes its sums with the optimizer, 0-d ones of a 0-d parameter (fuzz program 20075: RuntimeError)."""
    wanted = [0.75 - 0.5 * sum(3 / (0.25 + 9 * n) ** 0.5 for n in range(1, step + 1)) for step in (1, 2, 3)]
    for recompiled, ranks in run_cases(_one_number, 2, (False, True)):
        for result in ranks:
            assert result == pytest.approx(wanted, rel=1e-6), recompiled
