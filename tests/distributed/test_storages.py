"""A parameter's storage is its own: who tells tensors apart by their storage, or saves one with all of it, sees what it
sees in plain PyTorch. (The memory is flat_param's.)"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from models import GPT, mean_square, mlp, vectors
from torch import Tensor, nn
from training_runs import adamw

import zc

State = dict[str, Tensor]
safetensors = pytest.importorskip("safetensors.torch")


def _size(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def _whole_model(model: nn.Module, path: Path) -> State:
    safetensors.save_model(model, str(path))
    again = copy.deepcopy(model)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    safetensors.load_model(again, str(path))
    return again.state_dict()


def _state_file(model: nn.Module, path: Path) -> State:
    safetensors.save_file({name: p.detach() for name, p in model.named_parameters()}, str(path))
    return safetensors.load_file(str(path))  # type: ignore[no-any-return]


def _torch_save(model: nn.Module, path: Path) -> State:
    torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


def _accelerate(model: nn.Module, path: Path) -> State:
    from accelerate import Accelerator

    Accelerator(cpu=True).save_model(model, str(path))
    return safetensors.load_file(str(path / "model.safetensors"))  # type: ignore[no-any-return]


def _accelerate_state(model: nn.Module, path: Path) -> State:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator._models.append(model)  # prepare would wrap it in DDP
    accelerator.save_state(str(path))
    return safetensors.load_file(str(path / "model.safetensors"))  # type: ignore[no-any-return]


SAVERS: dict[str, Callable[[nn.Module, Path], State]] = {
    "safetensors.save_model": _whole_model,
    "safetensors.save_file": _state_file,
    "torch.save": _torch_save,
    "accelerate.save_model": _accelerate,
    "accelerate.save_state": _accelerate_state,
}


def _compiled(tied: bool, rank: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = GPT(tied=tied) if tied else mlp()
    model, optimizer = zc.compile(model, adamw(model), backend="eager", bucket_nbytes=2048)
    if not tied:
        mean_square(model, vectors()(rank, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _saved(rank: int, world_size: int, name: str, folder: Path) -> None:
    model = _compiled(tied=False, rank=rank)
    path = folder / f"rank{rank}"
    if name.startswith("accelerate"):
        path.mkdir()
    state = SAVERS[name](model, path)
    wanted = model.state_dict()
    assert state.keys() == wanted.keys(), "no tensor is taken for a part of another"
    for key, value in wanted.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("name", SAVERS)
def test_round_trips(name: str, tmp_path: Path) -> None:
    """accelerate wrote 1 of 8 tensors ("Removed shared tensor"), safetensors' save_model failed."""
    if name.startswith("accelerate"):
        pytest.importorskip("accelerate")
    run_ranks(_saved, 2, name, tmp_path)


def _sizes(rank: int, world_size: int) -> None:
    model, plain = _compiled(tied=True, rank=rank), GPT(tied=True)
    assert _size(model.state_dict()) == _size(plain.state_dict())
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert _size(param) <= _size(other) + 64, name
        copied = copy.deepcopy(param.detach())
        assert copied.untyped_storage().nbytes() == param.nbytes and torch.equal(copied, param)
    copied = copy.deepcopy(model)
    mine = {param.untyped_storage().data_ptr() for param in model.parameters()}
    assert not mine & {param.untyped_storage().data_ptr() for param in copied.parameters()}
    assert copied.head.weight is copied.embed.weight, "tied"  # type: ignore[union-attr]
    states = copy.deepcopy(model.state_dict())
    assert sum(t.untyped_storage().nbytes() for t in states.values()) == sum(p.nbytes for p in states.values())


def test_a_tensor_is_saved_and_copied_alone() -> None:
    """torch.save of one bias wrote its bucket, and a deepcopied state_dict held one for each of its tensors."""
    run_ranks(_sizes, 2)


def _kept(rank: int, world_size: int) -> None:
    model = _compiled(tied=False, rank=rank)
    data = next(model.parameters()).data
    wanted = data.clone()
    zc.close(model)
    assert data.data_ptr() != next(model.parameters()).data_ptr()
    del model
    gc.collect()
    more = [torch.full((numel,), 7.0) for numel in range(1, 1024)]  # who takes the bucket's place
    assert torch.equal(data, wanted) and len(more) == 1023


def test_what_is_kept_of_a_parameter_keeps_its_memory() -> None:
    run_ranks(_kept, 2)


def _shared(rank: int, world_size: int) -> str:
    before = mlp().share_memory()
    views = [p.detach() for p in before.parameters()]  # as another process has them
    zc.compile(before, adamw(before), backend="eager")
    notes = zc.explain(before).sections["notes"]
    assert all(p.is_shared() for p in views) and not any(p.is_shared() for p in before.parameters())
    model = mlp()
    optimizer = adamw(model)
    zc.compile(model, optimizer, backend="eager")
    mean_square(model, vectors()(rank, 0, 0)).backward()
    model.share_memory()
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(zc.ZcError, match=r"has left its bucket.*share_memory.*clones"):
        optimizer.step()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    return notes


def test_memory_that_processes_share_is_left_with_a_note_or_refused() -> None:
    """Who holds it in another process, an actor say, sees no update: never without a word."""
    for notes in run_ranks(_shared, 2):
        assert ".weight lay in memory that processes share" in notes
