"""overlap_gather: step() returns with the gathers launched, and nothing but time changes.

The comm thread sleeps before each gather (late_gathers.py), so it is always late; what reads without waiting reads the
weights of before the update (Megatron-LM #950), which the control shows.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from late_gathers import BUCKET, DEPTH, DIM, LATE, VERY_LATE, Careless, Late, last_weight, late_gathers, train_late
from models import mean_square, mlp, vectors
from tiers import full_only
from torch import nn
from training_runs import adamw

import zc
from zc.weights.overlapped import OverlappedWeights


def _with_and_without(rank: int, world_size: int, options: dict[str, Any]) -> tuple[bool, bool, str]:
    expected, _ = train_late(rank, Late, **options)
    trained, explanation = train_late(rank, Late, overlap_gather=True, **options)
    careless, _ = train_late(rank, Careless, overlap_gather=True, **options)
    same = [all(torch.equal(expected[k], w[k]) for k in expected) for w in (trained, careless)]
    return same[0], same[1], explanation


@pytest.mark.parametrize(
    ("backend", "stage"),
    [("eager", 1), pytest.param("aot_eager", 1, marks=full_only), ("aot_eager", 2),
     pytest.param("inductor", 2, marks=full_only)],
)
def test_bitwise_the_same_weights(stage: int, backend: str) -> None:
    results = run_ranks(_with_and_without, 2, {"stage": stage, "backend": backend}, timeout=240)
    for same, careless, explanation in results:
        assert same, "every late gather is waited for"
        assert not careless, "the control: without the waits the delay shows"
        if backend != "eager":
            forward = explanation.split("== schedule forward_0 ==")[1].split("==")[0]
            assert forward.count("wait_event(done/gathered[") == DEPTH, "a wait a bucket"
            assert forward.count("segment(") == DEPTH, "cut where a bucket is first read"
            assert "races 0, redundant 0" in forward


class _Interrupted(nn.Module):
    """Another thread calls ``meanwhile`` in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.meanwhile: Callable[[], object] = lambda: None

    @torch.compiler.disable
    def interrupt(self) -> None:
        thread = threading.Thread(target=self.meanwhile, name="second")
        thread.start()
        thread.join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.interrupt()
        return self.last(x)


def test_a_second_thread_is_refused_inside_a_forward() -> None:
    """The waits of a forward that was in another thread were taken for its own: AssertionError, or a hang."""
    model = _Interrupted()
    optimizer = adamw(model)
    zc.compile(model, optimizer, backend="aot_eager", bucket_nbytes=BUCKET, overlap_gather=True)
    said = []

    def update() -> None:
        try:
            optimizer.step()
        except zc.ZcError as error:
            said.append(str(error))

    model(torch.ones(2, DIM)).sum().backward()
    before = [param.detach().clone() for param in model.parameters()]
    model.meanwhile = update
    model(torch.ones(2, DIM))
    assert len(said) == 1 and said[0].startswith("an update or a load began in thread second, and a forward"), said
    assert "with overlap_gather one thread at a time" in said[0] and "leave overlap_gather out" in said[0]
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.step()
    model.meanwhile = lambda: None
    model(torch.ones(2, DIM))
    assert not torch.equal(before[0], next(model.parameters()))


def _averaged(model: nn.Module) -> list[torch.Tensor]:
    averages = [torch.zeros(p.shape) for p in model.parameters()]
    torch._foreach_lerp_(averages, list(model.parameters()), 0.5)
    return [average.detach() for average in averages]


def _saved(model: nn.Module) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(last_weight(model), file)
    file.seek(0)
    loaded = torch.load(file)
    assert type(loaded) is nn.Parameter
    return loaded.detach()


def _copied(model: nn.Module) -> torch.Tensor:
    copied = copy.deepcopy(last_weight(model))
    assert type(copied) is nn.Parameter
    return copied.detach()


def _clamped(model: nn.Module) -> None:
    with torch.no_grad():
        for p in reversed(list(model.parameters())):
            p.clamp_(-0.1, 0.1)


RAW: dict[str, Callable[[nn.Module], Any]] = {
    "a norm": lambda model: last_weight(model).norm().detach(),
    "p.data": lambda model: last_weight(model).data.clone(),
    "an average of the weights": _averaged,
    "numpy": lambda model: torch.from_numpy(last_weight(model).detach().numpy().copy()),
    "single elements": lambda model: [last_weight(model)[0, 0].item(), last_weight(model)[-1, -1].item()],  # one a rank
    "deepcopy": _copied,
    "torch.save": _saved,
    "repr": lambda model: torch.tensor(list(repr(last_weight(model)).encode())),
    "another of its class": lambda model: type(last_weight(model))(last_weight(model).data.clone()).detach(),
    "functional": lambda model: nn.functional.linear(torch.ones(1, DIM), last_weight(model)).detach(),
    "storage": lambda model: last_weight(model).untyped_storage().clone().tolist(),
    "clamp": _clamped,
}


def _raw(rank: int, world_size: int, is_watched: bool) -> dict[str, bool]:
    """By kind: whether a read right after step(), one kind a step, is the same as without overlap_gather."""
    seen: list[list[Any]] = [[], []]
    watch = OverlappedWeights.watch
    if not is_watched:
        OverlappedWeights.watch = lambda self: None  # type: ignore[method-assign]
    try:
        for into, overlap_gather in zip(seen, (False, True), strict=True):
            kinds = iter(RAW.values())

            def look(model: nn.Module, into: list[Any] = into, kinds: Any = kinds) -> None:
                into.append(next(kinds)(model))

            options = {"backend": "aot_eager", "overlap_gather": overlap_gather}
            late = LATE if is_watched else VERY_LATE
            weights, _ = train_late(rank, Late, look, num_steps=len(RAW), late=late, **options)
            into[-1] = list(weights.values())  # a clamp shows in what the run ends with
    finally:
        OverlappedWeights.watch = watch  # type: ignore[method-assign]
    return {kind: _is_same(*pair) for kind, *pair in zip(RAW, *seen, strict=True)}


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(map(_is_same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_raw_reads_wait() -> None:
    """Between step() and the next forward, without zc.synchronize."""
    for same in run_ranks(_raw, 2, True):
        assert all(same.values()), same


@full_only
def test_raw_reads_would_see_old_weights() -> None:
    """The control. (A clamp comes before the late gather takes this rank's shard, on every rank: no number differs.)"""
    for same in run_ranks(_raw, 2, False):
        assert [kind for kind, is_same in same.items() if is_same] == ["clamp"], same


def _asks_for_no_value(rank: int, world_size: int) -> None:
    seen = []

    def look(model: nn.Module) -> None:
        for p in model.parameters():
            assert isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf and p.grad_fn is None
            assert p.shape == p.size() and p.numel() and p.dim() == p.ndim and p.dtype is torch.float32
            assert p.device.type == "cpu" and p.stride() and p.is_contiguous() and len(p) and p.element_size() == 4
            assert p.nbytes == 4 * p.numel() and {p: 1}[p] and torch.is_tensor(p) and p.is_floating_point()
            p.grad = None
        weights = zc.registry.sharded(model).runtime.weights
        seen.append(bool(weights.in_flight) and type(last_weight(model)) is not nn.Parameter)
        assert last_weight(model).sum().item() and not weights.in_flight
        assert all(type(p) is nn.Parameter for p in model.parameters())

    _, explanation = train_late(rank, Late, look, backend="aot_eager", overlap_gather=True)
    assert seen == [True] * 4, "the gathers went on meanwhile"
    assert "schedule forward_0" in explanation and "schedule forward_1" not in explanation, "compiled once"


def test_what_asks_for_no_value_does_not_wait() -> None:
    run_ranks(_asks_for_no_value, 2)


class Named(nn.Parameter):
    """A user's own class, which can't be exchanged for another."""


def _own_class(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model: nn.Module = mlp(DIM, 2)
    last_weight(model).__class__ = Named
    model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=BUCKET, backend="aot_eager", overlap_gather=True)
    mean_square(model, vectors(DIM, 8)(rank, 0, 0)).backward()
    optimizer.step()
    assert type(last_weight(model)) is Named
    assert not zc.registry.sharded(model).runtime.weights.in_flight, "step() has waited"
    return str(zc.explain(model))


@pytest.mark.filterwarnings("ignore:zc")
def test_a_parameter_that_cannot_be_watched_is_waited_for() -> None:
    for text in run_ranks(_own_class, 2):
        assert "overlap_gather: parameters of class Named can't be watched: step() waits for the weights" in text


def _after_a_failed_gather(rank: int, world_size: int, is_compiled: bool) -> list[str]:
    """What each of several reads of the weights raises after a gather that has failed."""
    torch.manual_seed(0)
    model: nn.Module = mlp(DIM, DEPTH)
    backend = "aot_eager" if is_compiled else "eager"
    model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=BUCKET, backend=backend, overlap_gather=True)
    runtime = zc.registry.sharded(model).runtime
    batch = vectors(DIM, 8)
    mean_square(model, batch(rank, 0, 0)).backward()
    runtime.streams.synchronize()  # reductions read the other ranks' memory, too

    def fail(*args: Any) -> None:
        raise OSError("a page is gone")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runtime.group.shard.neighbours, "read", fail)
        optimizer.step()
        for bucket in range(DEPTH):
            assert runtime.streams._fences[f"done/gathered[{bucket}]"][1].reached.wait(60)
    errors = []
    reads: list[Callable[[], object]] = [
        model.state_dict,
        model.state_dict,
        lambda: model(batch(rank, 1, 0)),
        lambda: last_weight(model).sum(),
        lambda: zc.synchronize(model),
    ]
    for read in reads:
        with pytest.raises((OSError, zc.ZcError)) as raised:
            read()
        errors.append(f"{type(raised.value).__name__}: {raised.value}")
    return errors


@pytest.mark.parametrize("is_compiled", [False, True])
def test_weights_that_did_not_arrive_are_never_read(is_compiled: bool) -> None:
    """Not the second time either: an emergency save after the first error would keep half an update."""
    for errors in run_ranks(_after_a_failed_gather, 2, is_compiled):
        assert errors[0] == "OSError: a page is gone"
        for error in errors[1:]:
            assert "have not arrived on rank" in error and "OSError: a page is gone" in error, errors


def _reads_states(rank: int, world_size: int) -> None:
    with late_gathers(LATE * rank):
        model = mlp(DIM, DEPTH)
        optimizer = adamw(model)
        zc.compile(model, optimizer, bucket_nbytes=BUCKET, backend="eager", overlap_gather=True)
        for step in range(3):
            mean_square(model, vectors(DIM, 8)(rank, step, 0)).backward()
            optimizer.step()
            if rank == 0:  # here the weights' gathers come first
                zc.registry.sharded(model).runtime.streams.synchronize()
            moment = optimizer.state[last_weight(model)]["exp_avg"]
            assert moment.norm() > 0 if step else moment.full_tensor().any()
            optimizer.zero_grad()


def test_states_are_read_after_the_gathers_on_every_rank() -> None:
    """The next step was a RankMismatchError: the two exchanges had come in another order on each rank."""
    run_ranks(_reads_states, 2)
