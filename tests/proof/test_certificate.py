"""Certificates: a program of 200 lines, which knows nothing of zc, accepts those of all healthy schedules, and refuses
those of every mutant of this suite."""

from __future__ import annotations

import ast
import collections
import copy
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import compiled
import pytest
import record_mutants
import test_weights
import test_windows
import torch
from harness import run_ranks
from models import seeded
from schedules import by_messages, cases, make, offloaded, placed, schedule
from simulation import plan_of
from test_gradients_owed import _alone_in_a_group  # noqa: F401  (a fixture)
from tiers import FULL
from torch import fx, nn

import zc
from zc.engine.weights import gather_graph
from zc.passes.certificate import certificate
from zc.passes.pipeline import examine
from zc.planning.plan import Plan

CHECKER = Path(__file__).resolve().parents[2] / "passes" / "check_certificate.py"


def load_alone() -> ModuleType:
    """As a file of its own, without the package."""
    spec = importlib.util.spec_from_file_location("checker_alone", CHECKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checker = load_alone()


def faults(graph: fx.Graph, plan: Plan) -> list[str]:
    """What the checker says of the file."""
    found: list[str] = checker.check(json.loads(json.dumps(certificate(graph, plan))))
    return found


def is_refused(graph: fx.Graph, plan: Plan) -> bool:
    """By the checker; or no certificate can be made of it: fields of one node are of different lengths."""
    try:
        return bool(faults(graph, plan))
    except ValueError as error:
        return "zip()" in str(error)


def test_the_checker_is_small_and_stands_alone(tmp_path: Path) -> None:
    tree = ast.parse(CHECKER.read_text())
    imported = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    imported |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
    assert len(CHECKER.read_text().splitlines()) <= 200
    good = certificate(schedule("mlp", make(4, ring=2)), make(4, ring=2))
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "bad.json").write_text(json.dumps({**good, "conflicts": []}))
    (tmp_path / "other.json").write_text("[1, 2]")

    def run(*names: str) -> tuple[int, str]:
        command = [sys.executable, "-I", "-S", str(CHECKER), *names]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert run("good.json") == (0, "good.json: accepted\n")
    status, said = run("good.json", "bad.json", "other.json", "none.json")
    assert status == 1 and "good.json: accepted" in said and "bad.json: flat_grad[0]: " in said
    assert "other.json: this is no certificate: TypeError" in said
    assert "none.json: this is no certificate: FileNotFoundError" in said
    assert run()[0] == 1


def schedules() -> Iterator[tuple[str, fx.Graph, Plan]]:
    """Those of test_gradients_owed, by hand and of real models, and both levels of two."""
    by_hand = [*cases(), *offloaded()]
    chosen = by_hand if FULL else [c for k, c in enumerate(by_hand) if k % 4 == 0 and len(c.plan.buckets) < 64]
    for case in (*chosen, *compiled.cases()):
        for graph in dict.fromkeys(case.graphs):
            yield case.name, graph, plan_of(graph)
    more: tuple[dict[str, Any], ...] = ({}, {"num_replicas": 2}, {"in_8_bits": True}, {"overlap_gather": True})
    for stage, options in itertools.product((1, 2), more):
        messages = by_messages(2, stage=stage, **options)
        memory = make(2, stage=stage, world_size=4, reads=True, num_hosts=2, **options)
        for plan in (messages, memory):
            for graph in (schedule("mlp", plan), placed(plan, gather_graph(plan, range(2)))):
                yield f"two levels, stage {stage}, {options}", graph, plan


def test_mutants_of_schedules_are_refused_where_the_proof_refuses_them() -> None:
    total: collections.Counter[tuple[str, bool]] = collections.Counter()
    seen, num = collections.Counter[str](), 0
    for name, graph, plan in schedules():
        assert faults(graph, plan) == [], name
        num += 1
        for kind, what, mutant in record_mutants.of(graph, 7 if FULL else 200, seen):
            findings = examine(mutant, plan)
            # which kinds the processor and the bus alone may run is no matter of order: test_offload_schedules.py
            is_wrong = bool(findings.races) or any("can't be on" not in fault for fault in findings.faults)
            total[kind, is_wrong] += 1
            assert is_refused(mutant, plan) == is_wrong, f"{name}: {kind}: {what}: {findings}"
    print(f"\ncertificates: {num} healthy ones accepted; mutants, refused or not: {dict(total)}")
    assert num > 100 and sum(1 for _, is_wrong in total if is_wrong) > 60


def test_mutants_of_sharded_weights_are_refused_where_the_proof_refuses_them() -> None:
    total: collections.Counter[tuple[str, bool]] = collections.Counter()
    for seed in range(20):
        graph, plan = test_weights.case(seed)
        assert faults(graph, plan) == [], seed
    for kind, name, mutant, plan in test_weights.broken(range(100, 120), 1 if FULL else 7):
        findings = examine(mutant, plan)
        is_wrong = bool(findings.races or findings.faults)
        total[kind, is_wrong] += 1
        assert is_refused(mutant, plan) == is_wrong, f"{kind}: {name}: {findings}"
    seen = collections.Counter[str]()
    for seed in range(100 if FULL else 8):
        graph, plan = test_windows.case(seed)
        assert faults(graph, plan) == [], seed
        for kind, name, mutant in record_mutants.of(graph, 1 if FULL else 5, seen):
            findings = examine(mutant, plan)
            is_wrong = bool(findings.races or findings.faults)
            total[kind, is_wrong] += 1
            assert is_refused(mutant, plan) == is_wrong, f"{seed} {kind}: {name}: {findings}"
    assert sum(1 for _, is_wrong in total if is_wrong) >= 35 and total["another value", True] > 40


def test_a_file_that_was_edited_is_refused_by_its_pair() -> None:
    plan = make(4, ring=2)
    intact = json.loads(json.dumps(certificate(schedule("mlp", plan), plan)))
    assert checker.check(intact) == []
    by_name = {node["name"]: node for node in intact["nodes"]}
    chain = next(c for c in intact["conflicts"] if len(c["chain"]) > 2 and not by_name[c["nodes"][0]]["outside"])
    first, second = chain["nodes"]

    def edited(**changes: Any) -> str:
        """``changes``: by node, what is set there; or of the conflicts."""
        other = copy.deepcopy(intact)
        for name, change in changes.items():
            if name == "conflicts":
                other["conflicts"] = change
            else:
                next(node for node in other["nodes"] if node["name"] == name).update(change)
        return "\n".join(checker.check(other))

    others = [c for c in intact["conflicts"] if c is not chain]
    pair = f"nothing orders {first} on {by_name[first]['stream']} and {second} on {by_name[second]['stream']}"
    assert pair in edited(conflicts=others)
    for wrong in ([first, second], [first], [second, first], [first, "nobody", second], None):
        assert pair in edited(conflicts=[*others, {**chain, "chain": wrong}])
    record = next(name for name in chain["chain"] if by_name[name]["records"])
    wait = next(name for name in chain["chain"] if by_name[name]["waits"])
    event = by_name[record]["records"][0]
    assert f"waits for {event}, which no node before records" in edited(**{record: {"records": []}})
    assert f"nothing orders {record}" in edited(**{wait: {"waits": []}})
    assert "waits for e99" in edited(**{wait: {"waits": ["e99"]}})
    moved = edited(**{second: {"stream": "another"}})
    assert f"{second} on another" in moved and "nothing orders" in moved
    everything = [[chain["buffer"], 0, None]]
    widened = edited(**{name: {"writes": everything} for name, n in by_name.items() if not n["outside"]})
    assert widened.count("nothing orders") > 5
    writer = next(node for node in intact["nodes"] if "gradient" in node)
    bucket = intact["buckets"][str(writer["bucket"])]
    cut, (start, stop) = bucket["slots"][0][0] + 1, bucket["slots"][0]
    halves = {**writer["gradient"], "extents": [[0, cut], [cut, bucket["numel"]]]}  # every element, and no slot whole
    assert f"slot 0 is [{start}, {stop})" in edited(**{writer["name"]: {"gradient": halves}})
    taken = next(node for node in intact["nodes"] if node.get("contents") and "gradient" not in node)
    hidden = edited(**{taken["name"]: {"reads": [], "writes": []}})  # so that nothing conflicts
    assert f"{taken['contents'][0][0]} holds" in hidden and taken["name"] in hidden
    twice = copy.deepcopy(intact)
    twice["nodes"].append(twice["nodes"][0])
    assert checker.check(twice) == ["two nodes have the same name"]


def test_a_schedule_without_its_debt_is_checked_for_what_it_has() -> None:
    plan = make(4, ring=2)
    stated = json.loads(json.dumps(certificate(schedule("mlp", plan), plan)))
    assert checker.check({**stated, "owes": None}) == []
    missing = {**stated["owes"], "gradients": [*stated["owes"]["gradients"], [0, 77]]}
    assert "bucket 0, slot 77 is owed, and nobody brings it" in checker.check({**stated, "owes": missing})
    for reduced in ([], [*stated["owes"]["reduced"], 9]):
        owes = {**stated["owes"], "reduced": reduced}
        assert "times too often or too seldom" in "".join(checker.check({**stated, "owes": owes}))


# --- as a program gets them ---


def _train(rank: int, world_size: int, folder: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    zc.compile(model, optimizer, dump_dir=folder / str(rank), bucket_nbytes=3000, **options)
    for k in range(4):
        is_last = k % 2 == 1
        if not is_last:
            with zc.no_sync(model):
                model(torch.randn(4, 16, generator=seeded(rank, k))).square().mean().backward()
            continue
        model(torch.randn(4, 16, generator=seeded(rank, k))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1, "backend": "eager"},
        {"stage": 2, "backend": "aot_eager", "overlap_gather": True},
        {"stage": 3, "backend": "aot_eager"},
        {"stage": 2, "backend": "aot_eager", "offload": "cpu"},
    ],
    ids=str,
)
def test_every_schedule_that_was_proved_has_one(tmp_path: Path, options: dict[str, Any]) -> None:
    run_ranks(_train, 2, tmp_path, options)
    folders = {path.parent for path in tmp_path.glob("*/*/schedule.py")}
    files = {path.parent for path in tmp_path.glob("*/*/certificate.json")}
    assert files == folders and len(files) >= 4
    for folder in files:
        assert checker.check(json.loads((folder / "certificate.json").read_text())) == [], folder


def test_what_was_not_proved_has_none(tmp_path: Path) -> None:
    run_ranks(_train, 2, tmp_path, {"stage": 2, "backend": "eager", "verify": False})
    assert list(tmp_path.glob("*/*/schedule.py")) and not list(tmp_path.glob("*/*/certificate.json"))
