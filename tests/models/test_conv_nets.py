"""Convolutional nets of random blocks, in both memory formats, train through Inductor as under plain torch.compile.

Inductor gives a forward's saved activations other strides than they were traced with, and which ones is its own affair;
the backward's segments must take them as they come. By default one net runs, that did not, and with ZC_TESTS=full
fifty. The oracle is torch.compile of the same net: the same kernels, so that the difference is zc's alone.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from conv_nets import CLASSES, SIDE, Net
from tiers import FULL
from torch import nn

import zc

KNOWN = (22,)  # max pooling between convolutions
RUNS = tuple(range(50)) if FULL else KNOWN
TOLERANCE = 1e-5


@pytest.mark.parametrize("seed", RUNS)
def test_a_net_trains_as_under_torch_compile(seed: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    rng = random.Random(-1 - seed)
    net = Net(seed)
    if rng.random() < 0.3:
        net = net.to(memory_format=torch.channels_last)
    format_of_input = torch.channels_last if rng.random() < 0.3 else torch.contiguous_format
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=rng.random() < 0.25)
    options = {"stage": rng.choice((1, 2)), "bucket_nbytes": rng.choice((2**10, 2**12, 2**20))}
    options |= {name: rng.random() < 0.2 for name in ("overlap_gather", "write_in_place")}
    sizes = rng.choice(((4, 4), (4, 3)))  # a smaller last batch: its size is a symbol from then on
    if options["overlap_gather"]:
        autocast = torch.autocast("cpu", enabled=False)  # the cuts move where values are rounded to bf16

    other = copy.deepcopy(net)
    optimizer, optimizer_of_other = (torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, other))
    zc.compile(net, optimizer, **options)
    pairs: list[tuple[nn.Module, torch.optim.Optimizer]] = [(net, optimizer)]
    pairs.append((torch.compile(other), optimizer_of_other))  # type: ignore[arg-type]
    for size in sizes:
        x = torch.randn(size, 3, SIDE, SIDE).to(memory_format=format_of_input)
        y = torch.randint(CLASSES, (size,))
        for model, its_optimizer in pairs:
            with autocast:
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            its_optimizer.step()
            its_optimizer.zero_grad()

    sections = zc.explain(net).sections
    assert any(title.startswith("schedule backward") for title in sections), f"{net.what}: {sections['compilation']}"
    # a bias before a norm has a gradient of rounding alone: the scale is the net's
    scale = max(float(p.norm()) for p in other.parameters())
    for (name, mine), wanted in zip(net.named_parameters(), other.parameters(), strict=True):
        off = float((mine - wanted).norm()) / scale
        assert off <= TOLERANCE, f"{net.what}: {name} is {off:.1e} of the net's scale off, with {options}"
