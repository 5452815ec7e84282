"""Models with repeated blocks, and loops that do different things to different blocks. They train in float64: only the
order of sums differs from plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from models import seeded
from oracle import weights
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zc

DIM, BLOCKS, UPDATES = 8, 5, 5
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


class InSequence(Net):
    """The blocks are a Sequential, so that Dynamo compiles what stands around them."""

    def __init__(self) -> None:
        super().__init__([])
        self.blocks = nn.Sequential(*blocks())
        self.bias, self.last = nn.Parameter(torch.zeros(DIM)), nn.Linear(DIM, DIM)  # registered after them

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(torch.tanh(self.first(x)))) + self.bias


class Reader(HeadOfItsOwn):
    """Reads the weight of the head, or a later block's, where no step of the forward has waited for it."""

    def __init__(self, how: str) -> None:
        super().__init__(blocks())
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            if self.how == "by code between blocks":
                x = x + 0.01 * (self.last.weight.mean() + self.blocks[-1].down.weight.mean())
            x = block(x)
        return self.end(x)

    def begin(self, x: Tensor) -> Tensor:
        x = super().begin(x)
        if self.how == "before the blocks, compiled":
            x = x + 0.01 * self.last.weight.mean()
        return x.to(self.last.weight.dtype) if self.how == "its dtype, compiled" else x


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
    if update == 0:  # the block that is traced has none
        net.blocks[3].register_forward_hook(lambda module, args, output: 2 * output)
    if update == 1:
        net.blocks[1].up.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
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


LOOPS: dict[str, tuple[Callable[[], Net], Loop]] = {
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
OUTSIDE: dict[str, tuple[Callable[[], Net], Loop]] = {  # what stands outside of the blocks differs
    "a head of its own": (lambda: HeadOfItsOwn(blocks()), plain),
    "a Sequential": (InSequence, plain),
    "reads by code between blocks": (lambda: Reader("by code between blocks"), plain),
    "reads before the blocks, compiled": (lambda: Reader("before the blocks, compiled"), plain),
    "reads its dtype, compiled": (lambda: Reader("its dtype, compiled"), plain),
}
SIZES = {"parts": BLOCK_NBYTES // 2, "one": BLOCK_NBYTES, "two": 2 * BLOCK_NBYTES, "all": 2**20}


def build(name: str) -> Net:
    torch.manual_seed(0)
    return {**LOOPS, **OUTSIDE}[name][0]().double()


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
    loop = {**LOOPS, **OUTSIDE}[name][1]
    for update, x in enumerate(batches(rank)):
        loop(net, rank, update, x).backward()
        if averages:
            average(net)
        optimizer.step()
        optimizer.zero_grad()
    with contextlib.nullcontext() if averages else zc.whole_parameters(net):
        return weights(net)
