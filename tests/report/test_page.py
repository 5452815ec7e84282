"""The page of zc.explain: which step is clocked, what is drawn of it, and that a browser can read it."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zc
from zc.engine.ledger import Clock
from zc.registry import sharded
from zc.report.explain import text_of_sources
from zc.report.html import LOOP, Timeline, _cards, measured, module_of

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def trained(num_steps: int, backend: str = "aot_eager", microbatches: int = 2) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    zc.compile(model, torch.optim.AdamW(model.parameters()), backend=backend, bucket_nbytes=16 * 33 * 4)
    (optimizer,) = (each.optimizer for each in sharded(model).optimizers)
    for _ in range(num_steps):
        for _ in range(microbatches):
            model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# --- the clock ---


def test_the_clock_is_on_for_one_step_after_the_last_compilation() -> None:
    clock, on = Clock(torch.device("cpu")), []
    for num_graphs in (2, 2, 2, 2, 2, 3, 3, 3, 3):  # each at the end of a step
        clock.end_step(num_graphs)
        on.append(clock.is_on)
    assert on == [False, False, True, False, False, False, False, True, False]


def test_nothing_is_clocked_before_its_step_has_ended() -> None:
    for num_steps in (1, 3):
        assert sharded(trained(num_steps)).runtime.streams.clock.step() is None
    assert sharded(trained(4)).runtime.streams.clock.step() is not None


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_clocked_step_is_the_step(backend: str) -> None:
    """Phases follow each other without a gap; each operation of a backward lies inside one, once per microbatch."""
    model = trained(6, backend)
    runtime = sharded(model).runtime
    step = runtime.streams.clock.step()
    assert step is not None and [p.name for p in step.phases] == [*["forward", "backward"] * 2, "forward", "update"]
    assert all(a.stop == b.start for a, b in zip(step.phases, step.phases[1:], strict=False))
    backwards = [p for p in step.phases if p.name == "backward"]
    compute = [s for s in step.spans if s.stream == "compute"]  # other streams may end after the backward
    inside = [sum(p.start <= s.start <= s.stop <= p.stop for s in compute) for p in backwards]
    assert inside[0] == inside[1] > 0 and len(compute) >= sum(inside)
    assert all(nbytes > 0 for _, nbytes in step.memory)
    programs = [*runtime.programs, *runtime.deposits.programs, *runtime.weights.programs]
    line = measured(step, programs)
    assert [b.label for b in line.boxes if b.lane == LOOP] == [p.name for p in step.phases]
    assert len([b for b in line.boxes if b.node is not None]) == len(step.spans)
    if backend == "aot_eager":
        assert {"first", "second"} <= {box.label for box in line.boxes}, "segments are named by their module"


def test_a_wait_that_held_nobody_up_is_drawn_so() -> None:
    """Two writes and two reductions; the second write waits for an event that was there before."""
    model = trained(4, microbatches=1)
    runtime = sharded(model).runtime
    (program,) = runtime.programs
    step = runtime.streams.clock.step()
    assert step is not None
    own = [s for s in step.spans if s.program == program.name]
    # by hand: on compute 0 to 10, 10 to 20, ...; on every other stream each operation takes 100
    clock = dict.fromkeys({s.stream for s in own}, 0.0)
    spans = []
    for span in own:
        took = 10.0 if span.stream == "compute" else 100.0
        start = clock[span.stream] = max(clock[span.stream], clock["compute"])
        clock[span.stream] = start + took
        spans.append(span._replace(start=start, stop=start + took))
    line = measured(step._replace(spans=tuple(spans), exposed=None), [program])
    for arrow in line.arrows:
        before = max((b.stop for b in line.boxes if b.lane == arrow.target and b.stop <= arrow.stop), default=0.0)
        assert arrow.delayed == (arrow.start > before), arrow
    assert len(line.arrows) > 0


def test_names_of_modules() -> None:
    assert module_of(["layers.3.a.weight", "layers.3.b.bias"]) == "layers.3"
    assert module_of(["layers.3.a.weight", "layers.3.a.bias"]) == "layers.3.a"
    assert module_of(["head.weight", "layers.3.a.bias"]) == "head to layers.3.a"
    assert module_of(["scale"]) == "scale"


# --- the first sentence ---


def test_the_first_sentence_says_what_matters() -> None:
    model = trained(3)
    report = zc.explain(model)
    numel = sum(p.numel() for p in model.parameters())
    assert report.summary.ddp_nbytes == 16 * numel, "fp32: weights, gradients, two moments"
    rows = report.sections["persistent bytes"].splitlines()
    assert report.summary.nbytes == int(rows[-1].split(": ")[1].replace(",", ""))
    first = str(report).splitlines()[0]
    assert re.fullmatch(
        r"Nothing fell back\. 0\.0 MB per rank \(DDP in fp32: 0\.0 MB\), 0 recompiles, 0\.0 MB sent in the last step\.",
        first,
    ), first


def test_the_first_sentence_names_what_fell_back() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    with pytest.warns(UserWarning, match="without their proof"):
        zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="aot_eager", verify=False)
    optimizer = sharded(model).optimizers[0].optimizer
    model(torch.ones(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="unused"):
        optimizer.step()
    first = str(zc.explain(model)).splitlines()[0]
    schedules = zc.explain(model).summary.num_unproved
    said = f"1 gradient through its hook, {schedules} schedules without their proof, 2 notes"
    assert first.startswith(f"Look at {said}."), first


class Blocks(nn.Module):
    """Equal blocks in a loop; ``norm`` is read beside the loop, where Dynamo compiles nothing."""

    def __init__(self, reads_beside_the_loop: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5))
        self.norm = nn.LayerNorm(16)
        self.reads_beside_the_loop = reads_beside_the_loop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head_loss(self.norm(x) if self.reads_beside_the_loop else x)

    def head_loss(self, x: torch.Tensor) -> torch.Tensor:
        return (x if self.reads_beside_the_loop else self.norm(x)).square().mean()


@pytest.mark.parametrize(("beside", "said"), [(False, "Nothing fell back."), (True, "Look at 2 gradients")])
def test_the_loop_over_blocks_counts_as_no_graph_break(beside: bool, said: str) -> None:
    """Dynamo skips the function that has it, in every model with blocks; what stands beside it is named."""
    torch._dynamo.reset()
    model = Blocks(beside)
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="aot_eager")
    optimizer = sharded(model).optimizers[0].optimizer
    model(torch.ones(2, 16)).backward()
    optimizer.step()
    report = zc.explain(model)
    assert sharded(model).runtime.plan.kinds and str(report).startswith(said), str(report.summary)
    assert "Dynamo skips the function that has the loop over blocks" in report.sections["compilation"]


def test_equal_blocks_are_one_line_of_the_last_step() -> None:
    twice = Counter({"backward_0 of blocks.1": 1, "backward_2": 2})
    slots = [Counter({"backward_0": 1}), twice, Counter({"hook": 1}), Counter[str]()]
    assert text_of_sources(slots) == (
        "backward_0 of 2 blocks x 1 (2 of 4 parameters), backward_2 x 2 (1 of 4 parameters), "
        "hook x 1 (1 of 4 parameters)"
    )
    assert text_of_sources([Counter()]) == "nothing"


# --- the page ---


def test_long_lists_are_folded_and_sections_are_whole() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    zc.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), backend="eager")
    report = zc.explain(model)
    num_left = len(report.sections["buckets"].splitlines()) - 30
    assert num_left > 0 and f"... {num_left} more lines: zc.explain(model).sections['buckets']" in str(report)
    assert "39.weight" in report.sections["buckets"] and "\n0.weight" not in str(report)


def test_the_step_is_drawn_once_it_was_clocked(tmp_path: Path) -> None:
    for num_steps, is_clocked in ((6, True), (1, False)):
        report = zc.explain(trained(num_steps), format="html", path=tmp_path / f"{num_steps}.html")
        page = report.path.read_text()
        captions = re.findall(r'aria-label="([^"]*)"', page)
        assert ["measured" in caption for caption in captions] == [True] * is_clocked, captions
        assert ("No step was clocked yet" in page) is not is_clocked
        assert str(report).splitlines()[2] == f"The page is {report.path}"
        assert html.escape(str(report.summary)) in page


@pytest.mark.parametrize(("nbytes", "is_marked"), [(100, False), (101, True)])
def test_more_memory_than_ddp_s_is_marked(nbytes: int, is_marked: bool) -> None:
    summary = dataclasses.replace(zc.explain(trained(1)).summary, nbytes=nbytes, ddp_nbytes=100)
    card, *_ = re.findall(r'<div class="([^"]*)">memory of this rank', _cards(summary, None))
    assert card == "card" + " look" * is_marked


@pytest.mark.parametrize(("most", "said"), [(7_000_000, "below 1 MB"), (9_000_000, "+3.0 MB")])
def test_a_step_that_adds_next_to_nothing_says_so(most: int, said: str) -> None:
    step = Timeline((), (), memory=((0.0, 6_000_000), (1.0, most)))
    (card,) = re.findall(r"peak of the step<b>([^<]*)</b>", _cards(zc.explain(trained(1)).summary, step))
    assert card == said


@pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_reads_the_page(dark: bool, tmp_path: Path) -> None:
    """Narrow, by keyboard, by mouse, zoomed, printed; without an error of the script."""
    path = tmp_path / "page.html"
    zc.explain(trained(6), format="html", path=path)
    script = (Path(__file__).parent / "page_script.js").read_text()
    path.write_text(path.read_text().replace("</body>", f"<script>{script}</script></body>"))
    seen = read(path, "--window-size=500,900", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    paper = seen.pop("paper")
    assert paper == ("rgb(27, 27, 26)" if dark else "rgb(255, 255, 255)")
    assert len(seen) >= 9 and all(seen.values()), seen


def read(path: Path, *flags: str) -> dict[str, Any]:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent}/browser",
               "--enable-logging=stderr", "--virtual-time-budget=2000", *flags]  # fmt: skip
    done = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=240)
    assert "CONSOLE" not in done.stderr, done.stderr
    text = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, flags=re.S)
    assert text is not None, done.stdout[-500:] + done.stderr[-500:]
    seen: dict[str, Any] = json.loads(html.unescape(text[1]))
    return seen
