"""overlap_gather in models with blocks, which wait for their weights from call to call (`zc.weights.overlapped`).

The loops and the oracle, plain PyTorch with an all-reduce of each gradient, are those of test_blocks.py, with more
ways to read weights outside of the blocks. The comm thread sleeps before each gather (late_gathers.py), so what does
not wait reads old weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import run_ranks
from late_gathers import Careless, Late, late_gathers
from loops_over_blocks import BLOCKS, DIM, LOOPS, OUTSIDE, SIZES, UPDATES, Net, blocks, build, train
from oracle import relative
from test_blocks import depths
from tiers import FULL, full_only
from torch import Tensor, nn

import zc
from zc.weights.overlapped import OverlappedWeights

LATE = 0.01


SAYS = {  # what lets a forward wait for more at its beginning
    "reads before the blocks, compiled": "code outside of blocks reads last.bias early",
    "reads its dtype, compiled": "Dynamo compiles code outside of blocks again and again",
}
if torch.__version__ < "2.12":  # guards of a parameter that no graph reads, as of its class, are skipped
    del SAYS["reads its dtype, compiled"]
ALWAYS = {
    "plain", "tied", "a graph break in each block", "another layer drop on each rank", "a forward that raises",
    "other weights in a block", "reentrant checkpointing", "evaluated between",
}  # fmt: skip


# By default the others are compared with plain PyTorch alone, which tells an old weight as well.
BESIDE_PLAIN = {"plain", "a Sequential", *SAYS}


def trained(name: str, rank: int, late: float, streams: type[Late], **options: Any) -> tuple[Net, dict[str, Tensor]]:
    torch._dynamo.reset()
    net = build(name)
    with late_gathers(late, streams):
        net, optimizer = zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.05), **options)
        return net, train(net, optimizer, name, rank, averages=False)


def compared(rank: int, world_size: int, names: list[str], stage: int, size: str, backend: str) -> list[str]:
    """Job: what differs from plain PyTorch, and, in bits and graphs, from zc without overlap_gather."""
    wrong: list[str] = []
    options: dict[str, Any] = {"stage": stage, "bucket_nbytes": SIZES[size], "backend": backend}
    for name in names:
        net = build(name)
        wanted = train(net, torch.optim.SGD(net.parameters(), lr=0.05), name, rank, averages=True)
        same = graphs = None
        if FULL or name in BESIDE_PLAIN:
            net, same = trained(name, rank, 0.0, Late, **options)
            graphs = zc.registry.sharded(net).runtime.ledger.graphs
            zc.close(net)
        net, got = trained(name, rank, LATE, Late, overlap_gather=True, **options)
        for key, value in wanted.items():
            error = relative(got[key], value)
            if not error < 1e-12 or (same is not None and not torch.equal(got[key], same[key])):
                wrong.append(f"{name}, stage {stage}, buckets {size}: {key} differs by {error:.1e}")
        runtime = zc.registry.sharded(net).runtime
        notes = [note for note in runtime.notes if "waits at its beginning" in note]
        if [note.split(": ")[1] for note in notes] != [says for loop, says in SAYS.items() if loop == name]:
            wrong.append(f"{name} says {notes}")
        if graphs is not None and len(runtime.ledger.graphs) > len(graphs) + 3 * (name in SAYS):
            wrong.append(f"{name} compiles {runtime.ledger.graphs}, and without overlap_gather {graphs}")
        zc.close(net)
    return wrong


@pytest.mark.parametrize(("stage", "size"), [(2, "one"), (1, "two")])
def test_late_gathers_change_no_bit(stage: int, size: str) -> None:
    names = sorted(LOOPS) if FULL else sorted(ALWAYS)[stage - 1 :: 2]
    assert run_ranks(compared, 2, names, stage, size, "aot_eager", timeout=400.0) == [[], []]


def test_late_gathers_change_no_bit_of_what_stands_outside_of_blocks() -> None:
    """A bucket holds a part of a block, and the head is gathered last."""
    names = ["plain", *OUTSIDE] if FULL else ["a Sequential", *list(OUTSIDE)[2::2]]
    assert run_ranks(compared, 2, names, 2, "parts", "aot_eager", timeout=400.0) == [[], []]


@full_only  # waits stand before compiled code, whoever has compiled it; "a Sequential" is in the next test
def test_late_gathers_change_no_bit_under_inductor() -> None:
    assert run_ranks(compared, 3, ["a Sequential"], 2, "one", "inductor", timeout=200.0) == [[]] * 3


def careless(rank: int, world_size: int, names: list[str]) -> list[str]:
    """Job: the loops whose weights are right although the main stream waits for no gather."""
    right = []
    for name in names:
        net = build(name)
        wanted = train(net, torch.optim.SGD(net.parameters(), lr=0.05), name, rank, averages=True)
        options: dict[str, Any] = {"bucket_nbytes": SIZES["one"], "backend": "aot_eager", "overlap_gather": True}
        net, got = trained(name, rank, LATE, Careless, **options)
        right += [name] if all(relative(got[key], value) < 1e-12 for key, value in wanted.items()) else []
        zc.close(net)
    return right


def test_without_the_waits_late_gathers_show() -> None:
    """The control."""
    names = ["plain", "a Sequential"] if FULL else ["plain"]
    assert run_ranks(careless, 2, names, timeout=200.0) == [[], []]


@contextlib.contextmanager
def seen_in_blocks() -> Iterator[list[list[int]]]:
    """Yields, for each call of a block, the buckets for which nobody has waited when it begins."""
    seen: list[list[int]] = []
    plain_block = OverlappedWeights.block

    @contextlib.contextmanager
    def block(self: OverlappedWeights, places: Any) -> Iterator[None]:
        with plain_block(self, places):
            seen.append(sorted(self.in_flight))
            yield

    OverlappedWeights.block = block  # type: ignore[method-assign, assignment]
    try:
        yield seen
    finally:
        OverlappedWeights.block = plain_block  # type: ignore[method-assign]


def steps(rank: int, world_size: int, name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Job: for the last forward, `seen_in_blocks`, and the buckets that are gathered after each block."""
    with seen_in_blocks() as seen:
        options: dict[str, Any] = {"bucket_nbytes": SIZES["parts"], "backend": "aot_eager"}
        net, _ = trained(name, rank, 0.0, Late, overlap_gather=True, **options)
    where = zc.registry.sharded(net).runtime.plan.slot_of
    assert len(seen) == UPDATES * BLOCKS and where["last.weight"][0] == 0, "the head is gathered last"
    last = [min(bucket for key, (bucket, _) in where.items() if key.startswith(f"blocks.{k}.")) for k in range(BLOCKS)]
    return seen[-BLOCKS:], [list(range(bucket)) for bucket in last]


@pytest.mark.parametrize("name", ["plain", "a Sequential", *(["a head of its own"] if FULL else [])])
def test_each_block_waits_for_its_own_buckets_alone(name: str) -> None:
    """One rank has the steps that several have."""
    ((not_waited_for, gathered_later),) = run_ranks(steps, 1, name)
    assert not_waited_for == gathered_later and len(not_waited_for[0]) > len(not_waited_for[-1]) > 0


def test_depth_adds_nothing_to_compile() -> None:
    """Nor do forwards get schedules. In test_blocks.py Inductor compiles as many segments."""
    options = {"overlap_gather": True, "backend": "aot_eager"}
    ((shallow, deep), _), = run_ranks(depths, 1, options, timeout=200.0)
    assert shallow == deep and shallow[0] > 0 and shallow[3] == 0


class Stops(set[int]):
    """Of blocks to skip: raises at the second one."""

    @torch.compiler.disable  # compiling it would publish everything
    def __contains__(self, number: object) -> bool:
        if number == 1:
            raise RuntimeError("stops")
        return False


def test_weights_that_a_failed_forward_has_not_read_are_waited_for() -> None:
    torch._dynamo.reset()
    net = Net(blocks())
    options: dict[str, Any] = {"bucket_nbytes": 300, "backend": "aot_eager", "overlap_gather": True}
    net, optimizer = zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)
    weights = zc.registry.sharded(net).runtime.weights
    for _ in range(2):
        net(torch.ones(2, DIM)).sum().backward()
        assert not weights.in_flight, "after a forward all weights may be read"
        optimizer.step()
    net.skipped = Stops()
    with pytest.raises(RuntimeError, match="stops"):
        net(torch.ones(2, DIM))
    bucket = zc.registry.sharded(net).runtime.plan.slot_of["last.weight"][0]
    assert bucket in weights.in_flight and type(net.last.weight) is not nn.Parameter
    net.last.weight.sum()
    assert bucket not in weights.in_flight and type(net.last.weight) is nn.Parameter
    zc.close(net)
