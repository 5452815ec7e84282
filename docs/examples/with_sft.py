"""torchrun --nproc-per-node 2 docs/examples/with_sft.py --out out/sft [--resume]

The tokenizer is made here; yours comes from the Hub."""

import argparse

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from zc.integrations.transformers import ZcMixin

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--cpu", action="store_true")
parser.add_argument("--ddp", action="store_true", help="SFTTrainer as it is, to compare with")
args = parser.parse_args()


class ZcSFTTrainer(ZcMixin, SFTTrainer):
    """SFTTrainer with zc_options=."""


words = ["<pad>", "<eos>", *(f"w{k}" for k in range(30))]
tokens = Tokenizer(WordLevel({word: k for k, word in enumerate(words)}, unk_token="<pad>"))
tokens.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
rows = [{"text": " ".join(f"w{(k + j) % 30}" for j in range(5 + k % 7))} for k in range(64)]

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
arguments = SFTConfig(
    output_dir=args.out,
    use_cpu=args.cpu,
    bf16=False,
    max_length=16,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=4,
    save_steps=2,
    logging_steps=1,
    report_to=[],
)
options = {} if args.ddp else {"zc_options": {"stage": 2, "backend": "eager" if args.cpu else "inductor"}}
trainer = (SFTTrainer if args.ddp else ZcSFTTrainer)(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    **options,
)
trainer.train(resume_from_checkpoint=args.out + "/checkpoint-2" if args.resume else None)
trainer.save_model(args.out + "/model")
