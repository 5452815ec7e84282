"""Whether two checkouts train to the same bits: hashes of losses, norms, gradients, weights and states.

    python -m bench.bits record new.json eager aot_eager
    python -m bench.bits record old.json eager aot_eager --tree ../an-older-checkout
    python -m bench.bits compare old.json new.json

A case is one small training: a model, a stage, where its ranks stand (`PLACES`), what travels (`WIRES`), a backend and
a way (`WAYS`). Its name is these words, and words on the command line choose cases: those of one kind are
alternatives, so `eager stage2 stage3 offload` is two stages. Hashes are over all ranks. What zc.compile refuses is
recorded by the class of the error, and so is what fails later or hangs; the processes are started again after that.

It uses the public functions of zc alone, and nothing else of this repository: an older checkout must be able to run it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW, Muon, Optimizer

import zc

SCRIPT = "bits_of_this_record.py"
ROOT = Path(__file__).resolve().parent.parent
UPDATES, MICROBATCHES, BATCH = 3, 2, 4
VOCAB, SEQ, WIDTH, BLOCKS = 64, 8, 32, 2
BUCKET_NBYTES = 10_000
EPS = 1e-3  # of AdamW: no element whose gradient is rounding alone moves by whole steps
START_S, CASE_S = 300.0, 300.0  # without a new result for so long, ranks hang


class Place(NamedTuple):
    """``num_ranks`` processes; ``per_host``: ranks of each host, as torchrun's GROUP_RANK tells them."""

    num_ranks: int
    per_host: int
    memory: bool = True


PLACES = {
    "memory": Place(2, 2), "messages": Place(2, 2, memory=False), "hosts": Place(4, 2), "apart": Place(2, 1),
    "memory4": Place(4, 4), "messages4": Place(4, 4, memory=False), "hosts_messages": Place(4, 2, memory=False),
}  # fmt: skip
WIRES: dict[str, dict[str, Any]] = {
    "exact": {},
    "reduce8": {"reduce_dtype": torch.int8},
    "int8": {"reduce_dtype": torch.int8, "gather_dtype": torch.int8},
    "int4": {"reduce_dtype": torch.int8, "gather_dtype": "int4"},
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {}, "no_sync": {}, "offload": {"offload": "cpu"}, "muon": {}, "hsdp": {},
    "overlap_gather": {"overlap_gather": True}, "native": {"reduce": "native"}, "in_place": {"write_in_place": True},
    "small_buckets": {"bucket_nbytes": 3000, "num_buffers": 3}, "no_overlap": {"overlap": False},
    "on_device": {"offload": "cpu", "offload_accumulate": "device"}, "frozen_shards": {"shard_frozen": True},
    "bf16": {"param_dtype": torch.bfloat16},
}  # fmt: skip
BACKENDS = "eager", "aot_eager", "inductor"
EVERYWHERE = ("plain", "no_sync", "offload", "muon", "hsdp", "overlap_gather")  # the other ways: in ALL_ELSE
ALL_ELSE = ("memory", "messages", "hosts")
WITH_REPLICAS = ("memory4", "messages4", "hosts", "hosts_messages")


class Case(NamedTuple):
    """``model``: a name in `MODELS`; the others as their tables have them."""

    backend: str
    place: str
    wire: str
    way: str
    model: str
    stage: str

    @property
    def name(self) -> str:
        return " ".join(self)


def every_case() -> Iterator[Case]:
    """The matrix. What travels encoded stands by itself where nothing leaves a host; `Odd` has no blocks for Muon; and
    of what compiles, the ways beyond `EVERYWHERE` are trained in stage 2 alone."""
    axes = BACKENDS, PLACES, WIRES, WAYS, MODELS, ("stage1", "stage2", "stage3")
    for case in map(Case._make, itertools.product(*axes)):
        is_place = case.place in (WITH_REPLICAS if case.way == "hsdp" else ALL_ELSE)
        is_wire = case.wire == "exact" or case.way == "plain" or case.place in ("hosts", "hosts_messages")
        is_way = case.way in EVERYWHERE or (case.wire == "exact" and case.way != "frozen_shards")
        if case.backend != "eager" and case.way not in EVERYWHERE:
            is_way &= case.stage == "stage2" and case.place != "messages"
        if case.wire == "reduce8":  # where weights, too, are refused
            is_way &= case.way in ("offload", "muon")
        if case.model == "odd":
            is_way = case.way in ("plain", "no_sync", "overlap_gather", "hsdp", "frozen_shards")
            is_way &= case.wire == "exact" or (case.way == "plain" and case.wire != "reduce8")
        if case.place in ("apart", "hosts_messages") and case.model == "mixer":  # a smaller part of the matrix
            is_place |= case.way == "plain" or (case.way in ("overlap_gather", "muon") and case.backend == "eager")
        if is_place and is_wire and is_way:
            yield case


def chosen_cases(words: Sequence[str]) -> list[Case]:
    """The cases that have all ``words``; of two words of one kind, one. Raises ValueError for a word of no case."""
    cases = list(every_case())
    kinds = [{case[k] for case in cases} for k in range(len(Case._fields))]
    unknown = [word for word in words if not any(word in kind for kind in kinds)]
    if unknown:
        known = ", ".join(word for kind in kinds for word in sorted(kind))
        raise ValueError(f"no case has {', '.join(unknown)}; words are {known}")
    wanted = [kind & set(words) or kind for kind in kinds]
    return [case for case in cases if all(value in kind for value, kind in zip(case, wanted, strict=True))]


# --- what is trained ---


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(SEQ, SEQ, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 65), nn.Linear(65, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(self.norm(x).mT).mT
        return x + self.down(torch.tanh(self.up(mixed)))


class Mixer(nn.Module):
    """Blocks of one kind, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten().roll(1))


class Odd(nn.Module):
    """Odd sizes, buffers, a graph break, a frozen layer, one that nothing uses, and one that every second call uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(19, 37, bias=False), nn.BatchNorm1d(37)
        self.frozen, self.side, self.never = nn.Linear(37, 37), nn.Linear(37, 37), nn.Linear(3, 3)
        self.last = nn.Linear(37, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, takes_side: bool) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        torch._dynamo.graph_break()
        if takes_side:
            x = x + torch.tanh(self.side(x))
        out: Tensor = self.last(torch.tanh(self.frozen(x)))
        return out.square().mean()


MODELS: dict[str, type[nn.Module]] = {"mixer": Mixer, "odd": Odd}


def loss_of(model: nn.Module, rank: int, step: int, microbatch: int) -> Tensor:
    """Of a batch that depends on the three numbers alone."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + microbatch)
    if isinstance(model, Mixer):
        loss: Tensor = model(torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator))
    else:
        loss = model(torch.randn(BATCH, 19, generator=generator), (rank + step + microbatch) % 2 == 0)
    return loss / MICROBATCHES


def make_optimizers(model: nn.Module, way: str) -> list[Optimizer]:
    params = [param for param in model.parameters() if param.requires_grad]
    if way != "muon":
        return [AdamW(params, lr=1e-2, eps=EPS)]
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("embed")]
    others = [p for p in params if all(p is not matrix for matrix in matrices)]
    return [Muon(matrices, lr=1e-2), AdamW(others, lr=1e-2, eps=EPS)]


# --- a rank ---


def digest(*values: Any) -> str:
    """Of tensors, bit by bit, and of all else by its text."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            own = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # a parameter that numpy has seen
            found.update(own.reshape(-1).view(torch.uint8).numpy().tobytes())  # can't give its memory back
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:12]


def flattened(value: Any) -> list[Any]:
    """The leaves of nested mappings and sequences, with keys, in the order of their keys' text."""
    if isinstance(value, Mapping):
        return [leaf for key in sorted(value, key=str) for leaf in (str(key), *flattened(value[key]))]
    return [leaf for each in value for leaf in flattened(each)] if isinstance(value, (list, tuple)) else [value]


def of_all_ranks(*values: Any) -> str:
    """A digest a rank; one, where all have the same."""
    gathered: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(gathered, digest(*values))
    return gathered[0] if len(set(gathered)) == 1 else " ".join(gathered)


def masters(model: nn.Module, optimizers: list[Optimizer]) -> str:
    """Of the whole fp32 values, wherever ranks keep their parts."""
    parts = {
        (name, value.start): value.local.detach().clone()
        for name, value in zc.state_dict(model, optimizers)["model"].items()
        if hasattr(value, "local") and value.local.numel()
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, parts)
    whole: dict[str, list[Tensor]] = {}
    for (name, _), part in sorted({key: part for each in gathered for key, part in each.items()}.items()):
        whole.setdefault(name, []).append(part)
    return digest(*flattened({name: torch.cat(of_name) for name, of_name in whole.items()}))


@functools.cache
def replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def train(case: Case) -> dict[str, Any]:
    """Trains one case on all ranks; the hashes, or {"refused": the class of the error}."""
    rank = dist.get_rank()
    torch.compiler.reset()
    torch.manual_seed(0)
    model = MODELS[case.model]()
    optimizers = make_optimizers(model, case.way)
    options = {"bucket_nbytes": BUCKET_NBYTES, **WIRES[case.wire], **WAYS[case.way]}
    if case.way == "hsdp":
        options["mesh"] = replicas()
    try:
        zc.compile(model, optimizers, stage=int(case.stage[-1]), backend=case.backend, **options)
    except (zc.ZcError, ValueError, TypeError) as error:
        return {"refused": type(error).__name__, "why": str(error)}
    made: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(UPDATES):
        losses = []
        for k in range(MICROBATCHES):
            is_inside = case.way == "no_sync" and k < MICROBATCHES - 1
            with zc.no_sync(model) if is_inside else contextlib.nullcontext():
                loss = loss_of(model, rank, step, k)
                loss.backward()
            losses.append(loss.detach())
        made["losses"].append(of_all_ranks(*losses))
        made["norms"].append(of_all_ranks(torch.as_tensor(zc.clip_grad_norm_(model, 1.0))))
        if step == UPDATES - 1:  # the steps before are as steps are, with nothing between
            made["gradients"] = of_all_ranks(*flattened(zc.full_grad(model)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    zc.synchronize(model)
    made["masters"] = masters(model, optimizers)
    made["states"] = of_all_ranks(*flattened(zc.full_optimizer_state(model, optimizers)))
    with zc.whole_parameters(model):
        made["weights"] = of_all_ranks(*flattened(dict(model.named_parameters())))
    made["buffers"] = of_all_ranks(*flattened(dict(model.named_buffers())))
    zc.close(model)
    return made


def be_rank(rank: int, store: str, cases: list[Case], out: Path, place: Place) -> None:
    """Trains ``cases``; rank 0 appends a line to ``out`` for each. An error in the middle of one ends the process: the
    others may be anywhere."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=2 * CASE_S)
    init = dist.FileStore(store, place.num_ranks)
    dist.init_process_group("gloo", store=init, rank=rank, world_size=place.num_ranks, timeout=limit)
    _append(out, rank, {"tree": str(Path(zc.__file__).resolve().parent.parent)})
    for case in cases:
        try:
            made = train(case)
        except BaseException as error:
            made = {"failed": type(error).__name__, "why": str(error)}
            with (out.parent / "failed").open("a") as file:
                file.write(json.dumps({"case": case.name, "rank": rank, **made}) + "\n")
            raise
        _append(out, rank, {"case": case.name, **made})
    dist.barrier()
    os._exit(0)  # what a case has left alive is of no interest


def _append(out: Path, rank: int, line: Mapping[str, Any]) -> None:
    if rank == 0:
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


# --- all of them ---


def record(cases: Sequence[Case], tree: Path) -> dict[str, Any]:
    """{"tree", "commit", "torch", "cases": {name: hashes}}. Raises RuntimeError where ranks don't start."""
    results: dict[str, Any] = {}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends the ranks, too
    with tempfile.TemporaryDirectory(prefix="zc-bits-") as folder:
        shutil.copy(__file__, Path(folder) / SCRIPT)  # all ranks run one text, though it may be edited meanwhile
        for place, of_place in itertools.groupby(sorted(cases, key=lambda c: c.place), lambda c: c.place):
            left = list(of_place)
            while left:
                results |= _run(left, PLACES[place], tree, Path(tempfile.mkdtemp(dir=folder)), Path(folder))
                left = [case for case in left if case.name not in results]
    commit = subprocess.run(["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {"commit": commit.stdout.strip(), "torch": torch.__version__, "cases": results}


def _run(cases: Sequence[Case], place: Place, tree: Path, folder: Path, shared_folder: Path) -> dict[str, Any]:
    """Starts ranks, which train ``cases`` until one fails or hangs; {name: hashes} of those that were reached."""
    out = folder / "out"
    out.touch()
    (folder / "cases").write_text(json.dumps(cases))
    shared = {
        "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_CACHE_DIR": str(shared_folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "ZC_HOST_MEMORY": str(int(place.memory)),
    }  # fmt: skip
    ranks, logs = [], [folder / f"rank{rank}.log" for rank in range(place.num_ranks)]
    for rank, log in enumerate(logs):
        command = [sys.executable, str(shared_folder / SCRIPT), "rank", str(rank), str(folder)]
        env = {**os.environ, **shared, "GROUP_RANK": str(rank // place.per_host)}
        with log.open("w") as file:
            ranks.append(subprocess.Popen(command, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT))
    try:
        num_lines, seen_at = 0, time.monotonic()
        while any(rank.poll() is None for rank in ranks):
            time.sleep(0.1)
            lines = out.read_text().splitlines()
            for line in lines[num_lines:]:
                _print(json.loads(line))
            if len(lines) > num_lines:
                num_lines, seen_at = len(lines), time.monotonic()
            waited_s = time.monotonic() - seen_at
            if any(rank.poll() for rank in ranks):
                seen_at = min(seen_at, time.monotonic() - CASE_S + 20.0)  # the others get time for errors of their own
            if waited_s > (CASE_S if num_lines else START_S):
                break
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    if not lines:
        raise RuntimeError("the ranks did not start:\n" + "\n".join(log.read_text()[-3000:] for log in logs))
    if lines[0]["tree"] != str(tree):
        raise RuntimeError(f"zc was to come from {tree} and comes from {lines[0]['tree']}")
    results = {line.pop("case"): line for line in lines[1:]}
    following = next((case for case in cases if case.name not in results), None)
    if following is not None:
        failed = folder / "failed"
        errors = [json.loads(line) for line in failed.read_text().splitlines()] if failed.exists() else []
        kinds, texts = sorted({e["failed"] for e in errors}), [f"rank {e['rank']}: {e['why']}" for e in errors]
        results[following.name] = {"failed": kinds, "why": texts} if errors else {"failed": ["hangs"], "why": ""}
        _print({"case": following.name, **results[following.name]})
    return results


def _print(line: Mapping[str, Any]) -> None:
    if "case" in line:
        end = next((f"{kind} {line[kind]}: {line['why']}" for kind in ("refused", "failed") if kind in line), "")
        print(f"{line['case']}: {end[:200] or line['weights']}", flush=True)


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Lines that say what differs, and whether nothing does. A case that one of them lacks is named and is no
    difference."""
    one, other = first["cases"], second["cases"]
    lines, num_equal = [], 0
    for name in sorted(one.keys() & other.keys()):
        keys = sorted((one[name].keys() | other[name].keys()) - {"why"})
        differ = [key for key in keys if one[name].get(key) != other[name].get(key)]
        num_equal += not differ
        if differ:
            ends = [end for end in (one[name], other[name]) if "refused" in end or "failed" in end]
            texts = [str(end.get("refused", end.get("failed"))) + f" ({end['why']})" for end in ends]
            lines.append(f"different: {name}: {', '.join(differ)}" + "".join(f"; {text}" for text in texts))
    num_different = len(lines)
    missing = [(name, "second" if name in one else "first") for name in sorted(one.keys() ^ other.keys())]
    lines += [f"missing in the {where}: {name}" for name, where in missing]
    lines.append(f"{num_equal} equal, {num_different} different, {len(missing)} missing")
    return lines, not num_different


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.bits", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("words", nargs="*", help="of the names of cases; none: all of them")
    recording.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose zc trains")
    recording.add_argument("--every", type=int, default=1, help="takes each n-th case")
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs=2)
    ranking = commands.add_parser("rank")  # what `record` starts
    ranking.add_argument("rank", type=int)
    ranking.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    if args.command == "rank":
        cases = [Case(*words) for words in json.loads((args.folder / "cases").read_text())]
        be_rank(args.rank, str(args.folder / "store"), cases, args.folder / "out", PLACES[cases[0].place])
        return 0
    if args.command == "compare":
        lines, is_equal = compare(*(json.loads(path.read_text()) for path in args.files))
        print(*lines, sep="\n")
        return 0 if is_equal else 1
    try:
        cases = chosen_cases(args.words)[:: args.every]
    except ValueError as error:
        parser.error(str(error))
    recorded = record(cases, args.tree.resolve())
    args.out.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    kinds = [kind for result in recorded["cases"].values() for kind in ("refused", "failed") if kind in result]
    print(f"{len(cases)} cases, {kinds.count('refused')} refused, {kinds.count('failed')} failed: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
