"""A model that its program drops goes, whatever has happened to it: its memory, and the threads of its groups."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import mlp
from torch import nn

import zc
from zc import registry
from zc.engine.buffers import Accumulators
from zc.ranks.control import Control
from zc.ranks.process import ProcessGroups


def assert_freed(params: list[weakref.ref[Any]]) -> None:
    """The comm stream's thread may still work for the model."""
    for _ in range(500):
        gc.collect()
        if all(param() is None for param in params):
            return
        time.sleep(0.02)
    raise AssertionError(f"{sum(param() is not None for param in params)} parameters live on")


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_dropped_model_is_freed(stage: int) -> None:
    def program() -> list[weakref.ref[nn.Parameter]]:
        model = mlp()
        zc.compile(model, optimizer := torch.optim.AdamW(model.parameters()), stage=stage, backend="eager")
        train(model, optimizer)
        return [weakref.ref(param) for param in model.parameters()]

    assert_freed(program())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_model_whose_step_raised_is_freed(stage: int) -> None:
    """zc may keep nothing of the step: its frame has the caller's variables, and the loss among them keeps the graph,
    in which Python's collector sees no cycle."""

    def program() -> list[weakref.ref[nn.Parameter]]:
        model = mlp()
        zc.compile(model, optimizer := torch.optim.AdamW(model.parameters()), stage=stage, backend="eager")
        loss = model(torch.ones(3, 16)).square().sum()
        loss.backward()

        def closure() -> torch.Tensor:
            raise KeyError("of the caller")

        has_raised = False
        try:  # pytest.raises would keep the traceback, and so the loss
            optimizer.step(closure)
        except KeyError:
            has_raised = True
        assert has_raised
        return [weakref.ref(param) for param in model.parameters()]

    assert_freed(program())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("options", [{"stage": 3}, {"stage": 2, "overlap_gather": True}], ids=str)
def test_a_block_that_outlives_its_model_keeps_no_weights(options: dict[str, Any]) -> None:
    """Its call runs inside a context of the model's weights, which have all buckets."""

    def program() -> tuple[nn.Module, weakref.ref[nn.Parameter], weakref.ref[Any]]:
        torch._dynamo.reset()
        model = nn.Sequential(*(Block() for _ in range(4)))
        zc.compile(model, optimizer := torch.optim.SGD(model.parameters()), backend="aot_eager", **options)
        train(model, optimizer)
        assert registry.sharded(model).runtime.plan.kinds
        return model[0], weakref.ref(model[1].linear.weight), weakref.ref(registry.sharded(model).runtime.weights)

    _block, other, weights = program()
    assert_freed([other, weights])


def test_a_model_whose_lane_has_failed_is_freed() -> None:
    """As after a lost rank, whose error the loop has met elsewhere: nobody raises the lane's. Its traceback may keep
    nothing of the model, whose finalizer keeps the streams."""

    def program() -> list[weakref.ref[nn.Parameter]]:
        model = mlp()
        zc.compile(model, optimizer := torch.optim.AdamW(model.parameters()), backend="eager")
        train(model, optimizer)
        runtime = registry.sharded(model).runtime

        def reduce(accumulators: Accumulators) -> None:
            raise KeyError("of the network") from raised(accumulators)

        def raised(accumulators: Accumulators) -> Exception:
            try:
                raise OSError(len(accumulators.touched))
            except OSError as error:
                return error

        runtime.streams.run_on("comm", partial(reduce, runtime.accumulators))
        runtime.streams.record("reduced", "comm")
        while runtime.streams.error_before("reduced") is None:
            time.sleep(0.001)
        return [weakref.ref(param) for param in model.parameters()] + [weakref.ref(runtime.accumulators)]

    assert_freed(program())


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dist.Store]:
    yield dist.FileStore(str(tmp_path / "store"), 1)
    if dist.is_initialized():
        dist.destroy_process_group()


def test_groups_of_a_dropped_model_go_with_their_default_group(store: dist.Store, tmp_path: Path) -> None:
    """Also where something keeps the default group that the program has destroyed: torch's caches do, those of DTensor
    by their meshes. The groups go when ranks next make one under another default group."""
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    destroyed = dist.group.WORLD
    groups = ProcessGroups((0,), "gloo")
    group = weakref.ref(groups.new())
    del groups  # as a dropped model does
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "other"), 1), rank=0, world_size=1)
    ProcessGroups((0,), "gloo")
    assert group() is None and destroyed is not dist.group.WORLD


def test_a_group_stays_open_while_a_message_that_nobody_waits_for_is_on_its_way(store: dist.Store) -> None:
    """The announcements of a dropped model go by messages; another rank may not have sent its own yet."""
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    groups, is_done = ProcessGroups((0,), "gloo"), [False]
    on_its_way, group = SimpleNamespace(is_completed=lambda: is_done[0]), groups.new()
    control: Any = SimpleNamespace(
        _all_on_this_host=None, world_size=1, control=group, journal=None, _process_groups=groups,
        _post=lambda *args, **options: on_its_way,
    )  # fmt: skip
    Control.gather_on_host(control, bytearray(1), b"x", "an announcement")
    of_group = weakref.ref(group)
    del groups, control, group
    for is_done[0] in (False, True):
        ProcessGroups((0,), "gloo").close_dropped(lambda row: row.view(1, -1))
        assert (of_group() is None) == is_done[0]
