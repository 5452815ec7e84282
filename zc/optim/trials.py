"""What an optimizer's update reads, tried on small matrices, since its class does not say.

| question | asked |
|---|---|
| is a slice updated as the whole is? | of what `zc.elementwise` declares |
| is one parameter updated as if the others were not there? | of any other unknown class, with several ranks |
| does it depend on a parameter's position? | of any unknown class with a list of as many entries, with several ranks |
| does each state belong to the parameter that it is stored under? | of every unknown class, for checkpoints |
| can a group be empty, or without a gradient? | of every unknown class: a rank may own no such parameter of a group |
| does it change gradients past autograd's count (``p.grad.data``)? | of every unknown class |
| does it draw random numbers, return a number of its own, set options of a group? | of every unknown class |
| how often is a closure called? | at the first ``step(closure)`` |
| which state has the parameter's shape? | of torch's elementwise classes, with offload |
| may a method other than ``step`` run on slices? | of every unknown class: schedule-free's ``eval()``, a Hessian |

A copy of the caller's optimizer, with a group's own options, updates them. The caller's objects, random numbers and
counts in the class or its module stay as they were, hooks of all optimizers don't run, and what the optimizer compiles
runs eagerly. (`torch.autograd.gradcheck` tries a promise about a function in the same way.) What the optimizer refers
to is copied so that a trial changes nothing of the caller's:

| object | becomes |
|---|---|
| tensors, containers, and objects that pickle can take apart and put together | a copy, however deep |
| the optimizer itself, its state, its parameters | those of the copied optimizer, as `Copies` is told |
| functions, classes, modules, what is of torch.distributed, locks, files, and what has a ``__del__`` | shared |
| a generator, another iterator that can't be copied, another optimizer | `UncopyableError`: a step would change it |

Pickle does the work, inside this process: it calls `Copies.persistent_id` with each object that it meets.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import math
import pickle
import random
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zc import torch_private
from zc.errors import PlanError, ZcError
from zc.optim.local import REPLACED, class_of
from zc.optim.one_rank import one_rank
from zc.planning.traits import num_states

ROWS, COLUMNS = 54, 256  # three slices of at least 4,096 elements: 8-bit optimizers leave smaller tensors alone
# Of two shapes first, two of them equal: some optimizers stack what has one shape. One that stacks a group takes one
# shape; its batched kernels may round to bf16.
PAIRS = ((((16, 24), (40, 8), (16, 24)), 1e-4), (((16, 24), (16, 24)), 2e-2))  # and how close, of the largest change
OWN = 4  # parameters: where no pair fits, the first ones of the group do, such as an adapter's two matrices
MOST_ELEMENTS = 2**22  # of those together


def check_elementwise(optimizer: Optimizer, block: int, device: torch.device) -> None:
    """Raises PlanError where updating slices that begin and end at multiples of ``block`` elements differs from
    updating the whole parameter, in some group of ``optimizer``. Changes nothing."""
    name = type(optimizer).__name__
    (_, columns), slices = cut_matrix(block)
    value, grads = small_data((ROWS, columns), device)
    for number, group in enumerate(optimizer.param_groups):
        where = f"zc.elementwise({name}): parameter group {number}"
        try:
            updated, other = (update_copy(optimizer, group, [value], [grads], seed)[0] for seed in (1, 2))
        except Communicates as error:
            raise PlanError(_advice(optimizer, error)) from None
        except Exception as error:
            raise PlanError(
                f"{where} can't be tried on small data: {type(error).__name__}: {error}. Take the declaration away, "
                "and whole parameters stay on one rank"
            ) from error
        whole = updated.elementwise()
        if difference(whole, other.elementwise()) is not None:
            raise PlanError(f"{where} draws random numbers, so a slice's update is never the whole parameter's")
        outcomes: list[dict[str, Tensor]] = []
        for part in slices:  # each alone, as on its rank
            try:
                flat = [grad.view(-1)[part] for grad in grads]
                of_slice = update_copy(optimizer, group, [value.view(-1)[part]], [flat], 1)[0]
            except Exception as error:
                raise PlanError(
                    f"{where} is not elementwise: it updates a matrix {(ROWS, columns)} and refuses elements "
                    f"[{part.start}, {part.stop}) of it ({type(error).__name__}: {error}). Take the declaration away"
                ) from error
            for option in _estimates(updated, of_slice):
                raise PlanError(
                    f"{where} is not elementwise: its step reads the option {option!r}, which it makes of all elements "
                    f"of a matrix {(ROWS, columns)} ({updated.options[option]}) or of a slice of it "
                    f"({of_slice.options[option]}). Take the declaration away"
                )
            outcomes.append(of_slice.elementwise())
        joined = joined_parts(outcomes)
        key = difference({k: v.view(-1) for k, v in whole.items()}, joined)
        if key is not None:
            if drawn := _own_generator(optimizer):
                raise PlanError(f"{where} draws random numbers{drawn}: a slice's update is never the whole parameter's")
            what = f"the state {key!r}" if key else "the new weights"
            at = (whole[key].view(-1) - joined[key]).abs().argmax()
            raise PlanError(
                f"{where} is not elementwise: {what} of a matrix {(ROWS, columns)} differ from those of its slices "
                f"(element {int(at)}: {whole[key].view(-1)[at]:g} and {joined[key][at]:g}"
                f"{f', with block={block}' if block > 1 else ''}). Take the declaration away, and whole parameters "
                "stay on one rank; or give the block in which elements share something"
            )


def cut_matrix(block: int) -> tuple[tuple[int, int], list[slice]]:
    """The shape of a small matrix, and three slices of its elements that begin and end at multiples of ``block``."""
    columns = max(COLUMNS, block)
    cuts = [0, *(((k * ROWS // 3) * columns + columns // 3) // block * block for k in (1, 2)), ROWS * columns]
    return (ROWS, columns), [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


def check_independent(optimizer: Optimizer, device: torch.device) -> None:
    """Raises PlanError where the update of one parameter depends on the other parameters or on other ranks, since each
    rank owns other parameters.

    A group that can't be tried (the class wraps another optimizer, takes no small data, draws random numbers) passes.
    """
    for group in _with_large_decays(optimizer.param_groups):
        try:
            trial = _try_pair(optimizer, group, device)
        except Communicates as error:
            raise PlanError(_advice(optimizer, error)) from None
        except NeedsOthersError:
            differs = True
        else:
            differs = trial is not None and not trial.is_random and _differs_alone(trial)
        if differs:
            if drawn := _own_generator(optimizer):
                raise PlanError(
                    f"{type(optimizer).__name__} draws random numbers{drawn}, for one parameter after the other, and "
                    "ranks own different ones: no rank would draw what DDP's ranks draw. Use another optimizer"
                )
            raise PlanError(
                f"the update of {type(optimizer).__name__} depends on all of its parameters together (a norm or an "
                "estimate over them), and ranks own different ones: it can't be shared between ranks. Clip by "
                "zc.clip_grad_norm_ in the loop and leave it out of the update, or use an optimizer that treats "
                "parameters one by one"
            )


def _differs_alone(trial: Trial) -> bool:
    pairs = zip(trial.together, trial.apart, strict=True)
    return _differ(trial.together, trial.apart, trial.close) or any(_estimates(a, b) for a, b in pairs)


def _own_generator(optimizer: Optimizer) -> str:
    """Where ``optimizer`` keeps a generator, from which trials draw the same whatever the seed; "" if nowhere."""
    kinds, items = (torch.Generator, random.Random), vars(optimizer).items()
    names = [n for n, v in items if isinstance(v, kinds) or type(v).__module__.startswith("numpy.random")]
    return f" from a generator of its own, its attribute {names[0]}" if names else ""


def _with_large_decays(groups: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Each group, and then, if it decays, with decays of 1: small ones drown in rounding, and what scales them may read
    all parameters."""
    for group in groups:
        yield group
        decays = {k: 1.0 for k, v in group.items() if "weight_decay" in k and isinstance(v, float) and v != 0}
        if decays:
            yield {**group, **decays}


def check_positions(optimizer: Optimizer, device: torch.device) -> None:
    """Raises PlanError where an option or an attribute has an entry for each parameter, by position, since a rank sees
    some parameters alone: a list of tensors of their shapes, or any other if equal parameters get different updates."""
    if wrapped(optimizer) is not None:
        return
    groups = vars(optimizer)["param_groups"]
    attributes = {key: item for key, item in vars(optimizer).items() if key not in ("state", "param_groups")}
    everything = [param for group in groups for param in group["params"]]
    places = [("attribute", attributes, everything, groups[0])]
    for number, group in enumerate(groups):
        options = {key: item for key, item in group.items() if key not in ("params", "param_names")}
        places.append((f"option of parameter group {number}:", options, group["params"], group))
    for where, items, params, group in places:
        fit = [k for k, item in items.items() if isinstance(item, (list, tuple)) and len(item) == len(params) > 1]
        by_shape = [key for key in fit if _are_values_of(items[key], params, everything)]
        if by_shape or (fit and _depends_on_position(optimizer, group, len(params), device)):
            raise PlanError(_by_position(optimizer, len(params), f"{where} {(by_shape or fit)[0]}"))


def refuse_positions(optimizer: Optimizer, arguments: Mapping[str, Any], words: Iterable[str]) -> None:
    """Raises ZcError where an argument of ``step``, or what its code names (``words``), has a tensor for each parameter
    by position, which a step would pair with other parameters, or is a dict by parameters, where slices are not."""
    groups = vars(optimizer)["param_groups"]
    lists = [[param for group in groups for param in group["params"]], *(group["params"] for group in groups)]
    ids, has_names = set(map(id, lists[0])), any("param_names" in group for group in groups)
    for where, value in arguments.items():
        if isinstance(value, Iterator):  # such as model.parameters()
            raise ZcError(_by_position(optimizer, len(ids), where))
    for where, value in (*arguments.items(), *_in_reach(optimizer, words)):
        items = list(value.parameters()) if isinstance(value, nn.Module) else value
        if isinstance(value, Mapping):
            if any((id(key) if isinstance(key, Tensor) else key) in ids for key in value):
                raise ZcError(
                    f"{type(optimizer).__name__}.step() looks into {where}, whose keys are the model's parameters, and "
                    "it has this rank's elements of them instead. Keep what belongs to a parameter in "
                    "optimizer.state[param], and read self.state[p] in step()"
                )
            items = [] if has_names else list(value.values())
        for params in lists if isinstance(items, (list, tuple)) and len(items) > 1 else ():
            if len(items) == len(params) and _are_values_of(items, params, lists[0]):
                raise ZcError(_by_position(optimizer, len(params), where))


def _in_reach(optimizer: Optimizer, words: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """What the code of ``step`` reaches by one of its ``words``: an attribute, an attribute of that, a global, or a
    variable of the function around it."""
    step: Any = inspect.unwrap(class_of(optimizer).step)
    space, code, cells = (getattr(step, name, None) for name in ("__globals__", "__code__", "__closure__"))
    for word in words:
        value = vars(optimizer).get(word) if word not in ("state", "param_groups") else None
        yield f"self.{word}", value
        if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Optimizer, *_SHARED)):
            yield from ((f"self.{word}.{name}", vars(value)[name]) for name in words if name in vars(value))
        yield word, (space or {}).get(word)
    for word, cell in zip(code.co_freevars, cells, strict=True) if code and cells else ():
        with contextlib.suppress(ValueError):  # it is empty
            yield word, cell.cell_contents


def _by_position(optimizer: Optimizer, number: int, where: str) -> str:
    return (
        f"{type(optimizer).__name__} has an entry for each of {number} parameters, by position ({where}), and ranks "
        "own different parameters. Give parameters with other options groups of their own, and keep tensors in "
        "optimizer.state[param]: step() finds them in self.state[p]"
    )


def _are_values_of(items: Sequence[Any], params: Sequence[Tensor], of_groups: Sequence[Tensor]) -> bool:
    """Whether each is a tensor of the parameter's shape, or a pair of a name and that, and none is one
    of ``of_groups``, the parameters themselves."""
    tensors = [item[-1] if isinstance(item, tuple) and item else item for item in items]
    pairs, ids = zip(tensors, params, strict=True), set(map(id, of_groups))
    return all(isinstance(t, Tensor) and t.shape == p.shape and id(t) not in ids for t, p in pairs)


def _depends_on_position(optimizer: Optimizer, group: Mapping[str, Any], number: int, device: torch.device) -> bool:
    """Whether equal parameters with equal gradients get different updates, which are not random."""
    value, grads = small_data((16, 24), device)
    try:
        one, other = (
            update_copy(optimizer, group, [value] * number, [grads[:1]] * number, seed) for seed in (1, 2)
        )
    except Exception:  # noqa: BLE001  (it can't be tried)
        return False
    return not _differ(one, other) and _differ(one[:1] * number, one)


class Habits(NamedTuple):
    """What trials have shown of an unknown class, with the options of some groups.

    Attributes:
        stacks_state: a state was not shown to belong to the parameter that it is stored under, so that an update of
            several parameters leaves the same states as updates of one each. A momentum that is stacked under a group's
            first parameter does not.
        refuses_empty: an update fails on a group without parameters. An optimizer that stacks a group does.
        needs_a_gradient: an update of a group fails where none of its parameters has a gradient, and is then left out.
            What the class sets in the group comes from a rank that has updated it.
        edits_data: an update changes gradients without autograd's counting it, or that can't be tried. A decay of 0 may
            be another one later, so it is tried with another one, too.
        draws: a step draws random numbers.
        returns_own: a step returns a number that it makes of its gradients or weights.
        options: of a group, those that a step sets.
    """

    stacks_state: bool = False
    refuses_empty: bool = False
    needs_a_gradient: bool = False
    edits_data: bool = False
    draws: bool = False
    returns_own: bool = False
    options: frozenset[str] = frozenset()

    def joined(self, other: Habits) -> Habits:
        """Of a class that has shown either."""
        pairs: Iterator[tuple[Any, Any]] = zip(self, other, strict=True)
        return Habits(*(one | another for one, another in pairs))


def habits_of(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], device: torch.device) -> Habits:
    """As far as they can be tried."""
    habits = Habits()
    for group in groups:
        decays = {k: 0.01 for k, v in group.items() if "decay" in k and not isinstance(v, Tensor) and v == 0}
        trial = _try_alone(optimizer, group, device)
        later = _try_alone(optimizer, {**group, **decays}, device) if decays else None
        edits_data = trial is None or any(each.edits_data for one in (trial, later) if one for each in one.apart)
        habits = habits.joined(Habits(
            trial is None or not _has_own_states(trial), _fails(optimizer, group, [], []),
            _needs_a_gradient(optimizer, group, device), edits_data,
        ))  # fmt: skip
        if trial is None:
            continue
        whole = trial.together[0]
        rate = {} if "lr" not in group else {"lr": whole.options.get("lr")}  # a trial's own
        before, after = dict(leaves({**group, **rate, "params": []})), dict(leaves(whole.options))
        new = {path[0] for path in after if path not in before or not _is_same(before[path], after[path])}
        returns_own = any(not _is_same(whole.stepped, each.stepped) for each in trial.apart)
        options = frozenset(new - {"param_names"})
        habits = habits.joined(Habits(draws=whole.draws, returns_own=returns_own, options=options))
    return habits


def _try_alone(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> Trial | None:
    """`_try_pair` of a class that may start collectives of its own, or need several parameters."""
    with contextlib.suppress(Communicates, NeedsOthersError):
        return _try_pair(optimizer, group, device)
    return None


def _has_own_states(trial: Trial) -> bool:
    return _have_same_states(trial.together, trial.apart, None if trial.is_random else trial.close)


def _fails(
    optimizer: Optimizer, group: Mapping[str, Any], values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]]
) -> bool:
    """Whether an update of these fails: a rank to which it comes would meet that. One that can't be tried does not."""
    try:
        update_copy(optimizer, group, values, grads, seed=1)
    except UncopyableError:
        return False
    except Exception:  # noqa: BLE001  (whatever it is)
        return True
    return False


def _needs_a_gradient(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> bool:
    for (shape, *_), _ in PAIRS:
        value, grads = small_data(shape, device)
        if not _fails(optimizer, group, [value], [grads[:1]]):
            return _fails(optimizer, group, [value], [[]])
    return False


def _is_same(one: Any, other: Any) -> bool:
    """Whether numbers agree but for rounding. Anything else does: nobody knows what it means."""
    numbers = [item.item() if isinstance(item, Tensor) and item.numel() == 1 else item for item in (one, other)]
    if not all(isinstance(item, (int, float)) for item in numbers):
        return type(one) is type(other)
    return math.isclose(*numbers, rel_tol=1e-5) or all(map(math.isnan, numbers))


def calls_of_closure(optimizer: Optimizer) -> tuple[int, bool] | None:
    """How often one ``step(closure)`` calls its closure, and whether the weights have moved since the step before when
    it does; None where that can't be tried."""
    value, grads = small_data((16, 24), torch.device("cpu"))
    weights: list[Tensor] = []  # in each call

    def closure(param: nn.Parameter) -> Tensor:
        weights.append(param.detach().clone())
        return torch.zeros((), device="cpu")

    def change(num_steps: int) -> Tensor:
        some = (grads * REPEATS)[:num_steps]
        return update_copy(optimizer, group, [value], [some], seed=1, closure=closure)[0].change

    group = next((g for g in optimizer.param_groups if g["params"]), optimizer.param_groups[0])
    try:
        change(1)
        number = len(weights)
        before = change(REPEATS * STEPS - 1)
        change(REPEATS * STEPS)  # its last step begins where the one before has ended
    except Exception:  # noqa: BLE001  (then it is not known)
        return None
    return number, number > 0 and not torch.equal((weights[-number] - value).float(), before)


SHAPE = (16, 24, 3, 3, 3)  # its first numbers: of as many dimensions


def states_of_trial(optimizer: Optimizer, num_dims: int) -> list[dict[Any, Any]]:
    """Of each group the state of a parameter of so many dimensions after some updates, as far as that can be tried."""
    value, grads = small_data(SHAPE[:num_dims], torch.device("cpu"))
    states: list[dict[Any, Any]] = []
    for group in optimizer.param_groups:
        # without the state of a parameter, which may be of other dimensions; with it, where ``__init__`` makes it
        for tried in ({**group, "params": []}, group):
            with contextlib.suppress(Exception):  # it takes other shapes, or is not made to update what is not its own
                states.append({**update_copy(optimizer, tried, [value], [grads], seed=1)[0].state})
                break
    return states


def whole_keys(optimizer: Optimizer) -> list[list[str]]:
    """Of each group the names of the state tensors that have the parameter's shape, tried on a matrix."""
    states = states_of_trial(optimizer, 2)
    return [[k for k, v in state.items() if isinstance(v, Tensor) and v.shape == SHAPE[:2]] for state in states]


def num_kept(optimizer: Optimizer) -> int:
    """How many tensors of a matrix's shape the optimizer keeps for it, the most of any group. Sums of rows and columns
    (Adafactor) are not among them. Where that can't be tried, the table of classes says it."""
    keys = whole_keys(optimizer)
    is_tried = len(keys) == len(optimizer.param_groups)
    return max(map(len, keys), default=0) if is_tried else num_states(type(optimizer).__name__)


class Trial(NamedTuple):
    """Some parameters of one group, updated together and each alone. ``close``: the tolerance for their comparison."""

    together: list[Updated]
    apart: list[Updated]
    is_random: bool
    close: float


def _try_pair(optimizer: Optimizer, group: Mapping[str, Any], device: torch.device) -> Trial | None:
    """None where the optimizer takes neither `PAIRS` nor the group's own shapes (it may want a closure). Raises
    NeedsOthersError where it takes them together and not alone."""
    own_shapes = tuple(tuple(param.shape) for param in group["params"][:OWN])
    fits = len(own_shapes) > 1 and sum(map(math.prod, own_shapes)) <= MOST_ELEMENTS
    still: Trial | None = None
    for (shapes, close), scale in itertools.product((*PAIRS, (own_shapes, 1e-4)) if fits else PAIRS, (1.0, 1e-3)):
        data = [small_data(shape, device, seed) for seed, shape in enumerate(shapes, start=20)]
        values, grads = [value for value, _ in data], [[scale * grad for grad in own] for _, own in data]
        try:
            together, again = (update_copy(optimizer, group, values, grads, seed) for seed in (1, 2))
        except Communicates:
            raise
        except Exception:  # noqa: BLE001  (the next shapes)
            continue
        try:
            apart = [update_copy(optimizer, group, [v], [g], 1)[0] for v, g in zip(values, grads, strict=True)]
        except Exception as error:
            raise NeedsOthersError from error
        trial = Trial(together, apart, _differ(together, again), close)
        if any(each.change.any() for each in together):
            return trial
        still = still or trial  # it may skip what is too large, and take the same gradients smaller
    return still


def _advice(optimizer: Optimizer, error: Communicates) -> str:
    cls = type(optimizer)
    places = [
        f"{owner.__module__}.{name} = zc.one_rank{'' if value is dist else f'.{name}'}"
        for owner in _own_classes(cls)
        for name, value in vars(sys.modules[owner.__module__]).items()
        if value is dist or (callable(value) and getattr(dist, name, None) is value and hasattr(one_rank, name))
    ]
    without = (
        f"let its module see one rank: {', '.join(dict.fromkeys(places))}"
        if places
        else ("make it without its process group or mesh")
    )
    return (
        f"{cls.__name__} exchanges tensors between ranks in its own step ({error}): under zc ranks update different "
        f"parameters, and zc exchanges them. Use its variant for a single process. Where it has none, {without}"
    )


STEPS = 3
REPEATS = 3  # of these, where all may move nothing: RAdam's first four do, and then a schedule-free class's eval()
CLOSE = 1e-4  # of the largest change; a vector's tail may be summed in another order, which rounds differently


class Communicates(Exception):
    """An update started a collective of its own."""


class NeedsOthersError(Exception):
    """An update of a parameter alone fails, and one of several does not."""


class _Options(dict[str, Any]):
    """A parameter group that notes which options a step reads before it writes them."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.read: set[str] = set()
        self.written: set[str] = set()  # in this step

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._note(key)
        return super().get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        self.written.add(key)
        super().__setitem__(key, value)

    def _note(self, key: str) -> None:
        if key not in self.written:
            self.read.add(key)


class Updated(NamedTuple):
    """One parameter after the updates: its change, and its state as the optimizer keeps it."""

    change: Tensor
    state: Mapping[str, Any]
    returned: Any = None  # by the last of the methods that were called
    options: Mapping[str, Any] = MappingProxyType({})  # of its group
    edits_data: bool = False  # a step has changed its gradient without autograd's counting it
    draws: bool = False  # random numbers of torch, Python or numpy
    stepped: Any = None  # what the last step has returned
    reads: frozenset[str] = frozenset()  # options of its group that a step reads before it writes them

    def elementwise(self) -> dict[str, Tensor]:
        """The change under "", and each floating-point state of the parameter's size. Codes of a quantised state are
        left out: they may differ by one where values differ by a rounding."""
        states = {
            str(key): item.detach().float()
            for key, item in self.state.items()
            if type(item) is Tensor and item.is_floating_point() and item.numel() == self.change.numel()
        }
        return {"": self.change, **states}


def small_data(shape: tuple[int, ...], device: torch.device, seed: int = 20) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its gradients. Each third of the elements has another magnitude, so the norm of the whole is not
    that of a part."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    scale = torch.tensor([1.0, 10.0, 0.1], device="cpu").repeat_interleave(-(-numel // 3))[:numel].view(shape)
    value = 0.02 * torch.randn(shape, generator=generator, device="cpu") * scale.sqrt()
    grads = [torch.randn(shape, generator=generator, device="cpu") * scale for _ in range(STEPS)]
    return value.to(device), [grad.to(device) for grad in grads]


def update_copy(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    seed: int,
    closure: Any = None,
    methods: Sequence[str] = (),
) -> list[Updated]:
    """What a copy of ``optimizer`` makes of ``values`` with ``grads``, in as many steps as each has gradients, and in
    calls of ``methods`` after them. Without gradients it is one step. State under strings counts as state of each
    parameter, under "". ``closure`` gets the parameters."""
    params = [nn.Parameter(value.clone()) for value in values]
    twin, copies = _twin(optimizer)
    options = copies.copied({key: option for key, option in group.items() if key != "params"})
    if "lr" in options and not float(options["lr"]) > 0:  # a warmup that begins at 0 would hide every difference
        rates = (group.get("initial_lr"), optimizer.defaults.get("lr"), 1e-3)
        options["lr"] = float(next(rate for rate in rates if rate is not None and float(rate) > 0))
    if "param_names" in options:  # names may differ in what they do, so all have the first one
        options["param_names"] = options["param_names"][:1] * len(params)
    twin.param_groups = [noting := _Options({**options, "params": params})]
    first = optimizer.state.get(group["params"][0], {}) if group["params"] else {}  # by __init__ (Adagrad)
    twin.state.update(copies.copied({key: item for key, item in optimizer.state.items() if isinstance(key, str)}))
    for param in params if first else ():
        twin.state[param] = _like(first, group["params"][0], param, Copies(optimizer, twin, copies.known))

    def refuse(collective: str) -> None:
        raise Communicates(collective)

    if callable(train := getattr(twin, "train", None)):
        with contextlib.suppress(TypeError):  # one with arguments is something else
            train()  # a schedule-free class updates in no other mode
    devices = [value.device for value in values[:1] if value.device.type != "cpu"]
    forked = torch.random.fork_rng([d.index for d in devices], device_type=devices[0].type if devices else "cuda")
    # Eager: Dynamo skips a frame for good that it first meets under a dispatch mode, here that of watching_collectives.
    eager = torch.compiler.set_stance("force_eager")
    edits_data = [False] * len(params)
    counts, hooks = _undoing_counts(class_of(optimizer)), torch_private.without_global_step_hooks()
    with forked, _drawing_apart(seed), counts, hooks, eager, torch_private.watching_collectives(refuse):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would leave other devices' generators changed
        for device in devices:
            with torch.accelerator.device_index(device.index):
                torch.get_device_module(device).manual_seed(seed)
        generators = [torch.get_rng_state, *(torch.get_device_module(d).get_rng_state for d in devices)]
        before = [state_of() for state_of in generators], _states_of_python()
        for k in range(max(map(len, grads), default=1) or 1):
            given = [own[k].clone() if own else None for own in grads]
            for param, grad in zip(params, given, strict=True):
                param.grad = grad
            noting.written.clear()
            stepped = twin.step(*([partial(closure, *params)] if closure is not None else []))
            for n, grad in enumerate(given):
                if grad is not None and torch_private.version(grad) == 0 and not torch.equal(grad, grads[n][k]):
                    edits_data[n] = True
        draws = not all(torch.equal(old, state_of()) for old, state_of in zip(before[0], generators, strict=True))
        draws |= before[1] != _states_of_python()
        returned: Any = None
        for method in methods:
            returned = getattr(twin, method)()
    changes = [(param.detach() - value).float() for param, value in zip(params, values, strict=True)]
    others = {key: item for key, item in twin.state.items() if isinstance(key, str)}
    states = [{**twin.state.get(param, {}), **({"": others} if others else {})} for param in params]
    returned = None if returned is twin else returned
    options = {key: option for key, option in twin.param_groups[0].items() if key != "params"}
    updated = zip(changes, states, edits_data, strict=True)
    last = draws, stepped, frozenset(noting.read)
    return [Updated(change, state, returned, options, edits, *last) for change, state, edits in updated]


@contextlib.contextmanager
def _drawing_apart(seed: int) -> Iterator[None]:
    """Inside, Python's and numpy's random numbers follow this seed. The caller's go on as if nothing had drawn."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


@contextlib.contextmanager
def _undoing_counts(cls: type[Optimizer]) -> Iterator[None]:
    """Attributes of the class, globals that its code names, and what is in these (containers, tensors and generators,
    however deep) are afterwards as they were: a class may count its steps there."""
    places: list[tuple[Any, Any, Mapping[str, Any], set[str] | None]] = []  # what sets and deletes a name, where, which
    for each in _own_classes(cls):
        places.append((partial(setattr, each), partial(delattr, each), vars(each), None))
        for function in map(inspect.unwrap, filter(inspect.isfunction, vars(each).values())):
            space = function.__globals__
            places.append((space.__setitem__, space.__delitem__, space, set(_words(function.__code__))))

    def named(space: Mapping[str, Any], words: set[str] | None) -> dict[str, Any]:
        names = space if words is None else words & space.keys()
        return {name: space[name] for name in names if not name.startswith("__")}

    before = [named(space, words) for *_, space, words in places]
    contents: dict[int, tuple[Any, Any]] = {}
    _note_contents(itertools.chain.from_iterable(map(dict.values, before)), contents)
    try:
        yield
    finally:
        for (put, drop, space, words), items in zip(places, before, strict=True):
            now = named(space, words)
            for name in now.keys() - items.keys():
                drop(name)
            for name in (name for name in items if now.get(name, before) is not items[name]):
                put(name, items[name])
        for item, content in contents.values():
            _put_back(item, content)


def _note_contents(items: Iterable[Any], contents: dict[int, tuple[Any, Any]]) -> None:
    """Adds what can be written in these: each by its id, and what it has."""
    for item in items:
        if id(item) in contents:
            continue
        if isinstance(item, torch.Generator):
            contents[id(item)] = item, item.get_state()
        elif type(item) is Tensor and item.layout is torch.strided and not item.is_meta:
            contents[id(item)] = item, item.detach().clone()
        elif isinstance(item, (list, tuple, dict, set, deque)):
            contents[id(item)] = item, _items_of(item)
            _note_contents(_items_of(item), contents)


def _put_back(item: Any, content: Any) -> None:
    if isinstance(item, torch.Generator):
        item.set_state(content)
    elif isinstance(item, Tensor):
        if not torch.equal(item, content):
            item.detach().copy_(content)
    elif list(map(id, _items_of(item))) != list(map(id, content)):
        item.clear()
        if isinstance(item, dict):
            for key, value in zip(content[::2], content[1::2], strict=True):
                item[key] = value
        else:
            (item.update if isinstance(item, set) else item.extend)(content)


def _items_of(container: Any) -> list[Any]:
    """Of a dict its keys and values in turn."""
    return list(itertools.chain(*list(container.items())) if isinstance(container, dict) else container)


def _states_of_python() -> bytes:
    return pickle.dumps((random.getstate(), numpy.random.get_state()))


def _estimates(one: Updated, other: Updated) -> list[str]:
    """The options that steps read again, and have made of other parameters: to be sure of what grows from nothing, as
    Prodigy's estimate of a distance does, it would take many steps."""
    read = (key for key in one.options if key in one.reads and key in other.options)
    return [key for key in read if not _is_same(one.options[key], other.options[key])]


def difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor], close: float = CLOSE) -> str | None:
    """The first common key under which the two differ by more than rounding."""
    for key in (key for key in one if key in other):
        if not _is_close(one[key], other[key], close, key == ""):
            return key
    return None


def _differ(some: Sequence[Updated], others: Sequence[Updated], close: float = CLOSE) -> bool:
    """Whether a change, or a state, of one of these parameters differs by more than rounding."""
    pairs = zip(some, others, strict=True)
    return any(difference(a.elementwise(), b.elementwise(), close) is not None for a, b in pairs)


def _is_close(one: Tensor, other: Tensor, close: float, is_change: bool = False) -> bool:
    if one.shape != other.shape:
        return False
    largest = max(float(one.abs().max()), float(other.abs().max())) if one.numel() else 0.0
    rounding = 1e-6 * 0.1 if is_change else 0.0  # a change of weights of at most 0.1, stored in fp32
    return bool(torch.isclose(one, other, rtol=0.0, atol=close * largest + rounding, equal_nan=True).all())


def joined_parts(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One after the other, 1-D, what all parts of a parameter have."""
    common = (key for key in parts[0] if all(key in part for part in parts))
    return {key: torch.cat([part[key].view(-1) for part in parts]) for key in common}


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The items of nested dicts, lists and tuples, by their paths."""
    if isinstance(state, (Mapping, list, tuple)):
        for key, item in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from leaves(item, (*path, key))
    else:
        yield path, state


def _have_same_states(some: Sequence[Updated], others: Sequence[Updated], close: float | None) -> bool:
    """Whether their states have the same items. ``close``: None where values differ by the random numbers that were
    drawn."""
    pairs = zip(some, others, strict=True)
    return all(_is_same_state(dict(leaves(a.state)), dict(leaves(b.state)), close) for a, b in pairs)


def _is_same_state(one: Mapping[Any, Any], other: Mapping[Any, Any], close: float | None) -> bool:
    if one.keys() != other.keys():
        return False
    for key, item in one.items():
        counterpart = other[key]
        if type(item) is not type(counterpart):
            return False
        if isinstance(item, Tensor):
            if item.shape != counterpart.shape or item.dtype != counterpart.dtype:
                return False
            if close is None or not item.is_floating_point():
                continue
            if not _is_close(item.detach().float(), counterpart.detach().float(), close):
                return False
        elif isinstance(item, (int, float)) and item != counterpart and close is not None:
            return False
    return True


def _like(first: Mapping[str, Any], like: Tensor, param: Tensor, copies: Copies) -> dict[str, Any]:
    """``param``'s state, made like ``first``, that of the parameter ``like``."""
    filled = {
        key: torch.full_like(param, float(item.reshape(-1)[0]) if item.numel() else 0.0)
        for key, item in first.items()  # the count of steps is 0-d, and so may a parameter be
        if isinstance(item, Tensor) and key != "step" and item.shape == like.shape
    }
    return {**copies.copied({key: item for key, item in first.items() if key not in filled}), **filled}


def _twin(optimizer: Optimizer) -> tuple[Optimizer, Copies]:
    """A copy of ``optimizer`` without parameters and state, and what makes further copies for it. A class of torch's
    leaves attributes alone that others have set, so they are shared. Raises UncopyableError where a step of the copy
    could change what is the caller's."""
    if (name := wrapped(optimizer)) is not None:
        raise UncopyableError(f"its attribute {name} holds another optimizer or the parameters themselves")
    state: defaultdict[Any, Any] = defaultdict(dict)
    known: dict[int, Any] = {id(optimizer.state): state, id(vars(optimizer)["state"]): state}
    with torch_private.without_torch_function():
        for group in (*vars(optimizer)["param_groups"], *optimizer.param_groups):
            for p in group["params"]:  # on meta: it may have no bytes
                known[id(p)] = nn.Parameter(p.new_empty(p.shape, device="meta"), p.requires_grad)
    made: list[Copies] = []

    def copied(bare: Optimizer, attributes: dict[str, Any]) -> dict[str, Any]:
        made.append(Copies(optimizer, bare, known))
        return attributes if type(bare).__module__.startswith("torch.optim") else made[0].copied(attributes)

    twin = torch_private.bare_copy(optimizer, class_of(optimizer), copied)
    twin.state = state
    return twin, made[0]


def wrapped(optimizer: Optimizer) -> str | None:
    """The attribute through which a copy of ``optimizer`` would reach another optimizer, or the caller's own
    parameters; None if there is none."""
    of_caller = vars(optimizer)["param_groups"]
    groups = {id(group) for group in of_caller} | {id(of_caller)}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults") or name.startswith("_optimizer_"):
            continue
        inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        for item in (value, *inside):
            if isinstance(item, (Optimizer, nn.Parameter, nn.Module)) or id(item) in groups:
                return name
    return None


# --- methods of its class other than step ---

# On the caller's object they would read and write whole parameters, with states gathered, as the caller's own code
# does. That is right where weights are whole; on this rank's slices it is faster, and works in stage 3.


def _own_classes(cls: type[Optimizer]) -> list[type]:
    """The class, and those above it, without torch's."""
    return [each for each in cls.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]


def candidates(cls: type[Optimizer]) -> list[str]:
    """Public methods that the class has beyond torch's, that can be called without arguments, and whose code mentions
    the parameters of its groups or its state."""
    names = dict.fromkeys(name for each in _own_classes(cls) for name in vars(each))
    return [
        name
        for name in names
        if not name.startswith("_") and name not in REPLACED
        if isinstance(inspect.getattr_static(cls, name), FunctionType) and _takes_nothing(getattr(cls, name))
        if {"params", "state"} & mentions(cls, name)
    ]


def _takes_nothing(function: Any) -> bool:
    _, *params = inspect.signature(function).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in params)


def mentions(cls: type[Optimizer], name: str) -> set[str]:
    """Names and strings in the code of a method, and of the methods that it calls."""
    seen: dict[str, set[str]] = {}

    def look(name: str) -> None:
        function = inspect.unwrap(getattr(cls, name))
        if name not in seen and isinstance(function, FunctionType):
            seen[name] = set(_words(function.__code__))
            for word in seen[name]:
                if not word.startswith("__") and isinstance(getattr(cls, word, None), FunctionType):
                    look(word)

    look(name)
    return {word for words in seen.values() for word in words}


def may_zero(cls: type[Optimizer]) -> bool:
    """Whether the code of its methods, or of a function of their modules that they name, mentions an operation by which
    gradients become zeros."""
    all_words, visited = set[str](), set[Any]()
    todo = [item for each in _own_classes(cls) for item in vars(each).values()]
    while todo:
        item = todo.pop()
        function = inspect.unwrap(item) if isinstance(item, FunctionType) else None
        if not isinstance(function, FunctionType) or function in visited:
            continue
        visited.add(function)
        if function.__globals__.get("__name__", "").startswith("torch."):
            continue
        words = set(_words(function.__code__))
        all_words |= words
        todo += [function.__globals__[word] for word in words if word in function.__globals__]
    return not all_words.isdisjoint(("zero_", "_foreach_zero_", "fill_"))


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, str):
            yield const
        elif isinstance(const, CodeType):
            yield from _words(const)


def on_slices(
    optimizer: Optimizer, block: int | None, groups: Sequence[Mapping[str, Any]], device: torch.device
) -> list[str]:
    """The methods that may run on this rank's slices of these groups. ``block``: None where parameters stay whole,
    otherwise slices are cut at multiples of it. Only those that change weights or state: others exchange nothing."""
    names = candidates(class_of(optimizer))
    fit = set(names)
    changes: set[str] = set()
    for group in (group for group in groups if group["params"]):
        for name in names:
            for before in ((), *((other,) for other in names if other != name)):
                after = _try(optimizer, group, (*before, name), block, device)
                base = _try(optimizer, group, before, block, device)
                if after is None or base is None:
                    fit.discard(name)
                elif _differ(after, base, 0.0) or not _have_same_states(after, base, 0.0):
                    changes.add(name)
    return [name for name in names if name in fit & changes]


def _try(
    optimizer: Optimizer, group: Mapping[str, Any], methods: Sequence[str], block: int | None, device: torch.device
) -> list[Updated] | None:
    """What the methods make of parameters together, after some steps; None if it is not what they make of each alone,
    or if they return more than a number."""
    matrix, cuts = cut_matrix(block or 1)
    for shapes, close in PAIRS if block is None else (((matrix,), CLOSE),):
        data = [small_data(shape, device, seed) for seed, shape in enumerate(shapes, start=20)]
        data = [(value, own * REPEATS) for value, own in data]
        values, grads = [value for value, _ in data], [own for _, own in data]
        try:
            together, again = (
                update_copy(optimizer, group, values, grads, seed, methods=methods) for seed in (1, 2)
            )
            parts = data
            if block is not None:
                parts = [(values[0].view(-1)[cut], [grad.view(-1)[cut] for grad in grads[0]]) for cut in cuts]
            apart = [update_copy(optimizer, group, [v], [own], 1, methods=methods)[0] for v, own in parts]
        except Exception:  # noqa: BLE001  (other shapes; or it can't be tried)
            continue
        returned = [each.returned for each in (*together, *again, *apart)]
        if any(item != returned[0] for item in returned) or not isinstance(returned[0], (int, float, str, type(None))):
            return None
        if _differ(together, again):
            return None  # it draws random numbers
        if block is not None:
            whole = {key: value.view(-1) for key, value in together[0].elementwise().items()}
            is_same = difference(whole, joined_parts([part.elementwise() for part in apart]), close) is None
        else:
            is_same = not _differ(together, apart, close)
        return together if is_same else None
    return None


# --- copies of what an optimizer refers to ---

_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
_SHARED = (type, FunctionType, ModuleType, nn.Module)
_OF_RANKS = ("torch.distributed", "torch._C._distributed")  # modules: process groups, meshes, stores


class UncopyableError(Exception):
    """A copy of the optimizer could change an object of the caller's."""


class Copies(pickle.Pickler):
    """Makes copies for ``twin``, a copy of ``optimizer``. ``known``: the copies that exist already, by id."""

    def __init__(self, optimizer: Optimizer, twin: Optimizer, known: Mapping[int, Any]) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self._optimizer, self._twin = optimizer, twin
        self.known = dict(known)  # `copy.deepcopy` adds to it
        self._met: list[tuple[Any, Any]] = []  # objects that pickle leaves alone, and what each becomes
        self._loads = _Loads(self._file, self._met)

    def copied(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Copies of the values. They refer to each other, and to earlier copies, as the values do."""
        result: dict[Any, Any] = {}
        for key, value in values.items():
            start = self._file.tell()
            try:
                self.dump(value)
                self._file.seek(start)
                result[key] = self._loads.load()
            except UncopyableError as error:
                raise UncopyableError(f"its {key} holds {error}") from None
            except Exception as error:
                raise UncopyableError(f"its {key} can't be copied ({type(error).__name__}: {error})") from error
        return result

    def persistent_id(self, item: Any) -> int | None:
        """A number for an object that pickle is to leave alone; None for one that it takes apart."""
        if id(item) in self.known:
            becomes = self.known[id(item)]
        elif type(item) in _PLAIN:
            return None
        elif isinstance(item, Tensor):
            becomes = self._copy_tensor(item)
        elif isinstance(item, Optimizer):
            if vars(item) is not vars(self._optimizer):
                raise UncopyableError(f"another optimizer, of {type(item).__name__}")
            becomes = self._twin
        elif _is_shared(item):
            becomes = item
        elif _can_deepcopy(item):
            becomes = copy.deepcopy(item, self.known)
        elif _can_reduce(item):
            return None
        elif hasattr(type(item), "__next__") and not isinstance(item, io.IOBase):
            raise UncopyableError(f"a {type(item).__name__}, which can't be copied")
        else:
            becomes = item
        self._met.append((item, becomes))  # also keeps its id from another object
        return len(self._met) - 1

    def reducer_override(self, item: Any) -> Any:
        """A method by its function: pickle would look for its name, which zc and schedulers replace."""
        return (MethodType, (item.__func__, item.__self__)) if isinstance(item, MethodType) else NotImplemented

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            own: Tensor = copy.deepcopy(tensor, self.known)  # views of one storage stay views of one
            return own
        self.known[id(tensor)] = cloned = tensor.clone()  # a result of autograd
        return cloned


class _Loads(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, met: list[tuple[Any, Any]]) -> None:
        super().__init__(file)
        self._met = met

    def persistent_load(self, number: Any) -> Any:
        return self._met[number][1]


def _is_shared(item: Any) -> bool:
    kind = type(item)
    if kind is BuiltinFunctionType:  # or a method of a list, say
        return item.__self__ is None or isinstance(item.__self__, ModuleType)
    return kind is object or isinstance(item, _SHARED) or kind.__module__.startswith(_OF_RANKS)


def _can_deepcopy(item: Any) -> bool:
    return hasattr(type(item), "__deepcopy__") and not hasattr(type(item), "__del__")


def _can_reduce(item: Any) -> bool:
    if isinstance(item, MethodType):
        return True
    if hasattr(type(item), "__del__"):  # a copy's would close what both share
        return False
    try:
        return not isinstance(item.__reduce_ex__(pickle.HIGHEST_PROTOCOL), str)  # a name: of something global
    except Exception:  # noqa: BLE001  (whatever it says)
        return False
