"""Buffers are rank 0's where DDP makes them so: weights, buffers and what an evaluation gives are DDP's on every
rank."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_ranks
from models import batch_norm, seeded
from oracle import weights
from tiers import FULL, full_only
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import zc


class Codebook(nn.Module):
    """Buffers that a forward reads and updates: an average, a bool and an int64, one that is not saved, one that is
    replaced by a new tensor, complex ones, a lazily conjugated view and a lazily negated one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wide", torch.zeros(5, dtype=torch.float64), persistent=False)
        self.register_buffer("replaced", torch.zeros(7))
        self.register_buffer("complex", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("conjugate", torch.zeros(2, dtype=torch.complex64).conj())
        self.register_buffer("negative", torch.zeros(2, dtype=torch.complex64).conj().imag)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * (1 + self.mean)  # a compiled backward computes the factor again
        y = self.last(F.gelu(x)) + 0.1 * (self.mean + self.replaced.sum() + self.wide.mean().float())
        y = y + 0.1 * (self.complex.imag.sum() - self.conjugate.imag.sum() + self.negative.sum())
        if self.training:
            detached = x.detach()
            self.mean.mul_(0.5).add_(detached.mean(0))
            self.seen.logical_or_(detached.mean() > 0)
            self.calls.add_(1)
            self.wide.add_(detached.mean())
            self.replaced = self.replaced + 0.01 * detached.mean()
            for turned in (self.complex, self.conjugate):
                turned.add_(torch.complex(detached.mean(), detached.std()))
            self.negative.add_(detached.std())
        return y


def _batch(rank: int, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = seeded(rank, step, microbatch)
    return torch.randn(4, 16, generator=generator), torch.randn(4, 16, generator=generator)


NoSync = Callable[[], contextlib.AbstractContextManager[None]]


def _loop(
    call: Callable[[Tensor], Tensor], model: nn.Module, optimizer: SGD, no_sync: NoSync, rank: int, how: str
) -> Any:
    """Three updates, as ``how`` says, and what evaluations between and after them give."""
    seen: list[Tensor] = []
    call = call.forward if how == "calls forward" else call  # type: ignore[attr-defined]
    for step in range(3):
        for m in range(3):
            x, y = _batch(rank, step, m)
            is_held_back = how == "skips" or (how in ("no_sync", "calls forward") and m < 2)
            with no_sync() if is_held_back else contextlib.nullcontext():
                loss = F.mse_loss(call(x), y)
                if how == "looks":  # at itself, in training mode and without gradients
                    with torch.no_grad():
                        seen.append(call(x))
                loss.backward()
        if how == "skips":  # two steps without a gradient: the second has no forward before it, on any rank
            optimizer.zero_grad()
            optimizer.step()
        optimizer.step()
        if how in ("evaluates", "writes after a step of nothing", "averages"):
            optimizer.step()  # it finishes no backward, and the next forward is still the first
        optimizer.zero_grad()
        if how.startswith("writes"):
            with torch.no_grad():
                for number, (name, buffer) in enumerate(model.named_buffers()):
                    if name == "replaced":
                        model.replaced = buffer + 0.1 * rank
                    elif buffer.is_floating_point() and number % 2 == step % 2:
                        buffer.add_(0.2 * rank)
        if how == "averages":  # as timm's distribute_bn, or past autograd's count
            for buffer in model.buffers():
                if buffer.is_floating_point() and buffer.is_contiguous():
                    dist.all_reduce(buffer if step % 2 else buffer.data)
                    (buffer if step % 2 else buffer.data).div_(dist.get_world_size())
            seen.append({name: value.clone() for name, value in model.named_buffers()})
        if how in ("evaluates", "writes and evaluates"):
            model.eval()
            with torch.no_grad():
                seen += [call(torch.ones(2, 16)), call(torch.zeros(2, 16))]
            model.train()
    model.eval()
    with torch.no_grad():
        seen.append(call(torch.ones(2, 16)))
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    return seen, buffers, weights(model)


HOWS = ("plain", "no_sync", "skips", "looks", "evaluates", "writes", "writes and evaluates",
        "writes after a step of nothing", "averages", "calls forward")
MODELS = {"batch_norm": batch_norm, "codebook": Codebook}


def _against_ddp(rank: int, world_size: int, backend: str, stage: int, chosen: list[str]) -> None:
    for name in chosen:
        for how in HOWS if FULL or backend == "eager" else ("looks", "writes and evaluates"):
            if torch.__version__ < "2.12" and (name, how) == ("batch_norm", "looks"):
                continue  # DDP broadcasts the statistics, which the backward has saved in 2.11: an error
            torch.manual_seed(0)
            plain = MODELS[name]()
            optimizer = SGD(plain.parameters(), lr=0.1)
            ddp = DistributedDataParallel(plain)
            wanted = _loop(ddp, plain, optimizer, ddp.no_sync, rank, how)
            torch.manual_seed(0)
            model = MODELS[name]()
            inner = SGD(model.parameters(), lr=0.1)
            zc.compile(model, inner, backend=backend, stage=stage, bucket_nbytes=512)
            got = _loop(model, model, inner, lambda model=model: zc.no_sync(model), rank, how)  # type: ignore[misc]
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}, {how}: {m}")  # noqa: B023
            zc.close(model)


@pytest.mark.parametrize(
    ("backend", "stage", "chosen"),
    [("eager", 1, ["batch_norm", "codebook"]), ("aot_eager", 2, ["codebook"]),
     pytest.param("inductor", 1, ["codebook"], marks=full_only)], ids=str,
)  # fmt: skip
def test_buffers_and_what_reads_them_are_ddps(backend: str, stage: int, chosen: list[str]) -> None:
    """Several forwards an update, accumulation under no_sync, a forward without gradients between
    a forward and its backward, evaluations between updates. They were broadcast once, by zc.compile."""
    run_ranks(_against_ddp, 2, backend, stage, chosen)


class Observed(nn.Module):
    """As fake quantisation: each forward, an evaluation's too, observes its input while a buffer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.register_buffer("largest", torch.ones(()))
        self.register_buffer("observes", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.observes:
            self.largest = 0.5 * self.largest + x.detach().abs().max()
        return self.layer(self.norm(x) / self.largest)  # type: ignore[no-any-return]


def _rank_0_evaluates(rank: int, world_size: int, how: str) -> list[Any]:
    """Job: rank 0 alone evaluates between updates, the module itself as with DDP; all ranks write ``observes``. Weights
    and buffers of DDP and of zc, or the error of zc."""
    results: list[Any] = []
    for wrap in (DistributedDataParallel, None):
        torch.manual_seed(0)
        model = Observed()
        optimizer = SGD(model.parameters(), lr=2.0)
        if wrap is None:
            zc.compile(model, optimizer, backend="eager")
        call = model if wrap is None else wrap(model)
        is_refused = wrap is None and how == "observes"
        with pytest.raises(zc.RankMismatchError) if is_refused else contextlib.nullcontext() as error:
            for step in range(4):
                for microbatch in range(2):
                    x, y = _batch(rank, step, microbatch)
                    F.mse_loss(call(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if how == "observes not":
                    model.observes.fill_(0)
                elif how in ("samples", "attacks"):  # the former writes statistics alone, the latter nothing
                    model.observes.data.fill_(0)
                model.train(how == "samples")
                if rank == 0:
                    with torch.set_grad_enabled(how == "attacks"):
                        model(_batch(rank, step, 9)[0])
                model.train()
                if how in ("samples", "attacks"):
                    model.observes.data.fill_(1)
                elif how != "observes":
                    model.observes.fill_(1 if how == "observes not" else step % 2)
        values = {name: value.clone() for name, value in model.state_dict().items()}
        results.append(str(error.value) if error else values)
    return results


@pytest.mark.parametrize("how", ["observes", "observes not", "is told afterwards", "samples", "attacks"])
def test_rank_0_may_evaluate_alone_before_all_write_buffers(how: str) -> None:
    """Its evaluation counted as the forward that sends what the program writes afterwards: another rank waited for it
    (RankMismatchError after the time limit), or trained with what rank 0 had sent before (weights 8 % off)."""
    ranks = run_ranks(_rank_0_evaluates, 2, how, timeout=60.0)
    if how == "observes":  # what its evaluation wrote is read by other ranks under DDP, and was not: 3.6 % off
        assert all("rank 0 has written a buffer between two updates" in ours for _, ours in ranks)
    else:
        torch.testing.assert_close(ranks[0][1], ranks[0][0], rtol=1e-5, atol=1e-6)


def _by_tasks(rank: int, world_size: int) -> Tensor:
    """Job: the last rank's task alone has buffers, and the loop calls parts of the model. The trunk's weights."""
    parts = {"trunk": nn.Linear(4, 4), "plain": nn.Linear(4, 4), "normed": nn.BatchNorm1d(4)}
    model = nn.ModuleDict(parts)
    optimizer = SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager", stage=2)
    task = model["normed" if rank == world_size - 1 else "plain"]
    for _ in range(2):
        for _ in range(3):
            task(model["trunk"](torch.randn(4, 4))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zc.close(model)
    return parts["trunk"].weight.detach()


def test_ranks_with_different_tasks_do_not_wait_for_buffers() -> None:
    """A message of rank 0 after each backward made the rank that had written buffers wait for one that came in none."""
    first, second = run_ranks(_by_tasks, 2)
    assert first.equal(second)


def _unannounced(rank: int, world_size: int) -> list[bool]:
    """Job: whether zc.explain says that buffers come once an update, for model(x), model.forward(x) with accumulation
    under no_sync, and model.forward(x) without."""
    said = []
    for calls_forward, holds_back in ((False, False), (True, True), (True, False)):
        model = batch_norm()
        optimizer = SGD(model.parameters(), lr=0.1)
        zc.compile(model, optimizer, backend="eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "zc: no forward came")
            for step, microbatch in ((0, 0), (0, 1), (1, 0), (1, 1)):
                x, y = _batch(rank, step, microbatch)
                with zc.no_sync(model) if holds_back and microbatch == 0 else contextlib.nullcontext():
                    F.mse_loss(model.forward(x) if calls_forward else model(x), y).backward()
                if microbatch:
                    optimizer.step()
        said.append("rank 0's buffers come once an update" in str(zc.explain(model)))
        zc.close(model)
    return said


def test_buffers_that_come_less_often_than_ddps_are_said() -> None:
    assert run_ranks(_unannounced, 2) == [[False, False, True]] * 2


@contextlib.contextmanager
def _compiled(**options: Any) -> Iterator[tuple[nn.Module, SGD]]:
    torch.manual_seed(0)
    model = Codebook()
    optimizer = SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, **{"backend": "eager", "bucket_nbytes": 512, **options})
    yield model, optimizer
    zc.close(model)


def _differently(rank: int, world_size: int) -> list[Any]:
    """Job: ranks call the model differently often, one alone evaluates, and the caller has collectives of its own."""
    results: list[Any] = []
    for more in range(world_size):  # the one with more forwards between two updates
        with _compiled(stage=1) as (model, optimizer):
            for step in range(4):  # after the last one all have caught up
                for m in range(3 if rank == more and step < 3 else 1):
                    x, y = _batch(rank, step, m)
                    F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if rank == more:
                    model.eval()
                    with torch.no_grad():
                        model(torch.ones(2, 16))
                    model.train()
                dist.barrier()
            with torch.no_grad():
                model.eval()(torch.ones(2, 16))  # each takes over rank 0's
            results.append({name: value.clone() for name, value in model.named_buffers()})
    with _compiled(stage=2, broadcast_buffers=False) as (model, optimizer):
        F.mse_loss(model(_batch(rank, 0, 0)[0]), torch.ones(4, 16)).backward()
        optimizer.step()
        results.append(model.mean.clone())
    return results


def test_nobody_waits_for_a_forward_that_another_rank_does_not_run() -> None:
    (first, second, own), (first_1, second_1, own_1) = run_ranks(_differently, 2)
    torch.testing.assert_close((first_1, second_1), (first, second), rtol=0, atol=0)
    assert [int(buffers["calls"]) for buffers in (first, second)] == [10, 4], "rank 0's own"
    assert not torch.equal(own, own_1), "broadcast_buffers=False leaves each rank its own"


def _dropped(rank: int, world_size: int) -> float:
    """Job: rank 0 drops its model after its last update, before rank 1 begins to receive the buffers."""
    model = batch_norm()
    optimizer = SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=3, backend="eager")
    sharded_model = zc.registry.sharded(model)
    sync = sharded_model.runtime.buffer_sync
    assert sync is not None
    receive = sync.receive_all

    def late() -> None:
        if rank == 1:
            time.sleep(0.5)
        receive()

    with patch.object(sync, "receive_all", late):
        F.mse_loss(model(_batch(rank, 0, 0)[0]), torch.ones(4, 16)).backward()
        optimizer.step()
    sync.take_received()
    mean = float(model.get_buffer("1.running_mean").sum())
    if rank == 0:
        del model, optimizer, sharded_model, sync, receive, late
        gc.collect()
    return mean


def test_a_model_that_rank_0_drops_has_sent_its_buffers() -> None:
    first, second = run_ranks(_dropped, 2, timeout=60.0)
    assert first == second


def _other_shapes(rank: int, world_size: int) -> str:
    """Job: what each rank hears when one has another buffer than rank 0."""
    with _compiled() as (model, optimizer):
        F.mse_loss(model(_batch(rank, 0, 0)[0]), torch.ones(4, 16)).backward()
        if rank == 1:
            model.replaced = torch.zeros(9)
        with pytest.raises(zc.RankMismatchError) as caught:
            optimizer.step()
        return str(caught.value)


def test_buffers_of_other_shapes_are_named_on_all_ranks() -> None:
    for text in run_ranks(_other_shapes, 2, timeout=60.0):
        assert "replaced is (9,)" in text and "broadcast_buffers=False" in text


class Own(nn.Module):
    """A buffer and a frozen parameter that differ from rank to rank, each beside one that does not."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.register_buffer("number", torch.full((16,), float(rank)))
        with torch.no_grad():
            self.frozen.bias.fill_(rank)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.norm(self.layer(x))) + self.number
        self.number += 1
        return y


IGNORED = ["number", "frozen.bias", "norm.running_mean"]


def _left_to_ranks(rank: int, world_size: int, stage: int) -> list[str]:
    def trained(model: Own, call: Callable[[Tensor], Tensor], optimizer: SGD) -> dict[str, Tensor]:
        for step in range(3):
            x, y = _batch(rank, step, 0)
            F.mse_loss(call(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in model.state_dict().items() if name in IGNORED}

    models = []
    for _ in range(2):
        torch.manual_seed(rank)
        models.append(Own(rank))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(models[-1], IGNORED)
    plain, model = models
    optimizer = SGD(plain.parameters(), lr=0.1)
    wanted = trained(plain, DistributedDataParallel(plain), optimizer)
    inner = SGD(model.parameters(), lr=0.1)
    zc.compile(model, inner, backend="eager", stage=stage)
    torch.testing.assert_close(trained(model, model, inner), wanted, rtol=1e-5, atol=1e-6)
    zc.close(model)
    texts = [", ".join(model._ddp_params_and_buffers_to_ignore)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layer.weight"])
    with pytest.raises(zc.PlanError) as error:
        zc.compile(model, SGD(model.parameters(), lr=0.1), backend="eager", stage=stage)
    return [*texts, str(error.value)]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_ddp_is_told_to_ignore_stays_each_ranks_own(stage: int) -> None:
    for told, error in run_ranks(_left_to_ranks, 2, stage):
        assert told == ", ".join(IGNORED), "the program's own list is there again"
        assert "layer.weight" in error and "DistributedDataParallel was told to ignore" in error


def _one_rank_writes(rank: int, world_size: int) -> list[str]:
    """Job: one rank alone writes a buffer between two updates, then the model is called once or twice."""
    texts = []
    with patch.dict(os.environ, {"ZC_RANK_TIMEOUT": "5"}):
        for writer, forwards in ((0, 1), (0, 2), (1, 1)):
            with _compiled(stage=1) as (model, optimizer):
                for step in range(2):
                    if step == 1 and rank == writer:
                        model.mean += 1.0
                    with pytest.raises(zc.RankMismatchError) if step == 1 else contextlib.nullcontext() as caught:
                        for m in range(forwards):
                            x, y = _batch(rank, step, m)
                            F.mse_loss(model(x), y).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                texts.append(str(caught.value))
    return texts


def test_a_buffer_that_one_rank_alone_has_written_is_named_on_all_ranks() -> None:
    """Rank 1 waits in its forward for buffers that rank 0 does not send, and rank 0 in its backward for rank 1."""
    for alone, alone_twice, other in run_ranks(_one_rank_writes, 2, timeout=60.0):
        for text in (alone, alone_twice):
            assert "rank 0 has written a buffer between two updates, and rank 1 has written none" in text
        assert "mean was written between two updates" in other
        assert all("broadcast_buffers=False" in text for text in (alone, alone_twice, other))


def _new_buffers(rank: int, world_size: int, how: str) -> list[list[float]]:
    """Job: what the forward behind a change reads, of DDP and of zc. Ranks make values of their own, of one shape."""
    seen = []
    for wrap in (DistributedDataParallel, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        model.register_buffer("number", torch.zeros(1))
        optimizer = SGD(model.parameters(), lr=0.1)
        if wrap is None:
            zc.compile(model, optimizer, backend="eager")
        net = model if wrap is None else wrap(model)
        for step in range(2):
            if step == 1 and how == "a new one":
                model.register_buffer("added", torch.full((3,), float(rank)))
            elif step == 1:
                model.number = torch.full((3,), float(rank))
            output = net(torch.ones(2, 4) * (1 + rank))
            last = (model.added if how == "a new one" and step == 1 else model.number).tolist()  # as it was read
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        seen.append(last)
    return seen


@pytest.mark.parametrize("how", ["a new one", "of another shape"])
def test_a_buffer_that_is_new_is_rank_0s_in_the_next_forward(how: str) -> None:
    """As with DDP: a mask that each rank drew was its own for one forward, so an update mixed two networks."""
    for theirs, ours in run_ranks(_new_buffers, 2, how):
        assert ours == theirs == [0.0] * 3


def _train_under_grad(rank: int, world_size: int) -> list[list[list[float]]]:
    """Job: the buffers after a forward under torch.func, and of the closed model after one more update."""
    model, seen = Codebook(), []
    zc.compile(model, optimizer := SGD(model.parameters(), lr=0.1), stage=2, backend="eager")
    for step in range(2):
        x = _batch(rank, step, 0)[0]
        model.train()(x).sum().backward()
        optimizer.step()
        if step == 0:
            torch.func.grad(lambda x: model.eval()(x).sum())(x)
        else:
            zc.close(model)
        seen.append([value.flatten().tolist() for value in model.buffers()])
    return seen


def test_buffers_arrive_in_a_forward_under_torch_func_and_at_the_end() -> None:
    """Such a transform may write no buffer that it did not make: all ranks but rank 0 raised."""
    first, second = run_ranks(_train_under_grad, 2)
    assert first == second
