"""Memory that queued operations use outlives a dropped model: each tensor that a part of zc holds lies in a list that
`Buffers.all_tensors` names, whose streams are recorded then."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from harness import run_cases
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor

import zc
from zc import torch_private
from zc.kernels.blocks import Blocks

# What holds tensors outside of these lists, and why it may.
_ELSEWHERE = {
    "GradShards",  # norms: `hand_to_main` records the stream of whoever asks for them
    "FlatSlice",  # the class's states, which it makes, uses and frees on the stream of the update
    "_Deposit",  # a gradient is used on the stream that made it, until `hand_to_main` has handed it over
}


def test_every_tensor_that_zc_holds_is_in_a_list() -> None:
    cases: list[dict[str, Any]] = [{"stage": stage, "backend": "aot_eager"} for stage in (2, 3)]
    for stage in (1, 2, 3):
        cases += [{"stage": stage, **more} for more in ({}, {"offload": "cpu"}, {"param_dtype": torch.bfloat16})]
    encoded = {"reduce_dtype": torch.int8, "gather_dtype": torch.int8}
    cases += [{"stage": 2, "overlap_gather": True}, {"stage": 2, "overlap_gather": True, **encoded}]
    cases += [{"stage": 3, **encoded}]
    for case, ranks in run_cases(_unlisted, 2, [(case,) for case in cases]):
        assert ranks == ([], []), (case, ranks)


def _unlisted(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    """Job: what zc holds in the middle of an update that uses each part of it, and no list has."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank))  # two hosts, between which bytes may be encoded
        plain = Blocks.pieces
        # the kernels of a GPU read a table; their references on a CPU do not
        patch.setattr(Blocks, "pieces", lambda self, most: self.table(torch.device("cpu")) is None or plain(self, most))
        model: nn.Module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        zc.compile(model, optimizer, bucket_nbytes=1200, **{"backend": "eager", **options})
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        dtype = options.get("param_dtype", torch.float32)
        for _ in range(2):
            for _ in range(2):  # stage 1 moves the first one's gradients aside
                scaler.scale(model(torch.ones(2, 16, dtype=dtype)).float().square().sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        for _ in range(2):
            model(torch.ones(2, 16, dtype=dtype)).float().square().sum().backward()
        torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        sharded = zc.registry.sharded(model)
        assert bool(sharded.runtime.buffers.tables) == ("reduce_dtype" in options)
        assert any(t.numel() for t in sharded.runtime.buffers.spill) == (options["stage"] == 1)
        return list(unlisted(sharded, model))


def unlisted(root: Any, model: nn.Module) -> Iterator[str]:
    """Tensors with memory of their own that ``root`` leads to, without the model's and those that buffers list."""
    with torch_private.without_torch_function():
        lists = root.runtime.buffers.all_tensors
        listed = {_storage(t) for tensors in lists for t in tensors} | {_storage(p) for p in model.parameters()}
        for path, tensor in held(root, [model, *model.parameters()]):
            if _has_memory(tensor) and _storage(tensor) not in listed and _ELSEWHERE.isdisjoint(path.split("/")):
                yield f"{path} {tuple(tensor.shape)}"


def held(root: object, but: Sequence[object]) -> Iterator[tuple[str, Tensor]]:
    """All tensors that are reached through objects of zc and containers, with their way there."""
    seen, todo = {id(each) for each in but}, [(type(root).__name__, root)]
    while todo:
        path, holder = todo.pop()
        for each in gc.get_referents(holder):
            if id(each) in seen or isinstance(each, (type, types.ModuleType, nn.Module, fx.Graph, fx.Node)):
                continue
            seen.add(id(each))
            name = f"{path}/{type(each).__name__}"
            module = type(each).__module__
            if isinstance(each, Tensor):
                yield name, each
            elif isinstance(each, types.FunctionType):
                todo.append((name, (each.__closure__, each.__defaults__, each.__kwdefaults__)))
            elif module.startswith("zc.") or module in ("builtins", "collections", "functools", "types"):
                todo.append((name, each))


def _has_memory(tensor: Tensor) -> bool:
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta" or not tensor.numel():
        return False
    return torch._C._has_storage(tensor) and tensor.untyped_storage().nbytes() > 0 and tensor.data_ptr() != 0


def _storage(tensor: Tensor) -> int:
    return torch_private.storage_number(tensor)


def test_the_walk_finds_a_tensor_of_any_part() -> None:
    model: nn.Module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    sharded: Any = zc.registry.sharded(model)
    assert not list(unlisted(sharded, model))
    for part in (sharded, sharded.runtime, sharded.runtime.accumulators, sharded.runtime.deposits):
        part.kept = {0: (torch.ones(2), functools.partial(print, torch.ones(2)))}
        assert len(list(unlisted(sharded, model))) == 2, part
        del part.kept


def test_a_forward_without_gradients_leaves_no_room_for_whole_weights() -> None:
    """Stage 3: what is saved for a backward stays where it is until the update."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, stage=3, backend="aot_eager")
    arena, sizes = zc.registry.sharded(model).runtime.buffers.arena, []
    for has_grad in (False, True, False):
        with torch.set_grad_enabled(has_grad):
            model(torch.ones(2, 8))
        sizes.append(len(arena))
    assert sizes == [0, 1, 0]
