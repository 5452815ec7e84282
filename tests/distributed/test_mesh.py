"""``mesh=``: of two dimensions, (replicate, shard), state is sharded inside ``shard``, and each replica has a copy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_cases, run_ranks
from models import Stack
from oracle import weights, worst
from tiers import COMPILED, FULL, full_cases, full_only
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from training_runs import environment, message_of
from two_optimizers import EPS, WideMuon

import zc
from zc.registry import sharded

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TOLERANCE = 2e-5  # of weights and losses after a few updates: the order of summation is another one than DDP's
NAMES = ("replicate", "shard")


class Branches(nn.Module):
    """``side`` takes part on some ranks alone, ``never`` on none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(17, 24), nn.Linear(24, 24), nn.Linear(24, 5)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor, branches: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        if branches:
            x = x + torch.tanh(self.side(x))
        out: Tensor = self.last(x)
        return out


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=1e-2, eps=EPS, weight_decay=0.1)]


def muon(model: nn.Module) -> list[Optimizer]:
    params = list(model.parameters())
    return [WideMuon([p for p in params if p.dim() == 2]), AdamW([p for p in params if p.dim() != 2], eps=EPS)]


@dataclass(frozen=True)
class Loop:
    """``shape`` of the mesh; None: under DDP."""

    shape: tuple[int, ...] | None = None
    make: str = "adamw"
    stage: int = 2
    backend: str = "eager"
    updates: int = 4
    options: dict[str, Any] = field(default_factory=dict)


def batch(rank: int, step: int, microbatch: int) -> tuple[Tensor, bool]:
    """In every third step the branch is taken by rank 3 alone, else by the odd ranks in the last microbatch."""
    torch.manual_seed(1000 * step + 10 * rank + microbatch)
    takes = rank == 3 if step % 3 == 0 else rank % 2 == 1 and microbatch == 1
    return torch.randn(6, 17), takes


def compiled(loop: Loop, model: nn.Module, optimizers: list[Optimizer]) -> None:
    mesh = None if loop.shape is None else init_device_mesh("cpu", loop.shape, mesh_dim_names=NAMES[-len(loop.shape) :])
    zc.compile(
        model, optimizers, mesh=mesh, stage=loop.stage, backend=loop.backend, **{"bucket_nbytes": 2000, **loop.options}
    )


def made(loop: Loop) -> tuple[nn.Module, list[Optimizer]]:
    torch.manual_seed(0)
    model = Branches()
    return model, {"adamw": adamw, "muon": muon}[loop.make](model)


def update(
    model: nn.Module, run: Any, optimizers: Sequence[Optimizer], rank: int, step: int
) -> tuple[list[float], float]:
    """Two microbatches, clipped; the losses and the norm."""
    losses, is_ddp = [], isinstance(run, DistributedDataParallel)
    for k in range(2):
        with contextlib.nullcontext() if k else run.no_sync() if is_ddp else zc.no_sync(model):
            loss = run(*batch(rank, step, k)).square().mean()
            loss.backward()
            losses.append(loss.item())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) if is_ddp else zc.clip_grad_norm_(model, 0.5)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return losses, norm.item()


def train(rank: int, world_size: int, loop: Loop, memory: bool = True) -> dict[str, Any]:
    """Job: losses, norms and weights of every update."""
    model, optimizers = made(loop)
    run: Any = model
    with environment(ZC_HOST_MEMORY=str(int(memory))):
        if loop.shape is None:
            run = DistributedDataParallel(model, find_unused_parameters=True)
        else:
            compiled(loop, model, optimizers)
    result: dict[str, Any] = {"losses": [], "norms": [], "weights": []}
    for step in range(loop.updates):
        losses, norm = update(model, run, optimizers, rank, step)
        zc.synchronize(model) if loop.shape is not None else None
        result["losses"] += losses
        result["norms"].append(norm)
        result["weights"].append(weights(model))
    if loop.shape is not None:
        states = [value for o in optimizers for state in o.state.values() for value in state.values()]
        result["numel_state"] = sum(getattr(v, "local", v).numel() for v in states if isinstance(v, Tensor) and v.dim())
        result["explained"] = str(zc.explain(model))
        result["sent"] = sharded(model).runtime.ledger.last.nbytes_sent
    return result


_DDP: dict[str, list[dict[str, Any]]] = {}


def ddp(make: str) -> list[dict[str, Any]]:
    if make not in _DDP:
        _DDP[make] = run_ranks(train, 4, Loop(make=make))
    return _DDP[make]


def assert_as_ddp(got: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]]) -> None:
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine["losses"], theirs["losses"], rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(mine["norms"], theirs["norms"], rtol=TOLERANCE, atol=TOLERANCE)
        for here, first, there in zip(mine["weights"], got[0]["weights"], theirs["weights"], strict=True):
            assert all(torch.equal(here[name], first[name]) for name in first), "ranks have different weights"
            assert worst(here, there)[0] < TOLERANCE


@pytest.mark.parametrize(
    ("shape", "make", "stage", "backend", "options", "memory"),
    [
        pytest.param((2, 2), "adamw", 2, "aot_eager", {}, True, marks=full_only),
        pytest.param((2, 2), "adamw", 1, "aot_eager", {}, True, marks=full_only),
        ((2, 2), "adamw", 2, "eager", {}, False),
        ((2, 2), "adamw", 1, "eager", {}, False),
        ((2, 2), "muon", 2, "eager", {"overlap": False}, False),
        ((2, 2), "muon", 1, "eager", {"overlap_gather": True}, True),
        ((2, 2), "adamw", 2, "aot_eager", {"overlap_gather": True, "write_in_place": True}, True),
        ((4, 1), "adamw", 2, "eager", {}, True),
        ((4, 1), "muon", 1, "eager", {}, True),
        ((1, 4), "adamw", 2, "eager", {}, True),
    ],
)
@full_cases("shape4-muon-2-eager-options4-False", "shape2-adamw-2-eager-options2-False")
def test_ddp_s_losses_and_weights(
    shape: tuple[int, int], make: str, stage: int, backend: str, options: dict[str, Any], memory: bool
) -> None:
    """Clipped and accumulated, with a parameter that some ranks use and one that none does; all ranks have the same
    bits after every update."""
    results = run_ranks(train, 4, Loop(shape, make, stage, backend, options=options), memory)
    assert_as_ddp(results, ddp(make))
    numel = sum(p.numel() for n, p in Branches().named_parameters() if not n.startswith("never"))
    states = [each["numel_state"] for each in results]
    if make == "adamw":  # two moments an element; every row has each once
        rows = [states[k : k + shape[1]] for k in range(0, 4, shape[1])]
        assert [sum(row) for row in rows] == [2 * numel] * shape[0]
        assert max(states) <= 2 * numel / shape[1] * 1.25
    reads = "read from the other ranks' memory" if memory and shape[1] > 1 else "messages"
    assert all(f"reductions: {reads}" in each["explained"] for each in results) or shape[1] == 1


def resumed(rank: int, world_size: int, loop: Loop, folder: str, loads: str | None) -> dict[str, Any]:
    """Job: two updates and a save, or a load and two more; what the functions around state give after it."""
    model, optimizers = made(loop)
    compiled(loop, model, optimizers)
    extra = zc.load(loads, model, optimizers) if loads is not None else None
    loaded = copy.deepcopy(zc.full_optimizer_state(model, optimizers))
    for step in range(2) if loads is None else range(2, 4):
        update(model, model, optimizers, rank, step)
    if loads is None:
        zc.save(folder, model, optimizers, extra={"rank": rank})
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "weights": weights(model),
        "loaded": loaded,
        "extra": extra,
        "full": zc.full_optimizer_state(model, optimizers),
        "dcp": get_optimizer_state_dict(model, optimizers, options=options),
    }


def same_state(one: Any, other: Any) -> None:
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert a["state"].keys() == b["state"].keys() and a["state"]
        for key, values in a["state"].items():
            for name, value in values.items():
                assert torch.equal(value, b["state"][key][name]), (key, name)


@pytest.mark.parametrize(("make", "stage"), [("adamw", 2), ("muon", 1)])
def test_a_checkpoint_of_one_mesh_loads_in_another(tmp_path: Path, make: str, stage: int) -> None:
    """From 2 x 2 into 2 x 2, flat 4, 4 x 1; by AdamW also from flat 4. Each shard is written once."""
    runs = {shape: Loop(shape, make, stage) for shape in ((2, 2), (4,), (4, 1))}
    ways = (((2, 2), ((2, 2), (4,), (4, 1))), ((4,), ((2, 2),)))
    for first, others in ways if FULL or make == "adamw" else (((2, 2), ((4,), (4, 1))),):
        folder = str(tmp_path / f"from {first}")
        saved = run_ranks(resumed, 4, runs[first], folder, None)
        items = FileSystemReader(folder).read_metadata().storage_data.values()
        written = sum(path.stat().st_size for path in Path(folder).glob("*.distcp"))
        assert written == sum(item.length for item in items) > 0, "something is written twice"
        assert [each["full"] is None for each in saved] == [False, True, True, True]
        ends = [run_ranks(resumed, 4, runs[shape], folder, folder) for shape in others]
        for end in ends:
            assert [each["extra"] for each in end] == [{"rank": rank} for rank in range(4)]
            same_state(end[0]["loaded"], saved[0]["full"])
            assert all(torch.equal(each["weights"][n], end[0]["weights"][n]) for each in end for n in each["weights"])
            assert worst(end[0]["weights"], ends[0][0]["weights"])[0] < TOLERANCE
            for index, values in enumerate(end[0]["full"]):
                names = [n for group in end[0]["dcp"]["param_groups"][index : index + 1] for n in group["params"]]
                for number, state in values["state"].items():
                    for key, value in state.items():
                        assert torch.equal(value, end[0]["dcp"]["state"][names[number]][key])
            assert all(each["dcp"] == {} for each in end[1:])


def own_state(rank: int, world_size: int, shape: tuple[int, ...]) -> Any:
    """Job: optimizer.state_dict() of another rank given to this one."""
    model, optimizers = made(Loop(shape))
    compiled(Loop(shape), model, optimizers)
    update(model, model, optimizers, rank, 0)
    states: list[Any] = [None] * world_size
    dist.all_gather_object(states, optimizers[0].state_dict())
    return [states[rank].get("zc"), message_of(lambda: optimizers[0].load_state_dict(states[(rank + 2) % 4])),
            message_of(lambda: optimizers[0].load_state_dict(states[rank ^ 1]))]  # fmt: skip


def test_a_part_of_the_state_is_also_the_replica_s() -> None:
    for rank, (mark, replica_s, neighbour_s) in enumerate(run_ranks(own_state, 4, (2, 2))):
        assert (mark["rank"], mark["world_size"]) == (rank % 2, 2)
        assert replica_s == ("", "") and neighbour_s[0] == "CheckpointError"


def odd_meshes(rank: int, world_size: int) -> dict[str, Any]:
    """Job: what zc.compile says of meshes and options that don't fit, and whether the model is as it was."""
    group = dist.new_group(list(range(4)))

    def mesh(ranks: Any, *names: str) -> DeviceMesh:
        return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names or None)

    square = mesh([[0, 1], [2, 3]], *NAMES)
    meshes: dict[str, Any] = {
        "three": {"mesh": mesh([[[0, 1], [2, 3]]], "a", "b", "c")},
        "few": {"mesh": mesh([[0, 1]], *NAMES)},
        "down": {"mesh": mesh([[1, 0], [3, 2]], *NAMES)},
        "turned": {"mesh": mesh([[0, 1], [2, 3]], "dp_shard", "dp_replicate")},
        "both": {"mesh": square, "group": group},
        "no mesh": {"mesh": (2, 2)},
        "native": {"mesh": square, "reduce": "native"},
        "offload": {"mesh": square, "offload": "cpu"},
        "differs": {"mesh": square if rank else None},
    }
    messages: dict[str, Any] = {}
    for name, options in meshes.items():
        model, optimizers = made(Loop())
        before = [(id(p), p.data_ptr(), p.grad) for p in model.parameters()]
        call = message_of(lambda: zc.compile(model, optimizers, backend="eager", **options))  # noqa: B023
        assert before == [(id(p), p.data_ptr(), p.grad) for p in model.parameters()] and not optimizers[0].state
        messages[name] = call
    return messages


def test_a_mesh_that_does_not_fit_is_refused_with_both_shapes() -> None:
    for result in run_ranks(odd_meshes, 4):
        said = {name: text for name, (kind, text) in result.items() if kind == "PlanError"}
        assert "mesh (a=1, b=2, c=2) has 3 dimensions" in said["three"] and "all 4 ranks" in said["three"]
        assert "mesh (replicate=1, shard=2) has 2 ranks, and the default group has 4" in said["few"]
        assert "mesh (replicate=2, shard=2) of the ranks [[1, 0], [3, 2]]: ranks must ascend" in said["down"]
        assert "(dp_shard=2, dp_replicate=2): its dimensions are taken as (replicate, shard)" in said["turned"]
        assert "both group and mesh were given" in said["both"]
        assert "reduce='native' and a mesh of two dimensions with 2 replicas" in said["native"]
        assert "offload='cpu' and a mesh of two dimensions with 2 replicas" in said["offload"]
        assert result["no mesh"] == ("TypeError", "mesh must be a torch.distributed.DeviceMesh, got tuple")
        kind, text = result["differs"]
        assert kind == "RankMismatchError"
        assert "rank 0 has none, rank 1 has (replicate=2, shard=2) of the ranks [[0, 1], [2, 3]]" in text


def test_one_result_for_every_bucket_size_and_way() -> None:
    """Sums are in the order of the ranks of `shard`, then of the replicas, whatever carries them."""
    ways = (
        ({"bucket_nbytes": 2000}, True), ({"bucket_nbytes": 10**6, "num_buffers": 1}, False),
        ({"overlap": False, "bucket_nbytes": 500}, False),
    )  # fmt: skip
    results = run_cases(train, 4, [(Loop((2, 2), updates=3, options=options), memory) for options, memory in ways])
    first = results[0][1][0]["weights"]
    for case, ranks in results:
        for each in ranks:
            for mine, wanted in zip(each["weights"], first, strict=True):
                assert all(torch.equal(mine[name], wanted[name]) for name in wanted), case


def sent_and_held(rank: int, world_size: int, shape: tuple[int, int], memory: bool) -> list[dict[str, int]]:
    """Job: of the second of two updates of two microbatches, all of which reduce."""
    model = Stack(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    optimizer = AdamW(model.parameters())
    with environment(ZC_HOST_MEMORY=str(int(memory))):
        zc.compile(model, optimizer, backend="eager", bucket_nbytes=4000, mesh=init_device_mesh("cpu", shape))
    for _ in range(2):
        for _ in range(2):
            with zc.no_sync(model):
                model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    runtime = sharded(model).runtime
    return [dict(runtime.ledger.last.nbytes_sent), runtime.buffers.nbytes()]


def test_what_is_sent_and_held_is_what_was_planned() -> None:
    for (shape, memory), ranks in run_cases(sent_and_held, 4, [((2, 2), True), ((2, 2), False), ((4, 1), True)]):
        planned = zc.plan(
            Stack(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40)), world_size=4, num_replicas=shape[0],
            ranks_per_host=4 if memory else None, bucket_nbytes=4000, microbatches=2,
        )  # fmt: skip
        assert f"4 ranks in {shape[0]} replicas" in str(planned)
        inside = {"reduce"} if shape[1] > 1 else set()
        for sent, result in ranks:
            reductions = {kind: n for kind, n in sent.items() if kind.startswith(("reduce", "gather sums"))}
            assert set(reductions) == inside | {"reduce, between replicas", "gather sums, between replicas"}
            assert sum(reductions.values()) == planned.wire["gradients"]
            assert sent.get("gather weights", 0) == planned.wire["parameters"]
            assert {kind: n for kind, n in result.items() if n} == {k: planned.device[k] for k in result if result[k]}
            assert result["scratch"] > 0 and ("host_sum" in result) == (shape[1] > 1)


def test_bytes_that_leave_a_host() -> None:
    """By hand: 2 replicas of 4 ranks, a host each, P elements padded. A shard of P / 4 goes out in two halves, one of
    gradients and one of sums, of each of 4 ranks: P elements in all. Flat over 8 ranks without levels: 4 of 8 shards of
    P / 8 of each rank, 2 P, and as much of weights."""
    model = nn.Linear(64, 64, bias=False)
    numel = model.weight.numel()
    planned = zc.plan(model, world_size=8, num_replicas=2, ranks_per_host=4)
    assert planned.host_wire == {"gradients": 4 * numel, "parameters": 0}
    assert planned.device["host_sum"] == 2 * numel // 4 * 4 and planned.device["scratch"] == numel // 4 * 4
    flat = zc.plan(model, world_size=8, num_replicas=2)
    assert flat.host_wire["gradients"] == (3 * numel // 4 + numel // 4) * 4  # each rank on its own: of one rank
    assert zc.plan(model, world_size=8, num_replicas=4).device["optimizer_state"] == 2 * 4 * numel // 2
    with pytest.raises(zc.PlanError, match="num_replicas must divide the 8 ranks, got 3"):
        zc.plan(model, world_size=8, num_replicas=3)


def on_hosts(rank: int, world_size: int, shape: tuple[int, int], hosts: str) -> dict[str, Any]:
    """Job: rank r lies on host ``hosts[r]``."""
    with environment(GROUP_RANK=hosts[rank]):
        return train(rank, world_size, Loop(shape, updates=2))


def test_all_replicas_take_one_way() -> None:
    """Whatever hosts they lie on: all have one plan, and one order of summation."""
    apart = "on 2 hosts of 1; inside a replica reductions: messages"
    said = {
        "0011": ("on 1 host of 2, which read each other's memory", ""),
        "0101": (apart, ""),
        "0012": (apart, "the ranks of `shard` lie on 1 host of 2, which read each other's memory or 2 hosts of 1"),
    }
    for (_, hosts), results in run_cases(on_hosts, 4, [((2, 2), hosts) for hosts in said]):
        how, note = said[hosts]
        first = results[0]
        wanted = [{key: values[: len(first[key])] for key, values in each.items()} for each in ddp("adamw")]
        assert_as_ddp(results, wanted)
        assert all(how in each["explained"] and note in each["explained"] for each in results), hosts
        assert all(("treated as its own host" in each["explained"]) == bool(note) for each in results), hosts


def uneven(rank: int, world_size: int, stage: int, declared: bool, backend: str) -> Any:
    """Job: rank r has r backwards an update where they are declared, else two; three updates of SGD by 1."""
    torch.manual_seed(0)
    model = Stack(nn.Linear(6, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight.data = torch.eye(4)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    model[1].weight.requires_grad_(False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    zc.compile(model, optimizer, stage=stage, backend=backend, mesh=mesh)
    before = model[0].weight.detach().clone()
    for _ in range(3):
        num = rank if declared else 2
        for k in range(num):
            with zc.no_sync(model) if declared and k < num - 1 else contextlib.nullcontext():
                model(torch.full((1, 6), float(10**rank))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (before - model[0].weight.detach()).unique()


def test_other_numbers_of_backwards() -> None:
    """By hand: the mean over ranks of 10^r times the number of its backwards."""
    wanted = {True: 3 * (10 + 200 + 3000) / 4, False: 3 * 2 * 1111 / 4}
    cases = [(stage, declared, backend) for stage, backend in ((1, "eager"), (2, COMPILED)) for declared in wanted]
    for (_, declared, _), ranks in run_cases(uneven, 4, cases):
        for result in ranks:
            torch.testing.assert_close(result, torch.full_like(result, wanted[declared]), rtol=1e-5, atol=0.0)


def over_again(rank: int, world_size: int) -> dict[str, Tensor]:
    """Job: a layer thaws, the model is closed, and compiled again over another mesh; gradients are 1 an element and
    rank, whatever the mesh."""
    torch.manual_seed(0)
    model = Stack(nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].requires_grad_(False)
    for shape in ((2, 2), (4, 1), (4,)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-len(shape) :])
        zc.compile(model, optimizer, backend="eager", mesh=mesh)
        for _ in range(2):
            model(torch.full((2, 5), rank + 1.0)).sum().backward()
            zc.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if not model[0].weight.requires_grad:
                model[0].requires_grad_(True)
                zc.recompile(model)
        zc.close(model)
    return weights(model)


def test_recompiled_closed_and_compiled_again() -> None:
    """As one process with the ranks' batches."""
    torch.manual_seed(0)
    model = Stack(nn.Linear(5, 5), nn.Linear(5, 5))
    model[0].requires_grad_(False)
    for _ in range(6):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sum(model(torch.full((2, 5), rank + 1.0)).sum() / 4 for rank in range(4)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(True)
    wanted = {name: param.detach() for name, param in model.named_parameters()}
    for result in run_ranks(over_again, 4):
        assert worst(result, wanted)[0] < TOLERANCE
