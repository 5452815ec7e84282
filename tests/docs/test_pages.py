"""README and docs as a reader finds them: links lead somewhere, blocks run or at least are Python, diffs are what the
files say, examples run."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from documents import PAGES, ROOT, Block, blocks, with_diffs
from harness import patience, run_ranks
from tiers import full_only
from torch import nn
from torch.nn import functional as F
from training_runs import environment

import zc

BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in BLOCKS if block.run is not None]
EXAMPLES = ROOT / "docs" / "examples"


def ids(item: Any) -> str:
    return str(item.relative_to(ROOT)) if isinstance(item, Path) else str(item)


# --- links ---


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"({p.name})" not in index] == ["index.md"]


def test_every_example_is_named_on_a_page() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert [p.name for p in EXAMPLES.glob("*.py") if f"examples/{p.name}" not in text] == []


def repeated(page: Path) -> list[str]:
    """Headings and long lines of prose that stand on the page twice: a merge has kept two versions of a section."""
    lines = re.sub(r"<!-- table.*?<!-- end -->|```.*?```", "", page.read_text(), flags=re.S).splitlines()
    prose = [line for line in lines if line.startswith("#") or (len(line) > 60 and not line.startswith("|"))]
    return [line for line, times in Counter(prose).items() if times > 1]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_page_says_the_same_twice(page: Path) -> None:
    assert repeated(page) == []


# --- Python blocks ---


@pytest.mark.parametrize("block", BLOCKS, ids=ids)
def test_every_block_is_python(block: Block) -> None:
    compile(block.code, str(block), "exec")


def given(folder: str) -> dict[str, Any]:
    """What a block finds: a small model and its data, other data on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.manual_seed(1 + dist.get_rank())
    loader = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "model": model, "optimizer": optimizer, "loader": loader, "data": loader, "folder": folder, "x": loader[0][0],
        "y": loader[0][1], "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "torch": torch, "nn": nn, "F": F,
        "dist": dist, "zc": zc, "contextlib": contextlib, "copy": copy,
    }  # fmt: skip


def _run(rank: int, world_size: int, all_blocks: list[Block], folder: str) -> None:
    """Without Inductor, which would take half a minute for each block."""
    before, stock = Path.cwd(), zc.compile
    os.chdir(folder)
    zc.compile = lambda *args, **options: stock(*args, **{"backend": "eager", **options})
    try:
        for number, block in enumerate(all_blocks):
            names: dict[str, Any] = {}
            if block.run != "alone":
                names = given(f"{folder}/{number}")
            if block.run == "compiled":
                zc.compile(names["model"], names["optimizer"])
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code, str(block), "exec"), names)
            assert block.run != "prints" or printed.getvalue() == block.output, printed.getvalue()
    finally:
        zc.compile = stock
        os.chdir(before)


def test_blocks_that_are_marked_run_on_two_ranks(tmp_path: Path) -> None:
    assert {block.run for block in RUN} == {"", "compiled", "alone", "prints"} and len(RUN) >= 14
    run_ranks(_run, 2, RUN, str(tmp_path), timeout=240.0)


# --- diffs, pictures, examples ---


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_diffs_are_the_files(page: Path) -> None:
    assert with_diffs(page) == page.read_text(), "python tests/docs/documents.py"


def test_the_guide_shows_two_lines_against_ddp() -> None:
    diffs = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), flags=re.S)
    assert len(diffs) == 2
    added = [line for line in diffs[1].splitlines() if line.startswith("+")]
    assert added == ["+import zc", "+model, optimizer = zc.compile(model, optimizer, stage=2)"]
    assert sum(line.startswith("-") for line in diffs[1].splitlines()) == 2
    assert len((EXAMPLES / "train.py").read_text().splitlines()) == 30


def launched(*command: str, ranks: int) -> str:
    """As the example's first line says; gloo by the loopback, compiled code in the run's own folder, as in all tests:
    the user's is shared with whatever else runs or cleans up."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    limit = 300 * patience()
    done = subprocess.run(
        [sys.executable, *launcher, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def _example(rank: int, world_size: int, name: str, *arguments: str) -> str:
    """Job: what the script prints, op by op, in the rank process's own group (test_recipes.py has train.py through
    Inductor)."""
    printed, nothing = io.StringIO(), mock.Mock()
    with (
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.object(zc, "compile", partial(zc.compile, backend="eager")),
        environment(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)),
        mock.patch.multiple(dist, init_process_group=nothing, destroy_process_group=nothing),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def test_a_model_that_no_rank_holds_is_trained_and_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    printed = run_ranks(_example, 2, "large_model.py", str(tmp_path / "model"), timeout=200.0)[0]
    first, *_, last = (float(loss) for loss in re.findall(r"step \d+: loss (\S+)", printed))
    assert last < first and "generated [" in printed
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (exported,) = (tmp_path / "model" / "exported").glob("*.safetensors")
    weights = safetensors.load_file(exported)
    assert weights.keys() <= model.state_dict().keys() and not weights["lm_head.weight"].equal(model.lm_head.weight)


def test_adapters_train_on_a_backbone_in_shards(tmp_path: Path) -> None:
    """172,608 parameters in bf16: two bytes each, of which each of two ranks has half, and padding."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    printed = run_ranks(_example, 2, "lora.py", str(tmp_path / "model"), timeout=200.0)[0]
    first, *_, last = (float(loss) for loss in re.findall(r"step \d+: loss (\S+)", printed))
    assert last < first and "172,608 frozen parameters: 172,672 bytes on a rank of 2" in printed
    backbone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    adapted = peft.PeftModel.from_pretrained(backbone, tmp_path / "model" / "adapter")
    assert any(param.abs().max() > 0 for name, param in adapted.named_parameters() if "lora_B" in name)


def test_the_plain_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "train_plain.py"), run_name="__main__")
    assert "step 200: loss" in capsys.readouterr().out


def test_the_mean_over_tokens_is_as_near_as_the_page_says() -> None:
    printed = run_ranks(_example, 2, "mean_over_tokens.py")[0]
    means, counted = (float(number) for number in re.findall(r": (\S+) away", printed))
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert f"the mean of means is {means:.1e} of its norm away" in page and counted < 1e-6


def test_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "plan.py"), run_name="__main__")
    assert capsys.readouterr().out.count("| total") >= 4


@full_only
def test_the_picture_is_what_its_command_draws() -> None:
    """The same operations; the times are of another run."""
    with tempfile.TemporaryDirectory() as folder:
        launched("docs/examples/picture.py", f"{folder}/made.svg", ranks=2)
        new = Path(folder, "made.svg").read_text()
    committed, drawn = (
        sorted(re.findall(r'data-said="(.*?): [\d.,]+ (?:ms|µs), from', text))
        for text in (new, (ROOT / "docs" / "backward.svg").read_text())
    )
    assert committed == drawn and len(committed) > 20, "draw it anew: docs/examples/picture.py"


# --- figures of the README's first screen ---


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def column_of(rows: list[list[str]], name: str) -> list[str]:
    """The cells below ``name`` in tables that have it as a column."""
    cells, place = [], None
    for row, after in zip(rows, [*rows[1:], [""]], strict=True):
        if after[0].startswith("---"):  # a header
            place = row.index(name) if name in row else None
        elif place is not None and place < len(row):
            cells.append(row[place])
    return cells


def test_the_figures_of_the_readme_are_measured() -> None:
    """Each number of its first table stands in a row or column of that system in docs/benchmarks.md, which is made of
    results."""
    first = (ROOT / "README.md").read_text().split("<!-- table:")[0]
    table = rows_of(first[first.index("| | ") :].split("\n\n")[0])
    systems = {"zc": "zc stage 2", "FSDP2": "FSDP2 + compile", "DDP": "DDP + ZeroRedundancyOptimizer + compile"}
    measured = rows_of((ROOT / "docs" / "benchmarks.md").read_text())
    checked = 0
    for column, cells in enumerate(zip(*table, strict=True)):
        name = next((full for start, full in systems.items() if cells[0].startswith(start)), None)
        if name is None:
            assert column == 0
            continue
        rows = [cell for row in measured if row[0] == name for cell in row[1:]]
        figures = " ".join([*rows, *column_of(measured, name)])
        for cell in cells[2:]:
            for number in re.findall(r"\d[\d,.]*\d|\d", cell):
                assert re.search(rf"(?<![\d,.]){re.escape(number)}(?![\d,.]*\d)", figures), f"{name}: {number}"
                checked += 1
    assert checked >= 12
