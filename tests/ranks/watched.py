"""A watch without its thread, over a store in memory."""

from __future__ import annotations

from unittest import mock

from zc.ranks import watch
from zc.ranks.journal import Journal


class Shelf:
    """A store. ``failure``: what each of its methods raises."""

    def __init__(self) -> None:
        self.items: dict[str, str] = {}
        self.failure: Exception | None = None

    def _open(self) -> dict[str, str]:
        if self.failure is not None:
            raise self.failure
        return self.items

    def set(self, key: str, value: str) -> None:
        self._open()[key] = value

    def get(self, key: str) -> bytes:
        return self._open()[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._open() for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._open().setdefault(key, desired).encode()

    def delete_key(self, key: str) -> bool:
        return self._open().pop(key, None) is not None


def watch_of(store: Shelf, rank: int = 0) -> watch.Watch:
    with mock.patch.object(watch.process, "start_thread"):
        return watch.Watch(rank, store)


def journal_of(store: Shelf, num_ranks: int = 2, timeout: float = 600) -> Journal:
    """Of rank 0."""
    return Journal(watch_of(store), range(num_ranks), 1, timeout)
