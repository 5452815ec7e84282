"""zc trains what plain PyTorch trains, on a device that is late wherever it may be, and nothing that it does races.

`make test` runs a cover, `make test-device` all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from device_ranks import needs_device, run_on_device
from scenarios import STREAMS, Scenario, Seen, train, train_all
from tiers import FULL

pytestmark = [needs_device, pytest.mark.filterwarnings("ignore")]

HOST, OVERLAP = {"offload": "cpu"}, {"overlap_gather": True}
ONE = {"bucket_nbytes": 100_000}  # one bucket
OTHERS = ("no_sync", "evaluation", "state", "scaler", "closed", "dropped", "cleared between", "norms on two streams",
          "by hand")  # fmt: skip
BF16 = {"param_dtype": torch.bfloat16}
# Where zc's streams allocate: a sum of bf16 rows that is added to another one, and no kernel of Triton's.
NARROW = {("backward", "")}
LATE = tuple({kind: 1000} for kind in ("default", "high", "side", "group"))

COVER: dict[int, list[Scenario]] = {
    1: [
        Scenario(stage=1, loop="backward on a third", clips="zc"),
        Scenario(stage=3, model="branches", loop="scaler"),
        Scenario(stage=3, loop="evaluation", clips="zc"),
        Scenario(stage=3, backend="aot_eager", options=HOST, model="mlp"),
        Scenario(stage=2, model="mlp", loop="on any streams", clips="zc"),
        Scenario(stage=2, model="branches home first", options=ONE),
        Scenario(stage=3, model="one branch", loop="penalty", options=ONE),
        Scenario(stage=3, model="branches", loop="evaluation", options=ONE),
        Scenario(stage=3, model="branches", loop="dropped in a forward", options=ONE),
    ],
    2: [
        Scenario(stage=1, backend="aot_eager", options=OVERLAP, model="mlp", late={"group": 1000}),
        Scenario(stage=1, model="branches", options=ONE, jitter=500),
        Scenario(stage=2, options=HOST, loop="forward on a side", clips="zc"),
        Scenario(stage=2, model="branches", loop="update on a side", late={"high": 1000}),
        Scenario(stage=2, loop="dropped", late={"group": 1000}),
        Scenario(stage=2, model="mlp", loop="by hand", options=HOST, clips="", late={"side": 2000}),
        Scenario(stage=3, model="clamped", late={"default": 300}),
        Scenario(stage=3, model="mlp", loop="all on a side", is_other=True, late={"default": 300}),
        Scenario(stage=3, backend="aot_eager", model="mlp", loop="evaluation", options=BF16, late={"group": 1000}),
    ],
}


def _all(world_size: int) -> Iterator[Scenario]:
    """Four ranks on two cores are slow: of each stage a few."""
    yield from COVER.get(world_size, ())
    stages = (1, 2, 3)
    backends = ("eager",) if world_size == 4 else ("eager", "aot_eager")
    for stage, backend, options in itertools.product(stages, backends, ({}, HOST, OVERLAP)):
        if not (stage == 3 and options is OVERLAP):
            yield Scenario(stage, backend, options=options, jitter=300, seed=1)
    for stage in stages:
        # no layer norm: the CPU's returns other dtypes than a device's
        yield Scenario(stage, "eager", "mlp", options=BF16, late={"group": 1000})
    if world_size == 4:
        for stage in stages:
            yield Scenario(stage, "eager", options={"hosts": 2}, late={"group": 1000})
        return
    for stage, loop in itertools.product(stages, (*STREAMS, *OTHERS)):
        yield Scenario(stage, "eager", "mlp", loop, clips="zc", jitter=300, seed=2)
    for stage, backend, late in itertools.product(stages, backends, LATE):
        yield Scenario(stage, backend, "mlp", late=late, num_microbatches=3)
    for stage, loop, seed in itertools.product(stages, ("plain", *STREAMS), (3,)):
        if loop != "all on a side":
            yield Scenario(stage, "eager", "branches", loop, options=ONE, jitter=500, seed=seed)
            yield Scenario(stage, "eager", "branches", loop, late={"side": 1000}, seed=seed)
    for stage in stages:
        yield Scenario(stage, "eager", "mlp", "on any streams", clips="zc")
        for loop in ("backward on a third", "backward from elsewhere", "on any streams"):
            yield Scenario(stage, "eager", "unused", loop)  # a bucket is written where a backward ends
        for model, num in itertools.product(("branches", "branches home first"), (1, 3)):
            yield Scenario(stage, "eager", model, options=ONE, num_microbatches=num)
    for stage, options in itertools.product(stages, ({}, HOST)):
        yield Scenario(stage, "eager", "gpt_reentrant", options=options, jitter=300, is_other=True)
        yield Scenario(stage, "eager", "clamped", options=options, jitter=300)
        yield Scenario(stage, "aot_eager", "graph_break", options=options, jitter=300)
        yield Scenario(stage, "aot_eager", "unused", "dropped", options=options, late={"high": 1000})


ALL = {
    world_size: list({str(scenario): scenario for scenario in _all(world_size)}.values()) for world_size in (1, 2, 4)
}


def judge(world_size: int, scenario: Scenario, seen: list[Seen]) -> None:
    for rank, each in enumerate(seen):
        assert not each.races, f"rank {rank}: " + "\n".join(each.races[:5])
        assert not each.is_wrong, f"rank {rank}: {each.worst[1]} differs by {each.worst[0]} from plain PyTorch's"
        # GradScaler asks the device whether the step was skipped
        waits = {
            key: n for key, n in each.waits.items() if scenario.loop != "scaler" or key != ("update", "aten::item")
        }
        if not scenario.offloads and scenario.loop != "state":
            assert not waits, f"rank {rank}: the host waits for the device in a step: {waits}"
        # in a step that a graph captures, memory of a stream other than the caller's is of a pool of its own
        if not scenario.has_own_streams:
            allowed = set() if "param_dtype" not in scenario.options else NARROW
            assert each.sides.keys() <= allowed, f"rank {rank}: zc's streams allocate: {each.sides}"


@pytest.mark.parametrize(
    ("world_size", "scenario"),
    [(n, scenario) for n, chosen in (ALL if FULL else COVER).items() for scenario in chosen],
    ids=str,
)
def test_a_scenario(world_size: int, scenario: Scenario) -> None:
    judge(world_size, scenario, run_on_device(train, world_size, scenario))


def test_the_loops_order_what_plain_pytorch_needs() -> None:
    """A race in one of these would be the loop's. Of memory plain PyTorch makes its own: a gradient comes from the
    stream of its backward, and is freed there while the update's may still read it."""
    loops = [
        Scenario(0, model=model, loop=loop)
        for model, loop in itertools.product(("mlp", "branches"), ("plain", *STREAMS))
        if (model, loop) != ("branches", "all on a side")
    ]
    for scenario, seen in zip(loops, run_on_device(train_all, 1, loops)[0], strict=True):
        assert not [race for race in seen.races if "the allocator" not in race], scenario
