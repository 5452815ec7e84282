"""Stage 3: load_state_dict of whole tensors, against a plain model in one process that loads the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from models import seeded
from tiers import full_cases
from torch import Tensor, nn

import zc
from zc.registry import sharded


class Net(nn.Module):
    """A tied weight, a frozen one, a buffer, memory in channels_last, and shapes that shards cut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm, self.tied = nn.GroupNorm(1, 3), nn.Linear(7, 7, bias=False)
        self.register_buffer("scale", torch.rand(7))
        self.twin, self.frozen, self.head = self.tied, nn.Linear(7, 5).requires_grad_(False), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).mean((1, 2)) * self.get_buffer("scale").to(x.dtype)
        out: Tensor = self.head(self.frozen(self.twin(torch.tanh(self.tied(y)))))
        return out


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def values(number: int) -> dict[str, Tensor]:
    """A state of a plain model, with other values."""
    torch.manual_seed(number)
    return {key: value.clone() for key, value in Net().state_dict().items()}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    for number in range(first, first + 2):
        model(torch.randn(4, 2, 5, 7, generator=seeded(number))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def loads(rank: int, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Job: a whole state, a part of one, and a submodule's, each between updates; the plain model does the same. All
    ranks have the same batch, so that means over 2 and 4 are exact."""
    narrow, plain, model = options.get("param_dtype"), net(), net()
    alone = torch.optim.SGD((p for p in plain.parameters() if p.requires_grad), lr=0.01, momentum=0.9)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01, momentum=0.9)
    zc.compile(model, optimizer, stage=3, bucket_nbytes=64, backend="eager", **options)
    different = []

    def compare(when: str) -> None:
        whole = zc.full_state_dict(model)
        for key, value in plain.state_dict().items() if rank == 0 else ():
            is_narrow = narrow is not None and key != "scale" and not key.startswith("frozen")
            wanted = value.to(narrow) if is_narrow else value
            if not torch.equal(whole[key], wanted):
                different.append((when, key))

    for number, part in enumerate(("", "head.", "conv.")):
        state = values(number + 1)
        for one in (plain, model):
            if narrow is None:
                steps(one, optimizer if one is model else alone, 2 * number)
            if part == "head.":
                one.load_state_dict({key: value for key, value in state.items() if part in key}, strict=False)
            elif part:
                one.get_submodule(part[:-1]).load_state_dict(
                    {key.removeprefix(part): value for key, value in state.items() if key.startswith(part)}
                )
            else:
                one.load_state_dict(state)
        if rank == 0:  # alone: the others wait below, and let it read their shards
            with torch.no_grad(), torch.autocast("cpu", narrow, enabled=narrow is not None):
                model(torch.randn(1, 2, 5, 7, dtype=narrow))
        dist.barrier()
        compare(part or "whole")
        if narrow is not None:  # an update that changes nothing: weights come from the masters
            with torch.autocast("cpu", narrow):
                (0 * model(torch.randn(4, 2, 5, 7, dtype=narrow)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            compare(f"{part}, masters")
        with torch.no_grad(), zc.whole_parameters(model):
            x = torch.randn(4, 2, 5, 7, generator=seeded(9))
            if narrow is None and not torch.equal(plain(x), model(x)):
                different.append((part, "outputs"))
    masters = [bucket.has_master for bucket in sharded(model).runtime.plan.buckets]
    zc.close(model)
    return {"different": different, "masters": any(masters)}


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, {}), (4, {}), (2, {"offload": "cpu"}), (3, {"param_dtype": torch.bfloat16})]
)
@full_cases("4-options1", "2-options2")
def test_a_plain_model_that_loads_the_same_has_the_same_bits(world_size: int, options: dict[str, Any]) -> None:
    for seen in run_ranks(loads, world_size, options, timeout=90.0):
        assert seen == {"different": [], "masters": "param_dtype" in options}


def refused() -> tuple[nn.Module, dict[str, Tensor]]:
    model = net()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.01)
    zc.compile(model, optimizer, stage=3, backend="eager")
    return model, values(4)


def test_what_cannot_be_loaded_is_named() -> None:
    model, state = refused()
    with pytest.raises(zc.ZcError, match=r"load_state_dict\(assign=True\) .* conv\.weight"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="size mismatch for head"):
        model.load_state_dict({"head.weight": torch.zeros(4, 5)}, strict=False)
    with pytest.raises(zc.ZcError, match=r"zc\.whole_parameters"), torch.no_grad():
        model.head.weight.copy_(torch.zeros(3, 5))
    model.load_state_dict(state)
    assert torch.equal(zc.full_state_dict(model)["head.weight"], state["head.weight"])
    zc.close(model)


def test_a_backward_through_a_forward_of_before_fails_as_in_plain_pytorch() -> None:
    model, state = refused()
    loss = model(torch.randn(4, 2, 5, 7)).sum()
    model.load_state_dict(state)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    zc.close(model)
