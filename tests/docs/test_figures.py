"""Figures in prose are those of the committed rows, and limits and defaults those of the code."""

from __future__ import annotations

import csv
import inspect
import re
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from documents import ROOT

import zc
from bench.report import tables
from zc.engine import ledger
from zc.planning import packing, wire
from zc.report import prediction

RESULTS = ROOT / "bench" / "results"


class Row(NamedTuple):
    """Rows of one file, by columns; of several the median counts. ``session``: the last one that fits."""

    file: str
    column: str
    chosen: dict[str, str]

    def value(self) -> float:
        with (RESULTS / self.file).open(newline="") as file:
            rows = [r for r in csv.DictReader(file) if all(r[k] == v for k, v in self.chosen.items())]
        assert rows, self
        latest = max(rows, key=lambda r: r.get("time", ""))
        rows = [r for r in rows if r.get("session") == latest.get("session") and r[self.column]]
        return statistics.median(float(r[self.column]) for r in rows)


def run(case: str, provider: str, column: str, file: str = "run.csv", **chosen: str) -> Row:
    return Row(file, column, {"case": case, "provider": provider, **chosen})


def in_turn(case: str, provider: str) -> Row:
    return run(case, provider, "p50_ms", "turns.csv", session="2026-11-29T08:54:17Z")  # zc and DDP


def update(what: str, column: str) -> Row:
    return Row("host_adamw.csv", column, {"what": what})


def loss(options: str, seed: str, column: str = "from_fp32", overflow: str = "False", ranks: str = "2") -> Row:
    at = {"ranks": ranks, "updates": "1000", "rate": "cosine", "seed": seed, "overflow": overflow}
    return Row("wire_loss.csv", column, {"options": options, **at})


ZC, DDP = "zc stage 2", "DDP + compile"
FIRST = {"column": "first_step_s"}
# page -> text with a group per figure, and the rows of the groups
FIGURES: list[tuple[str, str, list[Row]]] = [
    (
        "docs/guide.md", r"took ([\d.]+) s with an empty cache and ([\d.]+) s with a filled one",
        [run("gpt30m-fp32-1k", ZC, "first_step_s", start=start) for start in ("cold", "warm")],
    ),
    ("docs/faq.md", r"168,448 parameters in all \| ([\d.]+) ms \| ([\d.]+) ms",
     [in_turn("norms-147", ZC), in_turn("norms-147", DDP)]),
    ("docs/faq.md", r"30 M parameters, bf16 \| (\d+) ms \| (\d+) ms",
     [in_turn("gpt30m-bf16", ZC), in_turn("gpt30m-bf16", DDP)]),
    ("docs/faq.md", r"small tensors took ([\d.]+) and ([\d.]+) ms",
     [run("norms-147", ZC, "p50_ms"), run("norms-147", DDP, "p50_ms")]),
    *(
        ("docs/offload.md", rf"{text} \| ([\d.]+) \| ([\d.]+) \|", [update(what, "ms_p50"), update(what, "of_floor")])
        for text, what in (
            ("torch fused, which zc uses", "torch fused (what zc takes)"),
            ("torch foreach", "torch foreach"),
            ("torch single-tensor", "torch single-tensor"),
            ("CPUAdam", "DeepSpeed CPUAdam"),
            ("page cache", "fused, moments on disk, in the page cache"),
            ("written alone", "fused, moments on disk, cold"),
        )
    ),
    (
        "docs/offload.md",
        r"took (\d+) ms without offload, (\d+) with `\"cpu\"`,\n(\d+) with .*, and (\d+) with `\"disk",
        [Row("offload.csv", "ms_p50", {"mode": mode}) for mode in (
            "no offload", "offload='cpu'", "offload='cpu', accumulate on device", "offload='disk'")],
    ),
    *(
        ("docs/offload.md", rf"\| {text} \| ([\d,]+) \| (\d+) \| ([\d,]+) \|",
         [run("gpt30m-fp32-1k", name, c, "run_offload.csv") for c in ("p50_ms", "held_mb", "peak_steady_mb")])
        for text, name in (("zc", "zc stage 2, offload"),
                           ("DeepSpeed 0.19.8 with its CPUAdam", "DeepSpeed ZeRO-2, offload + compile"))
    ),
    (
        "docs/multinode.md",
        r"8 bits end\s+\+([\d.]+) and (-[\d.]+) from fp32 \(seeds 0 and 1\), and 4 bits \+([\d.]+)",
        [loss(name, seed, ranks="4") for name, seed in (("int8, int8", "0"), ("int8, int8", "1"), ("int8, int4", "0"))],
    ),
    *(
        (
            "docs/multinode.md", rf"\| {text} " + 4 * r"\| \+?(-?[\d.]+) ",
            [loss(name, *which) for which in (("0", column), ("1", column), ("2", column), ("0", column, "True"))],
        )
        for text, name, column in (
            ("fp32, fp32", "fp32", "held_out_loss"), ("int8, int8 differences", "int8, int8", "from_fp32"),
            ("int8, 4-bit differences", "int8, int4", "from_fp32"),
            ("fp32, first weights moved by 1e-6", "fp32, first weights moved by 1e-6", "from_fp32"),
        )
    ),
    *(
        ("docs/checkpoints.md", text, [Row("checkpoint.csv", column, {})])
        for text, column in (
            (r"plain write and sync \| ([\d.]+)", "write_s"), (r"\| save \| ([\d.]+)", "save_s"),
            (r"asynchronous \| ([\d.]+)", "async_s"), (r"\(([\d.]+) until training goes on", "async_blocked_s"),
            (r"again and again \| ([\d.]+)", "read_s"), (r"holds it all \| ([\d.]+)", "read_keep_s"),
            (r"\| load \| ([\d.]+)", "load_s"),
        )
    ),
]  # fmt: skip
# settings and units that are no measurement, in the text around them
NOT_MEASURED = (
    r"1 GB of masters", r"plain read into 16 MiB", r"100 MB or more", r"5 s x 3", r"by default 10 minutes", r"--gb 1",
)  # fmt: skip
WITH_UNIT = re.compile(r"(?<![\w.])[\d,.]*\d (?:ms|s|us|µs|MB|GB|GB/s|minutes|seconds)\b")


def rounded(value: float, text: str) -> str:
    """``value`` with as many digits as the text has."""
    decimals = len(text.partition(".")[2])
    return f"{value:,.{decimals}f}" if "," in text else f"{value:.{decimals}f}"


@pytest.mark.parametrize(("page", "pattern", "rows"), FIGURES, ids=lambda item: item if isinstance(item, str) else "")
def test_figures_in_prose_are_those_of_the_rows(page: str, pattern: str, rows: list[Row]) -> None:
    match = re.search(pattern, (ROOT / page).read_text())
    assert match is not None, f"{page} has no {pattern!r}: change it here, too"
    assert list(match.groups()) == [rounded(row.value(), text) for row, text in zip(rows, match.groups(), strict=True)]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p}.md" for p in ("guide", "faq", "multinode", "recipes"))])
def test_no_figure_of_a_reader_s_page_is_left_out(page: str) -> None:
    """Each number with a unit of time or bytes is compared above, or is a setting."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    patterns = [pattern for name, pattern, _ in FIGURES if name == page]
    for pattern in (*patterns, *NOT_MEASURED):
        text = re.sub(pattern, "", text)
    assert WITH_UNIT.findall(text) == []


def test_ratios_that_benchmarks_names_are_in_its_tables() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    generated = " ".join(match[0] for match in tables.MARKED.finditer(text))
    first = text[text.index("## Where zc is behind") : text.index("## How")]
    numbers = re.findall(r"\b\d\.\d{3}\b|\b[\d.]+(?= (?:MB|s)\b)", first)
    assert len(numbers) >= 10
    assert [n for n in numbers if re.search(rf"(?<![\d.,]){re.escape(n)}(?![\d.,]*\d)", generated) is None] == []


def test_pages_are_short() -> None:
    longest = {"README.md": 110, "docs/benchmarks.md": 300, "docs/guide.md": 300, "CONTRIBUTING.md": 100}
    assert {p: n for p, most in longest.items() if (n := len((ROOT / p).read_text().splitlines())) > most} == {}


# --- limits and defaults ---

MIB = 2**20
PYPROJECT = (ROOT / "pyproject.toml").read_text()
TORCH, PYTHON = re.findall(r'torch>=([\d.]+)|requires-python = ">=([\d.]+)"', PYPROJECT)[::-1]
# page, text with one group, what the code says
LIMITS: list[tuple[str, str, Any]] = [
    ("README.md", r"needs torch ([\d.]+) or later", TORCH[0]),
    ("README.md", r"# torch ([\d.]+) or later", TORCH[0]),
    ("README.md", r"Python ([\d.]+) or later", PYTHON[1]),
    ("docs/glossary.md", r"reduced together; (\d+) MiB or more by default", packing.DEFAULT_NBYTES // MIB),
    ("docs/benchmarks.md", r"has some (\d+) buckets by default", packing.ENOUGH_BUCKETS),
    ("docs/glossary.md", r"one scale per (\d+) elements", wire.BLOCK),
    ("docs/multinode.md", r"in blocks of (\d+) elements", wire.BLOCK),
    ("docs/multinode.md", r"those below ([\d,]+) elements", f"{wire.SMALL:,}"),
    ("docs/api.md", r"for up to ([\d,]+) ranks", f"{prediction.MAX_WORLD_SIZE:,}"),
    ("docs/guide.md", r"`stage=(\d)`, the default", inspect.signature(zc.compile).parameters["stage"].default),
    ("docs/guide.md", r"zc clocks the (\w+) step after", {2: "third"}[ledger.SETTLE]),
]  # fmt: skip


@pytest.mark.parametrize(("page", "pattern", "limit"), LIMITS, ids=lambda item: item if isinstance(item, str) else "")
def test_limits_are_those_of_the_code(page: str, pattern: str, limit: Any) -> None:
    match = re.search(pattern, (ROOT / page).read_text())
    assert match is not None, f"{page} has no {pattern!r}: change it here, too"
    assert match[1] == str(limit)


def test_the_stated_timeout_is_the_group_s() -> None:
    """Wherever a page says what holds without ZC_RANK_TIMEOUT, it is the group's timeout."""
    checked = 0
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        if page.name in ("changelog.md", "decisions.md"):
            continue
        for match in re.finditer(r"`ZC_RANK_TIMEOUT`(.{0,120})", page.read_text().replace("\n", " ")):
            if re.search(r"default|not set", match[1]):
                checked += 1
                assert re.search(r"group's\s+timeout", match[1]), f"{page.name}: {match[0]}"
    assert checked >= 4


def test_options_of_the_pages_exist() -> None:
    """Every keyword in a call of zc.compile or zc.plan on a page is one of its parameters."""
    checked = 0
    for page in sorted([ROOT / "README.md", *(Path(ROOT, "docs").glob("*.md"))]):
        for name, arguments in re.findall(r"zc\.(compile|plan|explain)\(([^()]*)\)", page.read_text()):
            parameters = set(inspect.signature(getattr(zc, name)).parameters)
            used = set(re.findall(r"\b(\w+)=(?!=)", arguments))
            assert used <= parameters, f"{page.name}: zc.{name}({arguments})"
            checked += len(used)
    assert checked > 20

