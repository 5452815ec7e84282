"""Real text that every machine with Python has: the sources of the interpreter's own standard library, as bytes.

Files, not windows, are split: no line of a held-out file is ever trained on. The split hashes each file's path relative
to the library, so that adding or removing one file moves no other.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# not the interpreter's own text, or the same text once more
SKIPPED = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
HELD_OUT_EVERY = 10  # one file in so many


def stdlib() -> Path:
    """The folder that holds this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(relative: str) -> bool:
    """Whether a file belongs to the held-out part: a stable hash of its path relative to the library."""
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:8], "big") % HELD_OUT_EVERY == 0


def source_files(root: Path) -> list[str]:
    """Relative paths of the .py files under ``root``, sorted, without tests and installed packages."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(path.as_posix() for path in found if SKIPPED.isdisjoint(path.parts))


@dataclass(frozen=True)
class Corpus:
    """Token ids [n], uint8 (bytes) or int16 (pairs), and the files they came from."""

    train: Tensor
    held_out: Tensor
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def load(root: Path | None = None, vocab: int = 256) -> Corpus:
    """The corpus under ``root`` (default: the standard library). A token is a byte; above 256, a pair of bytes.

    With a vocabulary of V > 256 the V - 1 most frequent pairs of the training files have an id each, all others V - 1.

    Raises ValueError where there are fewer than two .py files, or none in one of the parts.
    """
    root = stdlib() if root is None else root
    if not 256 <= vocab <= 1 << 15:
        raise ValueError(f"vocab must be between 256 (a token is a byte) and 32,768, got {vocab}")
    files = source_files(root)
    parts = [tuple(f for f in files if is_held_out(f) is held) for held in (False, True)]
    if not all(parts):
        raise ValueError(f"{root} holds {len(files)} .py files: {len(parts[0])} to train on, {len(parts[1])} held out")
    # a zero byte between files: no source file has one
    train, held_out = (np.array(bytearray(b"\0".join((root / f).read_bytes() for f in p)), np.uint8) for p in parts)
    if vocab > 256:
        train, held_out = _pairs(train, held_out, vocab)
    return Corpus(torch.from_numpy(train), torch.from_numpy(held_out), *parts)


def _pairs(train: np.ndarray, held_out: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    paired = [t[: len(t) // 2 * 2].view(">u2").astype(np.uint16) for t in (train, held_out)]
    counts = np.bincount(paired[0], minlength=1 << 16)
    kept = np.argsort(-counts, kind="stable")[: vocab - 1]
    ids = np.full(1 << 16, vocab - 1, np.int16)
    ids[kept] = np.arange(len(kept))
    return ids[paired[0]], ids[paired[1]]


def train_batch(tokens: Tensor, *, batch: int, seq: int, seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 [batch, seq], at random offsets, fixed by (seed, step, rank) alone."""
    _check_long_enough(tokens, seq)
    starts = np.random.default_rng((seed, step, rank)).integers(0, len(tokens) - seq, batch)
    return _windows(tokens, starts, seq)


def held_out_batches(tokens: Tensor, *, batch: int, seq: int, num_batches: int) -> list[tuple[Tensor, Tensor]]:
    """``num_batches`` pairs [batch, seq] from evenly spaced windows: the same set on every rank and every system."""
    _check_long_enough(tokens, seq)
    starts = np.linspace(0, len(tokens) - seq - 1, num_batches * batch).astype(np.int64)
    return [_windows(tokens, part, seq) for part in starts.reshape(num_batches, batch)]


def _windows(tokens: Tensor, starts: np.ndarray, seq: int) -> tuple[Tensor, Tensor]:
    index = torch.from_numpy(starts)[:, None] + torch.arange(seq)
    return tokens[index].long(), tokens[index + 1].long()


def _check_long_enough(tokens: Tensor, seq: int) -> None:
    if len(tokens) <= seq + 1:
        raise ValueError(f"a window of {seq} + 1 tokens does not fit in {len(tokens)} tokens")
