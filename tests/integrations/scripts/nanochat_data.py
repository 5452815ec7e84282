"""Text of random words and a tokenizer for it, where nanochat looks for them. nanochat is on the path."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from nanochat.tokenizer import RustBPETokenizer

base = Path(os.environ["NANOCHAT_BASE_DIR"])
data = base / "base_data_climbmix"
data.mkdir()
random.seed(0)
words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 8))) for _ in range(300)]
shards = [[" ".join(random.choices(words, k=random.randint(10, 60))) for _ in range(2400)] for _ in range(2)]
for number, texts in enumerate(shards):  # the last is for validation; a rank reads every other group of rows
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, data / f"shard_{number:05d}.parquet", row_group_size=200)
tokenizer = RustBPETokenizer.train_from_iterator((text for texts in shards for text in texts), 512)
tokenizer.save(str(base / "tokenizer"))
special = tokenizer.get_special_tokens()
decoded = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
nbytes = [0 if text in special else len(text.encode()) for text in decoded]
torch.save(torch.tensor(nbytes, dtype=torch.int32), base / "tokenizer" / "token_bytes.pt")
