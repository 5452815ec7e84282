"""The pass of CONTRIBUTING.md, docs/examples/add_a_pass.py: what it does to gradients, the contract, and the proof."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from graphs import chain, plan_for
from torch import fx, nn

import zc
from zc.passes import pipeline as order
from zc.passes import tag_gradients
from zc.passes.base import Pass
from zc.passes.pipeline import pipeline

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "add_a_pass.py"
NAMES = runpy.run_path(str(EXAMPLE))
PASS, LIMIT = NAMES["PASS"], NAMES["LIMIT"]


def gradients(step: Pass, stage: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The gradients of one step with the pass after tag_gradients, and plain PyTorch's."""

    def longer(**options: Any) -> tuple[Pass, ...]:
        first, *others = pipeline(**options)
        return (first, step, *others)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    (2 * model(x)).mean().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with mock.patch.object(order, "pipeline", longer):
        optimizer = torch.optim.SGD(model.parameters())
        model, optimizer = zc.compile(model, optimizer, stage=stage, backend="aot_eager", bucket_nbytes=256)
        (2 * model(x)).mean().backward()
    return zc.full_grad(model), plain


@pytest.mark.parametrize("stage", [1, 2])
def test_the_pass_clamps_every_gradient(stage: int) -> None:
    compiled, plain = gradients(PASS, stage)
    assert any(grad.abs().max() > 2 * LIMIT for grad in plain.values())
    for name, grad in plain.items():
        torch.testing.assert_close(compiled[name], grad.clamp(-LIMIT, LIMIT), atol=1e-7, rtol=1e-5)


def test_the_proof_refuses_a_value_that_is_no_gradient() -> None:
    def forgets(graph: fx.Graph, plan: Any) -> fx.Graph:
        new = PASS.run(graph, plan)
        for node in new.nodes:
            if node.target is NAMES["CLAMP"]:
                del node.meta["gradient_of"]
        return new

    with pytest.raises(zc.RaceError, match=r"takes %\w+ for the gradient of bucket 1, slot 0"):
        gradients(PASS._replace(run=forgets), 2)


def test_the_pass_keeps_the_contract() -> None:
    graph, names = chain(3)
    plan = plan_for(names)
    tagged = tag_gradients.run(graph, plan)
    before = str(tagged)
    once = PASS.run(tagged, plan)
    assert str(tagged) == before and str(once).count("aten.clamp") == 3
    assert str(PASS.run(once, plan)) == str(once)


def test_the_page_names_the_file_and_it_is_short() -> None:
    page = (EXAMPLE.parents[2] / "CONTRIBUTING.md").read_text()
    assert "docs/examples/add_a_pass.py" in page and len(EXAMPLE.read_text().splitlines()) <= 40
