"""Loops with one fault each, as people make them, and zc with one fault each; and the word that names it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import VOCAB, mean_square, seeded, vectors
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import zc

Arguments = dict[str, Any]
DIM, NUM_RANKS = 16, 2


class Net(nn.Module):
    """``twist`` is called on what goes into the head."""

    def __init__(self, twist: Callable[[Tensor], Tensor] = torch.tanh, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.twist = twist
        self.trunk, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twist(self.trunk(x)))


def healthy(rank: int, model: nn.Module | None = None, **others: Any) -> Arguments:
    model = Net() if model is None else model
    torch.manual_seed(100 + rank)
    make = vectors(DIM)
    return {
        "step": mean_square,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1),
        "batches": [make(rank, 0, k) for k in range(4)],
        "updates": 1,
        "backend": "eager",
        **others,
    }


# --- faults of the program ---


def other_weights(rank: int) -> Arguments:
    return healthy(rank, Net(seed=rank))


def other_optimizer(rank: int) -> Arguments:
    made = healthy(rank)
    return {**made, "optimizer": torch.optim.AdamW(made["model"].parameters(), lr=1e-3 * (1 + rank))}


def same_random_numbers(rank: int) -> Arguments:
    made = healthy(rank, Net(F.dropout))
    torch.manual_seed(5)
    return made


def same_data(rank: int) -> Arguments:
    return {**healthy(rank), "batches": healthy(0)["batches"]}


def ignores_inputs(rank: int) -> Arguments:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(torch.ones(4, DIM)).square().mean()

    return healthy(rank, step=step)


def rank_dependent(rank: int) -> Arguments:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return mean_square(model, batch) * (1.0 + 0.5 * dist.get_rank())

    return healthy(rank, step=step)


def detached(rank: int) -> Arguments:
    def step(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(model(x), y) + 0.1 * model.aux(model.trunk(x)).detach().square().mean()

    model = Net()
    model.aux = nn.Linear(DIM, 3)
    return healthy(rank, model, step=step)


def gather_without_gradient(rank: int) -> Arguments:
    """Each rank's vectors against those of all ranks, as in contrastive learning."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        own = model(batch[0])
        everyone = [torch.zeros_like(own) for _ in range(NUM_RANKS)]
        dist.all_gather(everyone, own)
        return F.cross_entropy(own @ torch.cat(everyone).t(), torch.arange(len(own)))

    return healthy(rank, step=step)


def decay_twice(rank: int) -> Arguments:
    def update(model: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 - 1e-3 * 0.1)

    return healthy(rank, update=update)


def no_training(rank: int) -> Arguments:
    def update(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        optimizer.step()

    return healthy(rank, update=update)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def mean_of_means(rank: int) -> Arguments:
    """Padding, which the mean over tokens leaves out: 12 tokens on rank 0, 4 on rank 1."""
    batches = []
    for k in range(2):
        drawn = torch.randint(0, VOCAB, (2, 9), generator=seeded(rank, k))
        x, y = drawn[:, :-1], drawn[:, 1:].clone()
        y[:, 6 if rank == 0 else 2 :] = -100
        batches.append((x, y))

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return healthy(rank, Words(), step=step, batches=batches)


def buffer_by_rank(rank: int) -> Arguments:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("who", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.who.fill_(dist.get_rank() + 1.0)
            return super().forward(x)

    return healthy(rank, Counting())


def not_finite(rank: int) -> Arguments:
    return healthy(rank, Net(lambda x: x / 0.0))


def compiler(rank: int) -> Arguments:
    """Code that is another one when it is compiled, in place of a fault of the compiler."""
    return healthy(rank, Net(lambda x: x * 1.01 if torch.compiler.is_compiling() else x), backend="aot_eager")


PROGRAMS: dict[str, Callable[[int], Arguments]] = {
    "other-weights": other_weights,
    "other-optimizer": other_optimizer,
    "same-random-numbers": same_random_numbers,
    "same-data": same_data,
    "ignores-inputs": ignores_inputs,
    "rank-dependent": rank_dependent,
    "detached": detached,
    "gather-without-gradient": gather_without_gradient,
    "decay-twice": decay_twice,
    "no-training": no_training,
    "mean-of-means": mean_of_means,
    "buffer-by-rank": buffer_by_rank,
    "not-finite": not_finite,
    "compiler": compiler,
}

# --- faults of zc ---


@dataclass(frozen=True)
class Sabotage:
    code: str
    plant: Callable[[int], contextlib.AbstractContextManager[Any]]
    options: Arguments


def _scaled(factor: float) -> Callable[[int], contextlib.AbstractContextManager[Any]]:
    """The mean over ranks times ``factor``."""
    from zc.engine import operations

    right = operations._sum_into

    def wrong(*args: Any) -> Any:
        total = right(*args)
        return total._replace(scale=total.scale * factor)

    return lambda rank: mock.patch.object(operations, "_sum_into", wrong)


def _missing(rank: int) -> contextlib.AbstractContextManager[Any]:
    """Rank 1 sends zeros."""
    from zc.engine import operations

    right = operations._sent

    def wrong(*args: Any) -> Tensor:
        sent: Tensor = right(*args)
        return sent.zero_() if rank == 1 else sent

    return mock.patch.object(operations, "_sent", wrong)


def _narrow(rank: int) -> contextlib.AbstractContextManager[Any]:
    from zc.engine import operations

    right = operations._end_hop

    def wrong(accs: Any, bucket: int, total: Any, hop: int) -> None:
        total.out.copy_(total.out.bfloat16())
        right(accs, bucket, total, hop)

    return mock.patch.object(operations, "_end_hop", wrong)


def _forgetful(rank: int) -> contextlib.AbstractContextManager[Any]:
    """What a block of no_sync ends with, no gradient outlives."""
    right = zc.no_sync

    @contextlib.contextmanager
    def wrong(model: nn.Module) -> Iterator[None]:
        with right(model):
            yield
        model.zero_grad()

    return mock.patch.object(zc, "no_sync", wrong)


def _twice(rank: int) -> contextlib.AbstractContextManager[Any]:
    """What a block of no_sync adds, it adds twice."""
    right = zc.no_sync

    @contextlib.contextmanager
    def wrong(model: nn.Module) -> Iterator[None]:
        hooks = [param.register_hook(lambda grad: 2 * grad) for param in model.parameters()]
        with right(model):
            yield
        for hook in hooks:
            hook.remove()

    return mock.patch.object(zc, "no_sync", wrong)


def _apart(rank: int) -> contextlib.AbstractContextManager[Any]:
    """Each rank trains in a group of its own."""
    alone = [dist.new_group([each]) for each in range(NUM_RANKS)][rank]
    return mock.patch.object(zc, "compile", functools.partial(zc.compile, group=alone))


def _in_step(change: Callable[[Any], None], when: str) -> Callable[[int], contextlib.AbstractContextManager[Any]]:
    """``change`` of zc's optimizer, before or after its class's step."""
    from zc.optim.optimizer import ShardedOptimizer

    right = getattr(ShardedOptimizer, when)

    def wrong(self: Any, *args: Any) -> Any:
        result = right(self, *args)
        with torch.no_grad():
            change(self)
        return result

    return lambda rank: mock.patch.object(ShardedOptimizer, when, wrong)


def _decay(optimizer: Any) -> None:
    for part in optimizer.slices.values():
        part.mul_(1 - 1e-3 * 0.1)


def _forget_decay(optimizer: Any) -> None:
    for group in optimizer.local.param_groups:
        group["weight_decay"] = 0.0


def _double_lr(optimizer: Any) -> None:
    for group in optimizer.local.param_groups:
        group["lr"] *= 2


def _count(optimizer: Any) -> None:
    for state in optimizer.local.state.values():
        state["step"] += 1


def _wrong_when_compiled(rank: int) -> contextlib.AbstractContextManager[Any]:
    right = zc.compile

    def wrong(model: nn.Module, optimizer: Any, **options: Any) -> None:
        right(model, optimizer, **options)
        if options["backend"] != "eager":
            for param in model.parameters():
                param.register_hook(lambda grad: grad * 1.01)

    return mock.patch.object(zc, "compile", wrong)


SABOTAGES: dict[str, Sabotage] = {
    "the sum over ranks": Sabotage("sum-not-mean", _scaled(NUM_RANKS), {"stage": 2}),
    "divided twice": Sabotage("mean-twice", _scaled(1 / NUM_RANKS), {"stage": 1}),
    "a rank's gradient is lost": Sabotage("rank-missing", _missing, {"stage": 3}),
    "accumulation in bf16": Sabotage("narrow-accumulation", _narrow, {"stage": 2, "microbatches": 2}),
    "a microbatch is lost": Sabotage("microbatch-missing", _forgetful, {"stage": 1, "microbatches": 2}),
    "a microbatch counts twice": Sabotage("microbatch-twice", _twice, {"stage": 2, "microbatches": 2}),
    "the last microbatch alone": Sabotage("microbatch-alone", _forgetful, {"stage": 2, "microbatches": 3}),
    "nothing is reduced": Sabotage("not-reduced", _apart, {"stage": 2}),
    "an update twice as large": Sabotage("update-twice", _in_step(_double_lr, "_before_step"), {"stage": 1}),
    "no decay": Sabotage("no-decay", _in_step(_forget_decay, "_before_step"), {"stage": 3}),
    "decay": Sabotage("decay-twice", _in_step(_decay, "_before_step"), {"stage": 2}),
    "counter": Sabotage("optimizer-state", _in_step(_count, "_after_step"), {"stage": 2}),
    "compiled": Sabotage("zc-compiled", _wrong_when_compiled, {"stage": 2, "backend": "aot_eager"}),
}


class Scaled(CustomGraphPass):
    """In place of a fault of Inductor: each tanh is 1 % too large in what it compiles."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.target is torch.ops.aten.tanh.default:
                with graph.inserting_after(node):
                    larger = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
                node.replace_all_uses_with(larger, delete_user_cb=lambda user, own=larger: user is not own)

    def uuid(self) -> str:
        return "scaled"

    def __repr__(self) -> str:  # options are compared between ranks
        return "Scaled()"


def inductor(rank: int) -> Arguments:
    return healthy(rank, backend="inductor", options={"post_grad_custom_post_pass": Scaled()})
