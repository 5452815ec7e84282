"""A random program from one integer: legal by construction, and as ugly as users write them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import fuzz_models
import fuzz_optimizers
import fuzz_options
import fuzz_order
import fuzz_script
from fuzz_program import FULL_CLEARS, ZEROS, Op, Program, leaves_buffers, syncs_buffers

# Features that zc gets wrong today, which `make test` leaves out: each goes with what mends it.
OPEN: tuple[str, ...] = ()
CLEARED = 0.12  # chance of gradients that no_sync holds back and that are then dropped


def draw(seed: int, without: frozenset[str] = frozenset(), only: frozenset[str] = frozenset()) -> Program:
    """``without``: kinds of blocks and operations, ways to clear, values and groups of options that shall not come.
    ``only``: groups of options, of which each program has one."""
    rng, group = random.Random(seed), fuzz_options.draw_group(seed, without, only)
    sizes = [rng.choice((2, 2, 2, 3))]
    if "relaunch" not in without and rng.random() < 0.15:
        sizes.append(rng.choice((1, 2, 3, 3)))
    count = rng.choices((1, 2, 3), (82, 15, 3))[0] if "models" not in without else 1
    parts = [_part(seed, rng, sizes, without, group, few=count > 1) for _ in range(count)]
    if count == 1:
        return parts[0]
    may_differ = "differ" not in without and rng.random() < 0.7
    may_cross = "cross" not in without and rng.random() < 0.1
    first, *others = fuzz_order.interleave(rng, parts, may_cross, may_differ)
    return dataclasses.replace(first, others=tuple(others))


def _part(
    seed: int, rng: random.Random, sizes: list[int], without: frozenset[str], group: str | None, *, few: bool
) -> Program:
    """One model and its loop; ``sizes``: numbers of ranks, by launch. ``few``: it is not the only one."""
    dtype = rng.choices(("float64", "float32", "bfloat16"), (4, 5, 1))[0]
    if group == "wire" and dtype == "float64":  # which zc does not round
        dtype = "float32"
    first = options = fuzz_options.draw(rng, dtype, without, group)
    fault = "raise" not in without and rng.random() < 0.25
    if group is not None and rng.random() < 0.8:
        without = without | {"keeps"}  # in stage 3 code that is not compiled refuses it, and all else is right or wrong
    model = fuzz_models.draw(rng, narrow=dtype == "bfloat16", fault=fault, without=without)
    if group == "wire":
        model = {**model, "dim": fuzz_options.WIRE_DIM}
    if group is not None:  # it may be stage 3
        without = without | {"penalty"}  # it reads parameters outside of a forward
    if group == "stage3" and rng.random() < 0.9:
        without = without | {"differ"}  # of ranks that run other forwards zc expects an error alone
    if "own buffers" not in without and rng.random() < (0.5 if fuzz_models.has(model, *fuzz_models.BUFFERED) else 0.05):
        options["broadcast_buffers"] = False
    if fuzz_models.has(model, *fuzz_models.WRITING):
        without = without | {"differ"}
    if fuzz_models.has(model, "keeps"):
        without = without | {"assign"}  # the view then shows what the parameter has no more
        if group is not None:
            options["backend"] = "eager"  # elsewhere zc says it, and goes on
    if fuzz_models.has(model, "clamped late"):
        without = without | {"raise", "penalty"}
    optimizer = fuzz_optimizers.draw(rng, without)
    if fuzz_optimizers.is_stacked(optimizer) or dtype == "bfloat16":  # frozen from the start it would stay in float32
        without = without | {"freeze", "thaw", "replace", "reset"}
    if dtype == "bfloat16":
        without = without | {"array"}  # numpy has none
    if len(sizes) > 1:
        without = without | {"replace"}  # the next launch begins with other groups
    fuzz_options.fit(options, optimizer)
    loop = Loop(rng, sizes[0], model, options, without)
    for k, world_size in enumerate(sizes):
        if k > 0:
            options = fuzz_options.draw_again(rng, dtype, options, without, group)
            fuzz_options.fit(options, optimizer)
            loop.relaunch(world_size, options)
        for _ in range(rng.choice((1, 2, 2, 3)) if few or len(sizes) > 1 else rng.choice((2, 3, 3, 4, 5))):
            loop.update()
    if loop.is_uneven:  # a rank with more backwards is answered where the others meet it
        loop.put("step")
    return Program(seed, sizes[0], dtype, dict(model), optimizer, first, tuple(loop.ops))


class Loop:
    """Operations so far, and what may follow them."""

    def __init__(
        self,
        rng: random.Random,
        world_size: int,
        model: fuzz_models.Model,
        options: dict[str, Any],
        without: frozenset[str],
    ) -> None:
        self.rng, self.world_size, self.model, self.options, self.without = rng, world_size, model, options, without
        self.ops: list[Op] = []
        self.names = fuzz_models.trainable(model)
        self.frozen = list(model["frozen"])
        self.is_clean, self.is_uneven, self.has_snapshot, self.has_saved = True, False, False, False
        self.may_differ = "differ" not in without and rng.random() < 0.6
        is_compiled = options["backend"] != "eager"
        # each batch size and each set of heads is another graph
        low, high = (3, 6) if fuzz_models.has(model, *fuzz_models.BUFFERED) else (1, 5)
        self.sizes = [rng.randint(low, high) for _ in range(2 if is_compiled else 9)]
        count = len(model["heads"])
        self.uses = [sorted(rng.sample(range(count), rng.randint(0, count))) for _ in range(2 if is_compiled else 9)]
        self.ways = [w for w in (*FULL_CLEARS, *ZEROS, "one", "part") if w not in without]
        self.bulk = [how for how in FULL_CLEARS if how in self.ways]
        self.syncs_buffers = syncs_buffers(model, options)
        self.has_buffers = fuzz_models.has(model, *fuzz_models.BUFFERED)
        if not (self.has_buffers and not self.may_differ and rng.random() < 0.6):
            self.without = without | {"buffers_written"}

    def put(self, kind: str, **args: Any) -> int:
        self.ops.append(Op(kind, args))
        return len(self.ops) - 1

    def _maybe(self, kind: str, chance: float) -> bool:
        return kind not in self.without and self.rng.random() < chance

    # --- forwards and backwards ---

    def _batch(self) -> dict[str, Any]:
        rows = [self.rng.choice(self.sizes) for _ in range(self.world_size)]
        use = [self.rng.choice(self.uses)] * self.world_size
        if self.may_differ and self.rng.random() < 0.6:
            use = [self.rng.choice(self.uses) for _ in range(self.world_size)]
        return {"seed": self.rng.randrange(10_000), "rows": rows, "use": use}

    def forward(self, quiet: bool) -> int:
        penalty = 0.01 if self._maybe("penalty", 0.04) else 0.0
        scale = self.rng.choice((1.0, 0.5))
        return self.put("forward", quiet=quiet, penalty=penalty, scale=scale, **self._batch())

    def backward(self, of: list[int], quiet: bool, retain: bool = False) -> None:
        self.is_clean = False
        if not quiet and self._maybe("collective", 0.04) and not self.is_uneven:
            self.put("collective", of=of[:1])
        if self._maybe("peek", 0.05) and not fuzz_models.has(self.model, "reentrant"):
            self.put("peek", of=of[:1], name=self.rng.choice(self.names))
        self.put("backward", of=of, quiet=quiet, retain=retain)

    def gradients(self) -> None:
        """What stands between a clear and a step."""
        rng, style = self.rng, self.rng.random()
        if "pile" in self.without or self.syncs_buffers:
            style = (
                style if style >= 0.8 else 0.0
            )  # DDP's broadcast of buffers breaks a backward that waits behind another forward
        if "no_sync" not in self.without and self._maybe("cleared", CLEARED):
            self.cleared()
        if self.may_differ and self._maybe("uneven", 0.35):
            self.uneven()
        if style < 0.5:  # one after the other, all but the last declared or none
            count, declared = rng.choice((1, 1, 1, 2, 3)), self._maybe("no_sync", 0.5)
            for m in range(count):
                quiet = declared and (m < count - 1 or self._maybe("quiet to the end", 0.1))
                self.backward([self.forward(quiet)], quiet)
                self.between(quiet)
        elif style < 0.8:  # several forwards, their backwards in another order, or of sums
            quiet = "quiet to the end" not in self.without and self._maybe("no_sync", 0.15)
            waiting = [self.forward(quiet) for _ in range(rng.choice((2, 2, 3)))]
            rng.shuffle(waiting)
            while waiting:
                count = rng.randint(1, len(waiting))
                of, waiting = waiting[:count], waiting[count:]
                if rng.random() < 0.1:
                    continue  # that loss is never used
                self.backward(of, quiet)
                self.between(quiet, pending=True)
        elif style < 0.9 and "retain" not in self.without:
            one = self.forward(False)
            self.backward([one], False, retain=True)
            self.backward([one], False)
        elif fuzz_models.has(self.model, "fault") and "raise" not in self.without and not self._waits_with_buffers:
            if rng.random() < 0.4:
                self.backward([self.forward(False)], False)
            self.put("raise", of=[self.forward(False)])
            self.put("zero", how=rng.choice(self.bulk))
            self.is_clean = True
            if rng.random() < 0.8:
                self.backward([self.forward(False)], False)

    @property
    def _waits_with_buffers(self) -> bool:
        """Whether a backward that raises meets no rank, and the forward after it waits for rank 0's buffers."""
        return self.is_uneven and self.syncs_buffers

    def uneven(self) -> None:
        """Ranks with different numbers of microbatches: declared, as DDP takes them, or not."""
        quiet = self._maybe("no_sync", 0.5) or "undeclared" in self.without
        quiet = quiet or self.syncs_buffers
        if "no_sync" in self.without and quiet:
            return
        self.micro(quiet)

    def micro(self, quiet: bool) -> None:
        reps = [self.rng.randint(0, 3) for _ in range(self.world_size)]
        self.put("micro", quiet=quiet, reps=reps, **self._batch())
        self.is_clean = False
        self.is_uneven = self.is_uneven or ((not quiet or self.options["stage"] >= 2) and len(set(reps)) > 1)

    def cleared(self) -> None:
        """Gradients that no_sync has held back, on some ranks more of them, and that no step sees."""
        for _ in range(self.rng.choice((1, 2))):
            self.backward([self.forward(quiet=True)], quiet=True)
        if self.may_differ and "uneven" not in self.without and self.rng.random() < 0.6:
            self.micro(quiet="undeclared" in self.without or self.syncs_buffers or self.rng.random() < 0.5)
        self.clear(self.bulk if self.rng.random() < 0.7 else None)

    def between(self, quiet: bool, pending: bool = False) -> None:
        """Reads and clears that may stand behind any backward; writes only where no forward waits for its backward."""
        if self._maybe("look", 0.06) and not (quiet and "quiet to the end" in self.without):
            self.look()
        if self._maybe("evaluate", 0.05):
            self.evaluate()
        if self._maybe("zero", 0.05):
            self.clear()
        if not pending and self._maybe("write", 0.03):
            self.write()
        if not pending and self._maybe("buffers_written", 0.1):
            self.put("buffers_written")

    # --- the rest ---

    def look(self) -> None:
        kinds = ("grads", "norms", "clip", "weights", "by_hand", "leave", *(("buffers",) if self.has_buffers else ()))
        kind = self.rng.choice([k for k in kinds if k not in self.without] or ["grads"])
        if kind == "clip":
            self.clip()
            return
        hows = {"by_hand": fuzz_script.BY_HAND, "leave": fuzz_script.LEAVES}.get(kind, {})
        hows = [how for how in hows if how != "arrays" or "array" not in self.without]
        self.put(kind, **({"how": self.rng.choice(hows)} if hows else {}))
        self.is_uneven = self.is_uneven and kind in ("weights", "buffers", "leave")

    def clip(self) -> None:
        hows = [h for h in ("zc", "stock", "stock_inf") if h not in self.without]
        if fuzz_models.has(self.model, "empty"):  # torch's own norm refuses a tensor without elements
            hows = [h for h in hows if h != "stock_inf"]
        how = self.rng.choice(hows)
        self.put("clip", how=how, max_norm=self.rng.choice((0.01, 0.3, 1.0, 10.0)))
        self.is_uneven = False

    def evaluate(self) -> None:
        if "eval_buffers" in self.without and self.syncs_buffers:
            return
        self.put("evaluate", inference=self.rng.random() < 0.3, **self._batch())

    def write(self) -> None:
        whats = [what for what in ("clamp", "halve", "fill", "assign", "array") if what not in self.without]
        what = self.rng.choice(whats)
        args = {"name": self.rng.choice(self.names)} if what == "fill" else {"walks": self._maybe("walk", 0.3)}
        is_data = what in ("assign", "array") or self._maybe("data", 0.3)
        self.put("write", what=what, data=is_data, **args)

    def clear(self, ways: list[str] | None = None) -> None:
        how = self.rng.choice(ways or self.ways)
        blocks = [k for k, (kind, _) in enumerate(self.model["blocks"]) if kind in ("linear", "residual", "twice")]
        if how == "one":
            self.put("zero", how=how, name=self.rng.choice(self.names))
        elif how == "part" and blocks:
            self.put("zero", how=how, block=self.rng.choice(blocks))
        elif how != "part":
            self.put("zero", how=how)
            self.is_clean = self.is_clean or how in FULL_CLEARS

    def update(self) -> None:
        rng = self.rng
        self.gradients()
        if rng.random() < 0.25:
            self.clip()
        if self._maybe("look", 0.1):
            self.look()
        if not self._maybe("skip", 0.15):
            self.put("step")
            self.is_uneven = False
            if self._maybe("step", 0.05):
                self.put("step")
        if self._maybe("look", 0.1):
            self.look()
        if rng.random() < 0.9:
            self.clear(self.bulk if rng.random() < 0.75 else None)
        self.extras()

    def extras(self) -> None:
        """Between two updates."""
        rng = self.rng
        if self._maybe("evaluate", 0.12):
            self.evaluate()
        if self._maybe("write", 0.08):
            self.write()
        if self._maybe("buffers_written", 0.4):
            self.put("buffers_written")
        if self._maybe("reset", 0.06):
            how = rng.choice(tuple(fuzz_script.RESETS))
            self.put("reset", how=how, **({"name": rng.choice(self.names)} if how in ("pop", "empty") else {}))
        if self._maybe("lr", 0.05):
            self.put("lr")
        if self._maybe("hook", 0.03):
            self.put("hook", name=rng.choice(self.names))
        if self._maybe("restore", 0.4 if self.has_snapshot else 0.06):
            restores = self.has_snapshot and rng.random() < 0.8
            if not (restores and self.syncs_buffers and leaves_buffers(self.ops)):
                self.put("restore" if restores else "snapshot")
                self.has_snapshot = True
        if not self.is_clean or self.is_uneven:
            return
        if self._maybe("save", 0.6 if self.has_saved else 0.04):
            self.put("load" if self.has_saved and rng.random() < 0.8 else "save")
            self.has_saved = True
        if self.frozen and self._maybe("thaw", 0.3) and not self.options.get("offload"):
            self._toggle("thaw", self.frozen.pop(rng.randrange(len(self.frozen))))
        blocks = self.model["blocks"]
        linear = [k for k, (kind, _) in enumerate(blocks) if kind == "linear" and fuzz_models.may_freeze(blocks, k)]
        trained = [k for k in linear if k not in self.frozen]
        if trained and self._maybe("replace", 0.12) and not self.options.get("offload"):
            self.put("replace", block=rng.choice(trained), dim=self.model["dim"], seed=rng.randrange(10_000))
            self.has_saved = False
        linear = [k for k in trained if fuzz_models.trains(self.model, [*self.frozen, k])]
        if linear and self._maybe("freeze", 0.06):
            self.frozen.append(rng.choice(linear))
            self._toggle("freeze", self.frozen[-1])

    def relaunch(self, world_size: int, options: dict[str, Any]) -> None:
        """Saved here, loaded by the next launch."""
        if self.is_uneven:
            self.put("step")
        self.put("zero", how=self.rng.choice(self.bulk))
        self.put("relaunch", world_size=world_size, options=options)
        self.world_size, self.options = world_size, options
        self.is_clean, self.is_uneven, self.has_snapshot, self.has_saved = True, False, False, False
        self.may_differ = self.may_differ and world_size > 1

    def _toggle(self, kind: str, block: int) -> None:
        self.put(kind, block=block)
        self.names = fuzz_models.trainable({**self.model, "frozen": self.frozen})
