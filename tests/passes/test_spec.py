"""A node looks like its kind says, where it is made and where it is read; a buffer has one name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graphs import plan_for
from torch import fx

from zc.errors import PassError
from zc.passes.verify import examine
from zc.schedule.buffer import FACTS, KINDS, MAIN, Buffer, carried_by, carried_event
from zc.schedule.nodes import TARGETS, change, op_of, put, text
from zc.schedule.spec import (
    Deposit,
    Finish,
    FlattenCast,
    Op,
    RecordEvent,
    Reduce,
    Role,
    Segment,
    Take,
    WgradInto,
)

pytestmark = pytest.mark.check
RING, ACC = Buffer("flat_grad", 0), Buffer("acc", 2)


def test_a_record_comes_back_as_it_was_put_in() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    records: list[Op] = [
        Segment("segment_0", (x, x)), Segment("segment_1", ()), FlattenCast(2, RING, (0, 1), (x, x)),
        FlattenCast(2, RING, (), (), ((3, 8),)), FlattenCast(2, RING, (0,), (x,), ()), Deposit(2, 1, x),
        WgradInto(2, ACC, 0, 0, 3, (x,), "scatter"), WgradInto(2, ACC, 0, 0, 3, (x,)), Reduce(2, ACC, RING, 1),
    ]  # fmt: skip
    nodes = [put(graph, op) for op in records]
    assert [op_of(node) for node in nodes] == records
    assert all(isinstance(arg, int | str | tuple | list) for arg in nodes[2].args), "what fx and the printed text know"
    assert "flatten_cast(2, flat_grad[0], (), [], spans=((3, 8),))" in text(graph)
    assert op_of(x) is None


@pytest.mark.parametrize(
    ("kind", "args", "says"),
    [
        (Deposit, ("2", 0, "x"), r"deposit is no Deposit: bucket='2': no int"),
        (Deposit, (True, 0, "x"), r"bucket=True"),
        (Deposit, (2, 0), r"2 arguments, for bucket, slot, grad"),
        (Deposit, (2, 0, None), r"grad=None: no Node"),
        (Finish, (2, "akk[2]", "scratch[0]"), r"finish is no Finish: dst='akk\[2\]': akk\[2\] is no buffer"),
        (Finish, (2, "acc[2]", "scratch"), r"src='scratch': 'scratch' is no buffer's name"),
        (Finish, (2, "acc[2]", "scratch[-1]"), r"src='scratch\[-1\]'"),
        (Take, (2, "scratch[0]", 3), r"src=3: no str"),
        (FlattenCast, (2, "flat_grad[0]", 0, []), r"slots=0: no tuple"),
        (FlattenCast, (2, "flat_grad[0]", (0,), ["x"]), None),
        (FlattenCast, (2, "flat_grad[0]", (0.0,), ["x"]), r"slots=\(0.0,\)"),
        (WgradInto, (2, "acc[2]", 0, 0), r"wgrad_into is no WgradInto"),
        (RecordEvent, ("done/akk[0]",), r"event='done/akk\[0\]': akk\[0\] is no buffer"),
    ],
)
def test_what_does_not_look_like_its_kind_is_refused_by_name(kind: type[Op], args: tuple, says: str | None) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    arguments = [x if arg == "x" else [x] if arg == ["x"] else arg for arg in args]
    node = graph.call_function(TARGETS[kind], tuple(arguments))
    if says is None:
        assert op_of(node) is not None
        return
    with pytest.raises(PassError, match=says):
        op_of(node)


def test_a_node_is_checked_where_it_is_made_and_where_it_is_changed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with pytest.raises(PassError, match=r"deposit is no Deposit: slot=None"):
        put(graph, Deposit(0, None, x))
    node = put(graph, Take(0, Buffer("scratch", 0), RING))
    with pytest.raises(PassError, match=r"take is no Take: bucket='0'"):
        change(node, Take("0", Buffer("scratch", 0), RING))


def test_whoever_changes_arguments_changes_the_record() -> None:
    graph = fx.Graph()
    node = put(graph, Finish(0, ACC, Buffer("scratch", 0)))
    assert op_of(node) is op_of(node), "read once"
    node.args = (1, *node.args[1:])
    assert op_of(node) == Finish(1, ACC, Buffer("scratch", 0))
    write = put(graph, FlattenCast(0, RING, (), ()))
    write.kwargs = {"spans": ((0, 1),)}
    assert op_of(write) == FlattenCast(0, RING, (), (), ((0, 1),))
    replaced = graph.placeholder("y")
    deposit = put(graph, Deposit(0, 0, graph.placeholder("x")))
    deposit.replace_input_with(deposit.all_input_nodes[0], replaced)
    assert op_of(deposit) == Deposit(0, 0, replaced)


def test_every_kind_has_its_own_name() -> None:
    names = [target.__name__ for target in TARGETS.values()]
    assert len(names) == len(set(names)) == 21 and {"wgrad_into", "copy_to_device", "record_event"} <= set(names)


def test_every_kind_says_what_it_does() -> None:
    """Its role, the buffers that it reads and writes, and what those that it writes hold afterwards."""
    facts = {fact for *both, _ in FACTS for fact in both}
    for kind in TARGETS:
        fields = {*kind.reads, *kind.writes, *(row.field for row in kind.contents)}
        assert kind.role in Role and fields <= kind.__dataclass_fields__.keys(), kind
        assert {*kind.writes} <= {row.field for row in kind.contents}, kind
        assert {fact for row in kind.contents for fact in row.when.split()} <= facts, kind
    reductions = {kind.__name__ for kind in TARGETS if kind.role is Role.REDUCTION}
    assert reductions == {"Reduce", "Take", "Finish"}


def test_the_proof_refuses_a_kind_that_does_not_say_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fx.Graph()
    put(graph, FlattenCast(0, RING, (), ()), stream="compute")
    graph.output(())
    monkeypatch.setattr(FlattenCast, "contents", ())
    faults = examine(graph, plan_for(["x"])).faults
    assert any("flat_grad[0] holds nothing; flatten_cast of bucket 0 can't take it" in f for f in faults)


def test_a_buffer_and_its_name() -> None:
    for kind in KINDS:
        buffer = Buffer(kind, 12)
        assert Buffer.named(str(buffer)) == buffer == Buffer.named(f"{kind}[12]")
        assert carried_by(carried_event(buffer)) == buffer
    assert carried_by("e0") is None
    for name in ("acc", "acc[]", "acc[x]", "acc[1", "[1]", "acc[1][2]", "%acc[1]", "acc[ 1]"):
        with pytest.raises(ValueError, match="is no buffer"):
            Buffer.named(name)


def test_which_buffers_other_schedules_share() -> None:
    """The rule of each kind against its words."""

    always = ("gathered", "host", "master")

    def shared(stage: int, **options: Any) -> list[str]:
        plan = plan_for(["w", "v"], stage=stage, **options)
        return [kind for kind in KINDS if Buffer(kind, 0).is_shared(plan) and kind not in always]

    assert shared(2) == shared(2, world_size=1) == ["flat_grad"] and shared(1) == ["acc"]
    assert shared(3) == ["flat_grad", "weight", "arena"] and shared(3, overlap=False) == []
    assert shared(2, overlap=False) == shared(1, overlap=False) == shared(1, world_size=1) == []
    plan = plan_for(["w", "v"])
    assert all(Buffer(kind, 0).is_shared(plan) for kind in always), "fp32: masters have no cast"
    narrow = replace(plan, buckets=tuple(replace(b, param_dtype=torch.bfloat16) for b in plan.buckets))
    assert not Buffer("master", 0).is_shared(narrow)


def test_the_table_of_the_proof_is_the_one_in_the_code() -> None:
    """docs/proof.md: a line a kind of buffer."""
    lines = [
        f"| `{name}[i]` | {kind.holds} | {'-' if kind.carrier == MAIN else f'`{kind.carrier}`'} "
        f"| {'yes' if kind.on_host else 'no'} | {kind.shared} |"
        for name, kind in KINDS.items()
    ]
    page = (Path(__file__).parents[2] / "docs/proof.md").read_text()
    assert re.findall(r"^\| `\w+\[i\]` .*$", page, flags=re.M) == lines, "\n".join(lines)
