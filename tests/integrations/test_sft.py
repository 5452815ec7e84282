"""trl's SFTTrainer with peft's adapters and stage=3, against the same under DDP, on 2 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed: make test-integrations")
pytest.importorskip("peft", reason="peft is not installed: make test-integrations")

from datasets import Dataset
from harness import run_ranks
from launched import TOLERANCE, furthest, torchrun
from peft import LoraConfig, PeftModel
from tiers import FULL
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import zc
from zc.integrations.transformers import ZcMixin

WORDS = ["<pad>", "<eos>", *(f"w{k}" for k in range(30))]


class ZcSFTTrainer(ZcMixin, SFTTrainer):
    """SFTTrainer with zc_options=."""


def _base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _rows(num: int, start: int = 0) -> Dataset:
    texts = [" ".join(f"w{(k + j) % 30}" for j in range(5 + k % 7)) for k in range(start, start + num)]
    return Dataset.from_list([{"text": text} for text in texts])


def _train(rank: int, world_size: int, folder: str, options: dict[str, Any] | None, resume: str | None) -> Any:
    with torchrun(rank, world_size):
        tokens = Tokenizer(WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<pad>"))
        tokens.pre_tokenizer = Whitespace()
        arguments = SFTConfig(
            folder, use_cpu=True, bf16=False, max_length=16, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, max_steps=4, logging_steps=1, eval_strategy="steps", save_strategy="steps",
            eval_steps=2, save_steps=2, load_best_model_at_end=True, learning_rate=1e-2, max_grad_norm=0.5,
            gradient_checkpointing=False, report_to=[], disable_tqdm=True, seed=3,
        )  # fmt: skip
        objects: dict[str, Any] = {
            "model": _base(),
            "args": arguments,
            "train_dataset": _rows(48),
            "eval_dataset": _rows(8, start=7),
            "processing_class": PreTrainedTokenizerFast(
                tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>"
            ),
            "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]),
        }  # fmt: skip
        torch.manual_seed(1)  # of the adapters
        trainer: Any = SFTTrainer(**objects) if options is None else ZcSFTTrainer(**objects, zc_options=options)
        trainer.train(resume_from_checkpoint=resume)
        keys = ("loss", "grad_norm", "eval_loss")
        logged = [row[key] for row in trainer.state.log_history for key in keys if key in row]
        evaluated = trainer.evaluate()["eval_loss"]
        trainer.save_model(folder + "/end")
        trainer.accelerator.wait_for_everyone()
        read = PeftModel.from_pretrained(_base(), folder + "/end")
        adapters = ("lora", "_to_save")
        state = {n: value.float() for n, value in read.state_dict().items() if any(part in n for part in adapters)}
        result = {"logged": logged, "evaluated": evaluated, "adapters": state}
        if options is None:
            return result
        result["nbytes"] = zc.persistent_nbytes(trainer.model)
        full = zc.full_state_dict(trainer.model)
        with zc.whole_parameters(trainer.model), torch.no_grad():
            exposed = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        if rank == 0:
            assert all(torch.equal(full[name], value) for name, value in exposed.items())
            plain = PeftModel.from_pretrained(_base(), folder + "/end")
            plain.load_state_dict(full)
            x = torch.arange(2, 12)[None]
            result["logits"] = torch.equal(plain.eval()(input_ids=x).logits, read.eval()(input_ids=x).logits)
        return result


OPTIONS = [
    {"stage": 3, "backend": "eager", "bucket_nbytes": 2048},
    {"stage": 3, "backend": "aot_eager"},
]


@pytest.mark.parametrize("options", OPTIONS if FULL else OPTIONS[:1], ids=lambda options: options["backend"])
def test_adapters_are_ddp_s(tmp_path: Path, options: dict[str, Any]) -> None:
    """Evaluation, checkpoints, the best model at the end, resuming; the folder of adapters loads with peft."""
    wanted = run_ranks(_train, 2, str(tmp_path / "ddp"), None, None, timeout=300.0)
    result = run_ranks(_train, 2, str(tmp_path / "zc"), options, None, timeout=300.0)
    again = run_ranks(
        _train, 2, str(tmp_path / "again"), options, str(tmp_path / "zc" / "checkpoint-2"), timeout=300.0
    )
    for rank in range(2):
        assert furthest(result[rank]["adapters"], wanted[rank]["adapters"]) < TOLERANCE
        assert furthest(again[rank]["adapters"], result[rank]["adapters"]) == 0, "a run that was resumed is another one"
        assert result[rank]["logged"] == pytest.approx(wanted[rank]["logged"], rel=1e-4)
        assert result[rank]["evaluated"] == pytest.approx(wanted[rank]["evaluated"], rel=1e-5)
    assert result[0]["logits"], "the saved folder computes something else than zc.full_state_dict"
    numel = sum(p.numel() for p in _base().parameters())
    assert 4 * numel / 2 <= result[0]["nbytes"]["frozen"] < 1.3 * 4 * numel / 2
