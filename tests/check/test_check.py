"""zc.check names planted faults, of programs and of zc, and says nothing of healthy loops."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import pickle
import random
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import models
import numpy
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_ranks
from models import mean_square, vectors
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.optim import SGD

import zc
from zc import __main__
from zc.checking.check import Progress, needs_of
from zc.checking.loop import Loop, Report, Worst, steps_of
from zc.checking.reference import Reference
from zc.checking.values import Randomness, copied, digest, joined, packed, unpacked
from zc.config import Config
from zc.ranks.meshes import ranks_of

sys.path.insert(0, str(Path(__file__).parent))

import healthy
import planted


def _programs(rank: int, world_size: int) -> dict[str, tuple[list[str], str, str]]:
    reports = {}
    for name, make in planted.PROGRAMS.items():
        report = zc.check(**make(rank))
        reports[name] = report.codes, str(report), report.to_json()
    return reports


def test_faults_of_programs_are_named() -> None:
    assert len(planted.PROGRAMS) >= 12
    first, second = run_ranks(_programs, planted.NUM_RANKS)
    assert {name: codes for name, (codes, *_) in first.items()} == {name: [name] for name in planted.PROGRAMS}
    assert first == second  # one report on every rank


def _sabotaged(rank: int, world_size: int) -> dict[str, tuple[list[str], str]]:
    reports = {}
    for name, fault in planted.SABOTAGES.items():
        torch._dynamo.reset()
        with fault.plant(rank):
            report = zc.check(**planted.healthy(rank, **fault.options))
        reports[name] = report.codes, str(report)
    return reports


def test_faults_of_zc_are_named() -> None:
    named = run_ranks(_sabotaged, planted.NUM_RANKS)
    wanted = {name: [fault.code] for name, fault in planted.SABOTAGES.items()}
    assert {name: codes for name, (codes, _) in named[0].items()} == wanted, named[0]


def _inductor(rank: int, world_size: int) -> list[tuple[list[str], str]]:
    reports = []
    for arguments in (planted.healthy(rank, backend="inductor"), planted.inductor(rank)):
        torch._dynamo.reset()
        report = zc.check(**arguments)
        reports.append((report.codes, str(report)))
    return reports


def test_a_fault_of_inductor_is_named() -> None:
    (fine, _), (codes, text) = run_ranks(_inductor, 1, timeout=300.0)[0]  # what it compiles has no rank in it
    assert fine == [] and codes == ["compiler"]
    assert "Inductor's code differs from op by op" in text and "in the same way without zc" in text


# --- healthy loops ---


def _clip(model: nn.Module, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


# model, and what zc.check gets beside it: stages 1 to 3, both backends without Inductor, accumulation, clipping, bf16
HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 1, clipped": ("heads", {"stage": 1, "backend": "eager", "microbatches": 2, "update": _clip}),
    "stage 2, buffers": ("batch_norm", {"stage": 2, "backend": "aot_eager"}),
    "stage 3, bf16": ("gpt_tied", {"stage": 3, "backend": "aot_eager", "param_dtype": torch.bfloat16}),
    "narrow from the start": ("mixed_dtypes", {"stage": 2, "backend": "eager", "microbatches": 3}),
    "unused parameters": ("unused", {"stage": 2, "backend": "eager", "offload": "cpu"}),
}


def _of_case(rank: int, name: str, **options: Any) -> Any:
    case = models.CASES[name]
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches = [case.batch(rank, k, 0) for k in range(6)]
    return zc.check(case.loss, model, optimizer, batches, **{"updates": 2, **options})


def _gathers(rank: int) -> planted.Arguments:
    """As planted.gather_without_gradient, with a gather that has a gradient."""

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        own = model(batch[0])
        everyone = torch.cat(all_gather(own))
        return F.cross_entropy(own @ everyone.t(), torch.arange(len(own)))

    return planted.healthy(rank, step=step)


class Remembers(planted.Net):
    """Its loss depends on a buffer, which is rank 0's before a forward, but not after one of no_sync."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(planted.DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.mean)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return y


def _healthy(rank: int, world_size: int) -> dict[str, tuple[list[str], str]]:
    reports = {name: _of_case(rank, case, **options) for name, (case, options) in HEALTHY.items()}
    reports["a collective in the step"] = zc.check(**_gathers(rank))
    remembers = planted.healthy(rank, Remembers(), updates=2, microbatches=2)
    reports["a buffer that is read"] = zc.check(**remembers)
    torch.manual_seed(rank)
    dropout = planted.healthy(rank, planted.Net(F.dropout))
    reports["dropout"] = zc.check(**dropout)
    return {name: (report.codes, str(report)) for name, report in reports.items()}


def test_healthy_loops_have_no_fault() -> None:
    reports = run_ranks(_healthy, planted.NUM_RANKS, timeout=200.0)[0]
    assert {name: codes for name, (codes, _) in reports.items()} == {name: [] for name in reports}, reports
    assert "note  own-buffers: ranks write other values into 1.running_mean" in reports["stage 2, buffers"][1]


SAMPLE = 8
NARROW = 55  # in bfloat16, and its forward writes a weight


def test_a_sample_of_the_fuzzers_programs_has_no_fault() -> None:
    """`python tests/check/healthy.py --programs 200` runs more."""
    drawn = range(5_000, 5_000 + 3 * SAMPLE)
    seeds = [NARROW, *(seed for seed in drawn if healthy.draw(seed).world_size == 2)][:SAMPLE]
    outcomes = run_ranks(healthy.run, 2, seeds, timeout=300.0)[0]
    assert {seed: codes for seed, (codes, *_) in outcomes.items()} == {seed: [] for seed in seeds}, outcomes


def test_an_lr_of_zero_is_a_note() -> None:
    model = planted.Net()
    report = zc.check(**planted.healthy(0, model, optimizer=SGD(model.parameters(), lr=0.0), backend="eager"))
    assert report.is_fine and [note.code for note in report.notes] == ["lr-zero"]


def test_one_device_is_checked_without_ranks() -> None:
    report = zc.check(**planted.healthy(0, backend="eager"))
    assert report.is_fine and report.world_size == 1 and report.worst["eager"]["weight"].num_compared == 4


# --- the reference, against what shares no code with it ---


def _reference(rank: int, world_size: int, name: str) -> tuple[float, float]:
    """The largest relative difference of gradients from the float64 oracle, and of weights from real DDP's."""
    case, microbatches = models.CASES[name], 2
    make = functools.partial(torch.optim.AdamW, lr=1e-3)
    model = case.model()
    batches = [[case.batch(r, u, k) for u in range(3) for k in range(microbatches)] for r in range(world_size)]
    ranks = ranks_of(None, None)
    loop = Loop(
        case.loss, steps_of, model, make(model.parameters()), 3, microbatches, Config(), {}, ranks,
        torch.device("cpu"), batches, [Randomness(torch.device("cpu")).get()] * world_size,
    )  # fmt: skip
    reference = Reference(loop)
    trace = list(reference.run(lambda: None))
    wanted = oracle.full_gradients(case.model(), case.loss, [own[:microbatches] for own in batches])
    grads = {key.name: value for key, value in trace[0].of("gradient") if value is not None}
    ddp = case.model()
    updates = [batches[rank][microbatches * u : microbatches * (u + 1)] for u in range(3)]
    weights, _ = oracle.train_ddp(ddp, case.loss, lambda m: make(m.parameters()), updates)
    return oracle.worst(grads, wanted)[0], oracle.worst(dict(reference.weights()), weights)[0]


def test_the_reference_is_ddp() -> None:
    for gradients, weights in run_ranks(_reference, 2, "gpt_tied"):
        assert gradients < 1e-5 and weights < 1e-5


# --- what it leaves as it was, and what it refuses ---


def _untouched(rank: int, world_size: int) -> list[str]:
    """What differs afterwards."""
    batches = [vectors(16, 8)(rank, 0, k) for k in range(2)]
    made = planted.healthy(rank, models.batch_norm(), batches=batches)
    model, optimizer = made["model"], made["optimizer"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step, and keeps the optimizer
    optimizer.register_step_post_hook(lambda *_: None)

    def look() -> dict[str, bytes]:
        states: dict[str, Any] = {"torch": torch.get_rng_state().tolist(), "python": random.getstate()}
        states["numpy"] = numpy.random.get_state()
        tensors = {**model.state_dict(), **{f"grad {n}": p.grad for n, p in model.named_parameters()}}
        seen = {**states, **tensors, "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        return {name: pickle.dumps(value) for name, value in seen.items()}

    before = look()
    made["step"] = lambda model, batch: mean_square(model, batch) * random.random() * numpy.random.rand()
    report = zc.check(**made)
    assert report.is_fine and report.worst["eager"]["state"].num_compared > 0  # its copies have made their steps
    after = look()
    model.train()
    net, _ = zc.compile(model, optimizer, backend="eager")  # as if nothing had been before
    mean_square(net, made["batches"][0]).backward()
    optimizer.step()
    return [name for name in before if before[name] != after[name]]


def test_model_optimizer_and_random_numbers_are_untouched() -> None:
    assert run_ranks(_untouched, 2) == [[], []]


def test_a_copy_of_an_optimizer_has_its_own_functions_and_the_classs_step() -> None:
    model = planted.Net()
    optimizer = SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step
    optimizer.own_rule = mean_square  # type: ignore[attr-defined]
    _, twin = copied(model, optimizer)
    assert "step" in vars(optimizer) and "step" not in vars(twin) and twin.own_rule is mean_square


def test_json_has_no_infinity() -> None:
    report = Report(1, 1, 1, {}, worst={"eager": {"loss": Worst(float("inf"))}})
    worst = json.loads(report.to_json(), parse_constant=pytest.fail)["worst"]["eager"]["loss"]
    assert worst["ratio"] == "inf"


class Fails:
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise OSError("planted")
        return mean_square(model, batch)


def _refused(rank: int, world_size: int) -> list[str]:
    said = []
    few = planted.healthy(rank)
    few["batches"] = few["batches"][: 1 - rank]
    own = planted.healthy(rank)
    other = planted.healthy(rank)

    def of_another(model: nn.Module, batch: Any) -> Tensor:
        return mean_square(other["model"], batch)

    def updates_another(model: nn.Module, optimizer: Any) -> None:
        optimizer.step()
        other["optimizer"].param_groups[0]["lr"] *= 0.5

    compiled = planted.healthy(rank)
    zc.compile(compiled["model"], compiled["optimizer"], backend="eager")
    cases = [
        few, {**own, "stag": 2}, {**own, "stage": 4}, {**own, "step": of_another}, {**own, "step": lambda m, b: 1.0},
        {**other, "update": updates_another}, {**own, "step": Fails()}, {**own, "updates": 0}, compiled,
    ]  # fmt: skip
    for arguments in cases:
        try:
            zc.check(**arguments)
            said.append("")
        except (zc.ZcError, TypeError, OSError) as error:
            said.append(f"{type(error).__name__}: {error}")
    assert zc.check(**own).is_fine  # after all of them
    return said


def test_bad_input_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(_refused, 2)
    words = [
        "there are 0 batches, and updates=1", "stag is none of them", "stage must be one of", "reaches no parameter",
        "step returned float", "zc.check was given changes your own", "planted", "updates must be", "compiled already",
    ]  # fmt: skip
    for one, other, part in zip(first, second, words, strict=True):
        assert part in one and part in other
    assert first[0].startswith("RankMismatchError") and second[0].startswith("PlanError")
    assert first[6].startswith("RankMismatchError") and second[6].startswith("OSError")


def test_memory_is_counted_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planted.Net()
    needs = needs_of(model, 4, updates=3, microbatches=2)
    nbytes = 4 * 2 * (16 * 16 + 16)
    assert needs.device == (8 + 4) * nbytes and needs.host == (9 + 4 + 2 + 4 * 3) * nbytes
    monkeypatch.setattr("zc.checking.check.available_nbytes", lambda: 15_000_000)
    large = planted.healthy(0, nn.Linear(400, 400))  # 160,400 parameters: 9 + 15 times 641,600 bytes
    with pytest.raises(zc.PlanError, match=r"needs 15.4 MB of host memory on each of the 1 ranks here, and 15.0 MB"):
        zc.check(**large)


def test_the_memory_that_it_says_is_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tensors that are alive whenever the bar advances."""
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_alive()}
        most = max(most, sum(storages.values()))

    monkeypatch.setattr(Progress, "advance", look)
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(10)))
    batches = [(torch.randn(4, 300), torch.randn(4, 300)) for _ in range(2)]
    before = sum(t.nbytes for t in tensors_alive())
    arguments = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "batches": batches}
    report = zc.check(**planted.healthy(0, **arguments, updates=2))
    assert 0.75 * report.needed_nbytes < most - before < report.needed_nbytes


def tensors_alive() -> list[Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]


def test_batches_travel_and_join_as_they_are() -> None:
    class Pair(NamedTuple):
        x: Tensor
        rest: dict[str, Any]

    first, second = (Pair(torch.full((2, 3), float(k)), {"y": [torch.arange(k + 2)], "name": "a"}) for k in (0, 1))
    both = joined([first, second])
    assert both.x.shape == (4, 3) and both.rest["y"][0].tolist() == [0, 1, 0, 1, 2] and both.rest["name"] == "a"
    (there,) = unpacked(packed([(first.x, dict(first.rest))]), torch.device("cpu"))
    assert digest(there) == digest((first.x, first.rest)) != digest((first.x, second.rest))
    with pytest.raises(zc.PlanError, match="other values, differ"):
        joined([(1, first.x), (2, first.x)])
    with pytest.raises(zc.PlanError, match="can't be pickled"):
        packed([lambda: 0])


# --- what people see ---


def test_the_page_has_every_code() -> None:
    root = Path(__file__).resolve().parents[2]
    source = "".join(path.read_text() for path in sorted((root / "zc/checking").glob("*.py")))
    codes = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source)) | {"compiler", "zc-compiled", "zc"}
    codes |= set(re.findall(r'^        "[a-z]+": \("([a-z-]+)", "', source, flags=re.M))
    page = (root / "docs/check.md").read_text()
    table = page[page.index("## What it finds") : page.index("## How it decides")]
    assert set(re.findall(r"`([a-z-]+)`", table)) - {"aot_eager", "torch.compile"} - {"weight_decay"} == codes


def test_the_bar_is_drawn_on_a_terminal_alone() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), True), (io.StringIO(), False)):
        bar = Progress(4, shown=shown, stream=stream)
        bar.begin("plain PyTorch")
        bar.advance()
        bar.begin("zc, eager")
        bar.end()
        text = stream.getvalue()
        assert ("[#######......................." in text) == stream.isatty()
        assert ("zc.check: zc, eager (25 %)\n" in text) == (shown and not stream.isatty())
        assert bool(text) == shown


SCRIPT = """
import sys
sys.path[:0] = {path!r}
import planted
import torch.distributed as dist

def fine():
    made = planted.healthy(dist.get_rank())
    return made["step"], made["model"], made["optimizer"], made["batches"]

def faulty():
    return planted.same_data(dist.get_rank())

def broken():
    def step(model, batch):
        raise KeyError("no such column")
    return planted.healthy(dist.get_rank(), step=step)

def short():
    return fine()[:3]
"""


def _commands(rank: int, world_size: int, script: str) -> list[tuple[int, str]]:
    said = []
    for name in ("fine", "faulty", "lacking", "broken", "short"):
        printed = io.StringIO()
        arguments = [f"{script}:{name}", "--ranks", "1", "--updates", "1", "--backend", "eager"]
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = __main__.run_check([*arguments, "--json", script.replace(".py", f"-{name}.json")])
        said.append((status, printed.getvalue()))
    return said


def test_the_command_says_what_it_found_by_its_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(path=sys.path))
    first, second = run_ranks(_commands, 2, str(script))
    assert [status for status, _ in first] == [status for status, _ in second] == [0, 1, 2, 2, 2]
    assert "KeyError: 'no such column'" in first[3][1] and "returned 3 things" in first[4][1]
    assert "no fault found" in first[0][1] and "FAULT same-data" in first[1][1] and "has no function" in first[2][1]
    data = json.loads((tmp_path / "script-faulty.json").read_text())
    assert not data["is_fine"] and data["findings"][0]["code"] == "same-data" and data["ranks"] == 2
    assert data["worst"]["eager"]["gradient"]["num_compared"] == 4


def test_an_unknown_command_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["zc", "dif", "folder"])
    assert __main__.main() == 2
    assert "no command 'dif'" in capsys.readouterr().out


def test_a_report_without_a_folder_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ran to its end, and then raised FileNotFoundError."""
    with pytest.raises(SystemExit, match="2"):
        __main__.run_check(["script.py:make", "--ranks", "1", "--json", str(tmp_path / "missing" / "report.json")])
    assert f"there is no folder {tmp_path / 'missing'}. Make it first" in capsys.readouterr().err


def test_the_command_starts_ranks_by_itself(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """docs/examples/check.py, as its first line says."""
    root = Path(__file__).resolve().parents[2]
    line = (root / "docs/examples/check.py").read_text().splitlines()[0].strip('"').split()
    assert line[:3] == ["python", "-m", "zc"]
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", line[2:])
    for name, value in (("PYTHONPATH", str(root)), ("GLOO_SOCKET_IFNAME", "lo")):
        monkeypatch.setenv(name, value)
    assert __main__.main() == 0
    said = capfd.readouterr().out
    assert "zc.check: 2 ranks" in said and "no fault found" in said
