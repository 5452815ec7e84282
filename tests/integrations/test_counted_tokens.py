"""zc.count in Accelerate and transformers' Trainer, whose padded microbatches have other numbers of tokens: the weights
are those of one process over all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")

from accelerate import Accelerator
from harness import run_ranks
from launched import mlp, torchrun, whole
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import zc
from zc.integrations.accelerate import prepare
from zc.integrations.transformers import ZcTrainer

PADDED, NUM_MICRO, PER_BATCH = -100, 2, 2


class Padded(Dataset[Any]):
    """24 sequences of 12 words, of which the labels of 2 to 12 count."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = (torch.arange(12) * (1 + index % 3) + index) % 32
        return {"input_ids": words, "labels": words.masked_fill(torch.arange(12) >= 2 + 7 * index % 11, PADDED)}


class Counted(ZcTrainer):
    """As docs/integrations.md shows it."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs["labels"][:, 1:]
        zc.count(model, (labels != PADDED).sum())
        logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _fit(rank: int, world_size: int, kind: str, folder: str) -> dict[str, Tensor]:
    with torchrun(rank, world_size):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=PER_BATCH, max_steps=3, learning_rate=0.05, optim="sgd",
            gradient_accumulation_steps=NUM_MICRO * 2 // world_size, max_grad_norm=0.5, lr_scheduler_type="constant",
            save_strategy="no", report_to=[], disable_tqdm=True, average_tokens_across_devices=True,
        )  # fmt: skip
        if kind == "plain":
            trainer = Trainer(model, arguments, train_dataset=Padded())
        else:
            cls, stage = (Counted, 2) if kind == "counted" else (ZcTrainer, 3)
            trainer = cls(model, arguments, train_dataset=Padded(), zc_options={"backend": "eager", "stage": stage})
        trainer.train()
        if kind == "plain":
            return whole(model)
        with zc.whole_parameters(model):
            return whole(model)


@pytest.mark.parametrize("kind", ["counted ahead", "counted"])
def test_trainer(kind: str, tmp_path: Path) -> None:
    """The Trainer of one process, which accumulates the microbatches of both ranks, is the oracle."""
    (wanted,) = run_ranks(_fit, 1, "plain", str(tmp_path / "plain"), timeout=200.0)
    for weights in run_ranks(_fit, 2, kind, str(tmp_path / "zc"), timeout=200.0):
        for name, weight in wanted.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)


def ragged() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Rows, targets, and how much each counts: zeros are padding."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, 6, generator=generator), torch.randn(24, 2, generator=generator)
    weights = torch.randint(0, 4, (24,), generator=generator).float()
    return list(zip(x, y, weights, strict=True))


def loss_of(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    losses = (model(x) - y).square().sum(dim=1)
    return (losses * weights).sum()


def _accumulate(rank: int, world_size: int) -> dict[str, Tensor]:
    with torchrun(rank, world_size):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICRO)
        model = mlp()
        loader = DataLoader(ragged(), batch_size=PER_BATCH)  # type: ignore[arg-type]
        model, optimizer, loader = prepare(
            accelerator, model, SGD(model.parameters(), lr=0.1), loader, stage=1, backend="eager"
        )
        for x, y, weights in loader:
            with accelerator.accumulate(model):
                zc.count(model, weights.sum())
                accelerator.backward(loss_of(model, x, y, weights) * accelerator.gradient_accumulation_steps)
                optimizer.step()
                optimizer.zero_grad()
        result = whole(accelerator.unwrap_model(model))
        accelerator.end_training()
        return result


def test_accelerate() -> None:
    model = mlp().double()
    optimizer, rows = SGD(model.parameters(), lr=0.1), ragged()
    a_step = 2 * NUM_MICRO * PER_BATCH
    for start in range(0, len(rows), a_step):
        x, y, weights = (torch.stack(column).double() for column in zip(*rows[start : start + a_step], strict=True))
        (loss_of(model, x, y, weights) / weights.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for trained in run_ranks(_accumulate, 2):
        for name, weight in whole(model).items():
            torch.testing.assert_close(trained[name], weight, rtol=0, atol=1e-6)
