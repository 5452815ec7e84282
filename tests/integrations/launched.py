"""A rank process that a framework takes for one of torchrun's, and what the tests of all frameworks train."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TOLERANCE = 1e-5  # relative, against DDP's weights


@contextlib.contextmanager
def torchrun(rank: int, world_size: int) -> Iterator[None]:
    """The variables that torchrun sets; the process group is there already. Singletons of an earlier job are gone."""
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
    variables = dict.fromkeys(names, str(rank)) | {"GROUP_RANK": "0"}
    variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "GROUP_WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "test"}
    variables |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    before = dict(os.environ)
    os.environ.update(variables)
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def regression(num: int = 48, width: int = 6) -> TensorDataset:
    """Rows and what a fixed linear map makes of them: each rank has the same."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, width, generator=generator)
    return TensorDataset(x, x @ torch.randn(width, 2, generator=generator))


def mlp(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 2))


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().float().clone() for name, p in model.state_dict().items()}


def furthest(trained: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    assert trained.keys() == wanted.keys(), trained.keys() ^ wanted.keys()
    some = [k for k in wanted if wanted[k].numel()]
    return max(((trained[k] - wanted[k]).abs().max() / wanted[k].abs().max().clamp_min(1e-6)).item() for k in some)
