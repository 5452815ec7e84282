"""How a compiled model ends: zc.close, a model that is dropped, and copies, which are plain modules."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Script, run_ranks
from models import mean_square, mlp, vectors
from oracle import weights
from tiers import FULL, full_only
from torch import nn
from torch.distributed.checkpoint import state_dict as stock
from torch.distributed.device_mesh import init_device_mesh
from training_runs import adamw, environment, message_of

import zc

NUM = 200 if FULL else 4


def held_open() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def threads_of_zc() -> set[threading.Thread]:
    """A rank that was out of step in an earlier job keeps the thread that waits for an abandoned group."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("zc ")}


def wait_until(condition: Callable[[], bool]) -> bool:
    """Two seconds at most: a thread ends a moment after it was told to."""
    end = time.monotonic() + 2
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def nothing_left(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Fewer is right, too: a thread of an earlier job in this process may end in between."""
    return after[0] <= before[0] and after[1] <= before[1]


def trained(rank: int, steps: int = 1, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    model, optimizer = zc.compile(model, adamw(model), **{"backend": "eager", "bucket_nbytes": 512, **options})
    for step in range(steps):
        mean_square(model, vectors()(rank, step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _many(rank: int, world_size: int, how: str, num: int) -> tuple[Any, Any, Any]:
    """Job: descriptors and threads before, while ``num`` models came and went, and after the last is closed."""
    torch.ones((), requires_grad=True).backward()  # torch's threads for devices stay: a build for CUDA starts 8 of them
    before = held_open()
    most = (0, 0)
    for k in range(num):
        model, optimizer = trained(rank, stage=1 + k % 2)
        if how == "close":
            zc.close(model)
        elif rank == 0 and k % 3 == 0:  # a cycle: on this rank the collector comes later
            model.cycle = model
        del model, optimizer
        if rank == 1 or k % 2:
            gc.collect()
        held = held_open()
        end = time.monotonic() + 2
        while how == "close" and held[0] > before[0] and time.monotonic() < end:
            held = min(held, held_open())  # a file of another thread was open at the first look
        most = max(most, held)
    model, _ = trained(rank)
    zc.close(model)
    zc.close(model)  # nothing more to do
    wait_until(lambda: nothing_left(before, held_open()))
    return before, most, held_open()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_models_come_and_go(how: str) -> None:
    """Each zc.compile left 10 descriptors and 6 threads, and 100 of them reached the limit of
    1,024."""
    for before, most, after in run_ranks(_many, 2, how, NUM, timeout=600.0 if NUM > 100 else 120.0):
        assert nothing_left(before, after), f"descriptors and threads {before} before, {after} after"
        assert most[0] - before[0] <= (0 if how == "close" else 60), "at most a few models' groups wait for their end"


def _plain_again(rank: int, world_size: int, backend: str, options: dict[str, Any]) -> None:
    """Job: a closed model is a module like any other, and its optimizer says that it is none."""
    before = threads_of_zc()
    model, optimizer = trained(rank, 3, backend=backend, **options)
    mean_square(model, vectors()(rank, 9, 0)).backward()  # a gradient that no step takes
    at_close = weights(model)
    before_close = [param.detach() for param in model.parameters()]  # while these live, nobody else gets their memory
    x, y = vectors()(0, 10, 0)
    with torch.no_grad():
        wanted = model(x)
    zc.close(model)
    if options.get("overlap_gather"):
        assert not any(module._forward_pre_hooks or module._state_dict_pre_hooks for module in model.modules())
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter and param.grad is None and torch.equal(param, at_close[name])
        assert param.data_ptr() not in {tensor.data_ptr() for tensor in before_close}, "memory of its own"
    assert wait_until(lambda: threads_of_zc() <= before) and torch.allclose(model(x), wanted, atol=1e-6)
    with pytest.raises(zc.PlanError, match="was not compiled"):
        zc.full_grad(model)
    with pytest.raises(zc.ZcError, match="make a new optimizer"):
        optimizer.step()
    F.mse_loss(model(x), y).backward()  # plain PyTorch: no hook of zc's takes the gradient away
    assert all(type(param.grad) is torch.Tensor for param in model.parameters())
    model.zero_grad()
    again = adamw(model)
    assert not hasattr(model, "require_backward_grad_sync")
    model.require_backward_grad_sync = True  # the model's own, which zc.close took away, too
    zc.compile(model, again, backend=backend, bucket_nbytes=512, **options)
    F.mse_loss(model(vectors()(rank, 11, 0)[0]), y).backward()
    again.step()
    zc.synchronize(model)
    assert not torch.equal(next(model.parameters()), next(iter(at_close.values())))
    zc.close(model)
    assert vars(model)["require_backward_grad_sync"]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("eager", {"offload": "cpu"}),
        ("aot_eager", {"overlap_gather": True, "stage": 1}),
        pytest.param("inductor", {}, marks=full_only),
    ],
    ids=str,
)
def test_a_closed_model_is_a_plain_module(backend: str, options: dict[str, Any]) -> None:
    run_ranks(_plain_again, 2, backend, options)


def _keeps_its_optimizer(rank: int, world_size: int, backend: str, options: dict[str, Any]) -> tuple[int, int]:
    """Job: how many masters and states there were, and are left of a closed model whose optimizer a scheduler keeps."""
    model, optimizer = trained(rank, 2, backend=backend, **options)
    scheduler, kept_state_dict = torch.optim.lr_scheduler.StepLR(optimizer, 1), optimizer.state_dict
    kept = [optimizer.step, optimizer.zero_grad, partial(optimizer.load_state_dict, {})]
    kept += [partial(optimizer.add_param_group, {"params": list(model.parameters())})]
    one = zc.registry.sharded(model).optimizers[0]
    items = [item for state in one.local.state.values() for item in state.values()]
    alive = [weakref.ref(tensor) for tensor in (*one.slices.values(), *items)]
    del items
    zc.close(model)
    scheduler.step()
    for _ in range(2):  # while compiled code may still refer to zc's part of the optimizer, and afterwards
        for method in (optimizer.step, *kept):
            with pytest.raises(zc.ZcError, match="make a new optimizer"):
                method()
        assert kept_state_dict() == optimizer.state_dict() and set(kept_state_dict()) == {"state", "param_groups"}
        one = None
        gc.collect()
    return len(alive), sum(reference() is not None for reference in alive)


@pytest.mark.parametrize(
    ("backend", "options"), [("aot_eager", {}), ("eager", {"stage": 3}), ("eager", {"offload": "cpu"})], ids=str
)
def test_a_closed_model_leaves_no_memory_in_an_optimizer_that_is_kept(backend: str, options: dict[str, Any]) -> None:
    for before, after in run_ranks(_keeps_its_optimizer, 2, backend, options):
        assert before >= 8 and not after


def _after_a_failure(rank: int, world_size: int) -> str:
    """Job: rank 1 has left the loop; what rank 0 is told. Its close returns."""
    before = threads_of_zc()
    with environment(ZC_RANK_TIMEOUT="2"):
        model, optimizer = trained(rank)
    mean_square(model, vectors()(rank, 1, 0)).backward()
    text = ""
    if rank == 0:
        try:
            optimizer.step()
        except zc.ZcError as error:
            text = f"{type(error).__name__}: {error}"
        zc.close(model)
        assert wait_until(lambda: threads_of_zc() <= before)
    dist.barrier()  # rank 1 stands here, and so is no rank to wait for
    return text


def test_close_does_not_wait_for_ranks_that_are_lost() -> None:
    """Groups on which a collective never ends stay: gloo's destructor would wait for it."""
    assert "RankMismatchError" in run_ranks(_after_a_failure, 2, timeout=60.0)[0]


def _in_a_backward(rank: int, world_size: int, mesh: tuple[int, int] | None) -> None:
    """Job: in no_sync a backward raises on the last rank, when all have agreed to reduce it. Then all close."""
    model = mlp()
    device_mesh = init_device_mesh("cpu", mesh) if mesh is not None else None
    zc.compile(model, adamw(model), backend="eager", bucket_nbytes=64, stage=2, mesh=device_mesh)
    with zc.no_sync(model):
        for step in range(2):
            x, _ = vectors()(rank, step, 0)
            x.requires_grad_(True)
            hidden = model[0](x)
            if rank == world_size - 1 and step == 1:
                hidden.register_hook(_fail)
            with contextlib.suppress(FloatingPointError):
                model[1:](hidden).square().mean().backward()
    zc.close(model)


def _fail(_: torch.Tensor) -> None:
    raise FloatingPointError("planted")


@pytest.mark.parametrize("mesh", [None, (3, 1)])
def test_a_rank_that_closes_after_its_backward_raised_does_its_part(mesh: tuple[int, int] | None) -> None:
    """Ranks were out of step: the last one in zc.close, the others in a reduction that it had agreed to."""
    run_ranks(_in_a_backward, 3 if mesh else 2, mesh, timeout=60.0)


def _group_of_the_callers(rank: int, world_size: int) -> None:
    """Job: a model that one rank has dropped and the other still holds does not change how ranks name groups."""
    model, optimizer = trained(rank)
    if rank == 0:
        del model, optimizer
        gc.collect()
    group = dist.new_group([0, 1], use_local_synchronization=True)
    dist.all_reduce(torch.ones(1), group=group)
    second, _ = trained(rank)  # asks who has dropped what
    zc.close(second)
    dist.destroy_process_group(group)


def test_groups_of_the_caller_are_named_alike() -> None:
    run_ranks(_group_of_the_callers, 2)


def _without_default_group(rank: int, world_size: int, folder: str) -> list[tuple[str, str]]:
    """Job: the program has destroyed the default group, and makes another one later."""
    model, optimizer = trained(rank)
    dist.destroy_process_group()
    said = [
        message_of(lambda: zc.save(f"{folder}/early", model, optimizer)),
        message_of(lambda: zc.full_optimizer_state(model, optimizer)),
        message_of(lambda: stock.get_optimizer_state_dict(model, optimizer)),
        message_of(lambda: zc.load(f"{folder}/early", model, optimizer)),
    ]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    zc.save(f"{folder}/late", model, optimizer)
    zc.load(f"{folder}/late", model, optimizer)
    zc.full_optimizer_state(model, optimizer)
    another, its_optimizer = trained(rank)  # its groups have other names than those that the first one has just made
    zc.load(f"{folder}/late", another, its_optimizer)
    return said


def test_a_destroyed_default_group_is_named_with_the_way_out(tmp_path: Path) -> None:
    for said in run_ranks(_without_default_group, 2, str(tmp_path)):
        for name, text in said:
            assert name == "ZcError" and "has destroyed the default process group" in text, said
            assert "init_process_group again" in text, said


def _saved_whole(rank: int, world_size: int, folder: str, backend: str) -> list[str]:
    """Job: what copies of a compiled model say, and that they train like any module."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, _ = trained(rank, backend=backend)
        path = f"{folder}/{rank}.pt"
        average = copy.deepcopy(model)
        torch.save(model, path)
        shallow = copy.copy(model)
        shallow.eval()
        torch.save(average, f"{path}.average")
        torch.load(f"{path}.average", weights_only=False)
        zc.close(model)
        torch.save(model, f"{path}.closed")
        torch.load(f"{path}.closed", weights_only=False)
        assert not [w for w in said if "saved whole" in str(w.message)], "copies, and what is saved of them, are silent"
        loaded = torch.load(path, weights_only=False)
    for module in (loaded, average):
        mean_square(module, vectors()(rank, 1, 0)).backward()
        assert all(type(param.grad) is torch.Tensor for param in module.parameters())
    loaded.zero_grad()
    module, _ = zc.compile(loaded, adamw(loaded), backend="eager")
    mean_square(module, vectors()(rank, 1, 0)).backward()
    zc.close(module)
    return [str(w.message) for w in said if "saved whole" in str(w.message)]


WITHOUT_ZC = """
import os, sys, torch
sys.path[:0] = sys.argv[2].split(os.pathsep)
sys.modules.update({name: None for name in sys.modules if name.partition(".")[0] == "zc"})
torch.load(sys.argv[1], weights_only=False)
"""


def test_a_model_that_was_saved_whole_says_what_it_is(tmp_path: Path) -> None:
    """torch.save(model), torch.load, train: no gradient was reduced, and nothing said so."""
    for said in run_ranks(_saved_whole, 2, str(tmp_path), "eager"):
        assert len(said) == 1 and "zc.compile(model, optimizer)" in said[0]
    # where zc is not installed, too
    script = Script(WITHOUT_ZC, tmp_path / "0.pt", os.pathsep.join(sys.path))
    assert "saved whole" in script.read() and script.exit_code() == 0, script.text
    script.close()


def _until(path: Path) -> None:
    """As a program that has other things to do, outside of zc and of collectives."""
    while not path.exists():
        time.sleep(0.01)


def _drops_and_idles(rank: int, world_size: int, how: str, folder: str) -> str:
    """Job: rank 0 has a backward less, drops its model, and idles until rank 1 has its error. Python's collector alone
    can free the model: it is in a cycle, or a stream still has a task of it when the program calls the collector. Or it
    keeps the model, and destroys the group."""
    with environment(ZC_RANK_TIMEOUT="4"):
        model, optimizer = trained(rank)
    done, text = Path(folder, "done"), ""
    if rank == 0 and how == "group":
        dist.destroy_process_group()
        _until(done)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the harness
    elif rank == 0:
        of_model, may_end = weakref.ref(model), threading.Event()
        if how == "stream":
            runtime = zc.registry.sharded(model).runtime
            runtime.streams.run_on("comm", lambda held=model, runtime=runtime: may_end.wait())  # type: ignore[misc]
            del runtime
        else:
            gc.collect()
            model.cycle = model
        del model, optimizer
        if how == "stream":
            gc.collect()
        may_end.set()
        if how == "cycle":
            assert of_model() is not None
        _until(done)
    else:
        try:
            mean_square(model, vectors()(rank, 1, 0)).backward()
        except zc.ZcError as error:
            text = f"{type(error).__name__}: {error}"
        done.touch()
    return text


@pytest.mark.parametrize("how", ["cycle", "stream", "group"])
def test_a_rank_that_idles_without_its_model_or_group_keeps_nobody_waiting(how: str, tmp_path: Path) -> None:
    """The second is program 730077 of the fuzzer: rank 1 waited without end."""
    text = run_ranks(_drops_and_idles, 2, how, str(tmp_path), timeout=60.0)[1]
    why = "has called torch.distributed.destroy_process_group()" if how == "group" else "it closed or dropped its"
    assert "RankLostError: rank 0" in text and why in text, text


def _raises_and_idles(rank: int, world_size: int, folder: str) -> str:
    """Job: a backward raises on rank 0, whose program catches that, keeps the model and does something else."""
    with environment(ZC_RANK_TIMEOUT="4"):
        model, optimizer = trained(rank)
    done, text = Path(folder, "done"), ""
    x, _ = vectors()(rank, 1, 0)
    hidden = model[0](x.requires_grad_(True))
    if rank == 0:
        hidden.register_hook(_fail)
        with pytest.raises(FloatingPointError):
            model[1:](hidden).square().mean().backward()
        _until(done)
    else:
        try:
            model[1:](hidden).square().mean().backward()
            optimizer.step()
        except zc.ZcError as error:
            text = f"{type(error).__name__}: {error}"
        done.touch()
    return text


def test_a_program_that_stops_after_a_backward_that_raised_keeps_nobody_waiting(tmp_path: Path) -> None:
    text = run_ranks(_raises_and_idles, 2, str(tmp_path), timeout=60.0)[1]
    assert "RankLostError: rank 0" in text and "a backward raised there" in text and "zero_grad()" in text, text


def _close_inside(rank: int, world_size: int, stage: int) -> tuple[str, bool, bool]:
    """Job: what zc.close says inside zc.whole_parameters; whether the weights are what was written there; and whether
    the model is plain after the next close."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager", stage=stage)
    with zc.whole_parameters(model):
        for param in model.parameters():
            param.data.fill_(2.0)
        _, said = message_of(lambda: zc.close(model))
    if said:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.zero_grad()
        zc.close(model)
    are_written = all(bool((param == 2.0).all()) for param in model.parameters())
    return said, are_written, all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.parametrize(("stage", "words"), [(2, ""), (3, "leave it before you close the model")])
def test_close_inside_whole_parameters_loses_no_weights(stage: int, words: str) -> None:
    """In stage 3 the end of the block then wrote into shards that were gone, and left parameters without bytes."""
    for said, are_written, are_plain in run_ranks(_close_inside, 2, stage):
        assert said.endswith(words) and bool(said) == bool(words) and are_written and are_plain
