"""The fuzzer on a fixed sample, its reference against DDP, and faults that it must find. `make fuzz` runs 2,000."""

from __future__ import annotations

import ast
import dataclasses
import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fuzz_draw
import fuzz_optimizers
import fuzz_options
import fuzz_script
import fuzz_shrink
import pytest
from fuzz_judge import Outcome, Verdict, judge
from fuzz_oracle import Wanted
from fuzz_program import Op, Program, check_all, is_legal
from fuzz_ranks import _forget, verdicts
from tiers import FULL

# What DDP can't run: these programs are right by zc's documentation alone.
NOT_DDP = frozenset(
    ("pile", "retain", "uneven", "quiet to the end", "penalty", "reentrant", "raise", "inductor", "aot_eager",
     "eval_buffers", "cleared", "cross", "stage3", "wire")
)  # fmt: skip


def test_programs_come_from_their_seed_alone_and_are_legal() -> None:
    kinds, groups = set(), set()
    for seed in range(300):
        program = fuzz_draw.draw(seed)
        check_all(program)
        assert program == fuzz_draw.draw(seed) == Program.from_json(program.to_json())
        ast.parse(fuzz_script.script(program, "test"))
        kinds |= {op.kind for part in program.parts for op in part.ops} | program.clears
        options = [which.options for part in program.parts for which in part.launches]
        groups |= {"stage3" if of["stage"] == 3 else "wire" if "hosts" in of else None for of in options}
    assert kinds >= {"raise", "thaw", "load", "collective", "micro", "class", "slices", "one", *fuzz_script.SIMPLE}
    assert groups == {"stage3", "wire", None}


def test_groups_of_options_can_be_chosen() -> None:
    """And a program without one is the same whether or not others have one."""
    for seed in range(60):
        for group in fuzz_options.GROUPS:
            program = fuzz_draw.draw(seed, only=frozenset((group,)))
            check_all(program)
            assert fuzz_options.draw_group(seed, frozenset(), frozenset((group,))) == group
            for part in filter(lambda part: fuzz_optimizers.reads_whole(part.optimizer), program.parts):
                assert not any("gather_dtype" in which.options for which in part.launches), "zc.compile refuses it"
        if fuzz_options.draw_group(seed, frozenset()) is None:
            assert fuzz_draw.draw(seed) == fuzz_draw.draw(seed, frozenset(fuzz_options.GROUPS))


def test_the_reference_gives_what_ddp_gives() -> None:
    programs = [fuzz_draw.draw(seed, NOT_DDP) for seed in range(20)]
    programs = [program for program in programs if program.dtype != "bfloat16"]  # param_dtype is zc's
    for k, verdict in verdicts(programs, "ddp"):
        assert verdict.kind == "right", (programs[k].seed, verdict.text, fuzz_script.body(programs[k]))


def test_a_fixed_sample_of_programs_is_right() -> None:
    without = frozenset((*fuzz_draw.OPEN, "inductor"))
    programs = [fuzz_draw.draw(seed, without) for seed in range(40 if FULL else 14)]  # the last but one has 3 ranks
    by_number = dict(verdicts(programs))
    assert len(by_number) == len(programs)
    for k, verdict in by_number.items():
        assert verdict.is_fine, (programs[k].seed, verdict.text, fuzz_script.body(programs[k]))
    assert sum(v.kind == "right" for v in by_number.values()) > len(programs) * 3 // 4  # refusals say little


@pytest.mark.parametrize(
    ("fault", "kinds", "option"),
    [("loses_microbatches", {"forward", "backward", "micro"}, "quiet"), ("clips_too_little", {"clip"}, "how")],
)
def test_a_planted_fault_is_found(fault: str, kinds: set[str], option: str) -> None:
    # where ranks differ, the fault is most often a wait until patience ends: slow, and no wrong number
    without = frozenset(
        (*fuzz_draw.OPEN, "differ", "aot_eager", "inductor", "offload", "overlap_gather", *fuzz_options.GROUPS)
    )
    programs = [fuzz_draw.draw(seed, without) for seed in range(12)]
    prepare = f"fuzz_faults.{fault}"
    wrong = []
    for some in (programs,) if FULL else (programs[:4], programs[4:8], programs[8:]):  # until one shows it
        wrong += [(some[k], v) for k, v in sorted(verdicts(some, prepare=prepare)) if not v.is_fine]
        if wrong:
            break
    assert wrong, "no program shows the fault"
    program, verdict = min(wrong, key=lambda pair: len(pair[0].ops))
    assert verdict.kind == "wrong", verdict
    if FULL:
        program, verdict = fuzz_shrink.shrink(program, verdict, prepare=prepare)
        assert verdict.kind == "wrong"
        assert len(program.ops) <= 5, fuzz_script.body(program)
        assert next(iter(verdicts([program])))[1].kind == "right", "without the fault it must be right"
    assert any(op.kind in kinds and op.args.get(option) for op in program.ops), fuzz_script.body(program)


def is_at_fault(program: Program) -> bool:
    return any(op.kind == "clip" for part in program.parts for op in part.ops)


def test_a_failing_program_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule judges the candidates in place of ranks: a program with an operation that clips is wrong."""

    def judged(candidates: Sequence[Program], **_: Any) -> Iterator[tuple[int, Verdict]]:
        for k, candidate in enumerate(candidates):
            assert is_legal(candidate)
            yield k, Verdict("wrong" if is_at_fault(candidate) else "right", "")

    monkeypatch.setattr(fuzz_shrink, "verdicts", judged)
    programs = [program for program in map(fuzz_draw.draw, range(60)) if is_at_fault(program)]
    assert len(programs) >= 5
    for program in programs:
        small, verdict = fuzz_shrink.shrink(program, Verdict("wrong", ""))
        assert verdict.kind == "wrong" and is_at_fault(small)
        assert len(small.parts) == 1 and len(small.launches) == 1 and len(small.ops) <= 3, fuzz_script.body(small)
        assert small.world_size == 2 and small.backend == "eager" and small.model["dim"] == 2, small


REFUSED = {"group_state", "group_state_by_shape"}


def test_what_it_has_found_before_is_right() -> None:
    """Small programs that were wrong at 3bc0d56 and since: at 951e339 one_dropped, at f80740d those with launches,
    buffers or zeros, at dd2efd5 raised_twice_apart and group_state_by_shape, at 22044d1 raised_in_another_model, at
    e5c1028 owner_of_nothing."""
    paths = sorted((Path(__file__).parent / "kept").glob("*.json"))
    programs = [Program.from_json(path.read_text()) for path in paths]
    for program in programs:
        check_all(program)
    kinds = {}
    for k, verdict in verdicts(programs):
        kinds[paths[k].stem] = verdict.kind, verdict.text
    for name, (kind, text) in kinds.items():
        assert kind == ("refused" if name in REFUSED else "right"), (name, text)
    assert len(kinds) == len(paths)


def test_what_outlives_its_program_is_forgotten_later() -> None:
    """Models that a thread had kept for a moment stayed, with three threads for each group: 680 after 400 programs."""

    class Model:
        pass

    model: Any = Model()
    model.itself, ref = model, weakref.ref(model)
    _forget(is_compiled=False)
    del model
    _forget(is_compiled=False)
    assert ref() is None


def test_which_programs_may_get_pytorch_s_error_about_a_buffer() -> None:
    """Compiled, a forward that writes a buffer, and a backward through the forward before it; no other program."""
    program = Program.from_json((Path(__file__).parent / "kept" / "caught_exception.json").read_text())
    text = "one of the variables needed for gradient computation has been modified by an inplace operation: ..."
    outcome = Outcome(("RuntimeError", text, ""), {}, {})
    forwards, wanted = (Op("forward", {}), Op("forward", {})), Wanted([], {})
    for backend, block, of, expected in (
        ("aot_eager", "average", 0, "refused"), ("eager", "average", 0, "error"),
        ("aot_eager", "linear", 0, "error"), ("aot_eager", "average", 1, "error"),
    ):  # fmt: skip
        which = dataclasses.replace(
            program, ops=(*forwards, Op("backward", {"of": [of]})), options={"backend": backend},
            model={"blocks": [[block, None]], "frozen": []},
        )  # fmt: skip
        assert judge(which, [[outcome, outcome]], wanted).kind == expected, (backend, block, of)
        assert judge(which, [[outcome, Outcome(None, {}, {})]], wanted).kind == "error", "on one rank alone"


def test_which_programs_may_get_it_about_a_weight() -> None:
    """Compiled, a penalty, a later forward that writes the weights in compiled code; no other program."""
    program = Program.from_json((Path(__file__).parent / "kept" / "caught_exception.json").read_text())
    text = "one of the variables needed for gradient computation has been modified by an inplace operation: ..."
    outcome, wanted = Outcome(("RuntimeError", text, ""), {}, {}), Wanted([], {})
    for backend, block, penalty, of, expected in (
        ("aot_eager", "clamped", 0.01, 0, "refused"), ("eager", "clamped", 0.01, 0, "error"),
        ("aot_eager", "linear", 0.01, 0, "error"), ("aot_eager", "clamped", 0.0, 0, "error"),
        ("aot_eager", "clamped", 0.01, 1, "error"), ("aot_eager", "clamped apart", 0.01, 0, "error"),
    ):  # fmt: skip
        forward = Op("forward", {"penalty": penalty})
        which = dataclasses.replace(
            program, ops=(forward, forward, Op("backward", {"of": [of]})), options={"backend": backend},
            model={"blocks": [[block, None]], "frozen": []},
        )  # fmt: skip
        assert judge(which, [[outcome, outcome]], wanted).kind == expected, (backend, block, penalty, of)


def test_which_programs_may_be_refused_for_a_weight_that_compiled_code_writes() -> None:
    """Stage 3, compiled, a block whose compiled forward writes; no other program."""
    program = Program.from_json((Path(__file__).parent / "kept" / "caught_exception.json").read_text())
    text = "compiled code of the forward writes parameter b0.weight (an embedding with max_norm does), and ..."
    outcome = Outcome(("ZcError", text, ""), {}, {})
    for stage, backend, block, expected in (
        (3, "aot_eager", "clamped", "refused"), (2, "aot_eager", "clamped", "error"),
        (3, "eager", "clamped", "error"), (3, "inductor", "clamped apart", "error"),
    ):  # fmt: skip
        options, model = {"stage": stage, "backend": backend}, {"blocks": [[block, None]], "frozen": []}
        which = dataclasses.replace(program, ops=(), options=options, model=model)
        assert judge(which, [[outcome, outcome]], Wanted([], {})).kind == expected, (stage, backend, block)


def test_which_programs_may_gather_other_weights_than_other_ranks() -> None:
    """Stage 3, by messages, with heads that differ between ranks; no other program."""
    program = Program.from_json((Path(__file__).parent / "kept" / "caught_exception.json").read_text())
    outcome = Outcome(("RankMismatchError", "ranks are out of step, for 10 s now: ...", ""), {}, {})
    for options, use, expected in (
        ({"stage": 3, "hosts": True}, [[0], [1]], "refused"), ({"stage": 3, "hosts": True}, [[0], [0]], "error"),
        ({"stage": 3}, [[0], [1]], "error"), ({"stage": 2, "hosts": True}, [[0], [1]], "error"),
    ):  # fmt: skip
        ops = (Op("forward", {"use": use, "quiet": False}), Op("backward", {"of": [0], "quiet": False}))
        which = dataclasses.replace(program, ops=ops, options={"backend": "eager", **options})
        assert judge(which, [[outcome, outcome]], Wanted([], {})).kind == expected, (options, use)


@pytest.mark.parametrize(
    ("quiet", "broadcasts", "legal"), [(True, True, False), (False, True, True), (True, False, True)]
)
def test_a_snapshot_of_buffers_that_stay_each_rank_s_own_is_illegal(quiet: bool, broadcasts: bool, legal: bool) -> None:
    program = Program.from_json((Path(__file__).parent / "kept" / "buffers_apart.json").read_text())
    forward = next(op for op in program.ops if op.kind == "forward")
    forward = Op("forward", {**forward.args, "quiet": quiet})
    ops = (Op("snapshot", {}), forward, Op("restore", {}))
    which = dataclasses.replace(program, ops=ops, options={**program.options, "broadcast_buffers": broadcasts})
    assert is_legal(which) == legal


def test_illegal_programs_are_told_apart() -> None:
    """What a shrinking program must not become."""
    program = fuzz_draw.draw(0)
    forward = next(op for op in program.ops if op.kind == "forward")
    backward = Op("backward", {"of": [0], "quiet": False, "retain": False})
    fields = json.loads(program.to_json())
    for ops, legal in [
        ([forward, backward], True),
        ([forward, backward, backward], False),
        ([backward], False),
        ([forward, Op("step", {}), backward], False),
        ([forward, backward, Op("save", {})], False),
        ([Op("load", {})], False),
        ([Op("restore", {})], False),
    ]:
        assert is_legal(Program.from_json(json.dumps({**fields, "ops": ops}))) == legal, ops
