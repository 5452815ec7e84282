"""Parameters whose gather is under way, in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from training_runs import adamw

import zc
from zc.errors import PlanError
from zc.weights.pending import Pending, PendingParameter


class _Model:
    def wait(self, params: Sequence[nn.Parameter]) -> None:
        raise AssertionError("there is nobody to wait for")


def test_a_dropped_model_leaves_plain_parameters() -> None:
    param, model = nn.Parameter(torch.ones(2)), _Model()
    pending = Pending(model.wait)
    pending.add(0, [param])
    assert type(param) is PendingParameter
    del pending
    assert type(param) is nn.Parameter and param.sum().item() == 2.0


def test_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(PlanError, match="needs overlap=True"):
        zc.compile(model, adamw(model), overlap=False, overlap_gather=True)
    with pytest.raises(PlanError, match="leave one of them out"):
        zc.compile(model, adamw(model), offload="cpu", overlap_gather=True)
    with pytest.raises(PlanError, match="overlap_gather must be True or False"):
        zc.compile(model, adamw(model), overlap_gather=1)  # type: ignore[arg-type]
