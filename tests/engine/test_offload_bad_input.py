"""What offload refuses, before anything is changed, with both figures."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models import mean_square, mlp, vectors
from torch import nn

import zc
from zc import checks, machine
from zc.errors import PlanError
from zc.offload.host_step import HostStep, _threads


def compiled(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = mlp(16, 2)
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-3, **options.pop("arguments", {}))
    return zc.compile(model, optimizer, backend="eager", offload="cpu", **options)


def test_too_little_host_memory_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "available_nbytes", lambda: 1234)
    model: nn.Module = mlp(16, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(PlanError, match=r"offload needs [\d,]+ bytes .* and 1,234 are available"):
        zc.compile(model, optimizer, backend="eager", offload="cpu")
    assert [p.data_ptr() for p in model.parameters()] == before and len(optimizer.param_groups[0]["params"]) == 4
    zc.compile(model, optimizer, backend="eager")  # nothing was left half done


def test_what_is_needed_counts_every_rank_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"master_shard": 100, "optimizer_state": 200}
    checks.check_room("offload", needed, 2, 600, "")
    checks.check_room("offload", needed, 2, None, "")  # nobody says
    with pytest.raises(PlanError, match=r"needs 900 bytes of memory for 3 rank\(s\).* 800 are available"):
        checks.check_room("offload", needed, 3, 800, "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.ranks_on_this_host(16) == 4 and machine.ranks_on_this_host(2) == 2
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert machine.ranks_on_this_host(16) == 16


def test_threads_leave_the_other_ranks_their_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(12)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert machine.num_threads(64) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.num_threads(64) == 3


def test_memory_that_is_available_is_counted() -> None:
    nbytes = machine.available_nbytes()
    assert nbytes is None or 2**20 < nbytes < 2**50


def test_an_update_has_its_threads_and_the_program_its_own() -> None:
    before = torch.get_num_threads()
    with _threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_cpu_only_works_and_says_that_it_saves_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = compiled()
    assert any("saves no memory here" in str(w.message) for w in caught)
    assert "saves no memory here" in zc.explain(model).sections["notes"]
    mean_square(model, vectors(16)(0, 0, 0)).backward()
    optimizer.step()
    assert "bucket by bucket as gradients land" in zc.explain(model).sections["offload"]
    assert all(p.isfinite().all() for p in model.parameters())


def test_capturable_is_refused() -> None:
    with pytest.raises(PlanError, match="AdamW was made with capturable=True"):
        compiled(arguments={"capturable": True})


def test_an_option_on_a_device_is_refused() -> None:
    """A fused update copied it to pinned memory without waiting, and read what was there."""
    model: nn.Module = mlp(16, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3, device="meta")
    with pytest.raises(PlanError, match="the 'lr' of AdamW is a tensor on meta"):
        zc.compile(model, optimizer, backend="eager", offload="cpu")


@pytest.mark.parametrize("by_bucket", [False, True])
def test_a_scalers_tensors_come_to_host_memory(by_bucket: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is not by bucket, as a subclass of AdamW has, read the copies before they had come, too."""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: torch.zeros_like(self, device="cpu"))
    step = object.__new__(HostStep)
    step.optimizer = SimpleNamespace(found_inf=torch.zeros(1, device="meta"))
    step.runtime, step.disk = Mock(), None
    step._by_bucket = by_bucket
    step.before(())
    assert step.optimizer.found_inf.device.type == "cpu" and not step._is_done


@pytest.mark.parametrize("offload", ["gpu", True, "disk "])
def test_an_unknown_kind_is_named(offload: Any) -> None:
    model: nn.Module = mlp(16, 2)
    with pytest.raises(PlanError, match=r"offload must be one of None, 'cpu'"):
        zc.compile(model, torch.optim.SGD(model.parameters()), offload=offload)
