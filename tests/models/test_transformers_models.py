"""Unmodified models train as under DDP: transformers' own modelling code and loss, and plain PyTorch's modules.

By default seven of the models run once each in stage 2, op by op or by compiled schedules (aot_eager), and three in
stage 3. ZC_TESTS=full runs all models in all ways. With ZC_MODELS_TABLE=docs/models.md the table is written, too, from
this run's rows and those that lie in build/models.json from runs before (`make models-table`).
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import run_cases, run_ranks
from models_table import BACKENDS, keep_row, table
from oracle import weights
from tiers import FULL, full_cases, full_only
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from zoo import ZOO

import zc
from zc.ranks.routes import Routes

STEPS = 5
TOLERANCE = 2e-5
STAGES = (1, 2) if FULL else (2,)
SECTIONS = ("notes", "not covered by a schedule", "compilation")
OP_BY_OP = ("Llama", "T5", "DETR", "ResNet-like", "diffusion U-Net")  # GPT-2, BERT and ViT are Llama to zc
SAMPLE = ("Mixtral", "nn.LSTM")  # convolutions: DCGAN below, and a row of the table of loops
# not by Inductor: tests/backend/test_many_models.py has the sizes that DCGAN had shown to be wrong
COMPILED = [(name, 2, "aot_eager") for name in SAMPLE]
# one rank compiles: its weights come and go as two ranks' do, which tests/distributed/test_sharded_weights.py compiles
IN_STAGE_3 = [("Llama", 1, "aot_eager"), ("diffusion U-Net", 2, "eager"), ("DCGAN", 1, "aot_eager")]
CAPS = ("smallest", "default", "all")  # of gathered weights


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


class Outcome(NamedTuple):
    """After the run: weights, this rank's losses, and what explain says."""

    weights: dict[str, Tensor]
    losses: list[float]
    num_params: int
    notes: str
    uncovered: str
    num_schedules: int
    compilation: str


def weight_nbytes(part: nn.Module, cap: str) -> int:
    """Bytes: enough for the largest bucket, or as much as all buckets together."""
    sizes = [param.nbytes for param in part.parameters()]
    return 2 * sum(sizes) if cap == "all" else max(2**16, 4 * max(sizes))


def train(rank: int, world_size: int, name: str, stage: int, backend: str, cap: str = "default") -> Outcome:
    """Job: ``STEPS`` updates with zc; stage 0 is DDP, plain PyTorch."""
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.make().train()
    parts: list[Any] = [model.get_submodule(part) for part in entry.parts]
    optimizers = [sgd(part) for part in parts]
    if stage == 0:
        models = [DistributedDataParallel(part, find_unused_parameters=True) for part in parts]
    else:
        models = parts
        for part, optimizer in zip(parts, optimizers, strict=True):
            options = {} if cap == "default" else {"weight_nbytes": weight_nbytes(part, cap)}
            zc.compile(part, optimizer, stage=stage, backend=backend, bucket_nbytes=2**15, **options)
    losses = [entry.update(models, optimizers, entry.batch(rank, step)) for step in range(STEPS)]
    num_params = sum(p.numel() for p in model.parameters())
    if stage == 0:
        return Outcome(weights(model), losses, num_params, "", "", 0, "")
    reports = [zc.explain(part).sections for part in parts]
    schedules = sum(title.startswith("schedule backward") for report in reports for title in report)
    notes, uncovered, said = ("\n".join(report[title] for report in reports) for title in SECTIONS)
    for part in parts:
        zc.close(part)
    return Outcome(weights(model), losses, num_params, notes, uncovered, schedules, said)


@cache
def ddp(name: str) -> list[Outcome]:
    return run_ranks(train, 2, name, 0, "", timeout=300)


def difference(got: Outcome, wanted: Outcome) -> tuple[float, str]:
    """The largest relative difference of a parameter, and its name. The scale is that of the parameter, but never less
    than a ten-thousandth of the largest one's: a key's bias starts at zero and has a gradient of zero, so all that it
    ever holds is rounding."""
    assert got.weights.keys() == wanted.weights.keys()
    floor = 1e-4 * max(float(w.norm()) for w in wanted.weights.values())
    pairs = (
        (float((got.weights[n] - w).double().norm()) / max(float(w.double().norm()), floor), n)
        for n, w in wanted.weights.items()
    )
    return max(pairs, key=lambda pair: (pair[0] != pair[0], pair[0]))


def check(name: str, stage: int, backend: str) -> None:
    wanted = ddp(name)
    results = run_ranks(train, 2, name, stage, backend, timeout=600)
    worst, where = difference(results[0], wanted[0])
    for other in results[1:]:
        for param, value in results[0].weights.items():
            assert torch.equal(value, other.weights[param]), f"ranks ended with different {param}"
    assert worst <= TOLERANCE, f"{where} differs by {worst:.1e}"
    for mine, theirs in zip(results, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(theirs.losses), rtol=1e-4, atol=1e-5)
    assert results[0].losses[0] != results[0].losses[-1]
    if backend != "eager" and ZOO[name].why_eager is None:
        assert results[0].num_schedules > 0, f"nothing was compiled: {results[0].compilation}"
    elif backend != "eager":
        assert "nothing of the model was compiled" in results[0].notes and ZOO[name].why_eager in results[0].compilation
    if os.environ.get("ZC_MODELS_TABLE"):
        numbers = [worst, results[0].num_params, results[0].num_schedules]
        keep_row(name, stage, backend, numbers, results[0].notes, results[0].uncovered)


@pytest.mark.parametrize("name", ZOO if FULL else OP_BY_OP)
def test_op_by_op(name: str) -> None:
    """backend="eager": every gradient through hooks."""
    for stage in STAGES:
        check(name, stage, "eager")


@pytest.mark.parametrize(
    ("name", "stage", "backend"),
    [(name, stage, backend) for name in ZOO for stage in STAGES for backend in BACKENDS[1:]] if FULL else COMPILED,
)
@full_cases("Mixtral-2-aot_eager")
def test_compiled(name: str, stage: int, backend: str) -> None:
    check(name, stage, backend)


@pytest.mark.parametrize(
    ("name", "world_size", "backend"),
    [(name, ranks, backend) for name in ZOO for ranks in (1, 2, 3, 4) for backend in BACKENDS] if FULL else IN_STAGE_3,
)
@full_cases("diffusion U-Net-2-eager")
def test_stage_3_has_the_bits_of_stage_2(name: str, world_size: int, backend: str) -> None:
    cases = [(name, 2, backend), *((name, 3, backend, cap) for cap in (CAPS if FULL else CAPS[:1]))]
    (_, wanted), *others = run_cases(train, world_size, cases, timeout=600)
    for case, ranks in others:
        for mine, theirs in zip(ranks, wanted, strict=True):
            assert mine.losses == theirs.losses, case
            assert all(torch.equal(mine.weights[key], value) for key, value in theirs.weights.items()), case


def saved(rank: int, world_size: int, folder: Path) -> None:
    """Job: a compiled model is saved as transformers saves it, by rank 0, and made again from that."""
    entry = ZOO["GPT-2"]
    model: Any = entry.make()
    model, optimizer = zc.compile(model, sgd(model), backend="eager", bucket_nbytes=2**12)
    entry.update([model], [optimizer], entry.batch(rank, 0))
    model.save_pretrained(folder)
    dist.barrier()
    again = type(model).from_pretrained(folder)
    wanted, state = model.state_dict(), again.state_dict()
    assert state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert again.lm_head.weight is again.transformer.wte.weight


def test_save_pretrained(tmp_path: Path) -> None:
    run_ranks(saved, 2, tmp_path)


# --- generate(): the tokens of a plain model, with one gather of the weights per token ---

NUM_TOKENS = 40


def small_llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for param in (p for p in model.parameters() if p.dim() > 1):  # else each prompt gets one token again and again
        torch.nn.init.normal_(param, std=0.5)
    return model


def _tokens(model: Any, rank: int) -> list[list[int]]:
    prompt = torch.arange(3, 9)[None] + torch.tensor([[0], [5 + rank]])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    tokens: Tensor = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return tokens.tolist()


def generated(rank: int, world_size: int, backend: str) -> dict[str, Any]:
    """Job: greedy tokens after an update, outside of whole_parameters and inside; what is gathered and said."""
    model = small_llama(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zc.compile(model, optimizer, stage=3, backend=backend, bucket_nbytes=2**12)
    x = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(rank))
    model(input_ids=x, labels=x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    gathered: list[int] = []
    gather = Routes.gather

    def counted(self: Routes, bucket: Any, *tensors: Any, **options: Any) -> None:
        gathered.append(bucket.index)
        gather(self, bucket, *tensors, **options)

    Routes.gather = counted  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outside = _tokens(model, rank)
    num_outside, num_buckets = len(gathered), len(zc.registry.sharded(model).runtime.plan.sharded)
    with zc.whole_parameters(model):
        inside = _tokens(model, rank)
    Routes.gather = gather  # type: ignore[method-assign]
    num_said = sum("generate()" in str(each.message) and "whole_parameters" in str(each.message) for each in said)
    state = zc.full_state_dict(model)
    wanted = None
    if rank == 0:
        plain = small_llama(1)
        plain.load_state_dict(state)
        wanted = [_tokens(plain, number) for number in range(world_size)]
    zc.close(model)
    return {
        "tokens": [outside, inside], "wanted": wanted, "num_said": num_said, "per token": num_outside / NUM_TOKENS,
        "buckets": num_buckets,
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=full_only)])
def test_the_tokens_of_a_plain_model(backend: str) -> None:
    ranks = run_ranks(generated, 2, backend, timeout=300.0)
    for rank, result in enumerate(ranks):
        assert result["tokens"] == [ranks[0]["wanted"][rank]] * 2
        assert len({tuple(row[6:]) for row in result["tokens"][0]}) == 2, "each prompt has its own tokens"
        assert result["num_said"] == (1 if rank == 0 else 0)
        # within the cap a bucket that the first and the last layer read is gathered twice
        assert 3 < result["buckets"] <= result["per token"] < 1.5 * result["buckets"], "once per token"
        assert backend == "aot_eager" or result["per token"] == result["buckets"]


@pytest.mark.skipif(not os.environ.get("ZC_MODELS_TABLE"), reason="ZC_MODELS_TABLE names no file to write")
def test_write_the_table() -> None:
    """Last in the file: the rows of the tests above, as docs/models.md."""
    Path(os.environ["ZC_MODELS_TABLE"]).write_text(table(STEPS, TOLERANCE))
