"""Gives every rank the buffers of rank 0 whenever DDP would (``broadcast_buffers``, torch/nn/parallel/distributed.py).

DDP broadcasts all buffers at the start of a forward, if the backward of the forward before it reduces: with gradients
enabled, outside of no_sync. zc sends them at the boundary of an update at the latest, which all ranks reach anyway, so
a forward between two updates (an evaluation, perhaps on one rank alone) waits for no rank. It takes over what has come:
until then a rank has its own buffers, as under DDP, and may average them (timm's distribute_bn).

What the program writes into a buffer after the boundary may differ from rank to rank, and DDP overwrites it in the
next forward. So ranks that find a buffer written (another tensor, or counted by autograd) exchange buffers in that
forward once more: rank 0 sends, the others wait for it. Where some ranks alone have written one, the next message shows
it, or the watch finds ranks that wait for each other: an error on all ranks. A buffer that is written past autograd's
count (``buffer.data``) stays each rank's own until the forward after the next boundary.

A rank may evaluate alone before it trains, also with gradients (of its input). So each message has the place of rank
0's forward in the update, and a rank drops those from before its own. Rank 0 sends written buffers in its first
forward, and in the first of training after evaluations: who evaluates takes the former, who only trains the latter.
Ranks that have all evaluated keep what they write after it, as with DDP's own call. Where rank 0 alone has, what its
evaluation wrote is an error, but for the statistics of normalisations, which no forward in training mode reads.

Rank 0 waits for other ranks at the boundary alone, until its messages have arrived: it may drop its model next, and
gloo drops a message that the receiver has not asked for. It sends a copy, in host memory, to each of them. Its last
message before an update is marked as the last. So ranks that call the model more often than rank 0 keep their buffers
until the next update. Ranks that call it less often catch up at the boundary. DDP hangs in both cases. If rank 0
had no forward in an update, its data may have ended: then its buffers go to the ranks that have trained, and a rank
without a forward keeps its own. Where the loop calls ``model.forward(x)``, or parts of the model, the buffers that they
wrote tell rank 0 so: it sends them at the boundary, and the others take them there; zc.explain says so where an update
has several such backwards.

Buffers on a GPU travel after the last message, by a broadcast in the group that carries the weights. All ranks issue it
after the boundary's announcement and reductions, since collectives of one communicator need one order on all ranks. A
further forward of the same update, outside of no_sync, sends them through host memory; rank 0 waits for its device
then.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zc import torch_private
from zc.engine.core import Part
from zc.ranks.exchanges import Work

if TYPE_CHECKING:
    from zc.engine.runtime import Runtime

# For whom rank 0 sends its buffers. The last: it had no forward, but its buffers were written
_NOBODY, _WHO_HAS_TRAINED, _EVERY_RANK, _EVERY_RANK_AT_ONCE = range(4)
_FOR_ALL = (_EVERY_RANK, _EVERY_RANK_AT_ONCE)
_EVALUATES, _HAS_GRADIENTS, _TRAINS = range(3)  # a forward: without gradients; with them; also in training mode
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
          nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)  # fmt: skip
_WHAT = "the buffers of rank 0 (zc.compile(broadcast_buffers=False) leaves each rank its own)"
_TOGETHER = (
    "Write buffers (an evaluation may) on all ranks, and rank 0's values count; or call "
    "zc.compile(broadcast_buffers=False). "
    "(DistributedDataParallel lets all ranks wait for rank 0 before every forward)"
)


class BufferSync(Part):
    """For one model on one rank. Create it when all ranks have the same buffers; the runtime keeps it. ``own``: names
    of those that each rank keeps."""

    def __init__(self, model: nn.Module, runtime: Runtime, own: Collection[str]) -> None:
        super().__init__(runtime)
        self._own, self._model = own, weakref.ref(model)
        runtime.buffer_sync = self
        self._shapes = {name: (tuple(b.shape), b.dtype) for name, b in model.named_buffers()}
        self._is_due = False  # whether DDP would broadcast before the next forward
        self._num_trained = 0  # forwards of this update that train
        self._place = (0, _EVALUATES)  # of the last forward: how many before it train, and what it does
        self._has_evaluated = False  # whether a forward of a lower place came before the first one of training
        self._has_trained = False  # whether this update had a forward with gradients
        self._has_ended = False  # whether rank 0 has reached the boundary of this update
        self._for_whom = _NOBODY  # the ranks that the buffers of rank 0's last message are for
        self._is_first = True  # whether the next forward is the first since all ranks had the same buffers
        self._was_due = True  # whether DDP would broadcast before that forward
        self._stays_due = True  # the same after this update, as rank 0's last message says
        self._as_they_were = self._now()
        self._num_unannounced = 0  # backwards of this update that wrote buffers and whose forward was not announced
        self._sent: list[tuple[Work, list[Tensor]]] = []  # messages of rank 0 and their tensors, until they arrive
        # until the next forward: bytes that rank 0 has sent, the buffers for them, and the bytes that these had
        self._received: list[tuple[Tensor, list[Tensor], Tensor]] = []

    def before_forward(self) -> None:
        core = self._core()
        if core is None:
            return
        model, has_grads = self._model(), torch.is_grad_enabled()
        trains = has_grads and model is not None and model.training
        place = (self._num_trained, _TRAINS if trains else _HAS_GRADIENTS if has_grads else _EVALUATES)
        goes_on = self._num_trained == 0 and self._place < place  # towards training
        self._has_evaluated |= goes_on and not self._is_first
        repeats = core.group.rank == 0 and self._has_evaluated and goes_on
        self._place, self._num_trained = place, self._num_trained + trains
        if (self._is_first or repeats) and self._was_due and (written := self._written()):
            self._is_due = True
            while self._exchange(is_last=False, written=written):
                pass
        elif self._is_due and not self._has_ended:
            while self._exchange(is_last=False):
                pass
        self.take_received()
        self._is_first = False
        self._is_due = has_grads and core.is_boundary
        self._has_trained |= has_grads

    def after_backward(self) -> None:
        """Called when a backward outside of no_sync has ended. Says where DDP might have sent buffers before the next
        forward. This rank can't tell: other ranks may call other parts of the model, and would not wait for it."""
        self._num_unannounced += self._is_first and self._was_due and bool(self._written())
        if self._num_unannounced == 2:
            self.core.say_once(
                f"no forward came through model(...), and several backwards of an update wrote {self._written()}: "
                "rank 0's buffers come once an update, and not before each forward, as in DDP. Call model(x) in place "
                "of model.forward(x); parts of the model may be called as before, and DDP sends nothing for them"
            )

    def send_last(self) -> None:
        """Called at the boundary of an update, before rank 0 has waited for any rank."""
        if self.core.group.rank == 0:
            self._exchange(is_last=True)

    def receive_all(self) -> None:
        """Called when all ranks are at the boundary: receives rank 0's messages up to the last one."""
        while not self._has_ended:
            self._exchange(is_last=True)
        for device, buffers in self._by_device().items() if self._for_whom != _NOBODY else ():
            if device.type != "cpu":  # buffers in host memory came with the message
                packed = _pack(buffers)
                self.core.group.broadcast_(packed)
                self._take(packed, buffers)
        if self._is_first and self._for_whom == _EVERY_RANK_AT_ONCE:  # the next update may have no forward, either
            self.take_received()
        self._was_due = self._stays_due
        if not self._is_first or self._for_whom in _FOR_ALL:  # else this rank's last forward was before this update
            self._as_they_were = self._now() if self._was_due else {}
        self._has_ended = self._is_due = self._has_evaluated = self._has_trained = False
        self._place, self._num_trained = (0, _EVALUATES), 0
        self._num_unannounced = 0
        self._for_whom, self._is_first = _NOBODY, True
        while self._sent:
            self._sent.pop(0)[0].wait()

    @torch.no_grad()
    def take_received(self) -> None:
        """Copies what rank 0 has sent into buffers that have not been written since, through ``.data``, as DDP does: a
        backward may still need their versions."""
        while self._received:
            with torch_private.outside_of_func_transforms():  # which may write no buffer
                self._take_over(*self._received.pop(0))

    def _take_over(self, packed: Tensor, buffers: list[Tensor], before: Tensor) -> None:
        sizes = [buffer.nbytes for buffer in buffers]
        columns = (torch.split(each, sizes) for each in (packed, before, _pack(buffers)))
        for buffer, sent, then, now in zip(buffers, *columns, strict=True):
            new = torch.where((now == then).all(), sent, now)  # the host does not wait for a device
            buffer.data.copy_(new.view(buffer.dtype).view(buffer.shape))

    def _by_device(self) -> dict[torch.device, list[Tensor]]:
        """The model's buffers by device, in one order on all ranks. The widest elements come first, so each buffer is
        aligned to its element size."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for buffer in sorted((buffer for _, buffer in self._named()), key=lambda b: -b.element_size()):
            by_device.setdefault(buffer.device, []).append(buffer)
        return dict(sorted(by_device.items(), key=lambda item: str(item[0])))

    def _now(self) -> dict[str, tuple[weakref.ref[Tensor], int]]:
        """Each buffer, and how often autograd has counted a write to it."""
        return {name: (weakref.ref(buffer), _version(buffer)) for name, buffer in self._named()}

    def _written(self, ignored: Collection[str] = ()) -> str:
        """The first buffer that was written since all ranks had the same ones, or is new, or has another shape; "" for
        none. One of another dtype is refused at the boundary, if a parameter that was converted with it is not refused
        before."""
        for name, buffer in self._named():
            if name in ignored or (name in self._shapes and self._shapes[name][1] != buffer.dtype):
                continue
            ref, version = self._as_they_were.get(name, (None, 0))
            if ref is None or ref() is not buffer or version != _version(buffer):
                return name
        return ""

    def _statistics(self) -> Collection[str]:
        """Names of buffers that no forward reads while its module is in training mode."""
        model = self._model() or nn.Module()
        named = ((name, norm) for name, norm in model.named_modules() if isinstance(norm, _NORMS) and norm.training)
        return {f"{name}.{buffer}" for name, norm in named for buffer, _ in norm.named_buffers(recurse=False)}

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        model = self._model()
        named = model.named_buffers() if model is not None else ()
        return ((name, buffer) for name, buffer in named if name not in self._own)

    @torch.no_grad()
    def _exchange(self, *, is_last: bool, written: str = "") -> bool:
        """Sends or receives one message of rank 0: whether it is the update's last, and buffers if DDP would send
        them. ``written``: a buffer that was written, where it is the message that follows writes. Returns whether the
        message was from before this rank's forward, and is dropped."""
        group, by_device = self.core.group, self._by_device()
        nbytes = sum(b.nbytes for buffers in by_device.values() for b in buffers)
        for_whom = self._for_whom_now()
        stays_due = self._is_due or (self._is_first and self._was_due)  # an update without a forward changes nothing
        is_read = bool(written and self._written(self._statistics() if self._has_evaluated else ()))
        values = [is_last, for_whom, nbytes, is_read, stays_due, self._has_evaluated, *self._place]
        head = torch.tensor(values, device="cpu")
        if group.rank == 0:
            packs = [_pack(buffers).cpu() for buffers in self._in_message(by_device, head)]
            self._sent.append((group.send_to_all([head, *packs], "sending its buffers"), [head, *packs]))
        else:
            group.receive(
                head, f"{_WHAT}, as {written} was written between two updates. {_TOGETHER}" if written else _WHAT
            )
        self._has_ended, self._for_whom, self._stays_due = bool(head[0]), int(head[1]), bool(head[4])
        has_evaluated, place = bool(head[5]), (int(head[6]), int(head[7]))
        is_past = place < self._place or (is_last and not self._is_first and place == self._place)
        is_past = is_past and not self._has_ended
        is_of_evaluation = is_past and (bool(written) or place[1] < self._place[1])
        if not is_of_evaluation and not (has_evaluated and (written or self._has_evaluated)):
            self._compare_writes(written, rank_0_has_written=bool(head[3]))
        model = self._model()
        if self._for_whom == _NOBODY or model is None or group.rank == 0:
            return False
        if int(head[2]) != nbytes:
            raise group.failure(
                f"rank 0's buffers have {int(head[2]):,} bytes, those of rank {group.rank} {nbytes:,}"
                f"{self._changed(model)}: buffers must have the same shapes on all ranks before a forward, or call "
                "zc.compile(broadcast_buffers=False)"
            )
        if self._is_for_this_rank and not is_past:
            self._received.clear()
        for buffers in self._in_message(by_device, head):
            packed = torch.empty(sum(b.nbytes for b in buffers), dtype=torch.uint8, device="cpu")
            group.receive(packed, _WHAT)
            if not is_past:
                self._take(packed, buffers)
        return is_past

    def _compare_writes(self, written: str, *, rank_0_has_written: bool) -> None:
        """Raises RankMismatchError if this rank or rank 0 alone has written buffers before its first forward. A rank
        without one has nothing to compare."""
        rank_0_had_none = self._has_ended and self._for_whom in (_WHO_HAS_TRAINED, _EVERY_RANK_AT_ONCE)
        if bool(written) == rank_0_has_written or rank_0_had_none or (self._is_first and not written):
            return
        rank = self.core.group.rank
        who, other = (f"rank {rank} has written {written}", 0) if written else ("rank 0 has written a buffer", rank)
        text = f"{who} between two updates, and rank {other} has written none. {_TOGETHER}"
        raise self.core.group.failure(text)

    def _for_whom_now(self) -> int:
        """Of a message that rank 0 sends now."""
        if self._is_due or self._has_trained:
            return _EVERY_RANK if self._is_due else _NOBODY
        return _EVERY_RANK_AT_ONCE if self._is_first and self._was_due and self._written() else _WHO_HAS_TRAINED

    @property
    def _is_for_this_rank(self) -> bool:
        return self.core.group.rank != 0 and (self._for_whom in _FOR_ALL or self._has_trained)

    def _take(self, packed: Tensor, buffers: list[Tensor]) -> None:
        if self._is_for_this_rank:
            before = _pack(buffers)
            self._received.append((packed.to(before.device), buffers, before))

    def _in_message(self, by_device: dict[torch.device, list[Tensor]], head: Tensor) -> list[list[Tensor]]:
        """The buffers in the message with this head. After the last message, `receive_all` sends those on a GPU."""
        is_last, for_whom, *_ = head.tolist()
        return [buffers for device, buffers in by_device.items() if for_whom and (device.type == "cpu" or not is_last)]

    def _changed(self, model: nn.Module) -> str:
        for name, buffer in model.named_buffers():
            now, first = (tuple(buffer.shape), buffer.dtype), self._shapes.get(name)
            if first != now:
                was = "was not there" if first is None else f"was {first[0]} {first[1]}"
                return f" ({name} is {now[0]} {now[1]}, and {was} when the model was compiled)"
        return ""


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else torch_private.version(buffer)  # those of inference_mode have none


def _pack(buffers: list[Tensor]) -> Tensor:
    """The bytes of all buffers, concatenated as uint8, since gloo has no bool. A conjugate or negative view is computed
    first."""
    plain = (b.detach().resolve_conj().resolve_neg().contiguous() for b in buffers)
    return torch.cat([b.view(-1).view(torch.uint8) for b in plain])
