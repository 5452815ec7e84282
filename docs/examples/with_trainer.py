"""torchrun --nproc-per-node 2 docs/examples/with_trainer.py --out out/trainer [--resume]"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from zc.integrations.transformers import ZcTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--resume", action="store_true")
parser.add_argument("--cpu", action="store_true")
args = parser.parse_args()


class Counting(Dataset):
    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
arguments = TrainingArguments(
    output_dir=args.out,
    use_cpu=args.cpu,
    bf16=True,
    gradient_accumulation_steps=2,
    max_steps=8 if args.resume else 4,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    load_best_model_at_end=True,
    logging_steps=2,
    report_to=[],
)
# trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Counting(), eval_dataset=Counting())
trainer = ZcTrainer(
    LlamaForCausalLM(config),
    arguments,
    train_dataset=Counting(),
    eval_dataset=Counting(),
    zc_options={"stage": 2},
)
trainer.train(resume_from_checkpoint=args.resume)
trainer.save_model(args.out + "/model")
trainer.accelerator.wait_for_everyone()
LlamaForCausalLM.from_pretrained(args.out + "/model")
