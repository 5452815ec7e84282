"""What a caught error leaves behind: nothing that the next step would meet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from training_runs import weights

import zc
from zc.engine.runtime import Runtime
from zc.kernels import reduce_rows
from zc.ranks import routes
from zc.registry import sharded


def fail(_: Tensor) -> None:
    raise RuntimeError("in the middle of a backward")


@pytest.mark.parametrize("num_updates", [0, 2])  # a first forward may break, and has whole weights
def test_in_stage_3_parameters_are_absent_after_a_backward_that_raised(num_updates: int) -> None:
    """They stayed plain parameters over storages of 0 bytes: a read of one ended the process, and state_dict() was
    empty without a word."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=3, backend="aot_eager")
    for _ in range(num_updates):
        model(torch.ones(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    output = model(torch.ones(4, 16))
    output.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        output.sum().backward()
    assert type(model[0].weight) is not nn.Parameter
    with pytest.raises(zc.ZcError, match="that has no bytes"):
        model[0].weight.norm()
    assert model.state_dict()["0.weight"].untyped_storage().nbytes() > 0


def test_an_error_at_the_end_of_a_backward_is_that_backward_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the last flush, then model.zero_grad(): the next gradient was added to the failed one."""
    torch._dynamo.reset()
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])  # the second one is unused
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    zc.compile(model, optimizer, backend="eager", bucket_nbytes=16)
    at_end = Runtime._end_backward

    def out_of_memory(runtime: Any) -> None:
        monkeypatch.setattr(Runtime, "_end_backward", at_end)
        raise torch.OutOfMemoryError("in the last flush")

    monkeypatch.setattr(Runtime, "_end_backward", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.ones(2, 4)).sum().backward()
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert zc.full_grad(model)["0.bias"].tolist() == [2.0] * 4


class Unknown(torch.optim.SGD):
    """zc tries it on numbers of its own."""


def _with_a_default_device(rank: int, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = Unknown(model.parameters(), lr=0.1)
    x = torch.ones(4, 8) * torch.arange(4.0)[:, None]
    try:
        torch.set_default_device("meta")  # stands in for a GPU: what lies there can't be sent from the host
        zc.compile(model, optimizer, backend="eager")
        model(x).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    finally:
        torch.set_default_device(None)
    return weights(model)


def _sums_until(number: int, text: str) -> Callable[..., None]:
    """Stands in for `reduce_rows`: the sum of this number raises, after the backward that it came from has ended."""
    sums = list[int]()

    def out_of_memory(*args: Any, **options: Any) -> None:
        sums.append(1)
        if len(sums) == number:
            time.sleep(0.1)
            raise MemoryError(text)
        reduce_rows(*args, **options)

    return out_of_memory


def _fail_in_the_last_sum(overlap: bool, heard: str) -> list[str]:
    """What raised, in turn, in a loop that catches everything and goes on; at its end how many parameters a healthy
    update changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager", bucket_nbytes=300, overlap=overlap)
    before, said = weights(model), list[str]()
    out_of_memory = _sums_until(len(sharded(model).runtime.plan.buckets), "in the last sum")
    actions: list[Callable[[], object]] = [
        lambda: model(torch.ones(2, 8)).square().sum().backward(),
        *([lambda: zc.state_dict(model, optimizer)] if heard == "in a save" else []),
        optimizer.step,
        optimizer.step,
    ]
    with mock.patch.object(routes, "reduce_rows", out_of_memory):
        for act in actions:
            try:
                act()
            except (MemoryError, zc.ZcError) as error:
                said.append(f"{type(error).__name__}: {error}")
    assert all(torch.equal(now, before[name]) for name, now in weights(model).items()), "an update without all sums"
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    said.append(str(sum(not torch.equal(now, before[name]) for name, now in weights(model).items())))
    return said


@pytest.mark.parametrize("heard", ["in step()", "in a save"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_reduction_that_raised_is_no_part_of_an_update(overlap: bool, heard: str) -> None:
    """Who caught the error and called step() again updated from memory that nothing had written."""
    said = _fail_in_the_last_sum(overlap, heard)
    assert said[0] == "MemoryError: in the last sum"
    if overlap:  # otherwise the backward itself has raised
        assert len(said) == 4 if heard == "in a save" else 3
        assert all("call optimizer.zero_grad() before you go on" in text for text in said[1:-1]), said
    assert said[-1] == "4"

def _fail_at_the_boundary(rank: int, world_size: int) -> list[str]:
    """What step() raises or "stepped", three times, where the second sum of the first step raises on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager", stage=1, bucket_nbytes=300, overlap=False)
    before, said = weights(model), list[str]()
    with mock.patch.object(routes, "reduce_rows", _sums_until(1, "in a microbatch")), zc.no_sync(model):
        model(torch.ones(2, 8)).square().sum().backward()
    with mock.patch.object(routes, "reduce_rows", _sums_until(2, "in the second sum")):
        for _ in range(2):
            try:
                optimizer.step()
                said.append("stepped")
            except (MemoryError, zc.ZcError) as error:
                said.append(f"{type(error).__name__}: {error}")
    assert all(torch.equal(now, before[name]) for name, now in weights(model).items()), "an update without all sums"
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    return [*said, "stepped"]


def test_a_reduction_that_raised_in_step_is_no_part_of_the_next_one() -> None:
    """Without overlap the main stream sums at the boundary: no thread of a stream tells of the error."""
    for said in run_ranks(_fail_at_the_boundary, 2):
        assert said[0] == "MemoryError: in the second sum"
        assert "call optimizer.zero_grad() before you go on" in said[1]
        assert said[2:] == ["stepped"]



def test_exchanges_between_hosts_ignore_the_default_device() -> None:
    first, second = run_ranks(_with_a_default_device, 2)
    for name, value in first.items():
        assert torch.equal(value, second[name]) and bool(value.isfinite().all())


class Heads(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.trunk, self.norm = nn.Linear(8, 8), norm
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, x: Tensor, k: int) -> Tensor:
        return self.heads[k](self.norm(self.trunk(x)))


def _refused_once(rank: int, world_size: int, stage: int, way_out: str) -> tuple[int, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Heads(nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=stage, backend="eager")
    num_refused = 0
    for step in range(3):
        with zc.no_sync(model):
            model(torch.randn(4, 8), rank if step == 0 else 0).sum().backward()
        try:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        except zc.RankMismatchError:
            raise
        except zc.ZcError:
            num_refused += 1
            if way_out == "zero_grad":
                optimizer.zero_grad()
                continue
            zc.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return num_refused, weights(model)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("way_out", ["clip_grad_norm_", "zero_grad"])
def test_a_refused_read_of_gradients_changes_nothing(stage: int, way_out: str) -> None:
    """Stock clipping where ranks used other parameters in no_sync is refused. The way out that the error names ended in
    a RankMismatchError, and with buffers the ranks waited for each other after zero_grad."""
    (first_num, first), (second_num, second) = run_ranks(_refused_once, 2, stage, way_out)
    assert first_num == second_num == 1
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("is_again", [False, True])
def test_zeros_of_all_optimizers_end_a_failure(is_again: bool) -> None:
    """Two optimizers that set zeros: every retry said to call zero_grad, which the loop did."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
    zc.compile(model, optimizers, backend="eager")
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    failing = torch.ones(2, 4, requires_grad=True)
    failing.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(failing).sum().backward()
    if is_again:  # one is not enough
        optimizers[0].zero_grad(set_to_none=False)
        with pytest.raises(zc.ZcError, match="call optimizer"):
            model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
    model(torch.ones(2, 4)).sum().backward()
    assert zc.full_grad(model)["2.bias"].tolist() == [2.0, 2.0]
