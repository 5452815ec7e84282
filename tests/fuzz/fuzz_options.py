"""Random options of `zc.compile`.

A program of a *group* has options that most programs do not have: "stage3", sharded weights; "wire", fewer bits between
hosts. ``hosts`` is no option of zc.compile: each rank then stands for a host of its own.
"""

from __future__ import annotations

import random
from typing import Any

from fuzz_optimizers import reads_whole

GROUPS = {"stage3": 0.2, "wire": 0.05}  # and the share of the programs that are of this group
WIRE_DIM = 33  # of models on the wire: a matrix of fewer than 1,024 elements would travel exact


def draw_group(seed: int, without: frozenset[str], only: frozenset[str] = frozenset()) -> str | None:
    """The group of a program; None: it is of no group. ``only``: one of these."""
    rng, groups = random.Random(f"group of {seed}"), sorted(GROUPS.keys() - without)
    if only:
        return rng.choice(sorted(only))
    chance = rng.random()
    for group in groups:
        chance -= GROUPS[group]
        if chance < 0.0:
            return group
    return None


def draw(rng: random.Random, dtype: str, without: frozenset[str], group: str | None = None) -> dict[str, Any]:
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
    if group == "stage3":
        _shard_weights(rng, options)
        if "aot_eager" not in without and rng.random() < 0.3:  # its plans of residency come from compiled graphs
            options["backend"] = "aot_eager"
    if group == "wire":
        _encode(rng, options)
    return options


def _shard_weights(rng: random.Random, options: dict[str, Any]) -> None:
    """Stage 3 with room for few buckets, for zc's own choice of them, or for all."""
    options.pop("overlap_gather", None)
    options["stage"] = 3
    # the largest parameter of most models has fewer than 1,024 bytes, of those on the wire fewer than 8,192
    few = 2 * max(options["bucket_nbytes"], 8192 if "hosts" in options else 1024)
    nbytes = rng.choice((None, few, 2**20))
    if nbytes is not None:
        options["weight_nbytes"] = nbytes
    if rng.random() < 0.25:
        options["shard_frozen"] = True


def _encode(rng: random.Random, options: dict[str, Any]) -> None:
    """8 bits or 4 where bytes leave a host."""
    options.pop("reduce", None)
    options.pop("reduce_dtype", None)
    options["hosts"] = True
    which = rng.choice(("gradients", "weights", "both", "both"))
    if which != "weights":
        options["reduce_dtype"] = "int8"
    if which != "gradients":
        options["gather_dtype"] = rng.choice(("int8", "int4"))
        options.pop("offload", None)
        options.pop("offload_accumulate", None)
    if rng.random() < 0.4:
        _shard_weights(rng, options)
        if options.get("gather_dtype") == "int4":  # of the weights themselves: too few to compare what comes of them
            options["gather_dtype"] = "int8"


def fit(options: dict[str, Any], optimizer: str) -> None:
    """For an optimizer that reads whole parameters zc encodes no weights: gradients are encoded in their place."""
    if "Adadelta" in optimizer and options.get("gather_dtype") == "int4":
        options["gather_dtype"] = "int8"  # its steps of lr=0.5 follow each rounding: 4 bits give other weights
    if reads_whole(optimizer) and options.pop("gather_dtype", None):
        options["reduce_dtype"] = "int8"


def draw_again(
    rng: random.Random, dtype: str, before: dict[str, Any], without: frozenset[str], group: str | None = None
) -> dict[str, Any]:
    """Those of the next launch: another layout of the same model, whose graphs the backend does not change."""
    if group is not None and rng.random() < 0.3:
        group = None
    options = draw(rng, dtype, without, group)
    options["backend"] = before["backend"]
    if "broadcast_buffers" in before:
        options["broadcast_buffers"] = before["broadcast_buffers"]
    return options
