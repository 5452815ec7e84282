"""Host memory of offload is page-locked for as long as the plan lives, each page once; where the driver refuses, the
run goes on and says so."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from recorders import Driver, install_driver
from torch import Tensor, nn

import zc
from zc import api
from zc.offload import host_step
from zc.offload.host_step import HostMemory


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Host memory is made for a GPU, whatever device the parameters are on."""
    fake = Driver()
    install_driver(monkeypatch, fake)
    monkeypatch.setattr(api, "HostMemory", lambda device: HostMemory(torch.device("cuda")))
    yield fake
    gc.collect()
    host_step.unlock_dropped()
    assert not fake.locked, "what is page-locked goes with its plan"


def compiled() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    return zc.compile(model, optimizer, backend="eager", offload="cpu", param_dtype=torch.bfloat16, bucket_nbytes=3000)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    model(torch.ones(2, 24, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def on_host(model: nn.Module) -> list[Tensor]:
    buffers = zc.registry.sharded(model).runtime.buffers
    tensors = [*buffers.host, *buffers.master_shard, *buffers._param]
    assert len(tensors) >= 6
    return tensors


@pytest.mark.filterwarnings("ignore:zc. offload")
def test_what_is_copied_from_and_to_is_page_locked_while_the_plan_lives(driver: Driver) -> None:
    model, optimizer = compiled()
    for _ in range(2):
        assert all(map(driver.is_locked, on_host(model)))
        step(model, optimizer)
        gc.collect()
    zc.close(model)
    gc.collect()
    assert not driver.locked and not driver.pending
    assert "page-lock" not in str(zc.explain(compiled()[0]))


def test_no_page_is_registered_twice(driver: Driver) -> None:
    """Neighbours on the heap share pages, and the driver refuses the second one."""
    memory = HostMemory(torch.device("cuda"))
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    tensors = [memory.zeros(n, dtype) for n in (1, 3, 1500, 7) for dtype in dtypes]
    assert memory.note is None and all(map(driver.is_locked, tensors))
    assert all(t.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0 and not t.any() for t in tensors)
    assert memory.zeros(0, torch.float32).numel() == 0 and len(driver.locked) == len(tensors)
    memory.unlock()
    assert not driver.locked
    tensors[2].fill_(1)  # the tensors live on


def test_the_collector_calls_nothing_of_cuda(driver: Driver) -> None:
    """It runs in any thread, perhaps while a graph is captured, and copies of the dropped model may be queued: the
    memory goes with the next call of zc, when the device has done them."""
    memory = HostMemory(torch.device("cuda", 0))
    tensor = memory.zeros(8, torch.float32)
    del memory
    gc.collect()
    assert driver.is_locked(tensor) and driver.calls == []
    zc.close(nn.Linear(1, 1))
    assert driver.calls == ["synchronize cuda:0", "unregister"] and not driver.locked


def test_a_driver_that_refuses_is_said_once_and_nothing_else_changes(driver: Driver) -> None:
    model, optimizer = compiled()
    expected = step(model, optimizer)
    del model, optimizer
    gc.collect()
    driver.limit = 12_000
    with pytest.warns(UserWarning, match="does not page-lock") as warned:
        model, optimizer = compiled()
    driver.launch()  # the driver's error is not left for the caller's next kernel
    assert sum("page-lock" in str(w.message) for w in warned) == 1
    note = zc.explain(model).sections["notes"]
    assert note.count("page-lock") == 1 and "error 2, memory_allocation" in note and "ulimit -l" in note
    assert 0 < sum(map(driver.is_locked, on_host(model))) < len(on_host(model))
    weights = step(model, optimizer)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_child_reads_what_its_parent_has_and_unlocks_nothing(driver: Driver) -> None:
    memory = HostMemory(torch.device("cuda"))
    tensor = memory.zeros(8, torch.float32)
    tensor.fill_(3)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        del memory
        host_step.unlock_dropped()
        os.read(read, 1)
        os._exit(0 if driver.is_locked(tensor) and tensor.tolist() == [4.0] * 8 else 1)
    tensor.fill_(4)  # on the pages that the device knows: a private one would be copied here
    os.write(write, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
