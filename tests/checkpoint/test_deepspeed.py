"""What DeepSpeed 0.19.8 itself has written (deepspeed_universal/make.py), against a plain AdamW of the same steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from harness import run_ranks
from save_and_load import joined, parts

import zc

FOLDER = Path(__file__).parent / "deepspeed_universal"


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("deepspeed_universal_make", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _load(rank: int, world_size: int) -> dict[str, Any]:
    source = maker()
    model = source.make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(9.0)
    model, optimizer = zc.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2), backend="eager")
    zc.load_universal(FOLDER, model, optimizer)
    loaded = parts(model, optimizer)
    model(source.batch(3)).square().mean().backward()
    optimizer.step()
    return {"loaded": loaded, "after": parts(model, optimizer)}


def test_zero2_goes_on_in_zc() -> None:
    """Weights and moments after the load, and after one more step: a moment left behind would show there."""
    results = run_ranks(_load, 2)
    source = maker()
    model = source.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for key in ("loaded", "after"):
        for step in range(3) if key == "loaded" else (3,):
            optimizer.zero_grad()
            model(source.batch(step)).square().mean().backward()
            optimizer.step()
        ours = joined([rank[key] for rank in results])
        for name, param in model.named_parameters():
            torch.testing.assert_close(ours[name], param.detach().reshape(-1), rtol=1e-5, atol=1e-7)
            for state in ("exp_avg", "exp_avg_sq"):
                wanted = optimizer.state[param][state].reshape(-1)
                torch.testing.assert_close(ours[f"{name}/{state}"], wanted, rtol=1e-5, atol=1e-9)
            assert ours[f"{name}/step"].item() == optimizer.state[param]["step"].item()
