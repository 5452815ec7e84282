"""param.grad as a value on several ranks, with parameters of every kind, against one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from tiers import COMPILED, full_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from training_runs import message_of

import zc
from zc.optim.sharded_value import ShardedValue
from zc.registry import sharded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Odd(nn.Module):
    """Parameters of no dimension, of no element, of one row, and in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.none = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.empty(0, 3))
        self.inner, self.row = nn.Linear(7, 5), nn.Linear(5, 1)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = self.conv(x[:, :6].reshape(-1, 2, 1, 3).repeat(1, 1, 3, 1))
        return (self.row(self.inner(x).tanh()) * self.scale).square().sum() + image.square().sum() + self.none.sum()


def odd(dtype: torch.dtype) -> Odd:
    torch.manual_seed(0)
    return Odd().to(dtype)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def numbers(grad: Tensor) -> dict[str, Any]:
    calls = ["sum", "any", "all", "count_nonzero", "norm"] + ["mean", "max", "min", "amax", "var"] * (grad.numel() > 1)
    found: dict[str, Any] = {name: getattr(grad, name)() for name in calls}
    found |= {f"norm {order}": grad.norm(order) for order in (0, 1, 3)}
    if grad.numel():
        found |= {"largest": grad.abs().max(), "inf": grad.norm(float("inf"))}
    found |= {"square": (grad * grad).sum(), "finite": torch.isfinite(grad).all()}
    return found


def edit(param: Any) -> None:
    """In place, with masks and whole tensors, and by assignment."""
    grad = param.grad
    mask = (torch.arange(grad.numel()).reshape(grad.shape) % 3).to(grad.dtype)
    grad.clamp_(-0.5, 0.5).mul_(mask[:1] if grad.dim() > 1 else mask).add_(mask, alpha=0.01)
    torch._foreach_lerp_([grad], [grad.sign()], 0.01)
    grad.masked_fill_(grad.abs() > 0.4, 0.25)
    param.grad = torch.where(grad > 0, grad * 2, grad)
    param.grad.data = param.grad.data + 0.01


def _edited(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> float:
    """The largest difference from one process, of numbers, gradients and weights."""
    if options.get("mesh") is not None:
        options = {**options, "mesh": init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))}
    model, plain = odd(torch.float32), odd(torch.float64)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
    zc.compile(model, optimizers[0], param_dtype=None if dtype == torch.float32 else dtype, **options)
    worst = 0.0

    def compare(what: str, mine: Tensor, expected: Tensor) -> None:
        nonlocal worst
        whole: Any = mine.full_tensor() if isinstance(mine, ShardedValue) else mine
        assert whole.shape == expected.shape, (what, whole.shape)
        if whole.numel():
            worst = max(
                worst, float((whole.double() - expected.double()).abs().max() / (1 + expected.double().abs().max()))
            )

    for step in range(3):
        for each in range(world_size):
            (plain(batch(step, each).double()) / world_size).backward()
        model(batch(step, rank).to(dtype)).backward()
        pairs = list(zip(model.named_parameters(), plain.parameters(), strict=True))
        for (name, mine), other in pairs:
            assert mine.grad is not None and other.grad is not None and mine.grad.dtype == dtype
            expected = numbers(other.grad)
            for what, number in numbers(mine.grad).items():
                compare(f"{name} {what}", number, expected[what])
            edit(mine)
            edit(other)
            compare(name, mine.grad, other.grad)
        if step == 1:  # a backward that adds to what was assigned
            for each in range(world_size):
                (plain(batch(9, each).double()) / world_size).backward()
            model(batch(9, rank).to(dtype)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0, foreach=step == 0) for each in (model, plain)]
        compare("norm", norms[0], norms[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = zc.full_state_dict(model)  # on all ranks
    for name, other in plain.state_dict().items() if rank == 0 else ():
        compare(name, weights[name], other)
    return worst


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "options"),
    [
        (3, torch.float32, {"backend": "eager", "stage": 2}),
        (2, torch.float32, {"backend": COMPILED, "stage": 3}),
        (2, torch.bfloat16, {"backend": "eager", "stage": 1}),
        (2, torch.float32, {"backend": "eager", "offload": "cpu", "offload_accumulate": "device"}),
        (4, torch.float32, {"backend": "eager", "mesh": (2, 2)}),
    ],
    ids=["3 ranks", "stage 3", "bf16", "offload", "replicas"],
)
@full_cases("replicas", "3 ranks", "stage 3")
def test_gradients_of_every_kind_are_values(num_ranks: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    for worst in run_ranks(_edited, num_ranks, dtype, options):
        assert worst < (1e-5 if dtype == torch.float32 else 3e-2)


def _exchanges(rank: int, world_size: int) -> dict[str, int]:
    model = odd(torch.float32)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    group, count = sharded(model).runtime.group, 0
    plain = group._all_reduce

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        plain(*args)

    group._all_reduce = counted  # type: ignore[method-assign]
    params = [p for p in model.parameters() if p.numel()]
    model(batch(0, rank)).backward()
    counts = {}
    loops: dict[str, Any] = {
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(params, 1.0),
        "norms": lambda: [p.grad.norm() for p in params],
        "sums": lambda: [p.grad.sum() for p in params],
        "largest": lambda: [p.grad.abs().max() for p in params],
        "finite": lambda: [p.grad.isfinite().all() for p in params],
        "elementwise": lambda: [p.grad.clamp_(-1, 1).mul_(0.5) for p in params],
        "after a change": lambda: [p.grad.sum() for p in params],
    }
    for name, loop in loops.items():
        before = count
        loop()
        counts[name] = count - before
    return counts


def test_a_loop_over_all_gradients_has_one_exchange_or_two() -> None:
    expected = {
        "norms": 1, "clip_grad_norm_": 1, "sums": 1, "largest": 2, "finite": 2, "elementwise": 0, "after a change": 1,
    }  # fmt: skip
    assert run_ranks(_exchanges, 2) == [expected] * 2


def _with_owners(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))
    zc.compile(model, torch.optim.Muon(model.parameters(), lr=0.1), backend="eager")
    model(torch.randn(3, 6)).square().sum().backward()
    shards, worst = sharded(model).grad_shards, 0.0
    for name, param in model.named_parameters():
        whole = torch.randn(param.shape)  # the same on all ranks
        part = shards.part(name, is_owned=True)
        state = ShardedValue(shards, part, part.cut(whole).clone())
        assert state.part.is_owned and isinstance(param.grad, ShardedValue)
        expected = param.grad.full_tensor() + 2 * whole
        state.mul_(2.0)
        for value in (state, state + param.grad, param.grad.add_(state), param.grad):
            wanted = 2 * whole if value is state else expected
            worst = max(worst, float((value.full_tensor() - wanted).abs().max()))
        worst = max(worst, float((state.norm() - (2 * whole).norm()).abs()))
    return worst


def test_what_an_owner_has_meets_what_ranks_have_reduced() -> None:
    for worst in run_ranks(_with_owners, 2):
        assert worst < 1e-5


def _assigned_by_one(rank: int, world_size: int) -> tuple[str, str]:
    model = odd(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    model(batch(0, rank)).backward()
    assert model.row.weight.grad is not None
    kept = model.row.weight.grad.clone()
    optimizer.zero_grad()
    model(batch(1, rank)).backward()
    if rank == 0:
        model.row.weight.grad = kept
    return message_of(optimizer.step)


def test_a_rank_that_assigns_alone_is_named() -> None:
    for kind, text in run_ranks(_assigned_by_one, 2):
        assert kind == "RankMismatchError" and "gradients" in text, (kind, text)


def _handles(rank: int, world_size: int) -> list[Any]:
    model = odd(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    model(batch(0, rank)).backward()
    grad: Any = model.row.weight.grad
    half, kept = grad * 0.5, grad.clone()
    model.row.weight.grad = half
    gone = message_of(lambda: grad.norm()) if message_of(optimizer.step) == ("", "") else None
    of_half = float(half.norm() / kept.norm())  # as long as the gradient does not change
    model(batch(1, rank)).backward()
    changed = message_of(lambda: half.norm())
    optimizer.zero_grad()
    return [gone, of_half, changed, float(kept.norm()) > 0, F.relu(kept).full_tensor().shape]


def test_what_became_of_handles() -> None:
    for gone, of_half, changed, is_kept, shape in run_ranks(_handles, 2):
        assert gone[0] == "ZcError" and "clone it before" in gone[1], gone
        assert of_half == pytest.approx(0.5)
        assert changed[0] == "ZcError" and "was assigned to param.grad" in changed[1], changed
        assert is_kept and shape == (1, 5)
