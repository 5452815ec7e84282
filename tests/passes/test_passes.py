"""Each rewriting pass on graphs small enough to read, and the contract that all of them keep."""

from __future__ import annotations

import itertools
import operator

import pytest
import torch
from graphs import chain, plan_for
from harness import run_ranks
from torch import fx

from zc.errors import PassError
from zc.passes import bucket_gradients, outline_segments, reduce_buckets, tag_gradients
from zc.passes.base import Pass, copy_graph, run_passes
from zc.passes.pipeline import pipeline
from zc.schedule.nodes import op_of, put, text
from zc.schedule.spec import AccumulateCast, Deposit, Finish, FlattenCast, Segment, Take

pytestmark = pytest.mark.check


def kinds(graph: fx.Graph) -> list[str]:
    return [n.target.__name__ for n in graph.nodes if n.op == "call_function" and hasattr(n.target, "__name__")]


PIPELINE = pipeline(in_place=True)
COPYING = pipeline(in_place=False)  # every gradient in a flatten_cast: easier to read


def after(name: str, graph: fx.Graph, plan) -> fx.Graph:
    """The graph after the passes up to and with ``name``, gradients copied (test_write_in_place.py has the others)."""
    names = [p.name for p in COPYING]
    return run_passes(graph, plan, COPYING[: names.index(name) + 1])[0]


def test_tag_gradients_makes_gradients_deposits_and_leaves_other_outputs() -> None:
    graph, names = chain(3)
    new = tag_gradients.run(graph, plan_for(names))
    returned = new.output_node().args[0]
    assert returned[:3] == (None, None, None) and isinstance(returned[3], fx.Node)
    deposits = [(n.args[0], n.args[1]) for n in new.nodes if isinstance(op_of(n), Deposit)]
    # reverse registration order: layer 2 and 1 share bucket 0, layer 0 is alone in bucket 1; dW_2 is made first
    assert deposits == [(0, 0), (0, 1), (1, 0)]
    for node in new.nodes:
        if isinstance(op_of(node), Deposit):
            assert node.prev is node.args[2], "a deposit stands right after the gradient it takes"


def test_tag_gradients_names_a_shape_that_differs() -> None:
    graph, names = chain(2)
    with pytest.raises(PassError, match=r"layers\.0\.weight.*\(4, 16\).*\(8, 8\)"):
        tag_gradients.run(graph, plan_for(names, (4, 16)))


def test_a_complete_bucket_is_written_once_and_reduced_at_once() -> None:
    graph, names = chain(4)
    new = after("reduce_buckets", graph, plan_for(names))
    ops = [n for n in new.nodes if isinstance(op_of(n), FlattenCast | Take | Finish)]
    assert [type(op_of(n)) for n in ops] == [FlattenCast, Take, Finish] * 2
    assert [n.args[1] for n in ops if isinstance(op_of(n), FlattenCast)] == ["flat_grad[0]", "flat_grad[1]"]
    for first, second in itertools.pairwise(ops[:3]):
        assert first.next is second, "nothing stands between a bucket's write and its accumulation"


def test_an_incomplete_bucket_stays_deposited_and_cuts_no_segment() -> None:
    graph, names = chain(4)
    plan = plan_for([*names[:2], "unused", *names[2:]], per_bucket=3)  # buckets: (w3, w2, unused), (w1, w0)
    new = after("outline_segments", graph, plan)
    calls = [n for n in new.nodes if isinstance(op_of(n), Segment | Deposit | FlattenCast)]
    assert [n.target.__name__ for n in calls] == ["segment", "deposit", "deposit", "flatten_cast", "segment"]


def test_stage_1_adds_what_there_is_and_reduces_only_at_a_boundary() -> None:
    graph, names = chain(4)
    plan = plan_for([*names[:2], "unused", *names[2:]], per_bucket=3, stage=1)
    boundary = kinds(after("reduce_buckets", graph, plan))
    assert boundary.count("accumulate_cast") == 2 and boundary.count("take") == 1
    inside = kinds(after("reduce_buckets", graph, plan.microbatch()))
    assert inside.count("accumulate_cast") == 2 and inside.count("take") == 0


def test_one_rank_sends_nothing() -> None:
    graph, names = chain(4)
    for stage, writes in ((2, ["flatten_cast", "reduce"] * 2), (1, ["accumulate_cast"] * 2)):
        new = after("reduce_buckets", graph, plan_for(names, world_size=1, stage=stage))
        assert [
            k for k in kinds(new) if k in ("flatten_cast", "accumulate_cast", "take", "finish", "reduce")
        ] == writes


def test_segments_compute_what_the_graph_computed() -> None:
    graph, names = chain(4)
    plan = plan_for(names)
    new = after("outline_segments", graph, plan)
    values = {n.name: torch.randn(8, 8) for n in new.nodes if n.op == "placeholder"}
    expected = fx.GraphModule(torch.nn.Module(), copy_graph(graph))(*values.values())
    grads = {}
    for node in new.nodes:
        if isinstance(op_of(node), Segment):
            values[node.name] = node.meta["segment"](*(values[a.name] for a in node.args[1:]))
        elif node.op == "call_function" and node.target.__name__ == "getitem":
            values[node.name] = values[node.args[0].name][node.args[1]]
        elif isinstance(op_of(node), FlattenCast):
            for slot, grad in zip(node.args[2], node.args[3], strict=True):
                grads[plan.buckets[node.args[0]].slots[slot].name] = values[grad.name]
    for name, wanted in zip(names, expected, strict=False):
        assert torch.equal(grads[name], wanted)
    assert torch.equal(values[new.output_node().args[0][-1].name], expected[-1])


def test_identical_layers_have_identical_segments() -> None:
    """Canonical names: what compiles once is found by text (tried: 10 compilations of an 8-block GPT become 5 + 5
    hits)."""
    graph, names = chain(8)
    new = after("outline_segments", graph, plan_for(names))
    codes = [n.meta["segment"].code for n in new.nodes if isinstance(op_of(n), Segment)]
    assert len(codes) == 5 and len(set(codes[1:4])) == 1


def test_results_of_one_node_stay_in_its_segment() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    pair = graph.call_function(torch.ops.aten.topk.default, (x, 2))
    first = graph.call_function(operator.getitem, (pair, 0))
    inner = graph.call_function(operator.getitem, (pair, 1))  # a tuple again, as flex_attention's backward has one
    put(graph, Deposit(0, 0, first))
    second = graph.call_function(operator.getitem, (inner, 0))
    graph.output((second,))
    new = outline_segments.run(graph, plan_for(["w"]))
    assert sum(isinstance(op_of(n), Segment) for n in new.nodes) == 1


# --- the contract ---


def inputs_of(step: Pass, num_layers: int = 5, **options) -> tuple[fx.Graph, object]:
    graph, names = chain(num_layers)
    plan = plan_for(names, **options)
    before = PIPELINE[: [p.name for p in PIPELINE].index(step.name)]
    return run_passes(graph, plan, before)[0], plan


def fingerprint(graph: fx.Graph) -> str:
    metas = [sorted((k, repr(v)) for k, v in n.meta.items() if k in ("stream", "grad_of")) for n in graph.nodes]
    return f"{graph}\n{metas}\n{text(graph)}"


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("step", PIPELINE, ids=lambda p: p.name)
def test_contract(step: Pass, stage: int) -> None:
    """Input unchanged; deterministic; an unrelated graph comes back equal."""
    graph, plan = inputs_of(step, stage=stage)
    before = fingerprint(graph)
    first = step.run(graph, plan)
    assert fingerprint(graph) == before, f"{step.name} changed its input"
    assert first is not graph or step.name == "verify"
    again, plan_again = inputs_of(step, stage=stage)
    assert fingerprint(step.run(again, plan_again)) == fingerprint(first), f"{step.name} is not deterministic"
    empty = fx.Graph()
    empty.output((empty.placeholder("x"),))
    assert str(step.run(empty, plan)) == str(empty), f"{step.name} changed a graph that has nothing for it"


def scheduled(rank: int, world_size: int) -> tuple[int, str]:
    """Job: a hash of text in this process, and a schedule."""
    graph, names = chain(9)
    return hash("take"), text(run_passes(graph, plan_for(names), PIPELINE)[0])


def test_the_whole_pipeline_gives_one_text_whatever_the_hash_seed() -> None:
    """Ranks are other processes: nothing may depend on set order or addresses."""
    (seed, own), (other_seed, other) = run_ranks(scheduled, 2)
    assert seed != other_seed, "ranks are of two templates, each with a seed of its own"
    assert own == other and "take" in own


def test_options_leave_out_what_they_say_and_nothing_else() -> None:
    names = [p.name for p in PIPELINE]
    assert [p.name for p in COPYING] == [n for n in names if n != "write_in_place"]
    assert [p.name for p in pipeline(in_place=True, prove=False)] == [n for n in names if n != "verify"]


def test_runner_names_what_a_pass_lacks_and_writes_dumps(tmp_path) -> None:
    graph, names = chain(3)
    with pytest.raises(PassError, match="bucket_gradients requires"):
        run_passes(graph, plan_for(names), (bucket_gradients.PASS, reduce_buckets.PASS))
    run_passes(graph, plan_for(names), PIPELINE, dump_dir=tmp_path, name="g")
    written = sorted(p.name for p in (tmp_path / "g").iterdir())
    assert "00_input.txt" in written and "04_reduce_buckets.diff" in written
    assert "take" in (tmp_path / "g" / "04_reduce_buckets.diff").read_text()


def test_stage_1_second_write_of_the_pipeline_is_an_accumulate_cast() -> None:
    graph, names = chain(2)
    assert AccumulateCast in {type(op_of(n)) for n in after("bucket_gradients", graph, plan_for(names, stage=1)).nodes}
