"""Stage 3: the bits of stage 2 for each cap of gathered weights, parameters that have no bytes, and whole ones."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_cases, run_ranks
from models import seeded
from tiers import FULL
from torch import Tensor, nn
from training_runs import environment

import zc
from zc import torch_private
from zc.registry import sharded

DIM, VOCABULARY, UPDATES = 16, 32, 4
CAPS = {"eager": (4608, None, 2**20), "aot_eager": (4608, None), "inductor": (4608,)}


class Net(nn.Module):
    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY)
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        for layer in self.layers:
            y = y + torch.tanh(layer(y))
        logits: Tensor = self.head(self.norm(y)) + self.empty.sum()
        return logits


def compiled(stage: int, backend: str, weight_nbytes: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    # each layer is a segment, and compiled
    net = Net(5 if FULL else {"eager": 5, "aot_eager": 2, "inductor": 1}[backend])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    zc.compile(net, optimizer, stage=stage, backend=backend, bucket_nbytes=2048, weight_nbytes=weight_nbytes)
    return net, optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    values = []
    for update in range(UPDATES):
        for microbatch in range(2):
            x = torch.randint(0, VOCABULARY, (3, 8), generator=seeded(rank, 2 * update + microbatch))
            loss = F.cross_entropy(net(x).flatten(0, 1), x.flatten())
            loss.backward()
        values += [loss.item(), float(zc.clip_grad_norm_(net, 1.0))]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            values.append(net(x).sum().item())
    return values


def stages(rank: int, world_size: int, backend: str) -> list[str]:
    """Job: what differs between stage 2 and stage 3 with the smallest cap, with room for some buckets, and for all. By
    default compiled models have fewer: caps change the order of gathers, which no compiled segment sees."""
    net, optimizer = compiled(2, backend)
    wanted = train(net, optimizer, rank), {key: value.clone() for key, value in net.state_dict().items()}
    zc.close(net)
    different = []
    for cap in CAPS["eager" if FULL else backend]:
        net, optimizer = compiled(3, backend, cap)
        values = train(net, optimizer, rank)
        if values != wanted[0]:
            different.append(f"{backend}, cap {cap}: {values} for {wanted[0]}")
        tables = [body for name, body in zc.explain(net).sections.items() if name.startswith("residency of weights")]
        assert backend == "eager" or any("gathered before it" in body for body in tables)
        state = zc.full_state_dict(net)
        different += [f"{backend}, cap {cap}: {key}" for key, value in state.items() if not value.equal(wanted[1][key])]
        assert bool(state) == (rank == 0)
        with torch_private.without_torch_function():
            assert all(param.untyped_storage().nbytes() == 0 for param in net.parameters())
        zc.close(net)
        different += [f"closed: {key}" for key, value in net.state_dict().items() if not value.equal(wanted[1][key])]
    return different


# Inductor's code sees no rank: by default one compiles
@pytest.mark.parametrize(
    ("world_size", "backend"), [(2, "aot_eager"), (3, "eager"), (1, "eager"), (2 if FULL else 1, "inductor")]
)
def test_the_bits_of_stage_2_for_every_cap(world_size: int, backend: str) -> None:
    assert run_ranks(stages, world_size, backend, timeout=300.0) == [[]] * world_size


def reads(rank: int, world_size: int) -> list[str]:
    """Job: what reads of parameters outside of forward and backward say, and what a write to whole ones does."""
    net, optimizer = compiled(3, "aot_eager")
    param, said = net.tokens.weight, []
    for read in (lambda: param.norm(), lambda: param.data.sum(), lambda: param.fill_(0.0), lambda: copy.deepcopy(net)):
        with pytest.raises(zc.ZcError, match=r"zc\.whole_parameters"):
            read()
    assert param.shape == (VOCABULARY, DIM) and param.grad is None
    loss = net(torch.zeros(1, 2, dtype=torch.long)).sum()
    asked = [param, *net.head.parameters()]
    if any(grad.shape != p.shape for grad, p in zip(torch.autograd.grad(loss, asked), asked, strict=True)):
        said.append("torch.autograd.grad of parameters without bytes")
    zc.state_dict(net, optimizer)
    with zc.whole_parameters(net):
        param.data.mul_(2.0)
        twice = param.detach().clone()
    with zc.whole_parameters(net):
        if not param.equal(twice):
            said.append("a write to whole parameters was lost")
        net(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
        with pytest.raises(zc.ZcError, match=r"inside zc\.whole_parameters"):
            optimizer.step()
    zc.close(net)
    return said


def test_a_parameter_without_bytes_names_the_way_out() -> None:
    assert run_ranks(reads, 2, timeout=120.0) == [[], []]


def test_a_recompile_inside_whole_parameters_is_refused_before_anything_changes() -> None:
    """It raised at the end of the block, where parameters had no bytes any more."""
    net = nn.Sequential(nn.Linear(DIM, DIM))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    zc.compile(net, optimizer, stage=3, backend="eager")
    net.append(nn.Linear(DIM, DIM))
    optimizer.add_param_group({"params": [*net[1].parameters()]})
    with zc.whole_parameters(net):
        before = net[0].weight.detach().clone()
        with pytest.raises(zc.ZcError, match=r"zc\.recompile .* inside zc\.whole_parameters"):
            zc.recompile(net)
    zc.recompile(net)
    with zc.whole_parameters(net):
        assert torch.equal(net[0].weight, before)
    net(torch.ones(1, DIM)).sum().backward()
    optimizer.step()
    zc.close(net)


def test_a_cap_that_is_too_small_is_refused_with_the_smallest_one() -> None:
    net = Net()
    with pytest.raises(zc.PlanError, match="at least weight_nbytes=2048 is needed"):
        zc.compile(net, torch.optim.SGD(net.parameters()), stage=3, bucket_nbytes=2048, weight_nbytes=1024)
    assert net.tokens.weight.norm() > 0


def test_a_use_that_reads_more_than_the_cap_gets_what_it_reads() -> None:
    """A matmul reads a weight of 1,024 bytes and a bias in a bucket of 1,152; the cap holds either."""
    weights = []
    for options in ({"stage": 2}, {"stage": 3, "weight_nbytes": 1200}):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        zc.compile(net, optimizer, backend="aot_eager", bucket_nbytes=1100, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for update in range(3):
                net(torch.randn(2, DIM, generator=seeded(update))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(zc.full_state_dict(net))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    said = [str(one.message) for one in caught if "weight_nbytes" in str(one.message)]
    assert len(said) == 1 and "weight_nbytes=1200 is too small" in said[0] and "weight_nbytes=2176" in said[0]
    assert "buckets 1 (2.weight, ...), 2 (0.weight, ...) together" in said[0]
    assert said[0].removeprefix("zc: ") in str(zc.explain(net))


def thawed_and_frozen(net: nn.Module, optimizer: torch.optim.Optimizer, compiled: bool) -> None:
    """The third update runs the graph of the first one, for which the frozen layer was no parameter of the plan."""
    for update in range(4):
        if update == 1:
            net[1].requires_grad_(True)
            if compiled:
                zc.recompile(net)
        if update == 2:
            net[1].requires_grad_(False)
        net(torch.randn(4, 6, generator=seeded(0, update)).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            net(torch.ones(2, 6).double())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_parameter_that_is_frozen_again_after_recompile(backend: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)).double()
    net[1].requires_grad_(False)
    twin = copy.deepcopy(net)
    thawed_and_frozen(twin, torch.optim.SGD(twin.parameters(), lr=0.1), compiled=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    zc.compile(net, optimizer, stage=3, backend=backend, bucket_nbytes=1)
    thawed_and_frozen(net, optimizer, compiled=True)
    for name, value in zc.full_state_dict(net).items():
        torch.testing.assert_close(value, twin.state_dict()[name], rtol=1e-12, atol=1e-12)


class Multiplied(nn.Module):
    """Reads a weight beside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) @ self.last.weight


@pytest.mark.parametrize("why", ["force_eager", "eager_on_recompile", "eager_then_compile", "limit", "disable"])
def test_a_forward_that_dynamo_leaves_uncompiled_finds_whole_weights(why: str) -> None:
    """It read weights without bytes: torch's bare error about a storage of size 0."""
    torch.manual_seed(0)
    net = Multiplied()
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, twin)]
    options: dict[str, object] = {"recompile_limit": 1, "automatic_dynamic_shapes": False} if why == "limit" else {}
    with torch._dynamo.config.patch(disable=why == "disable", **options):
        zc.compile(net, optimizers[0], stage=3, backend="aot_eager", bucket_nbytes=1)
        for step in range(4):
            x = torch.randn(3 + step, DIM)
            for each, optimizer in zip((net, twin), optimizers, strict=True):
                with torch.compiler.set_stance(why if step % 2 and "eager" in why else "default"):
                    loss = each(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert "code that Dynamo leaves uncompiled may read" in zc.explain(net).sections["notes"]
    for name, value in zc.full_state_dict(net).items():
        torch.testing.assert_close(value, twin.state_dict()[name])


class Branching(nn.Module):
    """Without blocks. From the third update on its forward leaves the graph and reads another module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.num_calls = 0

    def forward(self, x: Tensor, leaves: bool) -> Tensor:
        y = torch.tanh(self.first(x))
        if leaves:
            torch._dynamo.graph_break()
            y = y + outside(self.last.weight)
        logits: Tensor = self.last(y)
        return logits


@torch._dynamo.disable
def outside(weight: Tensor) -> Tensor:
    return weight.sum(0)


def test_what_eager_code_reads_lies_where_it_was_gathered() -> None:
    """Each parameter has a storage of its own there, and no copy."""
    net = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 4))
    zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=3, backend="eager")
    net(torch.ones(2, DIM))
    (bucket,) = sharded(net).runtime.plan.buckets
    params = dict(net.named_parameters())
    with torch_private.without_torch_function():
        assert len({params[slot.name].data_ptr() - 4 * slot.offset for slot in bucket.slots}) == 1
        assert all(param.untyped_storage().nbytes() == param.nbytes for param in params.values())


def evaluates_whole(rank: int, world_size: int, backend: str) -> list[list[float]]:
    """Job: losses of ranks that exchange messages, without and with an evaluation on rank 0 between two updates."""
    losses: list[list[float]] = []
    for evaluates in (False, True):
        torch._dynamo.reset()
        with environment(ZC_HOST_MEMORY="0"):
            net, optimizer = compiled(3, backend)
        losses.append([])
        for update in range(UPDATES):
            x = torch.randint(0, VOCABULARY, (3, 8), generator=seeded(rank, update))
            loss = F.cross_entropy(net(x).flatten(0, 1), x.flatten())
            loss.backward()
            losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            with zc.whole_parameters(net) if evaluates else nullcontext(), torch.no_grad():
                for _ in range(2 if evaluates and rank == 0 else 0):
                    net(x)
        zc.close(net)
    return losses


def test_rank_0_may_evaluate_alone_inside_whole_parameters() -> None:
    for backend, ranks in run_cases(evaluates_whole, 2, ("eager", "aot_eager")):
        assert all(with_it == without for without, with_it in ranks), backend


def reads_past_the_graph(rank: int, world_size: int, copies: bool) -> list[list[float]]:
    """Job: losses in stage 2 and in stage 3."""
    losses: list[list[float]] = []
    for stage in (2, 3):
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = Branching()
        net, optimizer = zc.compile(net, torch.optim.SGD(net.parameters(), lr=0.1), stage=stage, backend="aot_eager")
        losses.append([])
        for update in range(5):
            x = torch.randn(4, DIM, generator=seeded(rank, update))
            hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone) if copies else nullcontext()
            with hooks:
                loss = net(x, update >= 2 and not copies).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        if stage == 3:
            why = "hooks on what autograd saves" if copies else "code that Dynamo compiles anew"
            assert any(why in note for note in zc.registry.sharded(net).runtime.notes)
        zc.close(net)
    return losses


def test_code_that_reads_parameters_past_the_graph_finds_them_whole() -> None:
    """Of a graph that breaks later, and where saved tensors are copied."""
    for copies, ranks in run_cases(reads_past_the_graph, 2, (False, True)):
        assert all(in_stage_3 == in_stage_2 for in_stage_2, in_stage_3 in ranks), copies


def one_alone(rank: int, world_size: int, backend: str) -> list[float]:
    """Job: rank 0 evaluates between the updates, and rank 1 does not."""
    net, optimizer = compiled(3, backend)
    values = []
    for update in range(3):
        x = torch.randint(0, VOCABULARY, (3, 8), generator=seeded(rank, update))
        F.cross_entropy(net(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            for _ in range(2):
                with torch.no_grad():
                    values.append(net(x).sum().item())
    zc.close(net)
    with torch.no_grad():
        return [*values, net(x).sum().item()] if rank == 0 else []


def test_a_rank_may_evaluate_alone_where_ranks_read_memory() -> None:
    for backend, (values, _) in run_cases(one_alone, 2, ("eager", "aot_eager")):
        assert values[0] == values[1] != values[2] and values[-1] == pytest.approx(values[-2], rel=1e-5), backend


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_second_thread_is_refused_while_the_first_reads_weights(backend: str) -> None:
    """An evaluation in a thread took the arena of a forward or backward: KeyError on one rank alone. Here it begins in
    the middle of a forward of code that is not compiled, and of a backward of code that is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    twin, said = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    zc.compile(net, optimizer, stage=3, backend=backend, bucket_nbytes=1100)

    def use(call: Callable[[], object]) -> None:
        try:
            call()
        except zc.ZcError as error:
            said.append(str(error))

    def begin(*calls: Callable[[], object]) -> None:
        for call in calls:
            thread = threading.Thread(target=use, args=(call,), name="second")
            thread.start()
            thread.join()

    x = torch.randn(2, DIM, requires_grad=True)
    evaluate = torch.no_grad()(lambda: net(x))
    if backend == "eager":
        calls = [evaluate, optimizer.step]  # which end here: the second forward finds none
        net[0].register_forward_hook(lambda *_: begin(*(calls.pop(0) for _ in list(calls))))
    out = net(x)
    if backend != "eager":
        x.register_hook(lambda _: begin(evaluate))
    out.square().sum().backward()
    if backend == "eager":  # a step that is refused leaves no mark of an update
        net[0].weight.data = torch.ones(3)
        with pytest.raises(zc.ZcError, match=r"0.weight is torch.float32 of shape \(3,\)"):
            optimizer.step()
        begin(evaluate)
    optimizer.step()
    begin(evaluate)  # nothing else runs: no error
    in_use = "a forward" if backend == "eager" else "a backward"
    assert len(said) == 1 + (backend == "eager") and "threading.Lock" in said[0], said
    assert said[0].startswith(f"a forward began in thread second, and {in_use}"), said
    assert said[1:] == [text for text in said[1:] if text.startswith("an update or a load began in thread second")]
    twin(x).square().sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    zc.close(net)
    assert all(torch.allclose(ours, plain) for ours, plain in zip(net.parameters(), twin.parameters(), strict=True))


def test_what_another_thread_compiles_is_no_matter_of_a_forward() -> None:
    """This rank alone gathered whole weights then, also for the next forward: ranks that exchange messages were out of
    step."""
    torch._dynamo.reset()
    net = nn.Linear(4, 4)
    zc.compile(net, optimizer := torch.optim.SGD(net.parameters(), lr=0.1), stage=3, backend="aot_eager")
    weights: Any = sharded(net).runtime.weights
    net(torch.ones(1, 4)).sum().backward()  # the first forward may break, and has whole weights
    optimizer.step()

    def breaking(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with weights.forward():
        thread = threading.Thread(target=torch.compile(breaking, backend="eager"), args=[torch.ones(3)])
        thread.start()
        thread.join()
    num_whole, may_break = len(weights.whole.buckets), weights.passes.may_break
    assert (num_whole, may_break) == (0, False)
    zc.close(net)


def dropped(rank: int, world_size: int) -> bool:
    """Job: rank 1 drops its model, and uses as much memory anew, while rank 0 may still read its shards."""
    net, optimizer = compiled(3, "eager")
    x = torch.zeros(1, 2, dtype=torch.long)
    net(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        before = net(x)
    dist.barrier()
    if rank == 1:
        del net, optimizer
        gc.collect()
        gc.collect()  # what the model alone held
        junk = [torch.full((numel,), float("nan")) for numel in range(32, 640, 8) for _ in range(50)]
        dist.barrier()
        return len(junk) > 0
    dist.barrier()
    with torch.no_grad():
        return bool(net(x).equal(before))


def test_a_dropped_model_keeps_what_other_ranks_read() -> None:
    assert run_ranks(dropped, 2, timeout=120.0) == [True, True]
