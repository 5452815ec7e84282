"""Parameters that have replaced others under their names: what becomes of the old ones, and what ranks may not do.
tests/compatibility/rows_replaced.py trains such models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import GPT, Block, Stack, mean_square, mlp, seeded
from torch import nn

import zc

BUCKET = 4096  # all parameters of the model share two


def made(stage: int, backend: str = "eager") -> tuple[Stack, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(depth=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zc.compile(model, optimizer, stage=stage, backend=backend, bucket_nbytes=BUCKET)
    return model, optimizer


def layer(seed: int = 7) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(16, 16)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x = torch.randn(4, 16, generator=seeded(dist.get_rank(), step))
    mean_square(model, (x, x.flip(0))).backward()
    optimizer.step()
    optimizer.zero_grad()


def _replace(rank: int, world_size: int, stage: int, folder: str) -> dict[str, Any]:
    model, optimizer = made(stage)
    update(model, optimizer, 0)
    before = zc.full_state_dict(model)
    old = model[2]
    model[2] = layer(7 + rank)  # rank 0's values become those of all ranks
    optimizer.add_param_group({"params": list(model[2].parameters())})
    zc.recompile(model)
    kept = all(torch.equal(p.detach(), before[f"2.{n}"]) for n, p in old.named_parameters()) if rank == 0 else True
    shapes = {(type(p), p.untyped_storage().nbytes() // p.nbytes) for p in old.parameters()}
    (old(torch.ones(1, 16)).sum() * 2).backward()
    own = old.weight.grad is not None and bool((old.weight.grad == 2).all())  # a plain gradient, in nobody's bucket
    update(model, optimizer, 1)
    numel = sum(v.numel() for state in optimizer.state.values() for v in state.values() if v.dim() > 0)
    zc.save(folder, model, optimizer)

    torch.manual_seed(1)
    other = mlp(depth=3)
    last = list(other[2].parameters())
    first = [p for p in other.parameters() if all(p is not q for q in last)]
    again = torch.optim.AdamW([{"params": first}, {"params": last}], lr=1e-2)
    zc.compile(other, again, stage=2, backend="eager")
    zc.load(folder, other, again)
    update(model, optimizer, 2)
    update(other, again, 2)
    ours, theirs = zc.full_state_dict(model), zc.full_state_dict(other)
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs) and ours.keys() == theirs.keys()
    return {"kept": kept, "shapes": shapes, "own": own, "numel": numel, "same": same}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_old_parameter_is_a_plain_one_and_the_optimizer_keeps_nothing_of_it(stage: int, tmp_path: Path) -> None:
    ranks = run_ranks(_replace, 2, stage, str(tmp_path / "saved"))
    for seen in ranks:
        assert seen["kept"] and seen["own"] and seen["same"]
        assert seen["shapes"] == {(nn.Parameter, 1)}, "its memory is its own"
        # the caller sees whole shapes on every rank
        assert seen["numel"] == 2 * 3 * (16 * 16 + 16), "two moments of what the model has, none of what it had"


def _differ(rank: int, world_size: int) -> str:
    model, optimizer = made(2)
    if rank == 0:
        model[2] = layer()
        optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(zc.RankMismatchError) as error:
        zc.recompile(model)
    return str(error.value)


def test_ranks_that_replace_other_parameters_get_an_error() -> None:
    for text in run_ranks(_differ, 2):
        assert "2.weight was replaced" in text


def test_errors_have_the_names_of_now() -> None:
    """They had those of before a layer was put into another module."""
    torch.manual_seed(0)
    model, x = mlp(depth=3), torch.ones(4, 16)
    optimizer = torch.optim.Adam(model.parameters())
    zc.compile(model, optimizer, backend="eager", param_dtype=torch.bfloat16)
    model[2] = nn.Sequential(model[2])
    zc.recompile(model)
    param = model[2][0].weight

    def train() -> None:
        mean_square(model, (x.bfloat16(), x.bfloat16())).backward()
        optimizer.step()

    def steps_elsewhere() -> None:
        param.data = torch.zeros(3)
        optimizer.step()

    train()
    grad = param.grad
    optimizer.zero_grad()
    train()
    def has_a_hook() -> None:
        optimizer.zero_grad()
        param.register_post_accumulate_grad_hook(print)
        train()

    wrong: list[Any] = [
        lambda: grad.norm(),
        lambda: param.grad.tolist(),
        lambda: optimizer.state[param].update(exp_avg=torch.zeros(3)),
        lambda: setattr(param, "grad", torch.zeros_like(param)) or optimizer.step(),
        has_a_hook,
        steps_elsewhere,
    ]
    for call in wrong:
        with pytest.raises(zc.ZcError) as caught:
            call()
        assert "2.0.weight" in str(caught.value), caught.value


def _refuse(rank: int, world_size: int, stage: int, folder: str) -> list[str]:
    model, optimizer = made(stage)
    errors = []

    def refused(error: type[Exception], call: Any, *args: Any) -> None:
        with pytest.raises(error) as caught:
            call(*args)
        errors.append(str(caught.value))

    old = model[2]
    model[2] = layer()
    refused(zc.ZcError, zc.save, folder, model, optimizer)
    refused(zc.PlanError, zc.recompile, model)  # no optimizer has it
    model[2] = old
    update(model, optimizer, 0)
    model[0], model[2] = model[2], model[0]
    refused(zc.ZcError, update, model, optimizer, 1)
    model[0], model[2] = model[2], model[0]
    optimizer.zero_grad()
    update(model, optimizer, 1)
    if stage < 3:
        model.load_state_dict({name: torch.zeros_like(p) for name, p in model.state_dict().items()}, assign=True)
        refused(zc.ZcError, update, model, optimizer, 2)
    return errors


@pytest.mark.parametrize("stage", [2, 3])
def test_a_replaced_parameter_is_refused_by_name_until_it_has_a_place(stage: int, tmp_path: Path) -> None:
    for saved, lacking, swapped, *assigned in run_ranks(_refuse, 2, stage, str(tmp_path / "saved")):
        assert "parameter 2.weight is another one now: it was (16, 16) torch.float32" in saved
        assert "the optimizer lacks 2 trainable parameter(s)" in lacking
        assert "0.weight is another one now" in swapped and "under another name" in swapped
        assert len(assigned) == (stage < 3) and all("assign=True" in text for text in assigned)


@pytest.mark.parametrize("stage", [2, 3])
def test_blocks_may_share_a_layer_later_and_new_ones_come_before_them(stage: int) -> None:
    """The graph of the blocks' kind raised, in the middle of the forward, and new blocks were refused."""
    torch.manual_seed(0)
    model, x = GPT(dim=16, layers=4), torch.arange(8).view(1, 8)
    twin, new = copy.deepcopy(model), [Block(16) for _ in range(2)]
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    zc.compile(model, optimizer, backend="aot_eager", stage=stage)
    model(x)
    for step in range(3):
        for each, one in ((model, optimizer), (twin, plain)):
            if step == 0:
                each.blocks[0].attention.out = each.blocks[2].attention.out
            else:
                each.blocks.insert(0, copy.deepcopy(new[step - 1]))
                one.add_param_group({"params": list(each.blocks[0].parameters())})
            if each is model:
                zc.recompile(model)
            each(x).square().mean().backward()
            one.step()
            one.zero_grad()
        torch.testing.assert_close(zc.full_state_dict(model), twin.state_dict(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "options", "frozen"),
    [
        ((2, 0), {"overlap_gather": True}, ()),  # KeyError after the update, before its gathers
        ("wraps", {}, ()),  # it was taken for a frozen one, and each step asked for zc.recompile
        ("replaces", {"backend": "aot_eager"}, ()),  # the new one got the old one's gradient, too
        ("replaces", {"backend": "aot_eager", "stage": 3}, ()),  # and the backward read the new one's values
        ("replaces", {"backend": "aot_eager", "stage": 3}, (2,)),  # KeyError
        ("freezes", {"backend": "aot_eager"}, ()),  # KeyError
        ("trains", {"backend": "aot_eager", "stage": 3}, (2,)),  # the backward read the new one's values
        ("unfreezes", {"backend": "aot_eager", "shard_frozen": True}, (2,)),  # IndexError: no weights are sharded now
        ((0, 2), {"stage": 3}, (0,)),  # the other one was taken for a frozen one, as it comes later
        ((0, 2), {"shard_frozen": True}, (0,)),
        ((2, 0), {"shard_frozen": True}, (0,)),  # the rest of its bucket was gathered from shards that there are not
        ("wraps", {"stage": 3}, (2,)),  # and unfreezes: its old and new name were said to share memory
        ("swaps", {"backend": "aot_eager"}, ()),  # these two were refused
        ("deletes", {"stage": 3}, ()),
        ("moves", {}, ()),
        ("prunes", {"backend": "aot_eager"}, ()),  # its state stayed in the checkpoint, which no such model took
    ],
)
def test_a_parameter_leaves_moves_or_stays_while_a_forward_waits_for_its_backward(
    change: str | tuple[int, int], options: dict[str, Any], frozen: tuple[int, ...], tmp_path: Path
) -> None:
    """``change``: of the last layer, to one that is frozen ("freezes"), or not ("trains"), or as it was ("replaces");
    or two layers: the weight of the first becomes that of the second. A checkpoint has the names of after it (it had
    those of before), so a fresh copy of the model goes on from there."""
    torch.manual_seed(0)
    model, x = mlp(depth=3), torch.ones(4, 16)
    for k in frozen:
        model[k].weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin)]
    zc.compile(model, optimizers[0], **({"backend": "eager"} | options))
    losses = [mean_square(each, (x, x)) for each in (model, twin)]
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        if isinstance(change, tuple):
            each[change[0]].weight = each[change[1]].weight
            continue
        if change in ("swaps", "moves"):
            each[0], each[2] = each[2], each[0]
        if change == "swaps":
            continue
        if change == "prunes":
            del each[2]
            continue
        if change == "deletes":
            each[2] = each[4]
            del each[4]
            continue
        if change == "unfreezes" or (change == "wraps" and frozen):
            each[2].requires_grad_()
        if change == "unfreezes":
            continue
        place = 0 if change == "moves" else 2  # a new layer in the place of one that the model still has
        each[place] = nn.Sequential(each[2], layer()) if change == "wraps" else layer()
        if change == "freezes" or (change == "replaces" and frozen):
            each[2].weight.requires_grad_(False)
        optimized = {id(param) for group in optimizer.param_groups for param in group["params"]}
        optimizer.add_param_group({"params": [p for p in each[place].parameters() if id(p) not in optimized]})
    zc.recompile(model)
    for each, optimizer, loss in zip((model, twin), optimizers, losses, strict=True):
        (loss + mean_square(each, (x, x))).backward()
        optimizer.step()
        optimizer.zero_grad()
    zc.save(tmp_path / "saved", model, optimizers[0])
    fresh, names = copy.deepcopy(twin), {id(param): name for name, param in twin.named_parameters()}
    params, groups = dict(fresh.named_parameters()), optimizers[1].param_groups
    assert zc.full_grad(model).keys() == {name for name, param in params.items() if param.requires_grad}
    kept = [{"params": [params[names[id(p)]] for p in group["params"] if id(p) in names]} for group in groups]
    optimizers.append(torch.optim.SGD(kept, lr=0.1, momentum=0.9))
    zc.compile(fresh, optimizers[2], backend="eager")
    zc.load(tmp_path / "saved", fresh, optimizers[2])
    for each, optimizer in zip((model, twin, fresh), optimizers, strict=True):
        mean_square(each, (x, x)).backward()
        optimizer.step()
    theirs = twin.state_dict()
    for ours in map(zc.full_state_dict, (model, fresh)):
        assert ours.keys() == theirs.keys() and all(torch.allclose(ours[name], theirs[name]) for name in theirs)
