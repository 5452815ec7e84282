"""Models with repeated blocks, of which each kind is compiled once: the same weights as plain PyTorch with an
all-reduce of each gradient (DDP refuses some of the loops), in loops that do different things to different blocks.

SGD in float64, five updates: only the order of sums differs, so relative differences stay below 1e-12.
"""

from __future__ import annotations

import logging
import logging.handlers
import re
from typing import Any

import pytest
import torch
from harness import run_ranks
from loops_over_blocks import BLOCKS, DIM, LOOPS, SIZES, Block, HeadOfItsOwn, Net, blocks, build, train
from oracle import relative
from tiers import FULL, full_cases, full_only

import zc

PARAMS = 5  # of a block


def both(rank: int, world_size: int, names: list[str], stage: int, size: str, backend: str) -> list[str]:
    """Job: trains each case with and without zc; what differs, and what was not compiled by blocks."""
    wrong = []
    for name in names:
        net = build(name)
        wanted = train(net, torch.optim.SGD(net.parameters(), lr=0.05), name, rank, averages=True)
        torch._dynamo.reset()
        net = build(name)
        net, optimizer = zc.compile(
            net, torch.optim.SGD(net.parameters(), lr=0.05), stage=stage, backend=backend, bucket_nbytes=SIZES[size]
        )
        got = train(net, optimizer, name, rank, averages=False)
        for key, value in wanted.items():
            error = relative(got[key], value)
            if not error < 1e-12:
                wrong.append(f"{name}, stage {stage}, buckets {size}: {key} differs by {error:.1e}")
        runtime = zc.registry.sharded(net).runtime
        by_blocks = {program.block for program in runtime.programs} - {None}
        if name not in ("called twice", "saved on the host") and len(by_blocks) < BLOCKS - 1:
            wrong.append(f"{name}: blocks {sorted(by_blocks)} alone have schedules of their own")
        num_schedules = sum(program.like is None for program in runtime.programs if len(program.gradients) == PARAMS)
        # two places in a bucket, and one block alone
        if name in ("plain", "tied") and num_schedules > {"two": 3}.get(size, 1):
            wrong.append(f"{name}: {num_schedules} schedules were made for one kind of block")
        zc.close(net)
    return wrong


WAYS = [(2, "one"), (1, "two")]
# a block that is called outside of the model's forward is refused by name
NOT_IN_STAGE_3 = {"other weights in a block"}
# in stage 3: weights come and go in another order than in "tied"
WINDOWS_DIFFER = {
    "tied", "a graph break in each block", "checkpointing", "another layer drop on each rank", "called twice",
    "a block frozen and unfrozen", "saved on the host", "a forward that raises",
}  # fmt: skip


# test_overlap_gather_of_blocks.py trains them without overlap_gather, too, and has one under Inductor
WITH_OVERLAP = {"a graph break in each block", "a forward that raises", "evaluated between"} | NOT_IN_STAGE_3


def sample(stage: int) -> list[str]:
    """A quarter of the loops in stage 1, another one in stage 2, and in both the plain one: its schedules are counted.
    All of them in the full tier."""
    quarter = {name for k, name in enumerate(LOOPS) if k % 4 == stage} - WITH_OVERLAP
    return [name for name in LOOPS if FULL or name in quarter | {"plain"}]


@pytest.mark.parametrize(("stage", "size"), WAYS)
@full_cases("2-one")
def test_the_same_weights_without_zc(stage: int, size: str) -> None:
    num_ranks = 2 if FULL else 1  # two train blocks of both stages and sizes in test_overlap_gather_of_blocks.py
    assert run_ranks(both, num_ranks, sample(stage), stage, size, "aot_eager", timeout=400.0) == [[]] * num_ranks


# By default one rank trains the others: it gathers into the same arena, in the same order.
BETWEEN_RANKS = {"another layer drop on each rank", "checkpointing", "a block frozen and unfrozen"}


def test_the_same_weights_without_zc_in_stage_3() -> None:
    names = [name for name in LOOPS if name in WINDOWS_DIFFER or (FULL and name not in NOT_IN_STAGE_3)]
    here = [name for name in names if not FULL and name not in BETWEEN_RANKS]
    assert run_ranks(both, 1, here, 3, "one", "aot_eager", timeout=400.0) == [[]]
    names = [name for name in names if name not in here]
    assert run_ranks(both, 2, names, 3, "one", "aot_eager", timeout=400.0) == [[], []]


@full_only
def test_the_same_weights_without_zc_for_other_buckets() -> None:
    assert run_ranks(both, 2, ["tied"], 2, "parts", "aot_eager", timeout=200.0) == [[], []]
    assert run_ranks(both, 2, ["plain", "layer drop"], 2, "all", "aot_eager", timeout=200.0) == [[], []]


def depths(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[tuple[int, ...]], list[str]]:
    """Job: Dynamo's graphs, compiled segments, schedules that passes made, and those of forwards, by depth; the log."""
    counts, said = [], logging.handlers.BufferingHandler(10_000)
    logger = logging.getLogger("zc")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    for depth in (4, 12):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Net([Block() for _ in range(depth)])
        net, optimizer = zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), bucket_nbytes=2**10, **options)
        for _ in range(3):
            net(torch.ones(2, DIM)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime = zc.registry.sharded(net).runtime
        made = (runtime.ledger.graphs, runtime.compiled_segments, [p for p in runtime.programs if p.like is None])
        counts.append((*map(len, made), len(runtime.forwards)))
        zc.close(net)
    logger.removeHandler(said)
    return counts, [record.getMessage() for record in said.buffer]


def test_depth_adds_nothing_to_compile_and_the_log_names_the_kind_of_block() -> None:
    ((shallow, deep), log), = run_ranks(depths, 1, {"backend": "inductor"}, timeout=200.0)
    assert shallow == deep and shallow[1] > 0
    kind = r"block kind 1 of 1 \(4 x Block\): Inductor compiles "
    assert sum(bool(re.fullmatch(kind + r"a forward graph of \d+ operations", line)) for line in log) == 1
    assert any(re.match(kind + r"segment \d+, of \d+ operations \(backward\)", line) for line in log)


def lengths(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    """Job: 20 lengths, others on each rank. Dynamo's graphs (frame/compilation), and sums of the weights."""
    torch.manual_seed(0)
    net = Net(blocks())
    net, optimizer = zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.01), backend="aot_eager")
    for update in range(20):
        net(torch.ones(2 + (7 * update + 3 * rank) % 20, DIM)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zc.registry.sharded(net).runtime.ledger.graphs, [param.sum().item() for param in net.parameters()]


def test_twenty_lengths_on_each_rank_cost_two_compiles() -> None:
    (graphs, sums), (others, sums_there) = run_ranks(lengths, 2, timeout=200.0)
    for each in (graphs, others):
        assert {compilation for _, compilation in (graph.split("/") for graph in each)} == {"0", "1"}
    assert sums == sums_there


@pytest.mark.parametrize(
    ("net_class", "fullgraph", "says"), [(Net, False, True), (HeadOfItsOwn, False, False), (Net, True, False)]
)
def test_a_head_beside_the_loop_over_blocks_is_said_to_run_op_by_op(
    net_class: type[Net], fullgraph: bool, says: bool
) -> None:
    torch._dynamo.reset()
    net = net_class(blocks())
    options = {"fullgraph": True} if fullgraph else {}
    net, optimizer = zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), backend="aot_eager", **options)
    net(torch.ones(2, DIM)).sum().backward()
    optimizer.step()
    notes = [note for note in zc.registry.sharded(net).runtime.notes if "runs op by op" in note]
    zc.close(net)
    assert [note.split(" runs")[0] for note in notes] == says * ["the code that reads first.weight, last.weight"]
