"""`zc.check`: the loop on one device, in plain PyTorch, and through zc; and which difference comes first.

The loop runs through zc on a copy, on all ranks, as a program would run it. A check says how much memory it needs
before it takes any, and how far it is: by one line on stderr that is drawn over where there is a terminal, else by a
line for each part.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TextIO

import torch
from torch import nn

from zc.checking import looks
from zc.checking.differences import (
    NUM_SAMPLES,
    UNKNOWN,
    Allowed,
    Difference,
    cause_in_gradients,
    cause_in_own_update,
    cause_in_weights,
    describe,
    rounding_of,
    worst_of,
)
from zc.checking.loop import KINDS, Finding, Key, Loop, Moment, Report, Step, Update, kept, steps_of
from zc.checking.reference import First, Reference
from zc.checking.values import Randomness, copied, digest, map_tensors, names_of, options_of, packed, unpacked
from zc.checks import check_initialized, check_module, is_on_cpu, left_to_ranks
from zc.config import OPTIONS, Config, check_count
from zc.errors import CheckpointError, PlanError, ZcError, megabytes
from zc.log import tell
from zc.machine import available_nbytes, free_nbytes, ranks_on_this_host
from zc.optim.assignment import given_in, parts_of
from zc.prepare import RANKS, fingerprint, resolve
from zc.ranks.group import Group
from zc.ranks.meshes import ranks_of
from zc.registry import COMPILED

WITHOUT_REFERENCE = ("rank-dependent", "not-finite", "other-optimizer")
NOTES = ("not-joined", "sum-of-losses", "own-buffers", "not-compared", "lr-zero")


def check(
    step: Step,
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    *,
    update: Update | None = None,
    updates: int = 3,
    microbatches: int = 1,
    progress: bool | None = None,
    **options: Any,
) -> Report:
    """Whether training does on these ranks what it does on one device: runs a few updates both ways, on copies.

    All ranks call it, before `compile`, with what they are about to train. On each rank plain PyTorch trains a
    copy, op by op, with the batches of all ranks one after the other and the mean of their gradients, as DDP promises.
    Then zc trains another copy with ``options``, op by op and as compiled. Losses, gradients, weights, optimizer states
    and buffers are compared by name, and the report names the first difference, and its cause where it knows one. How
    far two runs may be apart is found by running the reference beside itself, off by one rounding. docs/check.md
    lists the faults. ``model``, ``optimizer`` and the generators of random numbers are as before afterwards::

        def step(model, batch):
            x, y = batch
            return F.cross_entropy(model(x), y)

        report = zc.check(step, model, optimizer, loader, stage=2)
        print(report)

    Args:
        step: from the model and one batch to the loss, without backward: what your loop has between taking a batch and
            ``loss.backward()``. It must use the model that it is given, for it gets copies.
        optimizer: as `compile` takes it, fresh.
        batches: this rank's; the first ``updates * microbatches`` are taken, on the model's device.
        update: ``update(model, optimizer)``, what your loop has between backward and ``zero_grad()``, such as clipping
            and ``optimizer.step()``; None: the steps alone. It must use what it is given.
        microbatches: batches of an update, whose gradients add up.
        progress: whether rank 0 shows on stderr how far it is, and first how much memory is needed; None: if stderr is
            a terminal.
        options: those of `compile`.

    Raises:
        PlanError, TypeError: an argument does not fit, there are too few batches, or memory is too small.
        RankMismatchError: another rank has raised, or ranks differ in what they were given. What ``step`` and
        ``update`` raise comes through.
    """
    check_initialized()
    if unknown := sorted(options.keys() - OPTIONS - {"device", "group", "mesh"}):
        raise TypeError(f"zc.check takes the options of zc.compile, and {', '.join(unknown)} is none of them")
    group, mesh = options.get("group"), options.get("mesh")
    ranks = ranks_of(mesh, group, RANKS, reads_memory=is_on_cpu(model, None))
    try:
        with ranks.refuse_together():
            loop, own = _accept(
                Loop(step, update or steps_of, model, optimizer, updates, microbatches, Config(), options, ranks,
                     torch.device("cpu")), batches
            )  # fmt: skip
        generators = Randomness(loop.device)
        before, marks = generators.get(), _marks(model, optimizer)
        try:
            report = _check(loop, own, before, progress)
        finally:
            generators.set(before)
        if (after := _marks(model, optimizer)) != marks:
            changed = sorted(name for name in after if after[name] != marks.get(name))
            raise ZcError(
                "the step or update that zc.check was given changes your own model or optimizer, and not the copy that "
                f"it gets: {', '.join(changed[:3])}. Let both use their arguments, and leave schedulers out"
            )
        return report
    finally:
        ranks.close()


def _accept(loop: Loop, batches: Iterable[Any]) -> tuple[Loop, list[Any]]:
    """The loop with its options resolved, and this rank's batches. Raises PlanError or TypeError."""
    for name, function in (("step", loop.step), ("update", loop.update)):
        if not callable(function):
            raise TypeError(f"{name} must be a function, got {type(function).__name__}")
    check_module(loop.model)
    check_count("updates", loop.num_updates)
    check_count("microbatches", loop.microbatches)
    if loop.model in COMPILED:
        raise PlanError(f"this {type(loop.model).__name__} is compiled already: call zc.check before zc.compile")
    unset = [n for n, t in (*loop.model.named_parameters(), *loop.model.named_buffers()) if t.device.type == "meta"]
    if unset:
        raise PlanError(f"{unset[0]} is on the meta device, and zc.check needs values: give it a model that has them")
    if own_names := sorted(left_to_ranks(loop.model)):
        raise PlanError(
            f"{', '.join(own_names[:3])}: DistributedDataParallel was told to leave these to each rank, and zc.check "
            "has one model for all ranks: check it without that list"
        )
    options = {name: value for name, value in loop.options.items() if name not in ("dump_dir", "device")}
    config = Config(**{name: value for name, value in options.items() if name in OPTIONS})
    device = next((p.device for p in loop.model.parameters() if p.requires_grad), torch.device("cpu"))
    wanted = loop.num_updates * loop.microbatches
    own = list(itertools.islice(batches, wanted))
    if len(own) < wanted:
        raise PlanError(
            f"there are {len(own)} batches, and updates={loop.num_updates} with microbatches={loop.microbatches} takes "
            f"{wanted}: give more, or ask for fewer updates"
        )
    needs = needs_of(loop.model, loop.world_size, loop.num_updates, loop.microbatches)
    _check_memory(needs, device, loop.world_size)
    return replace(loop, config=config, options=options, device=device), own


def _check(loop: Loop, own: list[Any], random: dict[str, Any], shown: bool | None) -> Report:
    ranks = loop.ranks
    with ranks.refuse_together():
        lines = _try_to_plan(loop)
    lines += [f"updates={loop.num_updates}", f"microbatches={loop.microbatches}"]
    ranks.same_everywhere("the model or an option", lines, "Give zc.check the same on all ranks")
    needed = needs_of(loop.model, loop.world_size, loop.num_updates, loop.microbatches)
    is_shown = ranks.rank == 0 and (sys.stderr.isatty() if shown is None else shown)
    if is_shown:
        tell(f"zc.check needs {megabytes(sum(needed))} on each of {loop.world_size} ranks, without activations")
    report = Report(loop.world_size, loop.num_updates, loop.microbatches, dict(loop.options), needed_nbytes=sum(needed))
    found = _gather_all(loop, own, random)
    per_run = loop.num_updates * loop.microbatches
    backends = list(dict.fromkeys(("eager", loop.config.backend)))
    plain = per_run * (1 if loop.world_size == 1 else loop.world_size) * (1 + NUM_SAMPLES)
    progress = Progress(plain + per_run * len(backends), shown=is_shown)
    try:
        found = _look_and_run(loop, report, progress, backends, found)
    finally:
        progress.end()
    return _finished(report, found, ranks)


def _try_to_plan(loop: Loop) -> list[str]:
    """What `compile` would compare between ranks. Raises what it would refuse."""
    options = {name: value for name, value in loop.options.items() if name in OPTIONS}
    if options.get("offload") == "disk":
        options.update(offload="cpu", offload_dir=None)  # the same plan without files
    model, optimizer = copied(loop.model, loop.optimizer)
    request = resolve(model, optimizer, options, loop.ranks)
    request.discard()
    return fingerprint(model, request.config, request.assignment)


def _gather_all(loop: Loop, own: list[Any], random: dict[str, Any]) -> list[Finding]:
    """Gives the loop the batches and generators of all ranks, and rank 0's weights."""
    ranks = loop.ranks
    tensors = dict(itertools.chain(loop.model.named_parameters(), loop.model.named_buffers()))
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    with ranks.refuse_together():
        sent = packed(own)
    rows = ranks.gather_objects((sent, random, digests, options_of(loop.optimizer)))
    loop.batches = [own if rank == loop.rank else unpacked(row[0], loop.device) for rank, row in enumerate(rows)]
    loop.random = [row[1] for row in rows]
    found = looks.of_options([row[3] for row in rows]) + looks.of_data(loop.batches)
    if other := looks.of_weights([row[2] for row in rows]):
        found += other
        loop.model, loop.optimizer = copied(loop.model, loop.optimizer)
        values = {name: tensor.detach().cpu() for name, tensor in tensors.items()} if loop.rank == 0 else {}
        (first, *_) = ranks.gather_objects(values)
        with torch.no_grad():
            for name, tensor in itertools.chain(loop.model.named_parameters(), loop.model.named_buffers()):
                tensor.copy_(first[name])
    return found


def _look_and_run(
    loop: Loop, report: Report, progress: Progress, backends: list[str], found: list[Finding]
) -> list[Finding]:
    ranks, rank = loop.ranks, loop.rank
    reference, scratch, seen = _record(loop)
    rows = ranks.gather_objects(seen)
    loop.is_together = any(row.collectives for row in rows)
    loop.rounding = rounding_of(loop.config, set().union(*(row.dtypes for row in rows)))
    names: set[str] = set().union(*(row.drawn for row in rows))
    found += looks.of_random_numbers(loop.random, names) + looks.of_collectives(seen, rank)
    if names and len(backends) > 1:
        loop.model, loop.optimizer = copied(loop.model, loop.optimizer)
        looks.stop_dropout(loop.model)
        reference, scratch, seen = _record(loop)
        names = set().union(*(row.drawn for row in ranks.gather_objects(seen)))
        text = "the step draws random numbers, and compiled code draws others: "
        text += "compiled code was not compared" if names else "everything was compared without dropout"
        found.append(Finding("not-compared", text))
        backends = backends[:1] if names else backends
    progress.begin("plain PyTorch, all ranks' batches")
    with ranks.refuse_together():
        found += looks.of_inputs(loop, scratch)
    trace = list(reference.run(progress.advance))
    first = reference.first
    del reference  # with its weights and states
    progress.begin("the same, off by one rounding")
    samples = (Reference(loop, noise=1 + k) for k in range(NUM_SAMPLES))
    allowed = Allowed.around(trace, (sample.run(progress.advance) for sample in samples))
    found += looks.of_numbers(trace) + looks.of_buffers(loop, trace[-1]) + looks.of_updates(loop, trace)
    if (cause := cause_in_own_update(first)) is not None:
        found.append(replace(cause, rank=rank))
    found += looks.of_detached(loop, scratch, trace)
    found += looks.of_ranks(loop, allowed, trace) if not loop.is_together else []
    if any(ranks.gather_objects(any(finding.code in WITHOUT_REFERENCE for finding in found))):
        return [*found, Finding("not-compared", "plain PyTorch gives no one answer, so zc was not compared with it")]
    if loop.world_size > 1 and not names and not loop.is_together:
        found += looks.of_mean(loop, scratch, allowed)
    differing: dict[str, Difference] = {}
    for backend in backends:
        found += _run_backend(loop, report, progress, backend, allowed, first, differing)
    if "inductor" in differing and "eager" not in differing and "aot_eager" not in backends:
        progress.add(loop.num_updates * loop.microbatches)
        _run_backend(loop, report, progress, "aot_eager", allowed, first, differing)
    chosen = loop.config.backend
    if chosen in differing and "eager" not in differing:
        alone = any(ranks.gather_objects(looks.compiled_differs(loop, scratch, allowed, chosen)))
        found.append(_of_compiled(differing, chosen, alone=alone))
    return found


def _record(loop: Loop) -> tuple[Reference, looks.Scratch, looks.Seen]:
    """The reference before its first update, a model to try things on, and what its forward does."""
    seen = looks.Seen()
    with loop.ranks.refuse_together():
        reference = Reference(loop)
        scratch = looks.Scratch(loop, copied(reference.model, reference.optimizer)[0])
        _, grads = scratch.try_batch(loop.batch(loop.rank, 0, 0), seen=seen)
        if not grads:
            raise PlanError(
                "the loss of step reaches no parameter of the model that step is given: use that one, its first "
                "argument, and not another model"
            )
    return reference, scratch, seen


def _of_compiled(differing: dict[str, Difference], chosen: str, *, alone: bool) -> Finding:
    is_inductor = chosen == "inductor" and "aot_eager" not in differing
    who = "Inductor's code" if is_inductor else "code that Dynamo and AOTAutograd have traced"
    whose = "torch.compile differs in the same way without zc" if alone else "torch.compile alone does not, so it is zc"
    code = "compiler" if alone else "zc-compiled"
    first = differing[chosen]
    text = f"{who} differs from op by op, first in {describe(first)}; {whose}"
    return Finding(code, text, first.rank, chosen)


def _run_backend(
    loop: Loop, report: Report, progress: Progress, backend: str, allowed: Allowed, first: First,
    differing: dict[str, Difference],
) -> list[Finding]:  # fmt: skip
    """Runs the loop through zc, and compares. Where this is not the first backend that differs, nothing is said."""
    progress.begin(f"zc, {backend}")
    differences: list[Difference] = []
    moments: list[Moment] = []  # up to the first that differs
    notes: list[Finding] = []
    earliest: Difference | None = None
    for number, moment in enumerate(run(loop, backend, progress.advance)):
        own = allowed.compare(number, moment, loop)
        notes += [Finding("not-compared", note, loop.rank) for note in moment.notes[: not notes]]
        differences += own
        bad = [each for each in own if not each.size <= each.allowed]
        if earliest is None and bad:
            earliest = min(bad, key=lambda each: each.place)
            moments.append(moment)
    rows = loop.ranks.gather_objects((earliest, worst_of(differences)))
    report.worst[backend] = {
        kind: max((worst[kind] for _, worst in rows if kind in worst), key=lambda each: each.ratio)
        for kind in KINDS
        if any(kind in worst for _, worst in rows)
    }
    firsts = [one for one, _ in rows if one is not None]
    if not firsts:
        return notes
    one = min(firsts, key=lambda each: (each.place[:2], each.rank, each.place[2]))
    differing[backend] = one
    report.first[backend] = describe(one)
    if backend != "eager":
        return notes
    cause = None
    if loop.rank == one.rank and earliest is not None:
        cause = _cause(one, moments[0], allowed.trace[one.update], first if one.update == 0 else None, loop)
    (cause,) = loop.ranks.gather_objects(cause)[one.rank : one.rank + 1]
    code, text = (cause.code, cause.text) if cause is not None else ("zc", UNKNOWN)
    return [*notes, Finding(code, f"{text} (zc, {backend}: {describe(one)})", one.rank, backend)]


def _cause(one: Difference, got: Moment, wanted: Moment, first: First | None, loop: Loop) -> Finding | None:
    if one.key.kind == "gradient":
        return cause_in_gradients(got, wanted, first, loop.rank, loop.world_size)
    if one.key.kind == "weight":
        return cause_in_weights(got, wanted, first)
    named = {
        "state": ("optimizer-state", "zc's optimizer holds another state than a plain one"),
        "buffer": ("buffer", "zc's forward leaves another buffer than plain PyTorch"),
        "loss": ("loss", "the forward on zc's model gives another loss than plain PyTorch"),
    }[one.key.kind]
    return Finding(*named)


def _finished(report: Report, found: list[Finding], ranks: Group) -> Report:
    """The findings of all ranks, each once."""
    seen: set[tuple[str, str]] = set()
    for finding in itertools.chain(*ranks.gather_objects(found)):
        key = (finding.code, finding.backend)
        if key not in seen:
            seen.add(key)
            (report.notes if finding.code in NOTES else report.findings).append(finding)
    return report


def _marks(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """What must be as before."""
    tensors: Iterator[tuple[str, torch.Tensor]] = itertools.chain(model.named_parameters(), model.named_buffers())
    marks = {name: digest(tensor) for name, tensor in tensors}
    marks.update({f"gradient of {name}": str(p.grad is None) for name, p in model.named_parameters()})
    return marks | {name: str(options) for name, options in options_of(optimizer)}


def run(loop: Loop, backend: str, advance: Callable[[], None]) -> Iterator[Moment]:
    """One moment for each update. What one rank alone knows stands under its number; optimizer states on rank 0."""
    import zc  # what a program calls, once all of it is there

    with contextlib.ExitStack() as stack:
        options = loop.options_for(backend)
        if options.get("offload_dir") is not None:  # the program's own files are not touched
            options["offload_dir"] = stack.enter_context(tempfile.TemporaryDirectory(prefix="zc-check-"))
        model, optimizer = copied(loop.model, loop.optimizer)
        names = names_of(model, optimizer)
        first = {name: kept(param) for name, param in model.named_parameters() if param.requires_grad}
        if loop.config.param_dtype is not None:
            first = {name: weight.to(loop.config.param_dtype) for name, weight in first.items()}
        zc.compile(model, optimizer, **options)
        stack.callback(zc.close, model)
        generators = Randomness(loop.device)
        generators.set(loop.random[loop.rank])
        for number in range(loop.num_updates):
            moment = Moment()
            for k in range(loop.microbatches):
                is_last = k + 1 == loop.microbatches
                with contextlib.nullcontext() if is_last else zc.no_sync(model):
                    batch = map_tensors(loop.batch(loop.rank, number, k), torch.clone)
                    loss = loop.loss(model, batch)
                    loss.backward()  # type: ignore[no-untyped-call]
                moment.values[Key("loss", f"microbatch {k}", loop.rank)] = float(loss.detach())
                advance()
            for name, grad in zc.full_grad(model).items():
                moment.values[Key("gradient", name)] = None if grad is None else kept(grad)
            for name, buffer in model.named_buffers():
                moment.values[Key("buffer", name, loop.rank)] = kept(buffer)
            loop.update(model, optimizer)
            for each in given_in(optimizer):
                each.zero_grad()
            with zc.whole_parameters(model), torch.no_grad():
                moment.add_weights({n: p for n, p in model.named_parameters() if p.requires_grad}, first)
            _add_state(moment, model, optimizer, names)
            yield moment


def _add_state(moment: Moment, model: nn.Module, optimizer: Any, names: list[dict[int, str]]) -> None:
    import zc

    try:
        states = zc.full_optimizer_state(model, optimizer)
    except CheckpointError as error:  # on all ranks: parts of a state that no single parameter has
        moment.notes.append(f"optimizer states were not compared: {error}")
        return
    if states is not None:
        moment.add_state(parts_of(optimizer, states) or [states], names)


# Each in weights of fp32, by the tensors that were alive at one time (10 linear layers, AdamW; tests/check).
RUNNING = 8  # a model to try things on, one that trains, its narrow copy, two states, gradients of a rank and of all
COMPARED = 9  # in host memory: an update of the run that is compared, first weights, what the first update has shown
KEPT = 4  # of each update of the reference: gradients, weights and two states


class Needs(NamedTuple):
    """Bytes of a rank, without activations. On a CPU both are host memory."""

    device: int
    host: int


def needs_of(model: nn.Module, world_size: int, updates: int, microbatches: int) -> Needs:
    wide = sum(param.numel() * max(4, param.element_size()) for param in model.parameters() if param.requires_grad)
    rest = sum(param.nbytes for param in model.parameters() if not param.requires_grad)
    rest += sum(buffer.nbytes for buffer in model.buffers()) * (1 + world_size)
    device = (RUNNING + world_size) * wide + 2 * rest
    return Needs(device, (KEPT * updates + COMPARED + world_size + microbatches) * wide)


def _check_memory(needs: Needs, device: torch.device, world_size: int) -> None:
    """Raises PlanError where the memory that is free now can't hold it."""
    num_ranks = ranks_on_this_host(world_size)
    host = needs.host + (needs.device if device.type == "cpu" else 0)
    free = available_nbytes()
    if free is not None and host * num_ranks > free:
        raise PlanError(
            f"zc.check needs {megabytes(host)} of host memory on each of the {num_ranks} ranks here, and "
            f"{megabytes(free)} are available: check a smaller model of the same kind, or with updates=1"
        )
    if device.type != "cpu" and needs.device > free_nbytes(device):
        raise PlanError(
            f"zc.check needs {megabytes(needs.device)} on {device}, and {megabytes(free_nbytes(device))} are free: "
            "check a smaller model of the same kind, or move it to the CPU"
        )


WIDTH = 30
REDRAW_S = 0.1


class Progress:
    """``total``: forwards and backwards in all."""

    def __init__(self, total: int, *, shown: bool, stream: TextIO | None = None) -> None:
        self.total, self.done, self._part = max(total, 1), 0, ""
        self._stream = sys.stderr if stream is None else stream
        self._shown, self._drawn, self._started = shown, 0.0, time.monotonic()
        self._is_terminal = shown and self._stream.isatty()

    def begin(self, part: str) -> None:
        self._part = part
        if self._is_terminal:
            self._draw()
        elif self._shown:
            print(f"zc.check: {part} ({100 * self.done // self.total} %)", file=self._stream, flush=True)

    def advance(self) -> None:
        self.done = min(self.done + 1, self.total)
        if self._is_terminal and time.monotonic() - self._drawn > REDRAW_S:
            self._draw()

    def add(self, more: int) -> None:
        self.total += more

    def end(self) -> None:
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        filled = WIDTH * self.done // self.total
        seconds = self._drawn - self._started
        left = f", {seconds / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        bar = "#" * filled + "." * (WIDTH - filled)
        self._stream.write(f"\r\x1b[Kzc.check [{bar}] {self.done}/{self.total}, {seconds:.0f} s{left}: {self._part}")
        self._stream.flush()
