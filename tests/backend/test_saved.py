"""What AOTAutograd's cache keeps of zc's graphs: a later run compiles them under its own plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import FULL, full_only
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config

import zc

pytestmark = pytest.mark.usefixtures("own_cache")


class Net(nn.Module):
    """tanh saves its output, and the backward of the last one overwrites it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Table(nn.Module):
    """max_norm scales rows of the weight down in the forward, in place. A frozen layer is there for shard_frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.frozen = nn.Embedding(16, 16, max_norm=1.0), nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.table(x.argmax(1))).square().mean()


class Convolutions(nn.Module):
    """Inductor runs them channels_last, and so do the activations lie that its forward saves. A schedule's do not. The
    buffer that the second one writes lets overlap_gather have no schedule."""

    def __init__(self, is_written: bool = False) -> None:
        super().__init__()
        self.first, self.last = (nn.Conv2d(width, 32, 3, padding=1) for width in (16, 32))
        self.norm = nn.BatchNorm2d(32) if is_written else nn.GroupNorm(2, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, None, None] * torch.linspace(0, 1, 64, dtype=x.dtype).view(8, 8)
        return torch.tanh(self.norm(self.last(torch.tanh(self.first(x))))).square().mean()


class NormedConvolutions(Convolutions):
    def __init__(self) -> None:
        super().__init__(is_written=True)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, count: int = 3) -> list[Tensor]:
    for _ in range(count):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def weights(model: nn.Module) -> list[Tensor]:
    state = model.state_dict()
    return [getattr(tensor, "full_tensor", lambda tensor=tensor: tensor)().clone() for tensor in state.values()]


def run(
    loop: Callable[..., list[Tensor]] = steps, *, make: type[nn.Module] = Net, compiled: bool = False, **options: Any
) -> tuple[list[Tensor], tuple[int, int]]:
    """As in a new process that finds the cache: the weights, and how many entries were read and written. Without a
    ``stage``: plain PyTorch."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(8, 16, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.get("stage") is not None:
        zc.compile(model, optimizer, **{"bucket_nbytes": 16 * 17 * 8, **options})
    elif compiled:
        model = torch.compile(model)
    trained = loop(model, optimizer, x)
    cache = counters["aot_autograd"]
    return trained, (cache["autograd_cache_hit"], cache["autograd_cache_saved"])


def close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


LARGER = {"bucket_nbytes": 1 << 20}


@pytest.mark.parametrize(
    ("before", "others"),
    [
        ({"stage": 2}, ({"stage": 1}, {"stage": 2, **LARGER})),
        ({"stage": 3}, ({"stage": 3, **LARGER},)),
        ({"stage": 2, "overlap_gather": True}, ({"stage": 2, "overlap_gather": True, **LARGER},)),
    ],
    ids=str,
)
def test_a_second_run_compiles_nothing_and_other_plans_run_what_it_has_kept(before: Any, others: Any) -> None:
    wanted, _ = run()
    first, counted = run(**before)
    assert counted == (0, 1) and counters["inductor"]["fxgraph_cache_miss"]
    close(first, wanted)
    again, counted = run(**before)
    assert counted == (1, 0)
    assert counters["inductor"]["fxgraph_cache_hit"] and not counters["inductor"]["fxgraph_cache_miss"]
    assert all(map(torch.equal, again, first))
    for options in others:
        got, counted = run(**options)
        assert counted == (1, 0)
        close(got, wanted)


@pytest.mark.parametrize("make", [pytest.param(Convolutions, marks=full_only), NormedConvolutions])
def test_a_backward_is_kept_for_forwards_that_save_the_same_strides(make: type[nn.Module]) -> None:
    wanted, _ = run(make=make)
    stages: list[dict[str, Any]] = [{"stage": 2}, {"stage": 2, "overlap_gather": True}]
    if FULL:
        stages.append({"stage": 3})
    for options in stages:
        got, counted = run(make=make, **options)
        assert counted == (0, 1)
        close(got, wanted)
    for options in stages:
        got, counted = run(make=make, **options)
        assert counted == (1, 0)
        close(got, wanted)


def test_a_kept_graph_that_writes_a_sharded_weight_is_refused() -> None:
    _, counted = run(make=Table, stage=2, shard_frozen=True, fullgraph=True)
    assert counted == (0, 1)
    with pytest.raises(zc.ZcError, match=r"compiled code of the forward writes parameter table\.weight"):
        run(make=Table, stage=3, fullgraph=True)
    assert not counters["aot_autograd"]["autograd_cache_miss"], "it was not kept"


def test_plain_runs_and_ours_have_entries_of_their_own() -> None:
    wanted, _ = run()
    with config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True):  # as zc sets them
        _, counted = run(compiled=True)
        assert counted == (0, 1)
        ours, counted = run(stage=2)
        assert counted == (0, 1), "a plain entry would run in place of a schedule"
        plain, counted = run(compiled=True)
        assert counted == (1, 0)
    close(ours, wanted)
    close(plain, wanted)


def test_where_the_program_turned_the_cache_off_it_stays_off() -> None:
    with config.patch(enable_autograd_cache=False):
        run(stage=2)
        _, counted = run(stage=2)
    assert counted == (0, 0)
    assert config.enable_autograd_cache and not config.bundled_autograd_cache


def entries(folder: Path) -> list[Path]:
    return [path for path in (folder / "inductor" / "aotautograd").rglob("*") if path.is_file()]


def test_a_damaged_entry_is_made_again_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted, _ = run(stage=2)
    for damage in ("cut", "foreign", "what zc itself has written in it"):
        (entry,) = entries(tmp_path)
        content = entry.read_bytes()
        if damage == "cut":
            entry.write_bytes(content[: len(content) // 2])
        elif damage == "foreign":
            entry.write_bytes(b"no pickle at all")
        else:
            entry.write_bytes(content.replace(b"zc.compiler.traced", b"zc.compiler.nowher"))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            got, counted = run(stage=2)
        assert counted == (0, 1) and "unable to load compiled graph" in caplog.text, damage
        assert all(map(torch.equal, got, wanted)), damage
        entry.unlink()  # the new one stays


def test_a_folder_that_can_not_be_written_costs_time_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._functorch._aot_autograd import autograd_cache

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(autograd_cache, "write_atomic", full)
    wanted, _ = run()
    got, counted = run(stage=2)
    assert counted == (0, 0) and not entries(tmp_path)
    close(got, wanted)


def test_symbolic_sizes_are_traced_in_each_run() -> None:
    def lengths(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
        for rows in (3, 5, 8):
            steps(model, optimizer, x[:rows], 1)
        return weights(model)

    wanted, _ = run(lengths)
    for _ in range(2):
        got, counted = run(lengths, stage=2, dynamic=True)
        assert counted == (0, 0)
        close(got, wanted)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_graph_that_is_kept_for_another_backward_is_not_overwritten(backend: str, is_kept: bool) -> None:
    """The compiled backward may write into saved values that die with it. Under retain_graph=True none does."""

    def twice(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> list[Tensor]:
        steps(model, optimizer, x, 1)
        loss = model(x)
        for retained in (True, True, False):
            loss.backward(retain_graph=retained)
        optimizer.step()
        return weights(model)

    wanted, _ = run(twice)
    if is_kept:
        run(stage=2, backend=backend)
    got, _ = run(twice, stage=2, backend=backend)
    close(got, wanted)


@pytest.mark.parametrize("is_on", [False, True])
def test_a_compiled_graph_holds_no_second_copy_of_itself(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from zc.compiler import saved

    graphs: list[Any] = []
    init = saved.SavedGraph.__init__

    def spy(self: Any, *args: Any) -> None:
        init(self, *args)
        graphs.append(self)

    monkeypatch.setattr(saved.SavedGraph, "__init__", spy)
    with config.patch(enable_autograd_cache=is_on):
        run(stage=2)
    assert len(graphs) == 2 and not any(graph.traced for graph in graphs)
