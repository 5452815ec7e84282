"""What the documents say is there: their links and paths, and the schedule that docs/design.md follows line by line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from torch import nn

import zc

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
SOURCES = [p for top in ("zc", "passes", "kernels", "tests", "bench") for p in sorted((ROOT / top).rglob("*.py"))]
pytestmark = pytest.mark.check


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_paths_resolve(document: Path) -> None:
    text = document.read_text()
    headings = {path: _anchors(path.read_text()) for path in DOCUMENTS}
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name}: {target}"
        assert not anchor or anchor in headings[file], f"{document.name}: {target}"
    for name in re.findall(r"`((?:zc|passes|kernels|tests|bench|docs)/[\w./-]*\w)`", text):
        assert (ROOT / name).exists(), f"{document.name}: {name}"


def test_references_can_be_followed() -> None:
    """No text names a page in capitals that is not here, nor a project's issue by letters that nobody knows."""
    pages = "|".join(path.stem for path in ROOT.glob("*.md"))
    unknown = re.compile(rf"\b(?!(?:{pages})\.md)[A-Z_]{{3,}}\.md\b|\b[A-Z]{{2,3}}#\d")
    for path in [*DOCUMENTS, *SOURCES]:
        lines = [line.strip() for line in path.read_text().splitlines() if unknown.search(line)]
        assert not lines, f"{path.relative_to(ROOT)}: {lines[:3]}"


def _anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _explained(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    zc.compile(model, optimizer, backend="aot_eager", bucket_nbytes=80)
    model(torch.randn(2, 4)).sum().backward()
    return str(zc.explain(model))


def test_the_schedule_of_the_design_is_the_one_that_runs() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    block = re.search(r"## The life of one gradient.*?```\n(.*?)```", text, flags=re.S)
    assert block is not None and "flatten_cast" in block[1]
    assert all(block[1] in explanation for explanation in run_ranks(_explained, 2))
