"""`zc.plan`: bytes against literal numbers, against what a run really holds and moves, and for 4,096 ranks."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_cases
from models import mean_square, mlp, vectors
from torch import nn

import zc
from zc.errors import PlanError

pytestmark = pytest.mark.check

FP32, BF16 = torch.float32, torch.bfloat16


def meta_linear(features: int = 1024, layers: int = 4) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(features, features, bias=False) for _ in range(layers)))


def test_bytes_of_a_model_without_padding() -> None:
    """4 Mi parameters on 4 ranks, bf16, stage 2, one bucket: every number by hand."""
    numel, ranks = 4 * 2**20, 4
    plain = zc.plan(meta_linear(), world_size=ranks, param_dtype=BF16)
    assert plain.num_params == numel and plain.num_buckets == 1
    assert dict(plain.device) == {
        "flat_param": 2 * numel, "master_shard": numel, "acc": numel, "flat_grad": 2 * numel, "scratch": 2 * numel,
        "optimizer_state": 2 * numel,
    }  # fmt: skip
    assert not plain.host and plain.device_nbytes == 10 * numel
    assert dict(plain.wire) == {"gradients": 2 * numel * 3 // 4, "parameters": 2 * numel * 3 // 4}
    assert sum(plain.bus.values()) == 0 and plain.update_nbytes == 28 * numel // 4
    # stage 1: full-size fp32 gradients and recv, no ring; stage 3: a shard of the weights, an arena for the one bucket,
    # and a gather for the forward and for the backward
    assert plain.peers == {
        "zc, stage 1": (13 * numel, 4 * numel * 3 // 4 + 2 * numel * 3 // 4),
        "zc, stage 3": (numel // 2 + plain.device_nbytes - 2 * numel + 2 * numel, 3 * 2 * numel * 3 // 4),
        "DDP, fp32": (16 * numel, 6 * numel),
        "FSDP2": (4 * numel, 6 * numel * 3 // 4),
    }
    first = "4 ranks, stage 2, 1 microbatch: 41.9 MB per rank; DDP, fp32 67.1 MB; 12.6 MB sent per step."
    assert str(plain).splitlines()[0] == first
    offloaded = zc.plan(meta_linear(), world_size=ranks, param_dtype=BF16, offload="cpu", microbatches=3)
    gone = {"master_shard": numel, "acc": numel, "optimizer_state": 2 * numel}
    assert plain.device_nbytes - offloaded.device_nbytes == sum(gone.values()) - offloaded.device["staging"]
    assert offloaded.device["staging"] == numel  # one bucket, one staging buffer of S fp32
    assert dict(offloaded.host) == {
        "master_shard": numel, "host": numel, "param": numel // 2, "optimizer_state": 2 * numel,
    }  # fmt: skip
    # three microbatches: the sum goes down three times, comes up twice, and the weights once
    assert dict(offloaded.bus) == {"to host": 3 * numel, "to device": 2 * numel + numel // 2}
    assert offloaded.wire["gradients"] == 3 * plain.wire["gradients"]


def test_options_left_out_are_those_of_zc_compile() -> None:
    """Of a compiled model: its stage, dtype, bucket size and optimizer. Of microbatches the first line has stage 1."""
    model = mlp()
    with pytest.raises(PlanError, match=r"world_size is not given.*zc\.plan\(model, world_size=8\)"):
        zc.plan(model)
    options: dict[str, Any] = {"stage": 1, "param_dtype": BF16, "bucket_nbytes": 256}
    model, _ = zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", **options)
    asked = zc.plan(model, world_size=4)
    assert asked == zc.plan(mlp(), world_size=4, optimizer="SGD", **options) and asked.stage == 1
    assert asked.num_buckets > 1 and asked != zc.plan(mlp(), world_size=4)
    assert zc.plan(model, world_size=4, stage=2).stage == 2 and zc.plan(model).world_size == 1
    zc.close(model)
    line, *_ = str(zc.plan(meta_linear(), world_size=4, microbatches=8)).splitlines()
    assert line.endswith("113.2 MB sent per step. Stage 1: 58.7 MB per rank, 25.2 MB sent."), line


OPTIONS: dict[str, tuple[str, dict[str, Any], int]] = {  # class, options, tensors of a parameter's size
    "SGD": ("SGD", {}, 0), "momentum": ("SGD", {"momentum": 0.9}, 1), "AdamW": ("AdamW", {}, 2),
    "amsgrad": ("Adam", {"amsgrad": True}, 3), "RMSprop": ("RMSprop", {"momentum": 0.9, "centered": True}, 3),
    "Adagrad": ("Adagrad", {}, 1), "Adafactor": ("Adafactor", {}, 0), "Muon": ("Muon", {}, 1),
}  # fmt: skip


WHERE = [(None, OPTIONS), ("cpu", OPTIONS), ("disk", ("momentum", "amsgrad", "Adagrad"))]


@pytest.mark.parametrize(("offload", "name"), [(offload, name) for offload, names in WHERE for name in names])
def test_a_compiled_model_s_state_is_what_its_optimizer_keeps(offload: str | None, name: str, tmp_path: Path) -> None:
    """Before any step and after one, with its options; in the lines of host, disk and DDP, too."""
    cls, options, num = OPTIONS[name]
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    optimizer = getattr(torch.optim, cls)(model.parameters(), lr=0.01, **options)
    where = {"offload": offload, "offload_dir": str(tmp_path)} if offload == "disk" else {"offload": offload}
    zc.compile(model, optimizer, backend="eager", **where)
    state = 4 * 4096 * num
    for _ in range(2):
        plan = zc.plan(model)
        group = {None: plan.device, "cpu": plan.host, "disk": plan.disk}[offload]
        assert group["optimizer_state"] == state, plan
        assert plan.peers["DDP, fp32"].held == zc.explain(model).summary.ddp_nbytes == 2 * 4 * 4096 + state
        assert plan.update_nbytes == 4 * 4096 * (3 + 2 * num)
        mean_square(model, (torch.ones(2, 32), torch.ones(2, 32))).backward()
        optimizer.step()
    held = zc.persistent_nbytes(model)["optimizer_state"]
    assert held == state or (name == "Adafactor" and held == 4 * 2 * (32 + 64)), "sums of rows and columns are left out"
    zc.close(model)


def test_two_optimizers_of_one_class_keep_different_states() -> None:
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 16, bias=False))
    pair = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=m) for layer, m in zip(model, (0.9, 0.0), strict=True)]
    zc.compile(model, pair, backend="eager")
    assert zc.plan(model).device["optimizer_state"] == 4 * 32 * 64
    model[0].weight.requires_grad_(False)
    model[0].extra = nn.Parameter(torch.ones(4))
    with pytest.raises(PlanError, match=r"parameter 0\.extra trains since zc\.compile.*zc\.recompile"):
        zc.plan(model)
    del model[0].extra
    zc.close(model)


def test_a_name_says_which_options_it_stands_for() -> None:
    assert "in 1 buckets, SGD without momentum; bytes" in str(zc.plan(meta_linear(), world_size=4, optimizer="SGD"))
    assert "momentum" not in str(zc.plan(meta_linear(), world_size=4))


def test_others_hold_a_float64_model_in_float64() -> None:
    narrow, wide = (zc.plan(meta_linear().to(dtype), world_size=4).peers for dtype in (FP32, torch.float64))
    for name in ("DDP, fp32", "FSDP2"):
        assert wide[name] == (2 * narrow[name].held, 2 * narrow[name].sent)


def test_frozen_parameters_are_shards_in_stage_3_and_with_shard_frozen() -> None:
    """A bf16 backbone of 1,024 x 1,024 on 8 ranks: 2 / 8 bytes a parameter; an adapter of 1,024 x 4 in fp32."""
    with torch.device("meta"):
        backbone = nn.Linear(1024, 1024, bias=False, dtype=BF16).requires_grad_(False)
        model = nn.Sequential(backbone, nn.Linear(1024, 4, bias=False))
    plan = zc.plan(model, world_size=8, stage=3)
    assert plan.device["frozen"] == 2 * 1024**2 // 8 and plan.device["weight"] == 4 * 4096 // 8
    assert plan.device["arena"] == 2 * 1024**2 + 4 * 4096  # both buckets: all of them are less than twice the largest
    assert plan.wire["parameters"] == 2 * (7 * 2 * 1024**2 // 8 + 7 * 4 * 4096 // 8)
    for stage in (1, 2):  # the adapter stays as it is, and the backbone is whole, or in shards
        whole, sharded = (zc.plan(model, world_size=8, stage=stage, shard_frozen=flag) for flag in (False, True))
        assert whole.device["frozen"] == 2 * 1024**2 and sharded.device["frozen"] == 2 * 1024**2 // 8
        others = {kind: nbytes for kind, nbytes in whole.device.items() if kind != "frozen"}
        assert sharded.device == {**others, "frozen": 2 * 1024**2 // 8, "arena": 2 * 1024**2}
        assert sharded.wire["parameters"] == whole.wire["parameters"] + 2 * (7 * 2 * 1024**2 // 8)
        assert whole.peers["DDP, fp32"].held == 2 * 1024**2 + 16 * 4096 and not whole.residency and sharded.residency
    with pytest.raises(zc.PlanError, match=r"weight_nbytes=.* only stage=3 and shard_frozen=True gather"):
        zc.plan(model, world_size=8, stage=2, weight_nbytes=2**22)
    capped = zc.plan(model, world_size=8, stage=3, weight_nbytes=2**21 + 128)
    assert capped.device["arena"] == 2**21 + 128
    roomy = zc.plan(model, world_size=8, stage=2, shard_frozen=True, weight_nbytes=2**22)
    assert roomy.device["arena"] == 2**21  # all that is sharded


def test_state_on_a_disk() -> None:
    """By hand: bf16, 4 ranks; two moments and the master of each of the S elements, the moments read and written."""
    numel = 4 * 2**20
    plan = zc.plan(meta_linear(), world_size=4, param_dtype=BF16, offload="disk", disk_bandwidth=1e9)
    cpu = zc.plan(meta_linear(), world_size=4, param_dtype=BF16, offload="cpu")
    assert dict(plan.disk) == {"optimizer_state": 2 * numel, "master_shard": numel} and not cpu.disk
    assert plan.device == cpu.device and plan.bus == cpu.bus
    assert cpu.host_nbytes - plan.host_nbytes == 2 * numel and plan.host["optimizer_state"] == 0
    assert plan.floor_seconds["disk"] == pytest.approx(4 * numel / 1e9) == plan.step_floor
    assert "disk | optimizer_state" in str(plan)


def test_one_rank_gives_up_twelve_bytes_a_parameter() -> None:
    """Issue 6's formula: fp32 parameters, one rank: gradient and both moments leave the device; staging comes."""
    plain = zc.plan(meta_linear(), world_size=1)
    offloaded = zc.plan(meta_linear(), world_size=1, offload="cpu")
    staging = offloaded.device["staging"]
    assert plain.device_nbytes - (offloaded.device_nbytes - staging) == 12 * plain.num_params


def test_stage_3_with_offload_leaves_shards_and_what_is_gathered_on_the_device() -> None:
    """By hand: bf16, 4 ranks; S is 1 Mi elements, all in one bucket."""
    mi = 2**20
    plan = zc.plan(meta_linear(), world_size=4, stage=3, param_dtype=BF16, offload="cpu", microbatches=2)
    assert {kind: nbytes for kind, nbytes in plan.device.items() if nbytes} == {
        "weight": 2 * mi, "staging": 4 * mi, "arena": 8 * mi, "flat_grad": 8 * mi, "scratch": 8 * mi,
    }  # fmt: skip
    assert dict(plan.host) == {"master_shard": 4 * mi, "host": 4 * mi, "param": 2 * mi, "optimizer_state": 8 * mi}
    assert dict(plan.bus) == {"to host": 8 * mi, "to device": 4 * mi + 2 * mi}
    assert str(plan).startswith("4 ranks, stage 3, 2 microbatches, offload to cpu: 31.5 MB per rank")
    stage_2 = zc.plan(meta_linear(), world_size=4, stage=2, param_dtype=BF16, offload="cpu", microbatches=2)
    assert stage_2.peers["zc, stage 3"].held == plan.device_nbytes == 30 * mi
    assert "zc, stage 3" not in zc.plan(meta_linear(), world_size=4, offload="disk").peers


def test_in_stage_3_fp32_shards_are_the_masters_and_owners_of_matrices_have_theirs_apart() -> None:
    """By hand: of 4 Mi parameters on 4 ranks; with Muon on 3, of which one owns 2 of the 4 matrices."""
    mi = 2**20
    plan = zc.plan(meta_linear(), world_size=4, stage=3)
    assert {kind: nbytes for kind, nbytes in plan.device.items() if nbytes} == {
        "weight": 4 * mi, "acc": 4 * mi, "optimizer_state": 8 * mi, "arena": 16 * mi, "flat_grad": 16 * mi,
        "scratch": 16 * mi,
    }  # fmt: skip
    assert zc.plan(meta_linear(), world_size=3, stage=3, optimizer="Muon").device["master_shard"] == 2 * 4 * mi


def test_stage_1_moves_partial_sums() -> None:
    numel = 4 * 2**20
    plan = zc.plan(meta_linear(), world_size=4, stage=1, offload="cpu", microbatches=2)
    assert plan.host["host"] == 4 * numel and "acc" in plan.device and plan.device["acc"] == 0
    assert dict(plan.bus) == {"to host": 4 * numel + numel, "to device": 4 * numel + numel}
    there = zc.plan(meta_linear(), world_size=4, stage=1, offload="cpu", offload_accumulate="device", microbatches=2)
    assert there.device["acc"] == 4 * numel and dict(there.bus) == {"to host": numel, "to device": numel}
    assert there.wire["gradients"] == 4 * numel * 3 // 4, "once an update, whatever the microbatches"


def test_muon_and_a_mapping_of_names() -> None:
    """By hand: 4 matrices of 1 Mi elements, bf16, on 2 ranks: each has 2, one moment; in one bucket of equal shards
    nothing moves. With 3 ranks one has 2, and its master and moment are 8 bytes each of them."""
    mi = 2**20
    plan = zc.plan(meta_linear(), world_size=2, param_dtype=BF16, optimizer="Muon")
    assert dict(plan.device) == {
        "flat_param": 8 * mi, "master_shard": 8 * mi, "acc": 8 * mi, "flat_grad": 8 * mi, "scratch": 8 * mi,
        "optimizer_state": 8 * mi, "whole_grad": 8 * mi,
    }  # fmt: skip
    assert dict(plan.wire) == {"gradients": 4 * mi, "parameters": 4 * mi} and plan.update_nbytes == 20 * 2 * mi
    three = zc.plan(meta_linear(), world_size=3, param_dtype=BF16, optimizer="Muon", stage=1)
    assert three.device["optimizer_state"] == three.device["master_shard"] == 8 * mi
    assert "whole_grad" not in three.device, "stage 1 has room in its accumulator"
    mixed = zc.plan(meta_linear(), world_size=2, optimizer={"[01].weight": "AdamW", "*": "Muon"})
    assert mixed.num_buckets == 2 and mixed.device["optimizer_state"] == (2 * 4 + 4) * mi
    with pytest.raises(PlanError, match=r"torch.optim.Muon takes matrices, and bias is \(4,\)"):
        zc.plan(nn.Linear(4, 4), world_size=2, optimizer={"weight": "Muon", "*": "Muon"})


def test_the_floor_is_the_slowest_part() -> None:
    plan = zc.plan(
        meta_linear(), world_size=2, offload="cpu", compute_seconds=0.001, bus_bandwidth=1e9, wire_bandwidth=1e12,
        host_bandwidth=1e10,
    )  # fmt: skip
    half = 2 * 2**20
    assert plan.floor_seconds["bus to host"] == pytest.approx(4 * half / 1e9)
    assert plan.floor_seconds["update"] == pytest.approx(28 * half / 1e10)
    assert plan.step_floor == max(plan.floor_seconds.values()) == plan.floor_seconds["bus to host"]
    assert "floor" in str(plan) and "optimizer_state" in str(plan)
    assert zc.plan(meta_linear(), world_size=2).step_floor is None


def test_4096_ranks_on_the_meta_device() -> None:
    """Without a process group, a GPU or the model's memory; in seconds."""
    start = time.process_time()
    plan = zc.plan(meta_linear(8192, 48), world_size=4096, param_dtype=BF16, offload="cpu")
    assert time.process_time() - start < 20
    assert plan.num_params == 48 * 8192**2 and plan.device["flat_param"] >= 2 * plan.num_params
    assert plan.host["optimizer_state"] == 2 * plan.host["master_shard"] >= 8 * plan.num_params // 4096


def really(rank: int, world_size: int, stage: int, options: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Job: bytes held and moved by a run of two declared microbatches, the second step's."""
    model: nn.Module = mlp(32, 3)
    model, optimizer = zc.compile(
        model, torch.optim.AdamW(model.parameters()), backend="eager", stage=stage, bucket_nbytes=5000, **options
    )
    dtype = options.get("param_dtype", FP32)
    for step in range(2):
        x, y = vectors(32)(rank, step, 0)
        with zc.no_sync(model):
            mean_square(model, (x.to(dtype), y)).backward()
        mean_square(model, (x.to(dtype), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zc.persistent_nbytes(model), zc.registry.sharded(model).runtime.ledger.last.nbytes_moved


def test_a_run_holds_and_moves_what_was_planned() -> None:
    """To the byte; only the moments have no padding."""
    ways: tuple[dict[str, Any], ...] = ({}, {"offload": "cpu"}, {"offload": "cpu", "offload_accumulate": "device"})
    options = [{**way, "param_dtype": dtype} for way in ways for dtype in (FP32, BF16)]
    for (stage, arguments), ranks in run_cases(really, 2, itertools.product((1, 2, 3), options)):
        planned = zc.plan(
            mlp(32, 3), world_size=2, ranks_per_host=2, stage=stage, bucket_nbytes=5000, microbatches=2, **arguments
        )
        for nbytes, moved in ranks:
            claimed = {**planned.device, **planned.host}
            state = claimed.pop("optimizer_state")
            assert state >= nbytes.pop("optimizer_state") > 0
            assert {k: n for k, n in nbytes.items() if n} == {k: n for k, n in claimed.items() if n}
            assert moved == {"to_host": planned.bus["to host"], "to_device": planned.bus["to device"]}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"world_size": 0}, r"world_size must be a whole number from 1 to 4096, got 0"),
        ({"world_size": 4097}, r"got 4097"),
        ({"ranks_per_host": 0}, r"ranks_per_host must be a whole number of at least 1, got 0"),
        ({"ranks_per_host": 3}, r"2 ranks are no whole number of hosts of 3"),
        ({"microbatches": 0}, r"microbatches .* got 0"),
        ({"optimizer": "Adafactory"}, r"optimizer must be one of .* got 'Adafactory'"),
        ({"optimizer": {"*": "Lion"}}, r"optimizer must be one of .* got 'Lion'"),
        ({"optimizer": {"bias": "SGD"}}, r"parameter 0.weight fits none of the patterns bias: add \"\*\" as the last"),
        ({"bus_bandwidth": 0.0}, r"bus_bandwidth must be above 0, got 0.0"),
        ({"disk_bandwidth": -1.0}, r"disk_bandwidth must be above 0, got -1.0"),
        ({"stage": 1, "reduce_dtype": torch.bfloat16}, r"stage 1 reduces sums in torch.float32"),
        ({"stage": 3, "offload": "disk"}, r"stage=3 and offload='disk'"),
        ({"offload": "tape"}, r"offload must be one of .* got 'tape'"),
        ({"offload_accumulate": "disk"}, r"offload_accumulate must be one of 'cpu', 'device', got 'disk'"),
    ],
)
def test_bad_input_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        zc.plan(meta_linear(8), **{"world_size": 2, **wrong})


def test_a_stage_that_compile_refuses_is_no_alternative() -> None:
    options = [{"reduce_dtype": torch.bfloat16}, {"reduce_dtype": torch.int8}, {"offload": "disk"}]
    stages = [
        [name for name in zc.plan(meta_linear(8), world_size=2, stage=2, **each).peers if "zc" in name]
        for each in options
    ]
    assert stages == [["zc, stage 3"], ["zc, stage 1", "zc, stage 3"], ["zc, stage 1"]]


def test_what_is_no_module_or_has_nothing_to_train() -> None:
    with pytest.raises(TypeError, match=r'optimizer must be a name of a class, "AdamW".* got <class'):
        zc.plan(meta_linear(8), world_size=2, optimizer=torch.optim.AdamW)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got int"):
        zc.plan(3, world_size=2)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no trainable parameter"):
        zc.plan(nn.ReLU(), world_size=2)
