"""Models with repeated blocks, of which each kind is compiled once: the same weights as plain PyTorch with an
all-reduce of each gradient (DDP refuses some of the loops), in loops that do different things to different blocks.

SGD in float64, five updates: only the order of sums differs, so relative differences stay below 1e-12.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import seeded
from tiers import FULL
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zc

DIM, BLOCKS, UPDATES, PARAMS = 8, 5, 5, 5
BLOCK_NBYTES = 8 * (2 * DIM + 2 * DIM * DIM + DIM)


class Block(nn.Module):
    """``gain`` None: without; ``breaks``: a graph break in the middle."""

    def __init__(self, gain: float | None = None, breaks: bool = False) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM, bias=False)
        self.gain, self.breaks, self.fails = gain, breaks, False

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.tanh(self.up(self.norm(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        if bias is not None:
            y = y + bias
        return x + self.down(y) * (1.0 if self.gain is None else self.gain)


class Net(nn.Module):
    def __init__(self, blocks: list[Block], use: str = "", tied: bool = False) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(DIM, DIM), nn.ModuleList(blocks)
        self.bias, self.last = nn.Parameter(torch.zeros(DIM)), nn.Linear(DIM, DIM)
        if tied:
            self.last.weight = self.first.weight
        self.use, self.skipped = use, set[int]()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for k, block in enumerate(self.blocks):
            if k in self.skipped:
                continue
            if self.use.startswith("checkpoint"):
                x = checkpoint(block, x, use_reentrant=self.use.endswith("reentrant"))
            else:
                x = block(x, self.bias) if self.use == "bias" else block(x)
        return self.last(x) + self.bias


Loop = Callable[[Any, int, int, Tensor], Tensor]  # model, rank, update, batch -> loss


def plain(net: nn.Module, rank: int, update: int, x: Tensor) -> Tensor:
    return net(x).square().mean()


def drop_layers(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    net.skipped = {update % BLOCKS}
    return net(x).square().mean()


def drop_other_layers_on_each_rank(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    net.skipped = {(update + rank) % BLOCKS}
    return net(x).square().mean()


def hooks_on_two_blocks(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    if update == 1:
        net.blocks[1].up.weight.register_hook(lambda grad: 3 * grad)
        net.blocks[3].down.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return net(x).square().mean()


def freeze_a_block(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    net.blocks[2].requires_grad_(update != 2)
    return net(x).square().mean()


def other_sizes(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    return net(x[: 1 + update]).square().mean()


def called_twice(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    return net(net(x)).square().mean()


def other_weights_in_a_block(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    """The weights that stand in for a block's own are no parameters: their gradients go nowhere."""
    weight, bias = (nn.Parameter(torch.full(size, 0.1, dtype=torch.float64)) for size in ((DIM, DIM), (DIM,)))
    aside = functional_call(net.blocks[1], {"up.weight": weight}, (x,))
    # a backward needs no bias, so the saved parameters alone do not tell that another one was there
    return net(aside).square().mean() + functional_call(net.blocks[3], {"up.bias": bias}, (x,)).mean()


def saved_on_the_host(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    """As save_on_cpu does on a GPU: the backward gets copies, which do not tell the block."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        return net(x).square().mean()


def a_forward_that_raises(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    with contextlib.suppress(RuntimeError):
        net(x[:, :3])
    return net(x).square().mean()


def evaluated_between(net: Net, rank: int, update: int, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.eval()(x)
    net.train()
    return net(x).square().mean()


def blocks(**options: object) -> list[Block]:
    return [Block(**options) for _ in range(BLOCKS)]


def lora() -> Net:
    net = Net(blocks())
    for block in net.blocks:
        block.up.requires_grad_(False)
    return net


CASES: dict[str, tuple[Callable[[], Net], Loop]] = {
    "plain": (lambda: Net(blocks()), plain),
    "tied": (lambda: Net(blocks(), tied=True), plain),
    "lora": (lora, plain),
    "two kinds that alternate": (lambda: Net([Block(0.5 * (k % 2)) for k in range(8)]), plain),
    "a flag of its own in each block": (lambda: Net([Block(0.1 * k) for k in range(BLOCKS)]), plain),
    "a graph break in each block": (lambda: Net(blocks(breaks=True)), plain),
    "a parameter from outside": (lambda: Net(blocks(), use="bias"), plain),
    "checkpointing": (lambda: Net(blocks(), use="checkpoint"), plain),
    "reentrant checkpointing": (lambda: Net(blocks(), use="checkpoint, reentrant"), plain),
    "hooks on two blocks": (lambda: Net(blocks()), hooks_on_two_blocks),
    "layer drop": (lambda: Net(blocks()), drop_layers),
    "another layer drop on each rank": (lambda: Net(blocks()), drop_other_layers_on_each_rank),
    "a block frozen and unfrozen": (lambda: Net(blocks()), freeze_a_block),
    "other sizes": (lambda: Net(blocks()), other_sizes),
    "called twice": (lambda: Net(blocks()), called_twice),
    "other weights in a block": (lambda: Net(blocks()), other_weights_in_a_block),
    "saved on the host": (lambda: Net(blocks()), saved_on_the_host),
    "a forward that raises": (lambda: Net(blocks()), a_forward_that_raises),
    "evaluated between": (lambda: Net(blocks()), evaluated_between),
}
SIZES = {"parts": BLOCK_NBYTES // 2, "one": BLOCK_NBYTES, "two": 2 * BLOCK_NBYTES, "all": 2**20}


def made(name: str) -> Net:
    torch.manual_seed(0)
    return CASES[name][0]().double()


def batches(rank: int) -> Iterator[Tensor]:
    for update in range(UPDATES):
        yield torch.randn(6, DIM, generator=seeded(rank, update), dtype=torch.float64)


def average(net: nn.Module) -> None:
    """What DDP does, after the backward: a gradient that only other ranks have is theirs."""
    for param in net.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(grad)
        param.grad = grad / dist.get_world_size() if param.requires_grad else None


def train(net: Net, optimizer: torch.optim.Optimizer, name: str, rank: int, *, averages: bool) -> dict[str, Tensor]:
    for update, x in enumerate(batches(rank)):
        CASES[name][1](net, rank, update, x).backward()
        if averages:
            average(net)
        optimizer.step()
        optimizer.zero_grad()
    with contextlib.nullcontext() if averages else zc.whole_parameters(net):
        return {key: param.detach().clone() for key, param in net.named_parameters()}


def both(rank: int, world_size: int, names: list[str], stage: int, size: str, backend: str) -> list[str]:
    """Job: trains each case with and without zc; what differs, and what was not compiled by blocks."""
    wrong = []
    for name in names:
        net = made(name)
        wanted = train(net, torch.optim.SGD(net.parameters(), lr=0.05), name, rank, averages=True)
        torch._dynamo.reset()
        net = made(name)
        net, optimizer = zc.compile(
            net, torch.optim.SGD(net.parameters(), lr=0.05), stage=stage, backend=backend, bucket_nbytes=SIZES[size]
        )
        got = train(net, optimizer, name, rank, averages=False)
        for key, value in wanted.items():
            error = float((got[key] - value).norm() / (value.norm() + 1e-30))
            if not error < 1e-12:
                wrong.append(f"{name}, stage {stage}, buckets {size}: {key} differs by {error:.1e}")
        runtime = zc.registry.sharded(net).runtime
        by_blocks = {program.block for program in runtime.programs} - {None}
        if name not in ("called twice", "saved on the host") and len(by_blocks) < BLOCKS - 1:
            wrong.append(f"{name}: blocks {sorted(by_blocks)} alone have schedules of their own")
        num_made = sum(program.like is None for program in runtime.programs if len(program.brings) == PARAMS)
        if name in ("plain", "tied") and num_made > {"two": 3}.get(size, 1):  # two places in a bucket; one block alone
            wrong.append(f"{name}: {num_made} schedules were made for one kind of block")
        zc.close(net)
    return wrong


WAYS = [(2, "one"), (1, "two")]
# a block that is called outside of the model's forward is refused by name
NOT_IN_STAGE_3 = {"other weights in a block"}
# stages 1 and 2 have them, and no window of weights differs; test_frozen_shards.py has adapters in blocks
ELSEWHERE = {"lora", "hooks on two blocks", "layer drop", "other sizes"}


def sample(stage: int) -> list[str]:
    """A quarter of the loops in stage 1, another one in stage 2, and in both those whose schedules are counted. All of
    them in the full tier."""
    always = {"plain", "tied"} | (NOT_IN_STAGE_3 if stage == 2 else set())
    return [name for k, name in enumerate(CASES) if FULL or k % 4 == stage or name in always]


@pytest.mark.parametrize(("stage", "size"), WAYS)
def test_the_same_weights_without_zc(stage: int, size: str) -> None:
    assert run_ranks(both, 2, sample(stage), stage, size, "aot_eager", timeout=400.0) == [[], []]


def test_the_same_weights_without_zc_in_stage_3() -> None:
    names = [name for name in CASES if name not in (NOT_IN_STAGE_3 if FULL else NOT_IN_STAGE_3 | ELSEWHERE)]
    assert run_ranks(both, 2, names, 3, "one", "aot_eager", timeout=400.0) == [[], []]


def test_the_same_weights_without_zc_for_other_buckets_and_under_inductor() -> None:
    assert run_ranks(both, 2, ["plain", "tied"], 2, "parts", "aot_eager", timeout=200.0) == [[], []]
    assert run_ranks(both, 2, ["plain", "layer drop"], 2, "all", "aot_eager", timeout=200.0) == [[], []]
    assert run_ranks(both, 2, ["plain"], 1, "parts", "inductor", timeout=200.0) == [[], []]


def depths(rank: int, world_size: int) -> list[tuple[int, int, int]]:
    """Job: Dynamo's graphs, compiled segments and schedules that passes made, by depth."""
    counts = []
    for depth in (4, 12):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Net([Block() for _ in range(depth)])
        net, optimizer = zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), bucket_nbytes=2**10)
        for _ in range(2):
            net(torch.ones(2, DIM)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        runtime = zc.registry.sharded(net).runtime
        schedules = [p for p in runtime.programs if p.like is None]
        counts.append((len(runtime.ledger.graphs), len(runtime.compiled_segments), len(schedules)))
        zc.close(net)
    return counts


def test_depth_adds_nothing_to_compile() -> None:
    shallow, deep = run_ranks(depths, 1, timeout=200.0)[0]
    assert shallow == deep and shallow[1] > 0


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


class HeadOfItsOwn(Net):
    """What stands around the loop is in methods of its own."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)

    def begin(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def end(self, x: Tensor) -> Tensor:
        return self.last(x) + self.bias


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


def test_the_log_names_the_kind_of_block(caplog: pytest.LogCaptureFixture) -> None:
    net = Net(blocks())
    net, _ = zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with caplog.at_level(logging.INFO, logger="zc"):
        net(torch.ones(2, DIM)).sum().backward()
    lines = [record.getMessage() for record in caplog.records if "Inductor" in record.getMessage()]
    kind = r"block kind 1 of 1 \(5 x Block\): Inductor compiles "
    assert sum(bool(re.fullmatch(kind + r"a forward graph of \d+ operations", line)) for line in lines) == 1
    assert any(re.match(kind + r"segment \d+, of \d+ operations \(backward\)", line) for line in lines)
    zc.close(net)
