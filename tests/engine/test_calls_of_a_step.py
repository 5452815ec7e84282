"""How many functions of zc's a steady step calls: the number grows with a model's buckets, not with its parameters."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from tiers import full_cases
from torch import nn

import zc

ROOT = Path(zc.__file__).resolve().parent.parent
FOLDERS = tuple(ROOT / name for name in ("zc", "passes", "kernels"))


def calls_of_step(num_norms: int, **options: Any) -> Counter[str]:
    """By name, the functions of zc's that a step calls on any thread, without comprehensions. Two parameters a norm."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(num_norms)))
    optimizer = torch.optim.AdamW(model.parameters())
    is_on, calls = False, Counter[CodeType]()

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if is_on and event == "call":
            calls[frame.f_code] += 1

    threading.setprofile(note)  # threads inherit it when they are made
    sys.setprofile(note)
    try:
        zc.compile(model, optimizer, backend="aot_eager", **options)
        for step in range(5):
            is_on = step == 4
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    paths = {code: Path(code.co_filename).resolve() for code in calls if not code.co_name.startswith("<")}
    own = [code for code, path in paths.items() if any(path.is_relative_to(folder) for folder in FOLDERS)]
    return sum((Counter({f"{paths[code].stem}.{code.co_name}": calls[code]}) for code in own), Counter[str]())


@pytest.mark.parametrize("stage", [1, 2])
@full_cases("1")
def test_a_step_calls_one_function_for_a_parameter(stage: int) -> None:
    """That is the hook that autograd calls for each; whatever else loops over parameters does so in one call. (Each
    model that the process still has costs a few more.)"""
    few, many = (calls_of_step(num_norms, stage=stage) for num_norms in (4, 24))
    more = {name: number for name, number in (many - few).items() if number >= 20}
    assert more == {"runtime._bring": 2 * 20}
