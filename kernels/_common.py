"""What all kernels share: Triton, which no other file imports, checks of arguments, and the pieces of the references.

Without Triton every kernel is its torch reference, and ``why_reference`` says why. Checks are made before any element
is written: each raises ``ValueError`` that names both values. The references cut their work so that every temporary
stays in a core's cache.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
_import_error: str | None = None
try:
    triton = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
except Exception as error:  # noqa: BLE001  a broken install (no compiler, wrong driver) raises more than ImportError
    triton, _import_error = None, f"{type(error).__name__}: {error}"

# Kernels annotate compile-time parameters with this name. Others stay bare: Triton reads annotations as its types.
if TYPE_CHECKING:
    constexpr: TypeAlias = Any  # noqa: PYI042  the interpreter knows only this spelling
else:
    constexpr = getattr(tl, "constexpr", None)


def jit(function: Callable[..., Any], counts: Sequence[str] = ()) -> Any:
    """``triton.jit``; without Triton the plain function, which nobody calls. Of ``counts`` nothing is compiled in:
    whether one is 1 or a multiple of 16 makes nothing faster, and each would be a compile of its own."""
    return function if triton is None else triton.jit(function, do_not_specialize=list(counts))


def kernel(*counts: str) -> Callable[[Callable[..., Any]], Any]:
    """`jit` of what is launched: names its scalars that count something."""
    return functools.partial(jit, counts=counts)


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def without_grad(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """As ``torch.no_grad()`` over a function, but where gradients are off already, as in a backward, it only looks:
    torch's decorator makes two objects and nine calls for each call."""

    @functools.wraps(function)
    def run(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        if not torch.is_grad_enabled():
            return function(*args, **options)
        with torch.no_grad():
            return function(*args, **options)

    return run


def why_reference() -> str | None:
    """Why the torch references run even where a kernel exists; None where Triton kernels run (tensors on a GPU)."""
    if _import_error is not None:
        return f"triton can't be imported: {_import_error}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA or ROCm device"
    return None


def note_of(device: torch.device) -> str | None:
    """A note for users of ``device`` where its kernels are slower than need be: why, and what to install."""
    reference = f"every kernel runs as its torch reference on {device}, slower"
    if device.type not in ("cpu", "cuda"):
        return f"{reference}: zc launches its Triton kernels on CUDA and ROCm alone"
    why = why_reference() if device.type == "cuda" else None
    return None if why is None else f"{reference}: {why} (pip install 'zero-compile[triton]')"


def use_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and triton is not None


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device: this makes it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: dtype is {tensor.dtype}, expected one of {', '.join(map(str, allowed))}")


def check_flat(name: str, tensor: Tensor) -> None:
    """``tensor`` is 1-D and contiguous, so that an offset in elements says where an element lies."""
    if tensor.dim() != 1:
        raise ValueError(f"{name}: shape is {tuple(tensor.shape)}, expected 1 dimension")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: stride is {tensor.stride(0)}, expected 1 (contiguous)")


def check_flats(name: str, tensors: Sequence[Tensor]) -> None:
    """Each is 1-D, contiguous, of a float dtype and on the device of the first.

    Runs for every parameter of every step: each test is one attribute and one comparison (0.3 us per tensor).
    """
    device = tensors[0].device if tensors else None
    for i, tensor in enumerate(tensors):
        if tensor.dtype not in FLOATS:
            check_dtype(f"{name}[{i}]", tensor, FLOATS)
        if tensor.dim() != 1 or not tensor.is_contiguous():
            check_flat(f"{name}[{i}]", tensor)
        if tensor.device != device:
            check_device(f"{name}[{i}]", tensor, f"{name}[0]", tensors[0])


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.device != other.device:
        raise ValueError(f"{name} is on {tensor.device}, {other_name} on {other.device}; expected one device")


def check_numel(name: str, tensor: Tensor, other_name: str, numel: int) -> None:
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, {other_name} {numel}; expected the same number")


def check_alike(name: str, tensor: Tensor, allowed: Sequence[torch.dtype], other_name: str, other: Tensor) -> None:
    """``tensor`` is flat, of an allowed dtype, and has the elements and the device of ``other``."""
    check_dtype(name, tensor, allowed)
    check_flat(name, tensor)
    check_numel(name, tensor, other_name, other.numel())
    check_device(name, tensor, other_name, other)


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Addresses [start, stop) between the first and the last element; empty for an empty tensor. Strides are >= 0."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def check_disjoint(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """No element of ``tensor`` lies inside the address range of ``other``."""
    (start, stop), (other_start, other_stop) = byte_range(tensor), byte_range(other)
    if start < other_stop and other_start < stop:
        raise ValueError(
            f"{name} overlaps {other_name}: bytes [{start:#x}, {stop:#x}) and [{other_start:#x}, {other_stop:#x})"
        )


def check_slots(name: str, flat: Tensor, grads: Sequence[Tensor], offsets: Sequence[int]) -> None:
    """``grads[i]`` fits ``flat[offsets[i] : offsets[i] + numel]``; slots ascend, are disjoint and none overlaps a grad.

    Runs for every bucket of every backward: each test is one attribute and one comparison (0.4 us per gradient).
    """
    check_flat(name, flat)
    if len(grads) != len(offsets):
        raise ValueError(f"{len(grads)} grads, {len(offsets)} offsets; expected the same number")
    stop, device = 0, flat.device
    flat_start, flat_stop = byte_range(flat)
    for i, (grad, offset) in enumerate(zip(grads, offsets, strict=True)):
        if grad.device != device:
            check_device(f"grads[{i}]", grad, name, flat)
        if grad.dtype not in FLOATS:
            check_dtype(f"grads[{i}]", grad, FLOATS)
        if offset < stop:
            raise ValueError(f"offsets[{i}] is {offset}, expected {stop} or more (slots ascend and are disjoint)")
        stop = offset + grad.numel()
        start = grad.data_ptr()
        if start >= flat_stop or (grad.is_contiguous() and start + grad.nbytes <= flat_start):
            continue
        check_disjoint(f"grads[{i}]", grad, name, flat)
    if stop > flat.numel():
        raise ValueError(f"the last slot ends at element {stop}, {name} has {flat.numel()}")


# Elements of one piece. 1 MB of fp32: the piece in use stays in L2 or L3, and a torch call on it (some 50 us) dwarfs
# its dispatch and the Python around it (5 us). bench/kernels.py --sweep: 2^16 takes up to twice as long as 2^18, more
# gains nothing.
CHUNK = 1 << 18


def scratch_like(flat: Tensor, dtype: torch.dtype, numel: int | None = None) -> Tensor:
    """One piece of uninitialised memory on the device of ``flat``, no longer than needed."""
    return torch.empty(min(CHUNK, flat.numel() if numel is None else numel), dtype=dtype, device=flat.device)


def ranges(numel: int) -> Iterator[tuple[int, int]]:
    """[start, length) of each piece of ``numel`` elements."""
    for start in range(0, numel, CHUNK):
        yield start, min(CHUNK, numel - start)


def runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of consecutive items that fit one piece together; an item longer than that is alone."""
    start, used = 0, 0
    for i, length in enumerate(lengths):
        if i > start and used + length > CHUNK:
            yield start, i
            start, used = i, 0
        used += length
    if lengths:
        yield start, len(lengths)


def pieces(dst: Tensor, grad: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of pieces (dst, grad) of one shape, in order; ``dst`` is contiguous, ``grad`` of its shape may be strided.

    A strided gradient is cut along its first dimension only, so that a piece is a view of it, never a copy.
    """
    if grad.numel() <= CHUNK:
        yield dst, grad
        return
    if grad.is_contiguous():
        dst, grad = dst.view(-1), grad.view(-1)
    num_rows = max(1, CHUNK // (grad.numel() // grad.shape[0]))
    yield from zip(torch.split(dst, num_rows), torch.split(grad, num_rows), strict=True)
