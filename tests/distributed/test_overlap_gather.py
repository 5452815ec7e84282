"""overlap_gather: step() returns with the gathers launched, and nothing but time changes.

The comm thread sleeps before each of its tasks, so a gather is always late; what reads without waiting reads the
weights of before the update (Megatron-LM #950), which the control shows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from loops import adamw
from models import mean_square, mlp, vectors
from torch import nn

import zc
import zc.api
from zc.errors import PlanError
from zc.schedule import COMM, HOME
from zc.streams import ThreadStreams

DIM, DEPTH, BUCKET = 32, 4, 5000  # one bucket a layer
LATE = 0.012  # seconds


class Careless(ThreadStreams):
    """The home stream does not wait for gathers."""

    def wait(self, event: str, stream: str) -> None:
        if not (stream == HOME and event.startswith("done/gathered")):
            super().wait(event, stream)


Weights = dict[str, torch.Tensor]


def _train(
    rank: int, streams: type[ThreadStreams], look: Callable[[nn.Module], None] | None = None, **options: Any
) -> tuple[Weights, str]:
    """Weights after four updates, and the explanation. ``look`` is called right after each update."""
    torch.manual_seed(0)
    model: nn.Module = mlp(DIM, DEPTH)
    batch = vectors(DIM, 8)
    given, zc.api.make_streams = zc.api.make_streams, lambda device: streams({COMM: LATE})
    try:
        model, optimizer = zc.compile(model, adamw(model), bucket_nbytes=BUCKET, **options)
    finally:
        zc.api.make_streams = given
    for step in range(4):
        mean_square(model, batch(rank, step, 0)).backward()
        optimizer.step()
        if look is not None:
            look(model)
        optimizer.zero_grad()
    explanation = str(zc.explain(model))
    return {name: t.clone() for name, t in model.state_dict().items()}, explanation


def _with_and_without(rank: int, world_size: int, options: dict[str, Any]) -> tuple[bool, bool, str]:
    expected, _ = _train(rank, ThreadStreams, **options)
    found, explanation = _train(rank, ThreadStreams, overlap_gather=True, **options)
    careless, _ = _train(rank, Careless, overlap_gather=True, **options)
    same = [all(torch.equal(expected[k], w[k]) for k in expected) for w in (found, careless)]
    return same[0], same[1], explanation


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("stage", [1, 2])
def test_bitwise_the_same_weights(stage: int, backend: str) -> None:
    if backend == "inductor" and stage == 1:
        pytest.skip("the forward does not know the stage; aot_eager has both")
    found = run_ranks(_with_and_without, 2, {"stage": stage, "backend": backend}, timeout=240)
    for same, careless, explanation in found:
        assert same, "every late gather is waited for"
        assert not careless, "the control: without the waits the delay shows"
        if backend != "eager":
            forward = explanation.split("== schedule forward_0 ==")[1].split("==")[0]
            assert forward.count("wait_event(done/gathered[") == DEPTH, "a wait a bucket"
            assert forward.count("segment(") == DEPTH, "cut where a bucket is first read"
            assert "races 0, redundant 0" in forward


def test_masters_apart_from_the_parameters() -> None:
    """bf16 parameters: the casts come before the gathers."""
    options = {"backend": "aot_eager", "param_dtype": torch.bfloat16}
    for same, careless, _ in run_ranks(_with_and_without, 2, options):
        assert same and not careless


def _reads(rank: int, world_size: int, kind: str) -> None:
    """Whatever reads parameters right after step() sees the update, though the gathers are late."""
    batch = vectors(DIM, 8)(rank, 0, 0)
    seen: list[list[Any]] = [[], []]

    def look(model: nn.Module, into: list[Any]) -> None:
        layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
        if kind == "state_dict of a part":
            into.append(copy.deepcopy(layer.state_dict()))
        elif kind == "eager part":
            into.append(layer(batch[0] if isinstance(batch, tuple) else batch).detach().clone())
        elif kind == "evaluation":
            with torch.no_grad():
                into.append(mean_square(model, batch).clone())
        elif kind == "synchronize":
            zc.synchronize(model)
            into.append([p.detach().clone() for p in model.parameters()])
        elif kind == "clip":
            into.append(zc.clip_grad_norm_(model, 1e9))
            into.append([p.detach().clone() for p in model.parameters()])
        elif kind == "load_state_dict":
            model.load_state_dict({k: v * 1.5 for k, v in model.state_dict().items()})

    for k, overlap_gather in enumerate((False, True)):
        backend = "eager" if kind == "eager part" else "aot_eager"
        into = seen[k]
        weights, _ = _train(
            rank, ThreadStreams, lambda m: look(m, into), backend=backend, overlap_gather=overlap_gather  # noqa: B023
        )
        into.append(weights)
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind", ["state_dict of a part", "eager part", "evaluation", "synchronize", "clip", "load_state_dict"]
)
def test_readers_wait(kind: str) -> None:
    run_ranks(_reads, 2, kind)


def test_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(PlanError, match="needs overlap=True"):
        zc.compile(model, adamw(model), overlap=False, overlap_gather=True)
    with pytest.raises(PlanError, match="leave one of them out"):
        zc.compile(model, adamw(model), offload="cpu", overlap_gather=True)
    with pytest.raises(PlanError, match="overlap_gather must be True or False"):
        zc.compile(model, adamw(model), overlap_gather=1)  # type: ignore[arg-type]
