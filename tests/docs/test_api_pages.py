"""The API reference: pdoc makes its pages of the docstrings, every link in them leads somewhere, every name of zc in a
docstring exists, and docs/api.md has all public names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

import zc
from zc.config import Config

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = {name: getattr(zc, name) for name in zc.__all__}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors.add(attributes.get("id") or "")
        if tag == "a" and attributes.get("href"):
            self.links.append(attributes["href"] or "")


def broken(pages: dict[str, Page]) -> list[str]:
    """Links within the pages that lead nowhere."""
    links = []
    for name, page in pages.items():
        for link in page.links:
            if re.match(r"https?:", link):
                continue
            path, _, anchor = link.partition("#")
            target = str((Path("/") / Path(name).parent / path).resolve())[1:] if path else name
            if target not in pages or (anchor and anchor not in pages[target].anchors):
                links.append(f"{name}: {link}")
    return links


@pytest.mark.skipif(find_spec("pdoc") is None, reason="pdoc is not installed: the extra test has it")
def test_the_pages_are_made_and_their_links_lead_somewhere(tmp_path: Path) -> None:
    """As `make api` makes them."""
    recipe = re.search(r"^api:.*\n\t\$\(PY\) (.*)$", (ROOT / "Makefile").read_text(), flags=re.M)
    assert recipe is not None
    command = recipe[1].replace("build/api", str(tmp_path)).split()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "Warn" not in done.stderr, done.stderr
    pages = {str(path.relative_to(tmp_path)): Page(path.read_text()) for path in tmp_path.rglob("*.html")}
    assert broken(pages) == []
    assert set(PUBLIC) - {"__version__"} <= pages["zc.html"].anchors
    # an option of each section of compile's docstring, and the sections
    text = (tmp_path / "zc.html").read_text()
    assert all(f">{section}:</h6>" in text for section in ("Reductions", "Overlap", "Offload", "Looking inside"))


def docstrings() -> Iterator[tuple[str, str]]:
    for name, item in PUBLIC.items():
        if not callable(item):
            continue
        yield name, inspect.getdoc(item) or ""
        for key, member in vars(item).items() if inspect.isclass(item) else ():
            if callable(member) and not key.startswith("_"):
                yield f"{name}.{key}", inspect.getdoc(member) or ""


def is_there(dotted: str) -> bool:
    parts = dotted.split(".")
    for k in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:k]))
        except ImportError:
            continue
        return reduce(lambda item, part: getattr(item, part, None), parts[k:], module) is not None
    return False


def test_every_name_in_a_docstring_exists() -> None:
    assert is_there("zc.weights.param") and is_there("zc.compile") and not is_there("zc.compiled")
    texts = dict(docstrings())
    assert all(texts.values()), [name for name, text in texts.items() if not text]
    lost = [(name, ref) for name, text in texts.items() for ref in re.findall(r"\bzc(?:\.\w+)+", text)
            if not ref.endswith((".md", ".py")) and not is_there(ref)]  # fmt: skip
    assert lost == []


def test_every_option_of_compile_is_described_once() -> None:
    text = inspect.getdoc(zc.compile) or ""
    options = [name for name in inspect.signature(zc.compile).parameters if name != "model"]
    described = re.findall(r"^    (\w+): ", text, flags=re.M)
    assert sorted(described) == sorted(options)


def test_compile_and_its_record_of_options_have_the_same_defaults() -> None:
    parameters = inspect.signature(zc.compile).parameters
    record = {field.name: field.default for field in dataclasses.fields(Config)}
    assert record == {name: parameters[name].default for name in record}


def test_the_page_has_every_public_name() -> None:
    table = re.findall(r"^\| (.*?) \|", (ROOT / "docs" / "api.md").read_text(), flags=re.M)
    named = {name for cell in table for name in re.findall(r"zc\.(\w+)", cell)}
    assert named == set(zc.__all__) - {"__version__"}
