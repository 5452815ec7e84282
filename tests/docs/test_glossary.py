"""docs/glossary.md is complete and has nothing that is gone."""

from __future__ import annotations

import inspect
import re

from documents import ROOT

import zc
from zc.schedule import buffer
from zc.schedule.nodes import TARGETS


def words() -> list[set[str]]:
    """The names in each of the three tables: first columns, those in backticks."""
    tables = re.split(r"^## .*$", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)
    rows = [re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for table in tables]
    return [{name for row in table for name in re.findall(r"`([\w.]+)`", row)} for table in rows]


def test_every_word_of_a_schedule_s_text_is_there() -> None:
    _, of_schedules, _ = words()
    streams = {buffer.COMPUTE, buffer.COMM, buffer.COPY, buffer.HOST}
    in_text = streams | set(buffer.KINDS) | {target.__name__ for target in TARGETS.values()}
    assert in_text == of_schedules, in_text ^ of_schedules


def test_every_public_class_is_there() -> None:
    *_, classes = words()
    exported = {name for name in zc.__all__ if inspect.isclass(getattr(zc, name))}
    assert exported == classes
