"""What zc says to somebody new: a note once and not once a rank, and errors that name the way out."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import nn

import zc

ROOT = Path(__file__).resolve().parents[2]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def _notes(rank: int, world_size: int, keeps: int, num_steps: int) -> tuple[list[str], str]:
    """Rank ``keeps`` keeps a view of a weight, so there and nowhere else step() waits for the weights."""
    model = small()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = zc.compile(
            model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager", verify=False, overlap_gather=True
        )
        weight = model[0].weight.data if rank in (keeps, -keeps) else None
        for _ in range(num_steps):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert weight is None or weight.isfinite().all()
    return [str(w.message) for w in caught if str(w.message).startswith("zc")], zc.explain(model).sections["notes"]


def test_a_note_of_all_ranks_is_said_by_rank_0() -> None:
    (first, first_notes), (second, second_notes) = run_ranks(_notes, 2, 2, 4)
    assert first == ["zc: verify=False: schedules run without their proof"] and second == []
    assert first_notes == second_notes and "without their proof" in first_notes


def test_a_note_of_one_rank_is_said_there() -> None:
    (first, _), (second, notes) = run_ranks(_notes, 2, 1, 4)
    assert len(first) == 1 and "overlap_gather" not in first[0]
    assert len(second) == 1 and second[0].startswith("zc, rank 1, not rank 0: overlap_gather: ")
    assert "overlap_gather: " in notes
    (first, _), _ = run_ranks(_notes, 2, 0, 4)
    assert len(first) == 2 and first[1].startswith("zc: overlap_gather: ")


def test_a_plan_error_is_a_zc_error_and_a_value_error() -> None:
    with pytest.raises(zc.ZcError) as caught:
        zc.compile(small(), torch.optim.SGD(small().parameters(), lr=0.1))
    assert type(caught.value) is zc.PlanError and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_create_graph_twice_says_create_graph(backend: str) -> None:
    """A compiled backward brings its gradients past AccumulateGrad: there it is right."""
    model, plain = small(), small()
    x = torch.ones(3, 4)
    model, optimizer = zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
    model(x).square().sum().backward(create_graph=True)
    if backend == "eager":
        with pytest.raises(zc.ZcError, match=r"backward\(create_graph=True\) found a gradient of .*zero_grad\(\)"):
            model(x).square().sum().backward(create_graph=True)
        optimizer.zero_grad()
        model(x).square().sum().backward(create_graph=True)
    else:
        model(x).square().sum().backward(create_graph=True)
        plain(x).square().sum().backward()
    plain(x).square().sum().backward()
    for name, grad in zc.full_grad(model).items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_penalty_on_param_grad_says_that_it_has_no_graph(backend: str) -> None:
    """It had no gradient, in silence."""
    model = small()
    model, optimizer = zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend)
    x = torch.ones(3, 4)
    for penalty in (torch.sum, lambda grad: grad * 2):
        model(x).square().sum().backward(create_graph=True)
        grad = next(model.parameters()).grad
        with pytest.raises(zc.ZcError, match=r"grad is read after backward\(create_graph=True\)"):
            penalty(grad)
        with torch.no_grad():
            penalty(grad)
        optimizer.zero_grad()
    model(x).square().sum().backward(retain_graph=True)
    next(model.parameters()).grad.sum()  # type: ignore[union-attr]


def test_an_optimizer_with_state_is_told_of_load_state_dict() -> None:
    """And what the message says works: the moments are the old ones."""
    model = small()
    old = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    old.step()
    old.zero_grad()
    with pytest.raises(zc.PlanError, match=r"zc\.load_state_dict\(model, optimizer") as caught:
        zc.compile(model, old)
    model, optimizer = zc.compile(model, torch.optim.AdamW(model.parameters()), backend="eager")
    call = re.search(r"zc\.load_state_dict\(.*\)$", str(caught.value))
    assert call is not None
    eval(call[0], {"zc": zc, "model": model, "optimizer": optimizer, "old": old})
    whole = zc.full_optimizer_state(model, optimizer)
    for k, state in old.state_dict()["state"].items():
        torch.testing.assert_close(whole["state"][k]["exp_avg"], state["exp_avg"])


def test_zc_says_what_it_compiles(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its log, and once in one line to whoever waits."""
    monkeypatch.delenv("ZC_LOG", raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model, _ = zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.INFO, logger="zc"):
        model(torch.ones(2, 4)).sum().backward()
    assert [line[:12] for line in capsys.readouterr().err.splitlines() if line.startswith("zc: ")] == ["zc: compiles"]
    said = [record.getMessage() for record in caplog.records if record.name == "zc"]
    assert re.fullmatch(r"Inductor compiles a forward graph of \d+ operations", said[0])
    assert re.fullmatch(r"Inductor compiles segment 0, of \d+ operations \(backward\)", said[1])


# verbs in the last two sentences of an error: one says what to do
WAY_OUT = re.compile(
    r"\b(use|call|clear|give|keep|make|let|leave|take|tie|add|set|pass|clip|freeze|read|write|run|do that|don't assign"
    r"|end with|trains?|put|must not be)\b",
    flags=re.I,
)


def test_every_refusal_of_the_table_ends_with_what_to_do() -> None:
    """In docs/compatibility.md, which is made from what the errors have said."""
    sys.path.insert(0, str(ROOT / "tests" / "compatibility"))
    import run_rows as _rows  # noqa: F401  (with it all rows are there)
    from generate import read
    from rows import ROWS

    refused: dict[str, str] = {}
    for (row, _, _), (kind, text) in read().items():
        if kind == "refused":
            refused.setdefault(row, text.split(": ", 1)[1])  # op by op, where nothing stands around the error
    assert len(refused) > 30
    ends = {row: " ".join((*re.split(r"[:;.?] ", text)[-2:], ROWS[row].note)) for row, text in refused.items()}
    lacking = [row for row, end in ends.items() if WAY_OUT.search(end) is None]
    assert not lacking, lacking
