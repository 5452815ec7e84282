"""Parameters whose gather is under way, in one process."""

from __future__ import annotations

import gc

import pytest
from torch import nn
from training_runs import adamw

import zc
from zc.errors import PlanError
from zc.weights.param import ManagedParameter


def test_a_dropped_model_leaves_plain_parameters() -> None:
    model = nn.Linear(4, 4)
    model, optimizer = zc.compile(model, adamw(model), backend="eager", overlap_gather=True)
    weights, param = zc.registry.sharded(model).runtime.weights, model.weight
    weights.managed.add([param])  # type: ignore[attr-defined]
    assert type(param) is ManagedParameter
    del weights, model, optimizer
    gc.collect()
    assert type(param) is nn.Parameter and param.sum().item() is not None


def test_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(PlanError, match="needs overlap=True"):
        zc.compile(model, adamw(model), overlap=False, overlap_gather=True)
    with pytest.raises(PlanError, match="leave one of them out"):
        zc.compile(model, adamw(model), offload="cpu", overlap_gather=True)
    with pytest.raises(PlanError, match="overlap_gather must be True or False"):
        zc.compile(model, adamw(model), overlap_gather=1)  # type: ignore[arg-type]
