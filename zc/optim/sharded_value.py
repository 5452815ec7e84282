"""A tensor of a parameter's shape of which each rank holds some elements: what gradients and optimizer states are.

    p.grad            every rank holds the elements whose gradients it reduces
    state["exp_avg"]  every rank holds the elements that it updates; other ones where whole parameters have an owner

Functions on such values follow one table over the schemas of aten. An *elementwise* function, in place or not, takes
this rank's elements of each operand, be it a number, another value of the same parameter, or a whole tensor that
broadcasts to the parameter's shape. Its result is such a value again. Where a whole tensor is written, the values are
gathered first, on all ranks. A *reduction* is a plain tensor, the same on all ranks; one over some dimensions gathers
the values. A *random* function draws the whole tensor's numbers on every rank, as one process would, and each keeps its
own. Everything else, such as one row, views and products of matrices, raises an error that says what to call.

Of a reduction each rank has partial numbers, in fp64, and all ranks join them in one order, so all have the same bits.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from zc import torch_private
from zc.engine.memory_order import flattened, in_shape
from zc.errors import ZcError
from zc.kernels import sums_of_squares
from zc.planning.layout import Slot

if TYPE_CHECKING:
    from zc.optim.grad_shards import GradShards


aten = torch.ops.aten
DEEPEST = 8  # of functions of a gradient that many gradients may be asked for at once

# elementwise functions that torch tags in no form
_UNTAGGED = frozenset((
    "copy", "_to_copy", "zero", "fill", "floor_divide", "hardswish", "log_sigmoid_forward", "isclose", "isin",
    "complex", "polar", "real", "_add_relu", "_prelu_kernel", "special_ndtr",
    "zeros_like", "ones_like", "empty_like", "full_like",
))  # fmt: skip
_NEW = frozenset(("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"))


class Part(NamedTuple):
    """The elements of a parameter that this rank holds. ``is_owned``: those that it updates, where these are not those
    whose gradients it reduces; the same on all ranks."""

    slot: Slot
    elements: slice  # of the slot
    is_owned: bool

    def cut(self, whole: Tensor) -> Tensor:
        """[n]: this rank's elements of a tensor that broadcasts to the parameter's shape. Raises ZcError for others."""
        if whole.numel() == 1:
            return whole.reshape(1).expand(self.elements.stop - self.elements.start)
        try:
            whole = whole.expand(self.slot.shape)
        except RuntimeError as error:
            raise ZcError(
                f"a tensor of shape {tuple(whole.shape)} does not broadcast to {self.slot.shape}, the shape of "
                f"{self.slot.name}, whose values are sharded over ranks: use .full_tensor() of them"
            ) from error
        return flattened(whole, self.slot)[self.elements]


class ShardedValue(Tensor):
    """See the module. It has the parameter's shape and device, a dtype, and no storage.

    ``local`` [n]: this rank's elements, which functions in place write. They may be wider than the dtype shows, as a
    gradient's are for a bf16 parameter.
    """

    part: Part
    _owner: weakref.ref[GradShards]  # weak: a parameter holds its .grad where Python's collector does not look
    _local: Tensor
    _source: Tensor | None = None  # what ``_local`` is a copy of, and is copied to when it was written
    # the function of the live gradient that it is, if it is one, and when it was made (`GradShards.num_changes`)
    formula: tuple[Any, int] | None = None
    is_live = False  # whether it is a gradient, whose elements lie in the accumulators
    # it was assigned to param.grad, and zc has taken it over: it may be read until that gradient changes
    is_taken = False
    is_stale = False
    # what was computed inside no_sync: the mean over ranks of the same, of each rank's own gradient, is another value
    nonlinear: str | None = None

    @staticmethod
    def __new__(
        cls,
        owner: GradShards,
        part: Part,
        local: Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> ShardedValue:
        like = owner.runtime.params[part.slot.name]
        wrapper = torch_private.make_wrapper(cls, like, dtype or local.dtype, device)
        # 1-D, so that an operand that was cut meets it
        wrapper.part, wrapper._owner, wrapper._local = part, weakref.ref(owner), flattened(local, part.slot).view(-1)
        if wrapper._local.data_ptr() != local.data_ptr():  # it lies in another order than the parameter
            wrapper._source = local
        return wrapper

    @property
    def name_now(self) -> str:
        """The parameter's name in the model, for people; `param_name` is the plan's."""
        owner = self._owner()
        return self.param_name if owner is None else owner.runtime.name_now(self.param_name)

    @property
    def param_name(self) -> str:
        return self.part.slot.name

    @property
    def owner(self) -> GradShards:
        """Knows the ranks. Raises ZcError if the compiled model is gone."""
        owner = self._owner()
        if owner is None:
            raise ZcError(f"{self._what()} is gone with its compiled model")
        return owner

    def copies(self) -> list[Tensor]:
        """[n] each: this rank's elements; of a live gradient two where device and host both have them."""
        if self.is_stale:
            raise ZcError(
                f"{self._what()} was assigned to param.grad, and that gradient has changed since: take param.grad, or "
                "assign a clone()"
            )
        return [self._local]

    @property
    def local(self) -> Tensor:
        return self.copies()[0]

    def changed(self) -> None:
        """To be called when ``local`` was written."""
        self.formula = None
        if self._source is not None:
            self._source.copy_(in_shape(self._local, self.part.slot))
        if self.is_taken:
            self.owner.write_taken(self)

    def set_to_zero(self) -> None:
        self.local.zero_()
        self.changed()

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank (a collective: call it on all of them), in the dtype of ``local``."""
        return self.owner.gather(self.part, self.local)

    @property
    def data(self) -> ShardedValue:
        return self

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is not self:  # as nn.Module's methods do that change nothing
            self.copy_(value)

    def numpy(self, *, force: bool = False) -> Any:
        raise ZcError(self._refusal("Tensor.numpy"))

    def tolist(self) -> Any:
        raise ZcError(self._refusal("Tensor.tolist"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as torch.Tensor has it
        return f"{type(self).__name__}({self.name_now}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, proto: Any) -> Any:
        raise ZcError(f"{self._what()} is sharded over ranks: save full_tensor() instead")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedValue:
        copied = self.clone()
        assert isinstance(copied, ShardedValue)
        memo[id(self)] = copied
        return copied

    def _what(self) -> str:
        return f"a value of {self.name_now}"

    def _refusal(self, what: Any) -> str:
        return (
            f"{what} does not work on {self._what()}, which is sharded over ranks: functions by element, and sums, "
            "norms and the like of all elements do. Call .full_tensor() on all ranks for anything else; "
            "value.copy_(whole) writes a whole tensor back"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates the disabled default, a plain function
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _handler(func)(func, args, kwargs or {})


def values_in(items: Any) -> Iterator[ShardedValue]:
    """The sharded values among these arguments, and in lists of them."""
    for item in items:
        if isinstance(item, ShardedValue):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from values_in(item)


# --- the table ---

_Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@cache
def _handler(func: Any) -> _Handler:
    """What a function of aten does with sharded values. Every overload is looked up once."""
    name = func.overloadpacket.__name__
    if name in _OTHERS:
        return _OTHERS[name]
    if name.startswith("_foreach_"):
        return _for_each
    if name in _NEW:
        return _new
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _draw
    if torch.Tag.pointwise in func.tags or (name not in NAMES and _is_by_element(name.removesuffix("_"))):
        return _by_element
    if name in NAMES:
        return _reduce
    return _refuse


def _is_by_element(name: str) -> bool:
    """Whether the function that gives a new tensor is elementwise: forms in place and with out= may have no tag."""
    packet = getattr(aten, name, None)
    tags = [getattr(packet, overload).tags for overload in packet.overloads()] if packet is not None else []
    return name in _UNTAGGED or any(torch.Tag.pointwise in of_overload for of_overload in tags)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by their names in the schema, with its defaults."""
    defaults, _ = torch_private.schema_of(func)
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def _written(func: Any) -> tuple[str, ...]:
    """The arguments that a function writes, by name."""
    return torch_private.schema_of(func)[1]


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = next(values_in((*args, *kwargs.values())))
    raise ZcError(value._refusal(func))


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A whole new tensor of any shape."""
    like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return func(like, *args[1:], **kwargs)


def _zero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0].set_to_zero()
    return args[0]


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """AccumulateGrad adds to an existing ``.grad``: in place, or with create_graph out of place."""
    value = args[0]
    if torch_private.current_graph_task() == -1 or not isinstance(value, ShardedValue) or not value.owner.shows(value):
        return _by_element(func, args, kwargs)
    if func is aten.add.Tensor:
        raise ZcError(_CREATE_GRAPH.format(value.name_now))
    value.owner.add_grad(value.param_name, args[1])
    return value


_CREATE_GRAPH = (
    "backward(create_graph=True) found a gradient of {0}, and can't add to it: it is sharded over ranks, without a "
    "graph. Call zero_grad() before each such backward, or take what is to be differentiated again by "
    "torch.autograd.grad(..., create_graph=True), and call backward() once on the whole loss"
)


# --- elementwise functions ---


def _by_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _arguments(func, args, kwargs) if _written(func) else {}
    written = [given[name] for name in _written(func)]
    values = list(values_in((*args, *kwargs.values())))
    for tensor in written:
        if not isinstance(tensor, ShardedValue):
            return _into_whole(func, args, kwargs, values[0])
    first: ShardedValue = written[0] if written else values[0]
    if func is aten.copy_.default and isinstance(args[1], Tensor) and not isinstance(args[1], ShardedValue):
        first.owner.refuse_whole_write(func, first.param_name)  # DDP's finalizer brings the mean of nothing
    nonlinear = first.owner.nonlinear(func, args, kwargs, values)
    if written and first.is_live and nonlinear is not None:
        first.owner.refuse_in_no_sync(nonlinear)
    if "memory_format" in kwargs:  # values have the parameter's
        kwargs = {name: item for name, item in kwargs.items() if name != "memory_format"}
    for value in values if not written else ():
        if value.is_live:
            value.owner.refuse_graph(value.param_name)
    copies = first.copies()  # finishes gradients
    formula = None if written else _formula(func, args, kwargs, values)
    results = []
    for k in range(len(copies) if written else 1):
        place = copies[k].device
        own = [copies[k] if a is first else _operand(a, first, k, place) for a in args]
        results.append(func(*own, **{name: _operand(a, first, k, place) for name, a in kwargs.items()}))
    if written:
        for value in written:
            value.nonlinear = nonlinear
            value.changed()
        return written[0] if len(written) == 1 else tuple(written)

    def value_of(result: Tensor, formula: tuple[Any, int] | None) -> ShardedValue:
        is_wider = any(value.dtype != value._local.dtype for value in values)
        dtype = _shown_dtype(func, args, kwargs) if is_wider else result.dtype
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else first.device
        value = ShardedValue(first.owner, first.part, result, dtype=dtype, device=device)
        value.formula, value.nonlinear = formula, nonlinear
        return value

    result = results[0]
    if isinstance(result, Tensor):
        return value_of(result, formula)
    return type(result)(value_of(item, None) for item in result)


def _operand(item: Any, first: ShardedValue, k: int, place: torch.device) -> Any:
    """What this rank's elements of ``first``, in its ``k``-th copy, are combined with."""
    if not isinstance(item, Tensor):
        return item
    part = first.part
    if isinstance(item, ShardedValue):
        if item.part == part:
            copies = item.copies()
            return copies[min(k, len(copies) - 1)].to(place)
        if item.part.slot != part.slot:
            raise ZcError(
                f"{item._what()} meets {first._what()}: both are sharded over ranks, each in its own way. Use "
                ".full_tensor() of one of them"
            )
        item = item.full_tensor()  # the rank that updates an element is not the one that reduces its gradient
    if item.dim() == 0 and part.slot.shape:
        return item.to(place)
    return part.cut(item).to(place)


def _shown_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """The dtype of the result if values were as wide as they show."""

    def empty(item: Any) -> Any:
        if not isinstance(item, Tensor) or (item.dim() == 0 and not isinstance(item, ShardedValue)):
            return item
        return torch.empty(0, dtype=item.dtype, device="cpu")

    result = func(*map(empty, args), **{name: empty(item) for name, item in kwargs.items() if name != "device"})
    dtype: torch.dtype = (result if isinstance(result, Tensor) else result[0]).dtype
    return dtype


def _formula(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Sequence[ShardedValue]
) -> tuple[Any, int] | None:
    """The result as a function of one live gradient and numbers, so that `GradShards.reduce` can take it of many."""
    made_at = values[0].owner.num_changes
    is_of_one = all(
        value.part == values[0].part and value.formula is not None and value.formula[1] == made_at for value in values
    )
    if not is_of_one or sum(isinstance(a, Tensor) for a in (*args, *kwargs.values())) > len(values):
        return None
    inner = tuple(value.formula[0] for value in values if value.formula is not None)
    depth = 1 + max(formula.depth for formula in inner)
    if depth > DEEPEST:
        return None
    items = tuple(a.formula[0] if isinstance(a, ShardedValue) and a.formula else a for a in args)
    named = tuple((n, a.formula[0] if isinstance(a, ShardedValue) and a.formula else a) for n, a in kwargs.items())
    formula = Formula(func, items, named, depth)
    try:
        hash(formula)
    except TypeError:
        return None
    return formula, made_at


def _into_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: ShardedValue) -> Any:
    """A function that writes a whole tensor: all ranks gather the values, and write the same."""
    value.owner.refuse_whole_write(func, value.param_name)
    return func(*map(_whole, args), **{name: _whole(item) for name, item in kwargs.items()})


def _whole(item: Any) -> Any:
    return item.full_tensor().to(item.dtype) if isinstance(item, ShardedValue) else item


# --- random ones ---


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Random numbers for the whole tensor on every rank, of which each keeps its own."""
    first = next(values_in((*args, *kwargs.values())))
    name = func.overloadpacket.__name__
    overwrites = name.endswith(("_like", "_")) and name != "dropout_"

    def whole(item: Any) -> Any:
        if overwrites and item is first:
            return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device=item.device)
        return _whole(item)

    written = _written(func)
    result = func(*map(whole, args), **{name: whole(item) for name, item in kwargs.items()})
    if written:
        for copy in first.copies():
            copy.copy_(first.part.cut(result))
        first.changed()
        return first
    several = isinstance(result, tuple)
    values = []
    for item in result if several else (result,):
        if tuple(item.shape) != tuple(first.shape):
            _refuse(func, args, kwargs)
        values.append(ShardedValue(first.owner, first.part, first.part.cut(item).to(first.local.device).clone()))
    return tuple(values) if several else values[0]


# --- reductions ---


def _reduce(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = _arguments(func, args, kwargs)
    value = next(iter(given.values()))
    if not isinstance(value, ShardedValue) or _written(func):
        _refuse(func, args, kwargs)
    dim = given.get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    name = func.overloadpacket.__name__
    if dims and value.dim() and (name in ("max", "min") or len({d % value.dim() for d in dims}) < value.dim()):
        # of rows, which lie on several ranks, or with a place
        value.owner.refuse_in_no_sync(f"{name.removeprefix('linalg_vector_')}(dim={dims}) of {value._what()}")
        return func(_whole(value), *args[1:], **kwargs)
    dtype = dtype_of(name, value._local.dtype, given)
    result: Tensor = value.owner.reduce(value, choose(name, given), dtype)
    return result.reshape([1] * value.dim()) if given.get("keepdim") else result


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, other = args
    return (one * other).sum()


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    one, other = args
    return tuple(one.shape) == tuple(other.shape) and bool((one == other).all())


def _all_close(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(torch.isclose(*args, **kwargs).all())


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args[0].owner.is_read_in_no_sync |= args[0].owner.is_in_no_sync
    return args[0].full_tensor().item()


def _put_by_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``value[mask] = number``."""
    value, indices, source = args[:3]
    is_mask = len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool
    if not is_mask or tuple(indices[0].shape) != tuple(value.shape) or source.numel() != 1 or any(args[3:]):
        _refuse(func, args, kwargs)
    return value.masked_fill_(indices[0], source.reshape(()))


# --- lists ---

# functions of one tensor with another name than that of lists
_OF_ONE = {("maximum", True): "clamp_min", ("minimum", True): "clamp_max", ("norm", True): "linalg_vector_norm"}


def _for_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of one tensor, for each."""
    name = func.overloadpacket.__name__.removeprefix("_foreach_")
    base, end = name.rstrip("_"), "_" * name.endswith("_")
    call = getattr(aten, _OF_ONE.get((base, str(func).split(".")[-1].startswith("Scalar")), base) + end)
    num = max(len(arg) for arg in args if isinstance(arg, (list, tuple)))
    if base in ("addcmul", "addcdiv") and len(args) > 3:  # numbers, one for all or one each
        args, kwargs = args[:3], {**kwargs, "value": args[3].tolist() if isinstance(args[3], Tensor) else args[3]}

    def nth(item: Any, k: int) -> Any:
        return item[k] if isinstance(item, (list, tuple)) else item

    results = [call(*(nth(a, k) for a in args), **{n: nth(a, k) for n, a in kwargs.items()}) for k in range(num)]
    return None if end else results


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's GradScaler: what it finds in ``param.grad``."""
    grads, found_inf, inverse = args
    first = next(values_in(grads))
    first.owner.unscale([grad.param_name for grad in values_in(grads)], found_inf, inverse)


_OTHERS: dict[str, _Handler] = {
    "add": _add,
    "add_": _add,
    "zero_": _zero,
    "detach": _same,
    "detach_": _same,
    "alias": _same,
    "positive": _same,
    "dot": _dot,
    "vdot": _dot,
    "equal": _equal,
    "allclose": _all_close,
    "_local_scalar_dense": _item,
    "index_put_": _put_by_mask,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}


# functions of aten, by the names of their packets
NAMES = frozenset((
    "sum", "mean", "max", "min", "amax", "amin", "any", "all", "count_nonzero", "linalg_vector_norm", "norm", "var",
    "std",
))  # fmt: skip


class Formula(NamedTuple):
    """An elementwise function of one gradient and numbers, to be called on other gradients, too."""

    func: Any  # None: the gradient itself
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    depth: int = 0

    def of(self, grad: Tensor) -> Tensor:
        if self.func is None:
            return grad
        args = [a.of(grad) if isinstance(a, Formula) else a for a in self.args]
        kwargs = {name: a.of(grad) if isinstance(a, Formula) else a for name, a in self.kwargs}
        result: Tensor = self.func(*args, **kwargs)
        return result


GRADIENT = Formula(None)


class Reduction(NamedTuple):
    """``kind``: sum, mean, var, std with a ``correction``, norm of an ``order``, max, min, any or all."""

    kind: str
    order: float = 2.0
    correction: float = 1.0

    @property
    def is_sum(self) -> bool:
        """Whether ranks add their partial numbers. Otherwise the largest of them counts."""
        return self.kind in ("sum", "mean", "var", "std") or (self.kind == "norm" and not math.isinf(self.order))

    @property
    def is_least(self) -> bool:
        """Whether it is the smallest number, so the negative of the largest of the negatives."""
        return self.kind in ("min", "all") or (self.kind == "norm" and self.order == -math.inf)

    def partials(self, parts: Sequence[Tensor]) -> Tensor:
        """[parts, numbers] fp64."""
        if self.kind == "norm" and self.order == 2.0 and all(part.dtype.is_floating_point for part in parts):
            return sums_of_squares(parts)[:, None]
        return torch.stack([torch.stack(self._partial(part)) for part in parts])

    def _partial(self, part: Tensor) -> list[Tensor]:
        wide = part.double()
        if self.kind == "norm" and self.is_sum:
            return [(wide != 0).double().sum() if self.order == 0 else wide.abs().pow(self.order).sum()]
        if self.is_sum:
            return [wide.sum()] if self.kind in ("sum", "mean") else [wide.sum(), wide.square().sum()]
        if self.kind in ("any", "all"):
            return [wide.any().double() if self.kind == "any" else -wide.all().double()]
        if part.numel() == 0:
            return [wide.new_full((), -math.inf), wide.new_zeros(())]
        wide = wide.abs() if self.kind == "norm" else wide
        largest = -wide.amin() if self.is_least else wide.amax()
        is_nan = largest.isnan()  # apart, because a comparison of ranks may lose it
        return [largest.masked_fill(is_nan, -math.inf), is_nan.double()]

    def finish(self, joint: Tensor, counts: Sequence[int]) -> Tensor:
        """[values] fp64 <- the joint numbers [values, numbers] of values with so many elements. The host does not wait
        for the device."""
        total = joint[:, 0]
        if self.kind == "norm" and self.is_sum:
            return total if self.order == 0 else total ** (1.0 / self.order)
        if self.kind == "sum":
            return total
        is_on_host = joint.device.type == "cpu"  # a copy from memory that is not pinned would wait
        numels = torch.tensor(counts, dtype=joint.dtype, device="cpu", pin_memory=not is_on_host)
        numels = numels.to(joint.device, non_blocking=True)
        if self.kind in ("var", "std"):
            variance = (joint[:, 1] - total * total / numels).clamp(min=0.0) / (numels - self.correction).clamp(min=0.0)
            return variance.sqrt() if self.kind == "std" else variance
        if self.kind == "mean":
            return total / numels
        total = -total if self.is_least else total
        if self.kind in ("any", "all"):
            return total
        total = total.masked_fill(joint[:, 1] > 0, math.nan)
        return total.masked_fill(numels == 0, 0.0) if self.kind == "norm" else total


def choose(name: str, given: dict[str, Any]) -> Reduction:
    """The reduction that a function of aten asks for. ``given``: its arguments."""
    if name in ("linalg_vector_norm", "norm"):
        order = given.get("ord", given.get("p"))
        return Reduction("norm", order=2.0 if order is None else float(order))
    if name in ("var", "std"):
        correction = given.get("correction", float(given.get("unbiased", True)))
        return Reduction(name, correction=1.0 if correction is None else float(correction))
    if name == "count_nonzero":
        return Reduction("norm", order=0.0)
    return Reduction({"amax": "max", "amin": "min"}.get(name, name))


def dtype_of(name: str, dtype: torch.dtype, given: dict[str, Any]) -> torch.dtype:
    """The result's, of a value of ``dtype``."""
    if given.get("dtype") is not None:
        return given["dtype"]  # type: ignore[no-any-return]
    if name in ("any", "all"):
        return torch.bool
    if name == "count_nonzero" or (name == "sum" and not dtype.is_floating_point):
        return torch.int64
    return dtype
