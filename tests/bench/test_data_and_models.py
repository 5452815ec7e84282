"""What the text is split into, and the GPT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import train
from bench.cases import CASES, data
from bench.cases.models import GPT, GPTConfig, make_gpt, make_model, num_parameters
from zc.planning.blocks import find_kinds

SMALL = GPTConfig(vocab=256, seq=16, layers=2, width=24, heads=3)


# --- text ---


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for number in range(60):
        folder = tmp_path / ("a" if number % 2 else "b" / Path("c"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"m{number}.py").write_bytes(b"x%d = %d\n" % (number, number) * 20)
    for skipped in ("site-packages", "test", "__pycache__"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "never.py").write_text("raise SystemExit")
    return tmp_path


def test_split_is_by_file_disjoint_and_covers(library: Path) -> None:
    corpus = data.load(library)
    train_files, held_out = set(corpus.train_files), set(corpus.held_out_files)
    assert train_files.isdisjoint(held_out)
    assert train_files | held_out == set(data.source_files(library))
    assert len(train_files | held_out) == 60
    assert 1 <= len(held_out) <= 15
    assert not any("never" in name for name in train_files | held_out)


def test_data_says_what_is_wrong(tmp_path: Path, library: Path) -> None:
    with pytest.raises(ValueError, match=r"holds 0 \.py files"):
        data.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"vocab must be between 256 .* got 100"):
        data.load(library, vocab=100)
    with pytest.raises(ValueError, match=r"a window of 16 \+ 1 tokens does not fit in 10 tokens"):
        data.train_batch(torch.zeros(10), batch=1, seq=16, seed=0, step=0, rank=0)


# --- model ---


def test_parameter_counts() -> None:
    assert num_parameters(GPT(GPTConfig())) == 10_795_008
    assert num_parameters(GPT(GPTConfig(vocab=8192, seq=256, layers=8, width=512, heads=8))) == 29_545_472
    width, layers = SMALL.width, SMALL.layers
    block = 12 * width * width + 13 * width  # matrices; biases 3 + 1 + 4 + 1, norms 4
    assert num_parameters(GPT(SMALL)) == layers * block + (256 + 16) * width + 2 * width


def test_causal_and_each_position_counts() -> None:
    model = make_gpt(SMALL, seed=0)
    x = torch.randint(256, (2, 16))
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    same = (model(x) - model(changed)).abs().amax(dim=(0, 2)) == 0
    assert same.tolist() == [True] * 9 + [False] * 7


def test_the_llama_of_transformers_has_its_own_logits_and_loss_and_one_kind_of_block() -> None:
    model = make_model("llama-transformers", GPTConfig(vocab=64, seq=8, layers=5, width=24, heads=3), 0)
    tokens = torch.randint(64, (2, 8))
    own = model.llama(input_ids=tokens, labels=tokens)  # which shifts the labels
    torch.testing.assert_close(model(tokens), own.logits)
    shifted = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    torch.testing.assert_close(model(tokens, shifted), own.loss)
    (kind,) = find_kinds(model)
    assert kind.members == tuple(f"llama.model.layers.{k}" for k in range(5)), "as many as FSDP2 wraps"
    assert len(model.blocks) == 5


def test_every_case_of_the_matrix_has_a_model() -> None:
    """Its flags are ones that bench.train takes, and its sizes fit together. A model of several cases runs once."""
    parsed = [train.parse([*case.all_flags, "--system", "local", "--out", "nowhere"]) for case in CASES.values()]
    models = {(args.model, args.vocab, args.layers, args.width, args.heads): args.seq for args in parsed}
    for (name, vocab, layers, width, heads), seq in models.items():
        with torch.device("meta"):
            model = make_model(name, GPTConfig(vocab, seq, layers, width, heads), 0, "meta")
            tokens = torch.zeros(1, seq, dtype=torch.int64)
            loss = model(tokens, tokens)
        assert loss.shape == () and num_parameters(model) > 0, (name, layers)
