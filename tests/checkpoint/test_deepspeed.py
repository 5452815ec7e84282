"""What DeepSpeed 0.19.8 itself has written (deepspeed_universal/make.py), against a plain AdamW of the same steps."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from save_and_load import joined, parts

import zc
from zc.errors import CheckpointError

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


def assert_refused(folder: Path, words: str) -> None:
    """A load of ``folder`` raises CheckpointError, and leaves weights and states as they were."""
    model = maker().make_model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    model, optimizer = zc.compile(model, torch.optim.AdamW(model.parameters()), backend="eager")
    with pytest.raises(CheckpointError, match=words):
        zc.load_universal(folder, model, optimizer)
    torch.testing.assert_close(dict(model.named_parameters()), before, rtol=0, atol=0)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("0.weight/exp_avg.pt", {"param": torch.zeros(5)}, r"holds \(5,\), the parameter's shape is \(5, 6\)"),
        ("2.bias/fp32.pt", {"param": "none"}, r"holds str, the parameter's shape is \(3,\)"),
        ("2.bias/fp32.pt", Path("code"), "can't be read without running code from it"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(file: str, content: Any, words: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "zero", tmp_path / "zero")
    torch.save(content, tmp_path / "zero" / file)
    assert_refused(tmp_path, words)


@pytest.mark.parametrize(("pattern", "words"), [
    ("*/step.pt", r"zero/0\.weight/step\.pt is not there, and AdamW keeps it"),
    ("2.weight/exp_avg.pt", r"zero/2\.weight/exp_avg\.pt is not there, and AdamW keeps it"),
    ("2.bias/[!f]*.pt", r"zero/2\.bias/exp_avg\.pt is not there"),
])  # fmt: skip
def test_a_state_that_is_not_there_changes_nothing(pattern: str, words: str, tmp_path: Path) -> None:
    """The next step() raised KeyError, with the weights replaced."""
    shutil.copytree(FOLDER / "zero", tmp_path / "zero")
    for file in (tmp_path / "zero").glob(pattern):
        file.unlink()
    assert_refused(tmp_path, words)


def test_a_state_that_only_some_parameters_have_is_not_loaded(tmp_path: Path) -> None:
    """Of a class that can't be tried they are compared with each other. Weights alone load for any class."""

    class Untried(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["params"][0].shape == (16, 24):
                raise TypeError
            return super().step(closure)

    shutil.copytree(FOLDER / "zero", tmp_path / "zero")
    (tmp_path / "zero/2.weight/exp_avg_sq.pt").unlink()
    model = maker().make_model()
    model, optimizer = zc.compile(model, Untried(model.parameters()), backend="eager")
    with pytest.raises(CheckpointError, match=r"2\.weight/exp_avg_sq\.pt is not there, and Untried has it for other"):
        zc.load_universal(tmp_path, model, optimizer)
    for file in (tmp_path / "zero").glob("*/[!f]*.pt"):
        file.unlink()
    zc.load_universal(tmp_path, model, optimizer)
    wanted = torch.load(tmp_path / "zero/2.weight/fp32.pt", weights_only=True)["param"]
    assert torch.equal(model[2].weight, wanted.view_as(model[2].weight)) and not optimizer.state
