"""What the pages have of the repository: their Python blocks, and the diffs between examples.

python tests/docs/documents.py        writes the diffs anew
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_DIFF = re.compile(r"(<!-- diff: (\S+) (\S+) -->\n).*?(<!-- end -->)", flags=re.S)
_BLOCK = re.compile(r"(?:^<!-- run(?:: (\w+))? -->\n)?^( *)```python\n(.*?)^\2```$", flags=re.S | re.M)


class Block(NamedTuple):
    """``run``: None: it only has to compile; "" beside what `zc.compile` takes; "compiled" after it; "alone"; "prints"
    what the next block of the page has."""

    page: Path
    line: int
    run: str | None
    code: str
    output: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    result = []
    text = page.read_text()
    for match in _BLOCK.finditer(text):
        marked = match[0].startswith("<!-- run")
        indent = len(match[2])
        code = "".join(line[indent:] for line in match[3].splitlines(keepends=True))
        line = text.count("\n", 0, match.start(3)) + 1
        after = re.match(r"\n+```\n(.*?)^```$", text[match.end() :], flags=re.S | re.M)
        output = after[1] if after is not None else ""
        result.append(Block(page, line, (match[1] or "") if marked else None, code, output))
    return result


def diff(old: Path, new: Path) -> str:
    """Without the first line of each, which says how it is run."""
    before, after = (path.read_text().splitlines()[1:] for path in (old, new))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    changed = [line for line in lines if not line.startswith("@@") and line not in ("+", "-")]
    return "```diff\n" + "\n".join(changed) + "\n```\n"


def with_diffs(page: Path) -> str:
    """The page, its diffs made anew."""

    def made(match: re.Match[str]) -> str:
        return match[1] + diff(page.parent / match[2], page.parent / match[3]) + match[4]

    return _DIFF.sub(made, page.read_text())


if __name__ == "__main__":
    for each in PAGES:
        each.write_text(with_diffs(each))
