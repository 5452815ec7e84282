"""offload="cpu" with stage 3: masters and states in host memory, shards of the weights on the device.

The oracles are stage 2 with offload and stage 3 without: the same bits after updates with everything that may come
between a backward and an update.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from late_gathers import Delayed
from models import seeded
from tiers import COMPILED, FULL, full_cases
from torch import Tensor, nn

import zc
from zc.registry import sharded
from zc.schedule.buffer import COMM, COPY, HOST

DIM, UPDATES = 24, 5
SKIPPED = 2  # the update whose loss is infinite
OPTIMIZERS = {"AdamW": torch.optim.AdamW, "Muon": torch.optim.Muon}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(DIM, DIM, bias=False).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(x.to(self.frozen.weight.dtype))
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        return y


def compiled(optimizer: str, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    if options.get("param_dtype") is not None:
        net.frozen.to(options["param_dtype"])
    its = OPTIMIZERS[optimizer](net.layers.parameters(), lr=0.01)
    zc.compile(net, its, **{"backend": "aot_eager", "bucket_nbytes": 3072, **options})
    return net, its


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, updates: int = UPDATES) -> list[float]:
    """Two microbatches an update, the first one in no_sync; a scaler that skips one update; clipping."""
    scaler, values = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
    for update in range(updates):
        for microbatch in range(2):
            x = torch.randn(3, DIM, generator=seeded(rank, 2 * update + microbatch))
            with zc.no_sync(net) if microbatch == 0 else contextlib.nullcontext():
                loss = net(x).float().square().mean() * (float("inf") if update == SKIPPED else 1.0)
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        values += [loss.item(), float(zc.clip_grad_norm_(net, 0.5)), scaler.get_scale()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not value.equal(other[name])]


def masters(net: nn.Module) -> dict[str, Tensor]:
    """What an optimizer updates on this rank, by bucket, and its state."""
    model = sharded(net)
    values = {f"master {k}": value.detach().clone() for k, value in enumerate(model.runtime.buffers.master_shard)}
    for each in model.optimizers:
        for name, own in each.slices.items():
            for key, item in each.local.state.get(own, {}).items():
                values[f"{key} of {name}"] = torch.as_tensor(item).clone()
    return values


def runs(rank: int, world_size: int, optimizer: str, options: list[dict[str, Any]]) -> list[str]:
    """Job: what differs from the first of these options, in losses, norms, scales, weights, masters and states."""
    first: list[Any] = []
    different = []
    for choice in options:
        net, its = compiled(optimizer, choice)
        values, own = train(net, its, rank), masters(net)
        result = values, zc.full_state_dict(net), own
        first = first or list(result)
        if str(result[0]) != str(first[0]):  # as text: NaN equals NaN
            different.append(f"{choice}: {result[0]} for {first[0]}")
        for one, other in zip(result[1:], first[1:], strict=True):
            different += [f"{choice}: {name}" for name in differing(one, other)]
        zc.close(net)
    return different


SAMPLE = [(1, "Muon", None), (2, "AdamW", None), (2, "Muon", torch.bfloat16), (3, "AdamW", torch.bfloat16)]
REST = [(1, "AdamW", None), (2, "AdamW", torch.bfloat16), (3, "Muon", None)]


@pytest.mark.parametrize(("world_size", "optimizer", "dtype"), SAMPLE + REST if FULL else SAMPLE)
@full_cases("2-AdamW-None", "3-AdamW-dtype3")
def test_the_bits_of_stage_2_with_offload_and_of_stage_3_without(
    world_size: int, optimizer: str, dtype: torch.dtype | None
) -> None:
    backend = "aot_eager" if (world_size, optimizer) == (2, "AdamW") else COMPILED  # the others' graphs are its
    stage_3: dict[str, Any] = {"stage": 3, "param_dtype": dtype, "backend": backend}
    options = [{**stage_3, "stage": 2, "offload": "cpu"}, stage_3, {**stage_3, "offload": "cpu"},
               {**stage_3, "offload": "cpu", "offload_accumulate": "device"},
               {**stage_3, "offload": "cpu", "weight_nbytes": 2**20},
               {**stage_3, "offload": "cpu", "overlap": False}]  # fmt: skip
    if backend != "eager" and not FULL:
        options = options[1:4]
    assert run_ranks(runs, world_size, optimizer, options, timeout=300.0) == [[]] * world_size


def late(rank: int, world_size: int, delays: list[dict[str, float]]) -> list[str]:
    """Job: what differs where streams are slow, each in turn, from the run without delays."""
    first: list[Any] = []
    different = []
    for slow in delays:
        options = {"stage": 3, "offload": "cpu", "param_dtype": torch.bfloat16, "backend": COMPILED}
        net, optimizer = compiled("AdamW", options)
        runtime = sharded(net).runtime
        runtime.streams = runtime.deposits.streams = Delayed(slow)
        result = train(net, optimizer, rank, 4), zc.full_state_dict(net)
        first = first or list(result)
        different += [f"{slow}: {name}" for name in differing(result[1], first[1])]
        runtime.streams.close()
    return different


def test_the_same_bits_whichever_stream_is_late() -> None:
    delays = [{}, {COPY: 0.004, HOST: 0.002}, {COMM: 0.004}]
    if FULL:
        delays += [{COPY: 0.004}, {HOST: 0.004}]
    assert run_ranks(late, 2, delays, timeout=200.0) == [[], []]


def written(rank: int, world_size: int) -> list[str]:
    """Job: what is written to whole parameters, or loaded, reaches masters in host memory, where updates go on."""
    ends = []
    for offload in (None, "cpu"):
        options = {"stage": 3, "offload": offload, "param_dtype": torch.bfloat16, "backend": COMPILED}
        net, optimizer = compiled("AdamW", options)
        train(net, optimizer, rank, 2)
        with zc.whole_parameters(net):
            net.layers[1].weight.data.mul_(0.5)
            with pytest.raises(zc.ZcError, match=r"inside zc\.whole_parameters"):
                optimizer.step()
        train(net, optimizer, rank, 2)
        ends.append(masters(net))
        torch.manual_seed(7)
        net.load_state_dict(Net().state_dict())
        train(net, optimizer, rank, 2)
        ends.append(masters(net))
    return [*differing(ends[0], ends[2]), *differing(ends[1], ends[3])]


def test_a_write_to_whole_parameters_reaches_host_memory() -> None:
    assert run_ranks(written, 2, timeout=120.0) == [[], []]


def from_meta(rank: int, world_size: int, folder: Path) -> list[str]:
    """Job: a model on meta gets its masters in host memory from its modules, then from a checkpoint, and trains."""
    plain, its = compiled("AdamW", {"stage": 2, "backend": COMPILED})
    wanted = train(plain, its, rank)
    fresh, its = compiled("AdamW", {"stage": 2, "backend": COMPILED})
    zc.save(folder, fresh, its)
    with torch.device("meta"):
        net = Net()
    optimizer = torch.optim.AdamW(net.layers.parameters(), lr=0.01)
    zc.compile(net, optimizer, stage=3, device="cpu", offload="cpu", backend=COMPILED, bucket_nbytes=3072)
    zc.initialize(net)
    initial = zc.full_state_dict(net)
    problems = [name for name, value in initial.items() if value.isnan().any()]
    zc.load(folder, net, optimizer)
    if str(train(net, optimizer, rank)) != str(wanted):
        problems.append("values of a checkpoint")
    return problems


def test_a_model_on_meta_trains(tmp_path: Path) -> None:
    assert run_ranks(from_meta, 2, tmp_path / "ck", timeout=120.0) == [[], []]


def test_a_disk_is_refused_by_name_before_anything_changes(tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(zc.PlanError, match="stage=3 and offload='disk'"):
        zc.compile(net, torch.optim.AdamW(net.layers.parameters()), stage=3, offload="disk", offload_dir=tmp_path)
    assert net.layers[0].weight.norm() > 0 and not any(tmp_path.iterdir())


def test_explain_shows_the_update_without_gathers() -> None:
    net, optimizer = compiled("AdamW", {"stage": 3, "offload": "cpu", "param_dtype": torch.bfloat16})
    train(net, optimizer, 0)
    text = str(zc.explain(net))
    assert "copy_to_device(0, weight[0], param[0])" in text and "publish(0, weight[0])" in text
    (update,) = (body for name, body in zc.explain(net).sections.items() if name == "schedule update_0")
    assert "gather" not in update and "races 0, redundant 0" in update
    assert "== offload ==" in text and "== residency of weights, pass 0 ==" in text
