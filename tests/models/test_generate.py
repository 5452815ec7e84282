"""generate() in stage 3: the tokens of a plain model in one process, with one gather of the weights per token."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import zc
from zc.engine.accumulators import Accumulators

NUM_TOKENS = 40


def _model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for param in (p for p in model.parameters() if p.dim() > 1):  # else each prompt gets one token again and again
        torch.nn.init.normal_(param, std=0.5)
    return model


def _tokens(model: LlamaForCausalLM, rank: int) -> list[list[int]]:
    prompt = torch.arange(3, 9)[None] + torch.tensor([[0], [5 + rank]])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    tokens: Tensor = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return tokens.tolist()


def generated(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    """Job: greedy tokens after an update, outside of whole_parameters and inside; what is gathered and said."""
    model = _model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zc.compile(model, optimizer, stage=3, backend=backend, bucket_nbytes=2**12)
    x = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(rank))
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    gathered: list[int] = []
    places = Accumulators.weight_places

    def counted(self: Accumulators, bucket: int) -> Any:  # asked for by each gather
        gathered.append(bucket)
        return places(self, bucket)

    Accumulators.weight_places = counted  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outside = _tokens(model, rank)
    num_outside = len(gathered)
    with zc.whole_parameters(model):
        inside = _tokens(model, rank)
        num_inside = len(gathered) - num_outside
    Accumulators.weight_places = places  # type: ignore[method-assign]
    num_said = sum("generate()" in str(each.message) and "whole_parameters" in str(each.message) for each in said)
    state = zc.full_state_dict(model)
    wanted = None
    if rank == 0:
        plain = _model(1)
        plain.load_state_dict(state)
        wanted = [_tokens(plain, number) for number in range(world_size)]
    zc.close(model)
    return {
        "tokens": [outside, inside], "wanted": wanted, "num_said": num_said, "per token": num_outside / NUM_TOKENS,
        "buckets": num_inside,
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_tokens_of_a_plain_model(backend: str) -> None:
    ranks = run_ranks(generated, 2, backend, timeout=300.0)
    for rank, result in enumerate(ranks):
        assert result["tokens"] == [ranks[0]["wanted"][rank]] * 2
        assert len({tuple(row[6:]) for row in result["tokens"][0]}) == 2, "each prompt has its own tokens"
        assert result["num_said"] == (1 if rank == 0 else 0)
        # within the cap a bucket that the first and the last layer read is gathered twice
        assert 3 < result["buckets"] <= result["per token"] < 1.5 * result["buckets"], "once per token"
        assert backend == "aot_eager" or result["per token"] == result["buckets"]
