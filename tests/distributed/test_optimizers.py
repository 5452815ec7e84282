"""The caller's own optimizer on slices: groups, schedulers, masters, and parameters that get no gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import CASES, Heads, WithUnused, mean_square, vectors
from oracle import train_ddp, weights, worst
from tiers import FULL
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler
from training_runs import DIFFERS_MOST, adamw

import zc

UPDATES = 6


def loop(model: nn.Module, optimizer: Optimizer, rank: int, each: Callable[[int], None] = lambda step: None) -> None:
    case = CASES["gpt_tied"]
    for step in range(UPDATES):
        case.loss(model, case.batch(rank, step, 0)).backward()
        optimizer.step()
        each(step)
        optimizer.zero_grad()


def ddp_weights(
    rank: int, make: Callable[[nn.Module], Optimizer], each: Callable[[Optimizer], Any]
) -> dict[str, Tensor]:
    case = CASES["gpt_tied"]
    model = case.model()
    schedulers: list[Any] = []

    def optimizer_of(model: nn.Module) -> Optimizer:
        optimizer = make(model)
        schedulers.append(each(optimizer))
        return optimizer

    def before_step(model: nn.Module, optimizer: Optimizer) -> None:
        # the scheduler moves after the step; train_ddp offers the moment before it, so it moves before all but the
        # first
        if schedulers[0] is not None and optimizer.state:
            schedulers[0].step()

    batches = [[case.batch(rank, step, 0)] for step in range(UPDATES)]
    return train_ddp(model, case.loss, optimizer_of, batches, after_backward=before_step)[0]


# --- groups and schedulers ---


def in_groups(model: nn.Module) -> Optimizer:
    """Four groups that differ in everything, and cut across layers and buckets."""
    names = [n for n, _ in model.named_parameters()]
    of = dict(model.named_parameters())
    groups = [
        {"params": [of[n] for n in names if n.endswith("bias")], "weight_decay": 0.0, "lr": 3e-3},
        {"params": [of[n] for n in names if "norm" in n and n.endswith("weight")], "betas": (0.5, 0.9)},
        {"params": [of[n] for n in names if "embed" in n or "position" in n], "lr": 1e-4, "eps": 1e-6},
    ]
    held = {id(p) for g in groups for p in g["params"]}
    groups.append({"params": [p for p in of.values() if id(p) not in held], "weight_decay": 0.3})
    return AdamW(groups, lr=1e-3, weight_decay=0.01)


def warmup(optimizer: Optimizer) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)


def none(optimizer: Optimizer) -> None:
    return None


def _groups(rank: int, world_size: int, stage: int, backend: str, when: str) -> dict[str, Any]:
    model = CASES["gpt_tied"].model()
    optimizer = in_groups(model)
    options_before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    scheduler = warmup(optimizer) if when == "before" else None
    zc.compile(model, optimizer, stage=stage, backend=backend, bucket_nbytes=8192)
    if when == "after":
        scheduler = warmup(optimizer)
    elif when == "never":
        options_after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        assert options_after == options_before, "the groups keep their options and their order"
    loop(model, optimizer, rank, lambda step: scheduler.step() if scheduler is not None else None)
    wanted = ddp_weights(rank, in_groups, none if when == "never" else warmup)
    return {"error": worst(weights(model), wanted), "lrs": [g["lr"] for g in optimizer.param_groups]}


@pytest.mark.parametrize("when", ["never", "before", "after"])
@pytest.mark.parametrize("stage", [1, 2])
def test_param_groups_and_schedulers(stage: int, when: str) -> None:
    """Per-group options stay per parameter although buckets cut across groups (deepspeed#966, megatron-lm#844), and a
    scheduler made before or after zc.compile drives the same object."""
    for seen in run_ranks(_groups, 2, stage, "eager", when):
        assert seen["error"][0] < 2e-5, seen["error"]
        scale = 1.0 if when == "never" else (UPDATES + 1) / 4
        assert seen["lrs"] == pytest.approx([3e-3 * scale, 1e-3 * scale, 1e-4 * scale, 1e-3 * scale])


def test_the_groups_matter_to_this_test() -> None:
    """The negative control: without the groups the same loop ends elsewhere."""
    for error, _ in run_ranks(_ungrouped, 2):
        assert error > 1e-3


def _ungrouped(rank: int, world_size: int) -> DIFFERS_MOST:
    model = CASES["gpt_tied"].model()
    model, optimizer = zc.compile(model, AdamW(model.parameters(), lr=1e-3, weight_decay=0.01), backend="eager")
    loop(model, optimizer, rank)
    return worst(weights(model), ddp_weights(rank, in_groups, none))


# --- other optimizers ---


def nesterov(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01)


def amsgrad(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=1e-3, amsgrad=True)


def foreach_off(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, foreach=False)


def fused(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-3, fused=True)


class RowNormalized(Optimizer):
    """A third-party optimizer that reads whole matrices: each row's update has norm lr. Cut into slices it would be
    wrong."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    norm = param.grad.norm(dim=-1, keepdim=True) if param.dim() > 1 else param.grad.norm()
                    param.sub_(group["lr"] * param.grad / (norm + 1e-6))


def row_normalized(model: nn.Module) -> Optimizer:
    return RowNormalized(model.parameters())


def _other(rank: int, world_size: int, make: Callable[[nn.Module], Optimizer], stage: int) -> DIFFERS_MOST:
    model = CASES["gpt_tied"].model()
    model, optimizer = zc.compile(model, make(model), stage=stage, backend="eager", bucket_nbytes=8192)
    loop(model, optimizer, rank)
    return worst(weights(model), ddp_weights(rank, make, none))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("make", [nesterov, amsgrad, foreach_off, fused, row_normalized])
def test_optimizers_equal_their_unsharded_run(make: Callable[[nn.Module], Optimizer]) -> None:
    """deepspeed#7807, deepspeed#8090, deepspeed#8141: an optimizer that reads a whole matrix got a slice of it. One
    that zc does not know keeps its parameters whole."""
    for error, name in run_ranks(_other, 2, make, 2):
        assert error < 2e-5, name


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
    trained = sum(s["exp_avg"].numel() for s in optimizer.state.values() if "exp_avg" in s)
    total = torch.tensor(trained)
    dist.all_reduce(total)
    return {
        "moved": [n for n in before if not torch.equal(before[n], after[n])],
        "elements with state": total.item(),
    }


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_without_gradient_is_left_alone(stage: int, backend: str) -> None:
    """Zeros in place of None would let weight decay shrink it and momentum move it; PyTorch skips it (deepspeed#5639's
    opposite)."""
    for seen in run_ranks(_unused, 2, stage, backend):
        assert seen["moved"] == ["first.weight", "first.bias", "last.weight", "last.bias"]
        assert seen["elements with state"] == 2 * (16 * 16 + 16), "no moments for what is never trained"


def _sometimes(rank: int, world_size: int, stage: int, backend: str, set_to_none: bool, by: str) -> DIFFERS_MOST:
    """Heads come and go: used, then unused, then used. zero_grad as given, against plain PyTorch in float64."""
    torch.manual_seed(0)
    model: nn.Module = Heads()
    twin = Heads().double()
    twin.load_state_dict(model.state_dict())
    plain = adamw(twin)
    model, optimizer = zc.compile(model, adamw(model), stage=stage, backend=backend, bucket_nbytes=1024)
    for step, tasks in enumerate([(0,), (1, 0), (1,), (0, 1)]):  # head 2 never
        for r in range(world_size):
            x, y = (part.double() for part in vectors()(r, step, 0))
            (torch.stack([(o - y[:, :4]).square().mean() for o in twin(x, tasks)]).sum() / world_size).backward()
        x, y = vectors()(rank, step, 0)
        torch.stack([(o - y[:, :4]).square().mean() for o in model(x, tasks)]).sum().backward()
        for one, module in ((plain, twin), (optimizer, model)):
            one.step()
            (module if by == "model" else one).zero_grad(set_to_none=set_to_none)
    return worst(weights(model), weights(twin))


WAYS = [(stage, to_none, by) for stage in (1, 2) for to_none in (True, False) for by in ("model", "optimizer")]


# by default each of the four ways in one of the stages
@pytest.mark.parametrize(
    ("stage", "set_to_none", "by"), WAYS if FULL else [w for w in WAYS if (w[1] == (w[2] == "model")) == (w[0] == 1)]
)
def test_zero_grad_of_either_object_both_ways(stage: int, set_to_none: bool, by: str) -> None:
    """set_to_none=True: a head without gradient is skipped. False: its gradient is zeros, and decay and momentum go
    on, as in PyTorch; the difference between the two is some 1e-2 here."""
    for backend in ("eager", "aot_eager"):
        for error, name in run_ranks(_sometimes, 2, stage, backend, set_to_none, by):
            assert error < 2e-5, (backend, name)


def _forgotten(rank: int, world_size: int, stage: int) -> DIFFERS_MOST:
    """No zero_grad between two updates: the gradients go on adding up."""
    case = CASES["mlp"]
    model, twin = case.model(), case.model().double()
    plain = SGD(twin.parameters(), lr=1e-2)
    model, optimizer = zc.compile(model, SGD(model.parameters(), lr=1e-2), stage=stage, backend="eager")
    for step in range(3):
        for r in range(world_size):
            (case.loss(twin, case.batch(r, step, 0)) / world_size).backward()
        case.loss(model, case.batch(rank, step, 0)).backward()
        plain.step()
        optimizer.step()
    return worst(weights(model), weights(twin))


@pytest.mark.parametrize("stage", [1, 2])
def test_no_zero_grad_between_updates(stage: int) -> None:
    """As in PyTorch the next backward adds to what is there: stage 1 then holds a reduced sum beside a new partial
    one."""
    for error, name in run_ranks(_forgotten, 2, stage):
        assert error < 1e-6, name


def _skipped(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """A backward whose update is skipped, then a normal one; against a run that never saw the skipped batch."""
    found = []
    for skip in (True, False):
        case = CASES["mlp"]
        model = case.model()
        model, optimizer = zc.compile(model, adamw(model), stage=stage, backend="eager", bucket_nbytes=512)
        if skip:
            case.loss(model, case.batch(rank, 9, 0)).backward()
            optimizer.zero_grad()
            with torch.no_grad():
                case.loss(model, case.batch(rank, 8, 0))
        for step in range(2):
            case.loss(model, case.batch(rank, step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    return {"same": all(torch.equal(found[0][n], found[1][n]) for n in found[0])}


@pytest.mark.parametrize("stage", [1, 2])
def test_a_skipped_update_leaves_nothing(stage: int) -> None:
    """deepspeed#8432, deepspeed#8415: one skipped step must change no state, and zero_grad must clear the
    shards."""
    assert all(seen["same"] for seen in run_ranks(_skipped, 2, stage))


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


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [1, 2])
def test_bf16_parameters_have_fp32_masters_from_the_given_values(stage: int, backend: str) -> None:
    """The masters are the given fp32 weights, not their bf16 rounding, and keep updates that bf16 alone would lose:
    with bf16 weights 1 - 0.001 is 1 for ever."""
    for seen in run_ranks(_masters, 2, stage, backend):
        assert seen["first"] == 1.0 and seen["dtype"] == torch.bfloat16
        assert seen["steps"] == seen["expected"]
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


@pytest.mark.parametrize("stage", [1, 2])
def test_param_dtype_bf16_is_mixed_precision_as_written_by_hand(stage: int) -> None:
    """bf16 gradients on the wire, fp32 in the sum, in the masters and in the moments: nothing else is rounded. The
    same kernels run in both, so single bf16 weights may differ by an ulp at most where a master lies on a
    boundary."""
    for error, name in run_ranks(_bf16_training, 2, stage):
        assert error < 1e-4, name


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


@pytest.mark.parametrize("stage", [1, 2])
def test_everything_starts_from_rank_0(stage: int) -> None:
    """Ranks that were seeded apart: parameters, frozen ones and buffers of any dtype are rank 0's afterwards, as
    under DDP."""
    found = run_ranks(_broadcast, 4, stage)
    wanted = found[0]["own"]
    assert not torch.equal(found[1]["own"]["0.weight"], wanted["0.weight"])
    for seen in found:
        assert all(torch.equal(seen["after"][name], wanted[name]) for name in wanted)


# --- padding ---


def _padding(rank: int, world_size: int, stage: int) -> bool:
    model = WithUnused(dim=3)
    model, optimizer = zc.compile(model, adamw(model), stage=stage, backend="eager", bucket_nbytes=64)
    for step in range(2):
        mean_square(model, vectors(3)(rank, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = True
    found = 0
    for flat in zc.registry.sharded(model).runtime.buffers.flat_param:
        covered = torch.zeros(flat.numel(), dtype=torch.bool)
        for p in model.parameters():
            first = (p.data_ptr() - flat.data_ptr()) // flat.element_size()
            if p.numel() and 0 <= first < flat.numel():
                covered[first : first + p.numel()] = True
                found += 1
        kept = kept and bool((flat[~covered] == 0).all()) and bool((~covered).any())
    return kept and found == sum(p.numel() > 0 for p in model.parameters())


@pytest.mark.parametrize("stage", [1, 2])
def test_padding_stays_zero(stage: int) -> None:
    """deepspeed#5105: padding came back as data. No update may write what belongs to no parameter, or a norm would
    count it."""
    assert all(run_ranks(_padding, 2, stage))


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
    found = []
    for step in range(3):
        model(torch.ones(2) * (rank + 1)).sum().backward()  # gradients 2 and 4: 3 in the mean
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.scale.item())
        if recompiled and step == 0:
            zc.recompile(model)
    return found


@pytest.mark.parametrize("recompiled", [False, True])
def test_state_of_one_number_that_a_rank_has_nothing_of(recompiled: bool) -> None:
    """Adagrad makes its sums with the optimizer, 0-d ones of a 0-d parameter (fuzz program 20075: RuntimeError)."""
    wanted = [0.75 - 0.5 * sum(3 / (0.25 + 9 * n) ** 0.5 for n in range(1, step + 1)) for step in (1, 2, 3)]
    for found in run_ranks(_one_number, 2, recompiled):
        assert found == pytest.approx(wanted, rel=1e-6)
