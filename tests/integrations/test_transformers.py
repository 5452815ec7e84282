"""zc.integrations.transformers against the Trainer's own DDP, on 2 ranks: weights, logged numbers, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate is not installed: make test-integrations")
pytest.importorskip("transformers", reason="transformers is not installed: make test-integrations")

from harness import run_ranks
from launched import TOLERANCE, furthest, torchrun, whole
from tiers import FULL, full_only
from torch import Tensor
from torch.utils.data import Dataset
from training_runs import message_of
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

import zc
from zc.integrations.transformers import ZcMixin, ZcTrainer

Found = dict[str, Any]
PLAIN: dict[str, Any] = {"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False}


class Tokens(Dataset[Any]):
    """Sequences that count up: the same on every rank, learnable."""

    def __init__(self, num: int, start: int = 0) -> None:
        self._rows = [(torch.arange(12) * (1 + k % 3) + k + start) % 32 for k in range(num)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def _model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def _arguments(folder: str, **more: Any) -> TrainingArguments:
    fields: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 1,
        "max_steps": 6,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**fields, **more})


def _train(
    rank: int,
    world_size: int,
    folder: str,
    options: dict[str, Any] | None,
    more: dict[str, Any],
    resume_from: str | None = None,
) -> Found:
    with torchrun(rank, world_size):
        arguments = _arguments(folder, **more)
        objects: dict[str, Any] = {"args": arguments, "train_dataset": Tokens(48), "eval_dataset": Tokens(8, start=3)}
        model = _model()
        # an elementwise optimizer of the caller's, or the Trainer's own
        trainer = Trainer(model, **objects) if options is None else ZcTrainer(model, **objects, zc_options=options)
        trainer.train(resume_from_checkpoint=resume_from)
        keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
        logged = [{k: float(row[k]) for k in keys if k in row} for row in trainer.state.log_history]
        result = {"logged": [row for row in logged if row], "best": Path(str(trainer.state.best_model_checkpoint)).name}
        with zc.whole_parameters(model) if options is not None else nullcontext():
            result["weights"] = whole(model)
        result["evaluated"] = trainer.evaluate()["eval_loss"]
        trainer.save_model(folder + "/end")
        trainer.accelerator.wait_for_everyone()
        read = LlamaForCausalLM.from_pretrained(folder + "/end")
        result["read"] = whole(read)
        if options is not None and (full := zc.full_state_dict(model)):  # of rank 0
            plain = _model(seed=9)
            plain.load_state_dict(full)
            tokens = torch.arange(12)[None]
            result["logits"] = torch.equal(plain.eval()(tokens).logits, read.eval()(tokens).logits)
        return result


def _same(got: Found, wanted: Found, tolerance: float) -> None:
    assert furthest(got["weights"], wanted["weights"]) < tolerance
    assert furthest(got["read"], got["weights"]) == 0, "save_pretrained wrote other weights"
    assert got["best"] == wanted["best"]
    assert len(got["logged"]) == len(wanted["logged"]) > 6
    for row, other in zip(got["logged"], wanted["logged"], strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            assert value == pytest.approx(other[key], rel=max(tolerance, 1e-4), abs=1e-7), (key, row, other)
    assert got["evaluated"] == pytest.approx(wanted["evaluated"], rel=max(tolerance, 1e-5))


CASES = [
    pytest.param({"backend": "eager"}, {}, TOLERANCE, id="eager"),
    pytest.param({"backend": "eager", "stage": 3, "bucket_nbytes": 2048}, {}, TOLERANCE, id="eager, stage 3"),
    pytest.param({"backend": "aot_eager", "stage": 1}, {}, TOLERANCE, id="aot_eager, stage 1"),
    pytest.param({"backend": "aot_eager", "stage": 3}, {}, TOLERANCE, id="aot_eager, stage 3"),
    pytest.param({"backend": "aot_eager"}, {"bf16": True}, 3e-2, id="bf16"),
    pytest.param({"backend": "aot_eager"}, {"gradient_checkpointing": True}, TOLERANCE, id="checkpointing"),
    pytest.param({"backend": "inductor"}, {}, TOLERANCE, id="inductor"),
]


@pytest.mark.parametrize(("options", "more", "tolerance"), CASES if FULL else CASES[:2])
def test_the_numbers_are_ddp_s(tmp_path: Path, options: dict[str, Any], more: dict[str, Any], tolerance: float) -> None:
    """Accumulation, clipping, evaluation, a checkpoint every two steps, the best one at the end; and resuming."""
    wanted = run_ranks(_train, 2, str(tmp_path / "ddp"), None, more, timeout=300.0)
    results = run_ranks(_train, 2, str(tmp_path / "zc"), options, more, timeout=300.0)
    third = str(tmp_path / "zc" / "checkpoint-4")
    again = run_ranks(_train, 2, str(tmp_path / "again"), options, more, third, timeout=300.0)
    for rank in range(2):
        _same(results[rank], wanted[rank], tolerance)
        assert furthest(again[rank]["weights"], results[rank]["weights"]) == 0, "a run that was resumed is another one"
    assert results[0]["logits"], "the saved folder computes something else than zc.full_state_dict"
    assert (tmp_path / "zc" / "checkpoint-4" / "zc").is_dir()


@full_only
def test_a_plain_trainer_s_checkpoint_is_taken_up(tmp_path: Path) -> None:
    wanted = run_ranks(_train, 2, str(tmp_path / "ddp"), None, {}, timeout=300.0)
    third, options = str(tmp_path / "ddp" / "checkpoint-4"), {"backend": "eager"}
    results = run_ranks(_train, 2, str(tmp_path / "zc"), options, {}, third, timeout=300.0)
    for rank in range(2):
        assert furthest(results[rank]["weights"], wanted[rank]["weights"]) < TOLERANCE


def _twice(rank: int, world_size: int, folder: str, is_zc: bool) -> tuple[dict[str, Tensor], str]:
    """train() called a second time goes on with the optimizer's state; another Trainer, and this one once its
    optimizer is None or the caller's, begins with a new one."""
    with torchrun(rank, world_size):
        arguments = _arguments(folder, **PLAIN)
        model, data, trainers = _model(), Tokens(48), []
        for num_calls in (2, 1):
            trainer: Any
            if is_zc:
                trainer = ZcTrainer(model, arguments, train_dataset=data, zc_options={"backend": "eager"})
            else:
                trainer = Trainer(model, arguments, train_dataset=data)
            for _ in range(num_calls):
                trainer.train()
            trainers.append(trainer)
        text = message_of(trainers[0].train)[1] if is_zc else ""
        for optimizer in (None, torch.optim.SGD(model.parameters(), lr=0.05)):
            trainer.optimizer, trainer.lr_scheduler = optimizer, None
            trainer.train()
        return whole(model), text


def test_training_again(tmp_path: Path) -> None:
    wanted = run_ranks(_twice, 2, str(tmp_path), False, timeout=300.0)
    for (result, text), by_ddp in zip(run_ranks(_twice, 2, str(tmp_path), True, timeout=300.0), wanted, strict=True):
        assert furthest(result, by_ddp[0]) < TOLERANCE
        assert "trainer.optimizer = trainer.lr_scheduler = None" in text


def _trials(rank: int, world_size: int, folder: str, is_zc: bool) -> dict[str, Tensor]:
    """model_init: each train() begins with a new model; the one before is let go."""
    with torchrun(rank, world_size):
        arguments = _arguments(folder, **PLAIN)
        kwargs: dict[str, Any] = {"zc_options": {"backend": "eager"}} if is_zc else {}
        kind: Any = ZcTrainer if is_zc else Trainer
        trainer = kind(model_init=lambda: _model(7), args=arguments, train_dataset=Tokens(48), **kwargs)
        trainer.train()
        trainer.train()
        return whole(trainer.model)


@full_only
def test_a_model_of_each_trial(tmp_path: Path) -> None:
    wanted = run_ranks(_trials, 2, str(tmp_path / "ddp"), False, timeout=300.0)
    results = run_ranks(_trials, 2, str(tmp_path / "zc"), True, timeout=300.0)
    assert furthest(results[0], wanted[0]) < TOLERANCE


def _tokens_counted(prediction: Any) -> dict[str, float]:
    return {"tokens": float((prediction.predictions > 0).sum())}


def _generate(rank: int, world_size: int, folder: str, is_zc: bool) -> dict[str, Any]:
    """Evaluations with generate() between updates and after them, by ranks that exchange messages: there a forward
    that one rank runs alone would wait for ever."""
    with torchrun(rank, world_size):
        os.environ["ZC_HOST_MEMORY"] = "0"
        torch.manual_seed(6)
        config = T5Config(
            vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0,
            dropout_rate=0.0,
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
        for param in (p for p in model.parameters() if p.dim() > 1):  # else all inputs give the same tokens
            torch.nn.init.normal_(param)
        model.generation_config.eos_token_id = list(range(1, 6))
        arguments = Seq2SeqTrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=2, per_device_eval_batch_size=1, learning_rate=1e-4,
            max_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            predict_with_generate=True, generation_max_length=12,
        )  # fmt: skip

        class Mine(ZcMixin, Seq2SeqTrainer):
            zc_options: Mapping[str, Any] = {"stage": 3, "backend": "eager", "bucket_nbytes": 2048}

        kind: Any = Mine if is_zc else Seq2SeqTrainer
        data = Tokens(8)
        trainer = kind(model, arguments, train_dataset=data, eval_dataset=data, compute_metrics=_tokens_counted)
        trainer.train()
        predicted = trainer.predict(data).predictions
        logged = [row["eval_tokens"] for row in trainer.state.log_history if "eval_tokens" in row]
        return {"predicted": predicted.tolist(), "logged": logged}


def test_generation_in_an_evaluation(tmp_path: Path) -> None:
    wanted = run_ranks(_generate, 2, str(tmp_path / "ddp"), False, timeout=300.0)
    results = run_ranks(_generate, 2, str(tmp_path / "zc"), True, timeout=120.0)
    assert results == wanted
    ends = [sum(token > 0 for token in row) for row in results[0]["predicted"]]
    assert any(one != other for one, other in zip(ends[::2], ends[1::2], strict=True)), "both ranks end together"


def _refusals(rank: int, world_size: int, folder: str) -> list[str]:
    messages = []
    for more in ({"torch_compile": True}, {"auto_find_batch_size": True}, {"bf16_full_eval": True}, {"optim": "lomo"}):
        with torchrun(rank, world_size):
            arguments = _arguments(folder, **PLAIN, **more)
            kind, text = message_of(lambda arguments=arguments: ZcTrainer(_model(), arguments))
            messages.append(f"{kind}: {text}")

    with torchrun(rank, world_size):
        with torch.device("meta"):
            empty = _model()
        messages.append(": ".join(message_of(lambda: ZcTrainer(empty, _arguments(folder, **PLAIN)))))

    class Renamed(Trainer):
        _save_optimizer_and_scheduler = None  # as if a later version called it something else

    class Mine(ZcMixin, Renamed):
        pass

    class NoTrainer(ZcMixin):
        pass

    with torchrun(rank, world_size):
        import zc.integrations.transformers as ours

        original, ours._Trainer = ours._Trainer, Renamed
        try:
            messages.append(": ".join(message_of(lambda: Mine(_model(), _arguments(folder, **PLAIN)))))
        finally:
            ours._Trainer = original
        messages.append(": ".join(message_of(NoTrainer)))
    return messages


def test_what_is_refused(tmp_path: Path) -> None:
    words = [
        "PlanError: TrainingArguments(torch_compile=True) does not go with zc",
        "PlanError: TrainingArguments(auto_find_batch_size=True) does not go with zc",
        "PlanError: TrainingArguments(bf16_full_eval=True) does not go with zc",
        "PlanError: TrainingArguments(optim='lomo') does not go with zc",
        "PlanError: the model is on the meta device",
        "ZcError: Renamed of transformers",
        "TypeError: NoTrainer needs transformers.Trainer among its bases",
    ]
    for result in run_ranks(_refusals, 2, str(tmp_path)):
        assert len(result) == len(words)
        for text, part in zip(result, words, strict=True):
            assert text.startswith(part), text
