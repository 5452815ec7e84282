"""Parameters whose memory is not row-major (channels_last, a transpose) keep its order, as in plain PyTorch: in their
bucket, in the optimizer, and in what is saved, which any other order loads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_ranks
from models import CASES, Case, mean_square, vectors
from oracle import weights, worst
from tiers import full_cases, full_only
from torch import Tensor, nn
from torch.optim import Adafactor, Optimizer
from training_runs import Run, adamw, ddp_weights, train_zc

import zc
from zc.planning.layout import Slot, own_strides
from zc.registry import sharded


class Formats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.deep = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 5, 3, groups=5)
        self.norm, self.last = nn.GroupNorm(1, 5), nn.Linear(20, 16)
        self.to(memory_format=torch.channels_last)
        self.last.weight = nn.Parameter(torch.randn(20, 16).mul(0.1).t())

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv(x.view(-1, 1, 4, 4).repeat(1, 2, 1, 1).contiguous(memory_format=torch.channels_last)))
        output: Tensor = self.last(F.gelu(self.norm(self.deep(x))).flatten(1))
        return output


def row_major() -> nn.Module:
    model = Formats()
    for param in model.parameters():
        param.data = param.detach().contiguous()
    return model


CASES["formats"] = Case(Formats, vectors(), mean_square)
CASES["row-major formats"] = Case(row_major, vectors(), mean_square)
STRIDES = {"conv.weight": (18, 1, 6, 2), "deep.weight": (9, 1, 3, 1), "last.weight": (1, 16)}


def factors(model: nn.Module) -> Optimizer:
    """Reads whole parameters, by their last two dimensions."""
    return Adafactor(model.parameters(), lr=1e-2)


def strides_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: p.stride() for name, p in model.named_parameters() if name in STRIDES}


def _against_ddp(rank: int, world_size: int, run: Run) -> tuple[float, str]:
    model, _ = train_zc(run, rank)
    assert strides_of(model) == STRIDES
    error = worst({name: p.detach() for name, p in model.named_parameters()}, ddp_weights(rank, world_size, run))
    slices = [p for group in sharded(model).optimizers[0].local.param_groups for p in group["params"]]
    assert all(p.grad is None and not p.is_sparse for p in slices)
    if run.make_optimizer is factors and world_size == 1:
        assert [p.stride() for p in slices] == [p.stride() for p in model.parameters()]

    plain = run.of.model()
    plain.load_state_dict(model.state_dict())
    batch = run.of.batch(rank, 99, 0)
    mean_square(model, batch).backward()
    mean_square(plain, batch).backward()
    grads = zc.full_grad(model)
    for name, param in plain.named_parameters():
        assert param.grad is not None and grads[name] is not None
        dist.all_reduce(wanted := param.grad.contiguous())
        torch.testing.assert_close(grads[name].contiguous(), wanted / world_size, msg=name)
        assert grads[name].stride() == param.stride() == model.get_parameter(name).grad.stride(), name
        norm = model.get_parameter(name).grad.norm()
        torch.testing.assert_close(norm, wanted.norm() / world_size, msg=name)
    return error


BACKENDS = ("eager", "aot_eager", "inductor")
LOOPS: list[Any] = [
    (2, "eager", {"stage": 1, "microbatches": 2}),
    (2, "aot_eager", {"stage": 1, "microbatches": 2, "options": {"write_in_place": True}}),
    (2, "aot_eager", {"options": {"write_in_place": True, "bucket_nbytes": 64}}),
    (3, "eager", {"make_optimizer": factors}),
    (1, "aot_eager", {"make_optimizer": factors, "microbatches": 2}),
    (2, "eager", {"options": {"offload": "cpu"}}),
    pytest.param(2, "inductor", {"options": {"overlap_gather": True}}, marks=full_only),
]


@pytest.mark.parametrize(("world_size", "backend", "given"), LOOPS)
@full_cases("1-aot_eager-given4", "3-eager-given3")
def test_the_same_weights_as_ddp(world_size: int, backend: str, given: dict[str, Any]) -> None:
    """A channels_last model had row-major weights from zc.compile on, and no word of it."""
    run = Run("formats", backend=backend, updates=5, **given)
    for error, name in run_ranks(_against_ddp, world_size, run, timeout=240):
        assert error < 2e-5, name


def _trained(case: str, rank: int, make: Callable[[nn.Module], Optimizer], options: dict[str, Any]) -> Any:
    model: nn.Module = CASES[case].model(0)
    return zc.compile(model, make(model), **{"backend": "eager", "bucket_nbytes": 512, **options})


def _chain(
    rank: int, world_size: int, case: str, make: Any, options: dict[str, Any], source: Path | None, path: Path
) -> list[Any]:
    """Job: trains or loads; saves; what there is by name, and after one more step."""
    model, optimizer = _trained(case, rank, make, options)
    seen: list[Any] = []
    if source is not None:
        zc.load(source, model, optimizer)
    for step in range(0 if source is not None else 3):
        mean_square(model, vectors()(0, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zc.save(path, model, optimizer)
    whole = [zc.full_optimizer_state(model, optimizer)]
    dist.broadcast_object_list(whole, 0)
    seen += [weights(model), whole[0]]
    optimizer.load_state_dict(whole[0])
    again = [zc.full_optimizer_state(model, optimizer)]
    dist.broadcast_object_list(again, 0)
    _assert_same_states(again[0], whole[0])
    zc.load_state_dict(model, optimizer, {"model": model.state_dict(), "optimizer": whole[0]})
    mean_square(model, vectors()(0, 9, 0)).backward()
    optimizer.step()
    return [*seen, weights(model)]


def _assert_same_states(got: Any, wanted: Any) -> None:
    assert got["state"].keys() == wanted["state"].keys() and got["state"]
    for number, values in wanted["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(got["state"][number][key]), torch.as_tensor(value)), (number, key)


@pytest.mark.parametrize("make", [adamw, factors])
@full_cases("factors")
def test_checkpoints_know_names_and_shapes_not_the_order(make: Any, tmp_path: Path) -> None:
    """2 ranks, 3 that are row-major, 1, and 2 with bf16 weights."""
    chain: list[tuple[int, str, dict[str, Any]]] = [
        (2, "formats", {}),
        (3, "row-major formats", {"bucket_nbytes": 2048}),
        (1, "formats", {"stage": 1}),
        (2, "formats", {"offload": "cpu"}),
    ]
    source, first = None, None
    for k, (world_size, case, options) in enumerate(chain):
        results = run_ranks(_chain, world_size, case, make, options, source, tmp_path / str(k))[0]
        source, first = tmp_path / str(k), first or results
        assert all(torch.equal(results[0][name], first[0][name]) for name in first[0]), case
        _assert_same_states(results[1], first[1])
        assert worst(results[2], first[2])[0] < 1e-5


def _apart(rank: int, world_size: int) -> str:
    case = "formats" if rank else "row-major formats"
    with pytest.raises(zc.RankMismatchError) as raised:
        _trained(case, rank, adamw, {})
    return str(raised.value)


def test_ranks_that_differ_in_the_order_say_so() -> None:
    for text in run_ranks(_apart, 2):
        assert "strides=" in text


@pytest.mark.check
def test_which_strides_are_kept() -> None:
    for shape in ((4, 3, 2, 5), (4, 1, 3, 3), (1, 7), (6,), (), (0, 3), (2, 1, 1)):
        plain = torch.zeros(shape)
        assert own_strides(shape, plain.stride()) is None
        for order in itertools.permutations(range(len(shape))):
            turned = plain.permute(order)
            strides = own_strides(turned.shape, turned.stride())
            assert strides in (None, turned.stride()) and (strides is not None or turned.is_contiguous())
            slot = Slot("p", tuple(turned.shape), 0, strides)
            assert (slot.order is None) == turned.is_contiguous()
            assert slot.order is None or turned.permute(slot.order).is_contiguous()
    wide = torch.zeros(4, 6)
    for view in (wide[:, ::2], wide[:, :3], wide[:1].expand(4, 6)):  # holes, and an overlap: a row-major copy
        assert own_strides(view.shape, view.stride()) is None
