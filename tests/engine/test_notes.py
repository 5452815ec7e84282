"""Notes of `zc.compile` that need a GPU to arise: what they say, and when."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import mlp
from training_runs import adamw

from zc.config import Config
from zc.engine.core import warn
from zc.planning.packing import ParamSpec, make_plan
from zc.planning.plan import Topology, flat
from zc.prepare import Request, assign, notes_of


@dataclass
class Ranks:
    """What notes ask of a group."""

    topology: Topology
    note: str | None = None

    @property
    def shard(self) -> Ranks:
        return self

    @property
    def world_size(self) -> int:
        return self.topology.world_size


def notes(topology: Topology, device: str = "cuda", **options: Any) -> str:
    model, config = mlp(), Config(backend="eager", **options)
    plan = make_plan(
        [ParamSpec(n, tuple(p.shape), p.dtype, torch.device(device), 0, None) for n, p in model.named_parameters()],
        config,
        flat(topology.world_size),
    )
    ranks: Any = Ranks(topology)
    return "\n".join(notes_of(Request(model, config, assign(model, adamw(model)), plan, None), ranks))


def test_one_hardware_queue_for_all_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "CUDA_DEVICE_MAX_CONNECTIONS=1"
    assert words not in notes(Topology(1, 2))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert f"{words}: all streams share one hardware queue" in notes(Topology(1, 2))
    assert words not in notes(Topology(1, 1)) and words not in notes(Topology(1, 2), overlap=False)
    assert words not in notes(Topology(1, 2), device="cpu")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert words not in notes(Topology(1, 2))


def test_a_note_breaks_nothing_where_warnings_are_errors(caplog: pytest.LogCaptureFixture) -> None:
    """It raised on rank 0 alone, inside a backward or between an update's two halves, and the others waited."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn("zc: a note")
    assert "zc: a note" in caplog.text
    with pytest.warns(UserWarning, match="another note"):
        warn("zc: another note")
