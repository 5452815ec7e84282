"""What is measured: cases (a model, its sizes, a device) and providers (a system and how it is tuned)."""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

import torch

from zc.version import __version__


class Case(NamedTuple):
    """One workload. ``flags`` go to bench.train, the same for every provider."""

    flags: tuple[str, ...]
    tolerance: float = 2e-3  # nats, of each loss against the float64 reference: fp32 in another order of summation
    ranks: int = 2
    device: str = "cpu"
    steps: int = 10  # 3 to settle, 6 that the gate looks at, 7 that are timed
    suite: str = "cpu"

    @property
    def all_flags(self) -> tuple[str, ...]:
        return (*COMMON, *self.flags, "--steps", str(self.steps), "--device", self.device)


# No clipping: its collective differs between systems, and a step is what is compared. The learning rate is reached at
# once, so that the losses of the gate's first steps depend on the updates.
COMMON = ("--clip", "0", "--eval-batches", "0", "--lr", "3e-4", "--warmup", "1", "--settle", "3", "--quiet")
BF16_TOLERANCE = 3e-2
MUON_TOLERANCE = 1e-2  # torch's Newton-Schulz is bf16, whatever the weights are
GPT_30M = ("--vocab", "8192", "--layers", "8", "--width", "512", "--heads", "8")
GA1, GA4 = ("--seq", "256", "--batch", "2"), ("--seq", "128", "--batch", "1", "--accum", "4")
TINY = ("--vocab", "512", "--seq", "64", "--layers", "2", "--width", "64", "--heads", "4", "--batch", "2")
NORMS = ("--vocab", "512", "--seq", "64", "--width", "256", "--heads", "4", "--batch", "4")
BF16 = ("--compute-dtype", "bfloat16")


def _on_gpu(model: str, seq: int, accum: int) -> Case:
    flags = ("--model", model, "--vocab", "32768", "--seq", str(seq), "--batch", "1", "--accum", str(accum), *BF16)
    return Case(flags, BF16_TOLERANCE, ranks=1, device="cuda", suite="gpu", steps=12)


CASES = {
    # 512 tokens a rank and step: about a second on one core, of which 118 MB of gradients and weights are a part
    "gpt30m-fp32": Case((*GPT_30M, *GA1)),
    "gpt30m-fp32-ga4": Case((*GPT_30M, *GA4)),
    "gpt30m-fp32-1k": Case((*GPT_30M, "--seq", "256", "--batch", "4")),
    "gpt30m-bf16": Case((*GPT_30M, *GA1, *BF16), BF16_TOLERANCE),
    "gpt30m-bf16-ga4": Case((*GPT_30M, *GA4, *BF16), BF16_TOLERANCE),
    "gpt30m-muon": Case((*GPT_30M, *GA1, "--optimizer", "muon"), MUON_TOLERANCE),
    "qwen3-64m": Case(("--model", "qwen3-64m", "--vocab", "32768", "--seq", "256", "--batch", "1")),
    "norms-147": Case(("--model", "norms-147", *NORMS)),
    "gpt30m-ga16": Case((*GPT_30M, "--seq", "64", "--batch", "1", "--accum", "16")),
    "tiny": Case(TINY, suite="test"),
    **{
        f"{model}-{seq}-ga{accum}": _on_gpu(model, seq, accum)
        for model in ("llama-0.3b", "llama-1.3b", "llama-3b")
        for seq in (512, 2048, 8192)
        for accum in (1, 8)
    },
}


class Provider(NamedTuple):
    """One system, tuned as its documentation advises."""

    flags: tuple[str, ...]
    group: str  # the memory class it is compared within: "zero", "ddp", "floor"
    package: str = "torch"  # whose version counts
    communicates: bool = True  # else its losses agree before the first update only
    shards_weights: bool = False  # on a modelled network, whose other ranks are made up, so are weights from the start
    by_default: bool = True


def _zc(stage: int, *flags: str, by_default: bool = True) -> Provider:
    flags = ("--system", "zc", "--stage", str(stage), *flags)
    return Provider(flags, "zero", "zero-compile", by_default=by_default, shards_weights=stage == 3)


def _ds(stage: int, *flags: str, system: str = "deepspeed", by_default: bool = True) -> Provider:
    return Provider(("--system", system, "--stage", str(stage), *flags), "zero", "deepspeed", by_default=by_default)


INT8 = ("--reduce-dtype", "int8", "--gather-dtype", "int8")  # between hosts
EAGER = ("--backend", "eager")
PROVIDERS = {
    "compiled, no communication": Provider(("--system", "local"), "floor", communicates=False),
    "zc stage 2": _zc(2),
    "DDP + compile": Provider(("--system", "ddp-view"), "ddp"),
    "zc stage 1": _zc(1),
    "DDP + ZeroRedundancyOptimizer + compile": Provider(("--system", "zero-redundancy"), "zero"),
    "FSDP2 + compile": Provider(("--system", "fsdp2"), "zero", shards_weights=True),
    "DeepSpeed ZeRO-2 + compile": _ds(2),
    "DeepSpeed ZeRO-1 + compile": _ds(1),
    "DeepSpeed ZeRO-1 + DeepCompile": _ds(1, system="deepcompile"),
    "eager, no communication": Provider(("--system", "local", *EAGER), "floor", communicates=False),
    "zc stage 2, eager": _zc(2, *EAGER),
    "DDP": Provider(("--system", "ddp-view", *EAGER), "ddp"),
    "DDP + ZeroRedundancyOptimizer": Provider(("--system", "zero-redundancy", *EAGER), "zero"),
    "FSDP2": Provider(("--system", "fsdp2", *EAGER), "zero", shards_weights=True),
    "DeepSpeed ZeRO-2": _ds(2, *EAGER),
    "DeepSpeed ZeRO-1": _ds(1, *EAGER),
    "zc stage 3": _zc(3),
    "FSDP2, reshard_after_forward + compile": Provider(
        ("--system", "fsdp2", "--stage", "3"), "zero", shards_weights=True
    ),
    "zc stage 2, overlap_gather": _zc(2, "--overlap-gather"),
    "zc stage 2, int8": _zc(2, *INT8, by_default=False),
    "zc stage 2, overlap_gather, int8": _zc(2, "--overlap-gather", *INT8, by_default=False),
    "zc stage 2, overlap_gather, int4": _zc(
        2, "--overlap-gather", "--reduce-dtype", "int8", "--gather-dtype", "int4", by_default=False
    ),
    "zc stage 2, eager, int8": _zc(2, *EAGER, *INT8, by_default=False),
    "zc stage 1, write_in_place": _zc(1, "--write-in-place"),
    "zc stage 2, write_in_place": _zc(2, "--write-in-place", by_default=False),
    "zc stage 2, native reduction": _zc(2, "--reduce", "native"),
    "zc stage 1, eager": _zc(1, *EAGER, by_default=False),
    "zc stage 1, native reduction": _zc(1, "--reduce", "native", by_default=False),
    "zc stage 2, offload": _zc(2, "--offload", "cpu", by_default=False),
    "DeepSpeed ZeRO-2, offload + compile": _ds(2, "--offload", "cpu", by_default=False),
    "DDP, copied buckets + compile": Provider(("--system", "ddp"), "ddp", by_default=False),
}
# What says most, first: `make bench` begins with these cases and providers, `make bench-quick` is nothing else.
FIRST_CASES = ("gpt30m-fp32", "gpt30m-fp32-ga4", "gpt30m-bf16")
FIRST_PROVIDERS = ("compiled, no communication", "zc stage 2", "DDP + compile", "FSDP2 + compile")
FIRST_PROVIDERS += ("DeepSpeed ZeRO-2 + compile",)
COMPILED_PAIRS = {  # compiled -> the same, eager
    "zc stage 2": "zc stage 2, eager",
    "zc stage 1": "zc stage 1, eager",
    "DDP + compile": "DDP",
    "DDP + ZeroRedundancyOptimizer + compile": "DDP + ZeroRedundancyOptimizer",
    "FSDP2 + compile": "FSDP2",
    "DeepSpeed ZeRO-2 + compile": "DeepSpeed ZeRO-2",
    "DeepSpeed ZeRO-1 + compile": "DeepSpeed ZeRO-1",
    "compiled, no communication": "eager, no communication",
}


def version_of(provider: Provider) -> str | None:
    """Version of the provider's package; None where it is not installed."""
    if provider.package == "torch":
        return str(torch.__version__)
    if provider.package == "zero-compile":  # this checkout's, installed or not
        return __version__
    try:
        return importlib.metadata.version(provider.package)
    except importlib.metadata.PackageNotFoundError:
        return None
