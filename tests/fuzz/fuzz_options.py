"""Random options of `zc.compile`."""

from __future__ import annotations

import random
from typing import Any


def draw(rng: random.Random, dtype: str, without: frozenset[str]) -> dict[str, Any]:
    backend = rng.choices(("eager", "aot_eager", "inductor"), (166, 32, 2))[0]
    if backend in without:
        backend = "eager"
    options: dict[str, Any] = {"stage": rng.choice((1, 2)), "backend": backend}
    options["bucket_nbytes"] = rng.choice((1, 64, 64, 200, 512, 4096))
    if dtype == "bfloat16":
        options["param_dtype"] = "bfloat16"
    for name, values in {
        "num_buffers": (1, 3),
        "overlap": (False,),
        "overlap_gather": (True,),
        "write_in_place": (True,),
        "offload": ("cpu",),
        "reduce": ("native",),
        "reduce_dtype": ("bfloat16", "float32"),
    }.items():
        if name not in without and rng.random() < (0.1 if name == "reduce_dtype" else 0.25):
            options[name] = rng.choice(values)
    if options["stage"] == 1:
        options.pop("reduce_dtype", None)  # a sum of microbatches is not rounded: zc refuses that
    if options.get("offload") and rng.random() < 0.4:
        options["offload_accumulate"] = "device"
    if options.get("offload") or not options.get("overlap", True):
        options.pop("overlap_gather", None)
    return options


def draw_again(rng: random.Random, dtype: str, before: dict[str, Any], without: frozenset[str]) -> dict[str, Any]:
    """Those of the next launch: another layout of the same model, whose graphs the backend does not change."""
    options = draw(rng, dtype, without)
    options["backend"] = before["backend"]
    if "broadcast_buffers" in before:
        options["broadcast_buffers"] = before["broadcast_buffers"]
    return options
