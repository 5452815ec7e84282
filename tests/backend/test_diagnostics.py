"""zc.explain answers "why is this bucket empty", and says it before anybody asks (deepspeed#7579)."""

from __future__ import annotations

import logging
import mmap
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import zc
import zc.log
from zc.report.explain import MANY_PAGE_FAULTS


class Branches(nn.Module):
    """A trunk and two branches, of which a call takes one; ``never`` takes part in nothing, ``eager`` is not
    compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.eager, self.never = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        x = self.trunk(x)
        x = self.left(x) if left else self.right(x)
        return self._not_compiled(x)

    @torch.compiler.disable
    def _not_compiled(self, x: torch.Tensor) -> torch.Tensor:
        return self.eager(x)


def trained(backend: str, *steps: tuple[bool, ...]) -> tuple[nn.Module, list[str]]:
    """A backward for each item of each step; the texts of all warnings of zc."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend=backend, bucket_nbytes=8 * 9 * 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps:
            for left in step:
                model(torch.ones(2, 8), left).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, [str(w.message) for w in caught if str(w.message).startswith("zc: ")]


def line(section: str, start: str) -> str:
    rows = [row for row in section.splitlines() if row.startswith(start)]
    assert len(rows) == 1, section
    return rows[0]


def test_which_bucket_was_filled_by_what_and_how_often() -> None:
    """Buckets in reverse order of registration: never, eager, right, left, trunk."""
    model, _ = trained("aot_eager", (True,), (False, False, False))
    step = zc.explain(model).sections["last step"]
    assert line(step, "bucket 0:") == "bucket 0: nothing; reduced 0 times"
    assert "hook x 3 (2 of 2 parameters)" in line(step, "bucket 1:")
    assert re.search(r"backward_\d x 3 \(2 of 2 parameters\)", line(step, "bucket 2:"))
    assert line(step, "bucket 3:").startswith("bucket 3: nothing")
    assert re.search(r"backward_\d x 3 \(2 of 2", line(step, "bucket 4:"))
    assert line(step, "step") == "step 2"


def test_what_stayed_empty_and_why() -> None:
    empty = zc.explain(trained("aot_eager", (True,), (False,))[0]).sections["stayed empty in the last step"]
    assert "no compiled backward writes it" in line(empty, "never.weight:")
    assert re.search(r"backward_\d would write its gradient, and did not run", line(empty, "left.weight:"))
    assert "trunk" not in empty and "right" not in empty and "eager" not in empty
    full = zc.explain(trained("eager", (True, False))[0]).sections["stayed empty in the last step"]
    assert full.count("never") == 2 and "left" not in full


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_parameter_without_a_backward_is_named_once(backend: str) -> None:
    """Once for each parameter, when it is first left out, not at every step."""
    _, said = trained(backend, (True,), (True,), (False,), (True,))
    said = [text for text in said if "took part in no backward" in text]
    assert len(said) == 2, said
    assert all(name in said[0] for name in ("never.weight", "never.bias", "right.weight", "right.bias"))
    assert "left.weight" in said[1] and "never" not in said[1] and "trunk" not in " ".join(said)
    _, said = trained(backend, (True, False))
    assert sum("left" in text or "right" in text for text in said) == 0


def test_a_step_without_gradients_is_said() -> None:
    _, said = trained("eager", ())
    assert [text for text in said if "no parameter had a gradient" in text]


def test_compilation_is_counted() -> None:
    """The break before the disabled part; the second branch is the same frame compiled once more."""
    one = zc.explain(trained("aot_eager", (True,))[0]).sections["compilation"]
    two = zc.explain(trained("aot_eager", (True,), (False,))[0]).sections["compilation"]
    assert "guards): 0" in one and re.search(r"guards\): [1-9]", two), (one, two)
    assert re.search(r"[1-9]\d* x .*(disable|_not_compiled)", one), one
    assert "nothing is compiled" in zc.explain(trained("eager", (True,))[0]).sections["compilation"]


class Links(HTMLParser):
    """Every address that the page refers to, and the tags that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.refers += [value or "" for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    model, _ = trained("aot_eager", *[(True,)] * 4)  # the third step after the last compilation is clocked
    report = zc.explain(model, format="html", path=tmp_path / "page.html")
    assert report.path == tmp_path / "page.html"
    page = report.path.read_text()
    parser = Links()
    parser.feed(page)
    assert not parser.open, "every tag is closed"
    assert all(address.startswith(("#", "data:")) for address in parser.refers), parser.refers
    seen = "".join(parser.texts)
    for name, body in report.sections.items():
        assert name in seen and body.splitlines()[0] in seen
    launches = sum("flatten_cast" in row for body in report.sections.values() for row in body.splitlines())
    assert "<svg" in page and len(re.findall(r"<title>[^<]*: flatten_cast", page)) >= launches > 0
    with pytest.raises(zc.PlanError, match="'pdf'"):
        zc.explain(model, format="pdf")


def test_the_log_follows_every_bucket(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="zc"):
        trained("aot_eager", (True,))
    hooked = ["a hook brings the gradient of eager.weight", "written into", "is reduced into acc[1]"]
    compiled = ["written into flat_grad", "is reduced into acc[4]", "its new weights may be read"]
    for bucket, events in ((1, hooked), (4, compiled)):
        said = " ".join(r.getMessage() for r in caplog.records if r.getMessage().startswith(f"bucket {bucket}:"))
        assert all(event in said for event in events), said
    assert not any(r.getMessage().startswith("bucket 0:") for r in caplog.records), "nothing happened to it"


def test_zc_log_in_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(zc.log, "log", logging.getLogger("zc_log_of_a_test"))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("ZC_LOG", "debug")
    zc.log.configure()
    zc.log.log.debug("seen")
    said = capsys.readouterr().err
    assert said.startswith("[rank 3]") and said.endswith("zc: seen\n")
    monkeypatch.setenv("ZC_LOG", "warning")
    zc.log.configure()
    zc.log.log.debug("hidden")
    assert not capsys.readouterr().err
    monkeypatch.setenv("ZC_LOG", "chatty")
    with pytest.raises(ValueError, match="ZC_LOG must be one of"):
        zc.log.configure()


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="huge pages, which count once, can't be refused here")
def test_page_faults_of_the_last_step_are_counted_and_many_come_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is new to the process: a page fault a page, by definition."""
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    num_pages = 3 * MANY_PAGE_FAULTS
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zc.compile(model, optimizer, backend="eager")
    notes = []
    for step in range(3):
        model(torch.ones(2, 8)).sum().backward()
        if step == 1:
            with mmap.mmap(-1, num_pages * mmap.PAGESIZE) as fresh:
                fresh.madvise(mmap.MADV_NOHUGEPAGE)
                for page in range(num_pages):
                    fresh[page * mmap.PAGESIZE] = 1
        optimizer.step()
        optimizer.zero_grad()
        notes.append(line(zc.explain(model).sections["last step"], "page faults:"))
    counts = [int(re.findall(r"[\d,]+", row)[0].replace(",", "")) for row in notes]
    assert num_pages <= counts[1] and counts[2] < num_pages, notes
    assert "MALLOC_TRIM_THRESHOLD_" in notes[1]
    assert counts[2] >= MANY_PAGE_FAULTS or "MALLOC" not in notes[2]
