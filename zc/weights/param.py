"""The class of parameters that can't be read without asking, and the functions that may be called on them.

The weights of a bucket are, on one rank, in one of three states::

    sharded   other ranks have the rest: the parameters have no bytes       stage 3, shard_frozen
    coming    their gather writes them: the bytes are old or new ones       overlap_gather, from step() to the wait
    whole     they may be read

Where they are sharded or coming, each parameter has a class whose ``__torch_function__`` first asks the model's weights
(`Weights.read_param`). Those that come are waited for, and get their own class back. Those in shards become whole in a
forward or backward that is not compiled; elsewhere functions that read an element are refused, with an error that names
the way out. Those that read none (`_viewed_by`) work, and views that they make refuse reads in the same way.
torch's lazy parameters change the class of a tensor in the same way.

A ``p.data``, view or array from before an update reaches the memory without the parameter. While one exists,
`zc.weights.overlapped` makes the step wait. zc can't see an address, a DLPack capsule or a storage object, nor a
C++ extension that bypasses torch's dispatch: call `zc.synchronize` before you use these.

A tensor on meta has a shape, strides and a dtype, but no elements. A function that reads none gives there what it gives
anywhere: numbers, names, or views of its arguments. Any other one raises there, or makes a tensor that is no view.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.weak import WeakIdKeyDictionary

from zc import torch_private
from zc.engine.param_checks import AskingParameter
from zc.errors import ZcError, not_its_own, optimizer_in_step
from zc.planning.layout import own_strides

if TYPE_CHECKING:
    from zc.engine.weights import Weights


_OWNERS: Any = WeakIdKeyDictionary()  # parameter -> its ManagedParams
_COMING: weakref.WeakSet[Weights] = weakref.WeakSet()  # of the models whose weights come, in this process

_ALLOWED = torch_private.NO_VALUE | torch_private.hook_functions() | {Tensor.__hash__}
_AS_ANOTHER = frozenset((Tensor.to, Tensor.type_as))  # of another tensor they read dtype and device
_DATA: Any = Tensor.data
_ADDRESSES = frozenset(getattr(Tensor, name) for name in dir(Tensor) if name.endswith("data_ptr"))
_RAW = _ADDRESSES | {  # may lead to writes that autograd does not count
    _DATA.__get__, _DATA.__set__, Tensor.numpy, Tensor.untyped_storage, Tensor.__array__, Tensor.__dlpack__,
}  # fmt: skip
# on meta they have no address, and print no element
_OTHERWISE_ON_META = _ADDRESSES | {Tensor.__repr__}
_WRITES = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"))
_REQUIRES_GRAD: Any = Tensor.requires_grad
_ASK_FOR_GRADS = frozenset((Tensor.requires_grad_, _REQUIRES_GRAD.__set__))
_BACKWARD = frozenset((Tensor.backward, torch.autograd.backward))


def _way_out(param: Tensor) -> str:
    return (
        f"that has no bytes: with {_why(param)} it has them only inside the model's forward and backward. Use `with "
        "zc.whole_parameters(model):` on all ranks to read or write values, zc.full_state_dict(model) for all of them "
        "on rank 0, zc.save for a checkpoint"
    )


def _why(param: Tensor) -> str:
    """The option of `zc.compile` that has taken the bytes."""
    owner = _OWNERS.get(param)
    return owner.why if owner is not None else "sharded weights"


def _weights_of(param: Tensor) -> Weights | None:
    """Those of its model, while that lives."""
    owner = _OWNERS.get(param)
    return owner.weights() if owner is not None else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ask(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of parameters that can't be read without asking."""
    if _COMING:
        params = _params_in(args, kwargs)
        for weights in list(_COMING):
            weights.read(params)  # without any the read is of an unknown one, and waits for all
        if params and not any(type(param) is ManagedParameter for param in params):
            return func(*args, **kwargs)  # they have their own class again
    if func is Tensor.copy_ and isinstance(args[0], ManagedParameter):
        loading = _weights_of(args[0])
        if loading is not None and loading.load_value(args[0], args[1]):  # part of a load_state_dict
            return args[0]
    if func is torch.autograd.grad:
        return _grad(*args, **kwargs)
    if func in _BACKWARD:
        return _backward(func, _params_in(args, kwargs), args, kwargs)
    try:
        return _call(func, args, kwargs)
    except TypeError:  # make_fx knows no class of ours
        params = _params_in(args, kwargs)
        if get_proxy_mode() is None or not params:
            raise
        raise ZcError(
            f"make_fx (torch.func.linearize) traces a parameter of shape {tuple(params[0].shape)}, and with "
            f"{_why(params[0])} that is not a plain one. Call it inside `with zc.whole_parameters(model):` on all "
            "ranks, or take torch.func.jvp"
        ) from None


class ManagedParameter(AskingParameter, ask=_ask, reads_nothing=torch_private.NO_VALUE - _ASK_FOR_GRADS):
    """The class of a parameter while it can't be read without asking."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Never raises: debuggers print parameters, too."""
        if _can_read(Tensor.__repr__, [self]):
            with torch_private.without_torch_function():
                return str(nn.Parameter.__repr__(self))  # type: ignore[no-untyped-call]
        return f"Parameter of shape {tuple(self.shape)}, {self.dtype}, {self.device}, without bytes (zc, {_why(self)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        _need("copy.deepcopy", [self])
        copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        _need("pickling", [self])
        return nn.Parameter.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]


class AbsentView(Tensor):
    """A view of a parameter without bytes, ``param``. Code reads its shape, and hooks and code like DDP its
    ``grad_fn``, which leads to the parameter's own node, but no element. ``is_old``: it was made of a whole parameter,
    and has the values of before an update, where a view in plain PyTorch would have the new ones."""

    param: nn.Parameter
    is_old = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return _call(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"view of shape {tuple(self.shape)} of a parameter without bytes (zc, {_why(self.param)})"


def _ask_for_func(tensor: Any) -> None:
    """torch.func has it as an argument. Nobody will be asked when what wraps it is read."""
    if isinstance(tensor, AbsentView):
        _refuse_view("torch.func", tensor)
    for weights in list(_COMING):
        weights.read([tensor])
    if isinstance(tensor, ManagedParameter):
        _need("torch.func", [tensor])


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of parameters, or of views of them, that may have no bytes."""
    if func in _ALLOWED and func not in _ASK_FOR_GRADS:
        return _plainly(func, args, kwargs)
    leaves = torch_private.tensors_in((args, kwargs))
    params = [leaf for leaf in leaves if isinstance(leaf, ManagedParameter)]
    views = [leaf for leaf in leaves if isinstance(leaf, AbsentView)]
    is_of_another = func in _AS_ANOTHER and not isinstance(args[0], (ManagedParameter, AbsentView))
    if views and func in _ASK_FOR_GRADS:  # nn.Parameter(view) does
        _refuse_view(func, views[0])
    if func in _ALLOWED or is_of_another:
        return _plainly(func, args, kwargs)
    if not views and _have_bytes(params) and _can_read(func, params):
        return _lend_views(_plainly(func, args, kwargs), params)
    viewed = None if func in _OTHERWISE_ON_META or _writes_by_name(func) else _viewed_by(func, args, kwargs)
    if viewed is not None:
        absent = [tensor if isinstance(tensor, (ManagedParameter, AbsentView)) else None for tensor in viewed]
        if not any(each is not None for each in absent):
            return _plainly(func, args, kwargs)
        if views or not _can_read(func, params):
            return _views(_with_storages(func, args, kwargs), absent)
    elif views:
        _refuse_view(func, views[0])
    else:
        _need(func, params)
    return _lend_views(_plainly(func, args, kwargs), params)


def _lend_views(output: Any, params: list[ManagedParameter]) -> Any:
    """Returns ``output``. Where it is a view of a whole parameter, its ``data`` or its array may be written without a
    count, and it must not be read after an update."""
    storages: dict[int, Tensor] = {}
    with torch_private.without_torch_function():
        for leaf in torch_private.tensors_in(output):
            if isinstance(leaf, Tensor):
                with contextlib.suppress(NotImplementedError):  # sparse, or a wrapper of torch.func: they have no array
                    storages[torch_private.storage_number(leaf)] = leaf
        lent = [(param, storages.get(torch_private.storage_number(param))) for param in params] if storages else []
    for param, view in lent:
        owner = _OWNERS.get(param)
        if view is not None and owner is not None:
            _can_read(_DATA.__get__, [param])
            owner.keep_view(view, param)
    return output


def _params_in(args: Any, kwargs: Any) -> list[ManagedParameter]:
    return [leaf for leaf in torch_private.tensors_in((args, kwargs)) if isinstance(leaf, ManagedParameter)]


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    with torch_private.without_torch_function():
        return func(*args, **kwargs)


def _views(output: Any, absent: list[ManagedParameter | AbsentView | None]) -> Any:
    """``output``, whose leaves are views of what ``absent`` has in their places."""
    for leaf, of in zip(torch_private.tensors_in(output), absent, strict=True):
        if of is not None and type(leaf) is Tensor:  # not the parameter itself
            view: Any = leaf
            view.__class__, view.param = AbsentView, of.param if isinstance(of, AbsentView) else of
    return output


def _with_storages(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function that makes views. Most check them against the size of the storage, so that is not zero
    meanwhile; nothing touches the memory."""
    with torch_private.without_torch_function(), contextlib.ExitStack() as stack:
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            for leaf in torch_private.tensors_in((args, kwargs)):
                if isinstance(leaf, (ManagedParameter, AbsentView)) and not _have_bytes([leaf]):
                    storage, param = leaf.untyped_storage(), leaf.param if isinstance(leaf, AbsentView) else leaf
                    storage.resize_(_extent(param) * param.element_size())
                    stack.callback(storage.resize_, 0)
            return func(*args, **kwargs)


def _have_bytes(tensors: Iterable[Tensor]) -> bool:
    with torch_private.without_torch_function():
        return all(tensor.untyped_storage().nbytes() > 0 for tensor in tensors)


def _extent(tensor: Tensor) -> int:
    """Elements from its first to its last, with holes between them."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _refuse_view(func: Any, view: AbsentView) -> None:
    if view.is_old:
        raise ZcError(
            f"{getattr(func, '__name__', func)} reads a view of a parameter of shape {tuple(view.param.shape)} that "
            f"was made before the last update, and has the values of that time: with {_why(view.param)} the parameter "
            "has got other memory since. Make the view again from the parameter, or keep a copy (.clone()) for the "
            "values of before"
        )
    raise ZcError(f"{getattr(func, '__name__', func)} reads a view of a parameter {_way_out(view.param)}")


def _backward(func: Any, params: list[ManagedParameter], args: Any, kwargs: Any) -> Any:
    """Runs ``backward(inputs=params)``, which reads no element of them, so they are plain parameters meanwhile. Eager
    code of that backward has read its parameters in the forward, so they are whole."""
    try:
        with ManagedParams.lent(params):
            return func(*args, **kwargs)
    finally:
        for param in params:
            _can_read(_DATA.__get__, [param])  # a hook may have written what is whole


def _grad(outputs: Any, inputs: Any, *, materialize_grads: bool, **others: Any) -> tuple[Tensor | None, ...]:
    """Runs torch.autograd.grad, which reads no element of its inputs, with their edges of the graph instead. Inside
    `without_torch_function`, eager code of the backward would read parameters that have no bytes."""
    _need(torch.autograd.grad, [each for each in outputs if isinstance(each, ManagedParameter)])
    with torch_private.without_torch_function():
        edges = [get_gradient_edge(each) if isinstance(each, Tensor) else each for each in inputs]
    grads: tuple[Tensor | None, ...] = torch.autograd.grad(outputs, edges, **others)
    with torch_private.without_torch_function():
        pairs = zip(inputs, grads, strict=True)
        return tuple(torch.zeros_like(p) if grad is None and materialize_grads else grad for p, grad in pairs)


def _writes_by_name(what: Any) -> bool:
    name = getattr(what, "__name__", str(what))
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _can_read(what: Any, params: list[ManagedParameter]) -> bool:
    """Makes these parameters whole if their owners can, and says whether they are."""
    owners = [(_weights_of(param), param) for param in params]
    return all(weights is None or weights.read_param(param, what in _RAW) for weights, param in owners)


def _need(what: Any, params: list[ManagedParameter]) -> None:
    for param in params:
        if not _can_read(what, [param]):
            if (optimizer := optimizer_in_step()) is not None:
                raise ZcError(
                    f"{type(optimizer).__name__}.step() met a parameter of shape {tuple(param.shape)}, whose bytes lie "
                    f"in shards with {_why(param)}: {not_its_own(optimizer)}"
                )
            name = getattr(what, "__name__", str(what))
            raise ZcError(f"{name} reads a parameter of shape {tuple(param.shape)} {_way_out(param)}")


class Use:
    """One use of a model's weights by one thread, from `ManagedParams.enter` until its `end`, or until nobody holds it:
    autograd drops the callback of a backward that raised without a call."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.thread: int | None = threading.get_ident()  # None: it has ended
        self._at_end: Callable[[], object] = lambda: None

    def call_at_end(self, function: Callable[[], object]) -> None:
        """Calls ``function`` once, when this ends or nobody holds it. It must not refer to this use."""
        self._at_end = finalizer = weakref.finalize(self, function)
        finalizer.atexit = False

    def end(self) -> None:
        self.thread = None
        self._at_end()


class ManagedParams:
    """The parameters of one model that can't be read without asking, and views of them. ``weights`` is held weakly.

    Args:
        why: the option of `zc.compile` by which that is so.
        come: whether their weights come by themselves, so that who reads them waits.
    """

    def __init__(self, weights: Weights, why: str, *, come: bool = False) -> None:
        torch_private.before_func_wraps(_ask_for_func, (ManagedParameter, AbsentView))
        self.why = why
        if come:
            _COMING.add(weights)
        self._way_out = (
            "leave overlap_gather out"
            if come
            else "let threads that only evaluate begin and end inside `with zc.whole_parameters(model):`"
        )
        self._uses: list[weakref.ref[Use]] = []  # of the weights at the moment, and some that have ended
        self._lock = threading.Lock()  # of that
        self.update: Use | None = None  # from where masters may be written until weights are published
        self.weights = weakref.ref(weights)
        # weak: `_OWNERS` keeps this object as long as any of its parameters lives
        self._params: list[weakref.ref[nn.Parameter]] = []
        self._views: list[
            tuple[weakref.ref[Tensor], weakref.ref[nn.Parameter]]
        ] = []  # made since the last update, of whole ones

    def enter(self, what: str, *, beside_others: bool = False) -> Use:
        """This thread uses the weights for ``what``, perhaps inside another use. Raises ZcError if another thread uses
        them, unless ``beside_others``: what is here, or on its way, is known for the order in which one pass reads."""
        use = Use(what)
        with self._lock:
            other = None if beside_others else self._of_another_thread()
            if other is None:
                running = (ref for ref in self._uses if (each := ref()) is not None and each.thread is not None)
                self._uses = [*running, weakref.ref(use)]
                return use
        others, thread = other
        names = {t.ident: t.name for t in threading.enumerate()}
        raise ZcError(
            f"{what} began in thread {names.get(use.thread)}, and {others} of the same model runs in thread "
            f"{names.get(thread)}: with {self.why} one thread at a time may use the weights. Hold one threading.Lock "
            f"around each forward, backward, step() and load; or {self._way_out}"
        )

    def _of_another_thread(self) -> tuple[str, int] | None:
        """A use of another thread, in words: an error's frames would keep it."""
        uses = [(use.what, use.thread) for use in (ref() for ref in self._uses) if use is not None]
        own = threading.get_ident()
        return next(((what, thread) for what, thread in uses if thread is not None and thread != own), None)

    @contextlib.contextmanager
    def used(self, what: str) -> Iterator[None]:
        """Inside, this thread uses the weights for ``what``."""
        use = self.enter(what)
        try:
            yield
        finally:
            use.end()

    def add(self, params: Iterable[nn.Parameter]) -> None:
        """From now on who reads these parameters asks first. Skips empty ones, and those of another class than
        torch's."""
        for param in params:
            if type(param) is nn.Parameter and param.numel() > 0:
                if _OWNERS.get(param) is not self:
                    self._params.append(weakref.ref(param))
                    _OWNERS[param] = self
                param.__class__ = ManagedParameter

    def release(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Makes these, or all, plain parameters again. The caller then sees to their bytes."""
        _make_plain([ref() for ref in self._params] if params is None else params)

    @staticmethod
    @contextlib.contextmanager
    def lent(params: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        """Inside, these parameters are plain ones. Yields those that were not."""
        lent = _make_plain(params)
        try:
            yield lent
        finally:
            for param in lent:
                param.__class__ = ManagedParameter

    def keep_view(self, view: Tensor, param: nn.Parameter) -> None:
        """``view`` was made of a whole parameter."""
        if type(view) is Tensor:  # not the parameter itself
            self._views.append((weakref.ref(view), weakref.ref(param)))

    def end_views(self) -> None:
        """The parameters get other values: who has kept a view is told so when it is read."""
        for of_view, of_param in self._views:
            view: Any = of_view()
            param = of_param()
            if view is not None and param is not None:
                view.__class__, view.param, view.is_old = AbsentView, param, True
        self._views.clear()


def _make_plain(params: Iterable[nn.Parameter | None]) -> list[nn.Parameter]:
    """Returns those that were not."""
    lent: list[nn.Parameter] = [param for param in params if type(param) is ManagedParameter]
    for param in lent:
        param.__class__ = nn.Parameter
    return lent


def is_held_elsewhere(param: nn.Parameter) -> bool:
    """Whether something else holds the memory of a parameter, which has a storage of its own."""
    with torch_private.without_torch_function():
        return torch_private.num_sharing(param) > 2  # itself, and the question's


def give_bytes(param: nn.Parameter) -> Tensor:
    """Gives a parameter memory of its own, with nothing defined in it. Returns its ``data`` without bytes.

    To take the memory away again, assign that to ``data``. The memory then goes with the last tensor that shares it,
    such as a view that the program has kept: to empty its storage would leave that one without memory.
    """
    with torch.inference_mode(False), torch.no_grad(), torch_private.without_torch_function():
        empty = param.data
        param.data = torch.empty_like(empty, memory_format=torch.preserve_format)
    return empty


def without_bytes(param: nn.Parameter, slot_dtype: torch.dtype) -> Tensor:
    """A tensor of the shape and device of ``param`` and the strides that it has in its slot, whose storage has no
    bytes."""
    is_dense = own_strides(param.shape, param.stride()) is not None
    order = torch.preserve_format if is_dense else torch.contiguous_format
    empty = torch.empty_like(param.detach(), dtype=slot_dtype, memory_format=order)
    empty.untyped_storage().resize_(0)
    return empty


_PLAIN = (
    type(None), bool, int, float, complex, str, type, type(NotImplemented),
    torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _viewed_by(func: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor | None] | None:
    """For each leaf of what ``func(*args, **kwargs)`` returns: the argument that it is a view of, or None for a leaf
    without memory. None in place of the list: the function may read or write elements of its tensors."""
    twins: dict[int, Tensor] = {}
    of_storage: dict[int, Tensor] = {}  # of a twin -> the argument

    def twin(tensor: Tensor) -> Tensor:
        if id(tensor) not in twins:
            shape, strides = tensor.shape, tensor.stride()
            made = torch.empty_strided(
                shape, strides, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
            )
            twins[id(tensor)], of_storage[torch_private.storage_number(made)] = made, tensor
        return twins[id(tensor)]

    # tensors of that mode count no writes, and those of a transform have no storage
    plain = torch.inference_mode(False), torch_private.outside_of_func_transforms()
    with plain[0], plain[1], torch_private.without_torch_function():
        tensors = (leaf for leaf in torch_private.tensors_in((args, kwargs)) if isinstance(leaf, Tensor))
        if any(leaf.layout is not torch.strided for leaf in tensors):
            return None
        on_meta = torch_private.map_tensors(twin, (args, kwargs))
        before = [_state(made) for made in twins.values()]
        try:
            leaves = torch_private.tensors_in(func(*on_meta[0], **on_meta[1]))
        except Exception:  # noqa: BLE001  (whatever it is: the function does not work without elements)
            return None
        if [_state(made) for made in twins.values()] != before:
            return None
        viewed = [of_storage.get(torch_private.storage_number(x)) if type(x) is Tensor else None for x in leaves]
    is_known = [view is not None or isinstance(leaf, _PLAIN) for leaf, view in zip(leaves, viewed, strict=True)]
    return viewed if all(is_known) else None


def _state(tensor: Tensor) -> tuple[object, ...]:
    """It differs once the tensor has been written to, or has other memory."""
    return torch_private.version(tensor), torch_private.storage_number(tensor), tensor.shape, tensor.stride()
