"""A device with streams on a machine that has none: the CPU computes, and the order is checked.

Inside of :class:`SimulatedDevice` the CPU counts as a device: this library, and whatever else asks
``torch.cpu`` for streams, such as ``torch.distributed.fsdp``, queues its work on streams that take
notes. The numbers are those of the CPU, which does everything at once; what is checked is the order
that a device would be held to. Pinned memory counts as memory of the host.

Simplified: collectives of one process group run on one stream in order, as those of NCCL; kernels
are counted as aten operations, foreach ones as one where all their tensors are dense.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from composable_shard import _torch
from composable_shard.core.transport import host, pending
from composable_shard.testing.oracle import Unsharded
from support.happens_before import HOST, Block, Clock, Memory, Order, Span, Work

_CPU = torch.device("cpu")
COMPUTE = "the compute stream"

# Streams and events -------------------------------------------------------------------------------


class Event:
    """A moment of a stream, as ``torch.Event`` is."""

    def __init__(self, *_: Any, moment: Clock | None = None, **__: Any) -> None:
        self._moment = moment or {}
        self.device = _CPU

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or _device().current
        self._moment = stream.simulated.order.moment(stream.name)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or _device().current
        stream.simulated.order.wait(stream.name, self._moment)

    def synchronize(self) -> None:
        _device().wait_on_host(self._moment)

    def query(self) -> bool:
        return True


class Stream:
    """Work that is done in order, as that of a ``torch.Stream`` is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.simulated = _device()
        self.stream_id = self.simulated.num_streams
        self.simulated.num_streams += 1
        self.name = f"stream {self.stream_id}" if self.stream_id else COMPUTE
        self.device = _CPU
        self._outer: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.simulated.order.wait(self.name, self.simulated.order.moment(other.name))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.simulated.wait_on_host(self.simulated.order.moment(self.name))

    def __enter__(self) -> Stream:
        self._outer.append(self.simulated.current)
        self.simulated.current = self
        return self

    def __exit__(self, *_: object) -> None:
        self.simulated.current = self._outer.pop()


# What a device does -------------------------------------------------------------------------------


@dataclass
class Activity:
    """What a device did in some time, by operation; ``peak_nbytes`` is known when it has ended.

    ``flops`` are those of matrix products, convolutions and attention, each with its work.
    """

    launches: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    host_waits: Counter[str] = field(default_factory=Counter)
    flops: list[tuple[int, Work]] = field(default_factory=list)
    communication: list[Work] = field(default_factory=list)
    peak_nbytes: int = 0

    def beside(self, work: Work) -> int:
        """Return the floating-point operations that may be done while ``work`` is."""
        return sum(flops for flops, compute in self.flops if compute.is_beside(work))


class SimulatedDevice:
    """Gives streams to the CPU, and checks what is done on them.

    Use one at a time, on one thread, and shard models inside of it. It pauses while it records an
    operation, because that operation may call others.
    """

    def __init__(self) -> None:
        self.order = Order()
        self.activity = Activity()
        self.num_streams = 0
        self.is_paused = False
        self.current: Stream
        self._memory = Memory(self.order)
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._exits = contextlib.ExitStack()

    @property
    def faults(self) -> list[str]:
        """What a device may do in another order than it has to, one sentence each."""
        return list(dict.fromkeys(self._memory.faults))

    def new_activity(self) -> Activity:
        """Begin to note anew; return what was done before."""
        done, self.activity = self.activity, Activity()
        done.peak_nbytes, self._memory.peak_nbytes = self._memory.peak_nbytes, self._memory.nbytes
        return done

    def __enter__(self) -> SimulatedDevice:
        global _entered
        assert _entered is None, "Expected one simulated device at a time, got a second one"
        _entered = self
        self._exits.callback(_leave)
        self.current = Stream()
        for patch in _patches(self):
            self._exits.enter_context(patch)
        self._exits.enter_context(_Operations(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    # Work -----------------------------------------------------------------------------------

    def run(
        self, op: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor], where: str
    ) -> Work:
        """Note that ``op`` is done on a stream or on the host."""
        spans = [[self._seen(t) for t in some if _has_memory(t)] for some in (reads, writes)]
        work = self.order.work(where, op)
        self._memory.touch(work, *spans)
        return work

    def wait_on_host(self, moment: Clock, what: str = "synchronize") -> None:
        self.activity.host_waits[what] += 1
        self.order.wait(HOST, moment)

    def read_on_host(self, tensor: torch.Tensor, what: str) -> None:
        """Let the host read a value, for which it waits if a device has it."""
        if _has_memory(tensor) and not self.is_of_host(tensor):
            self.run(what, [tensor], [], self.current.name)
            self.wait_on_host(self.order.moment(self.current.name), what)
        else:
            self.run(what, [tensor], [], HOST)

    # Memory ---------------------------------------------------------------------------------

    def is_of_host(self, tensor: torch.Tensor) -> bool:
        block = self._memory.find(tensor.untyped_storage().data_ptr())
        return block is not None and block.is_of_host

    def allocated(
        self, tensor: torch.Tensor, op: str, *, on_host: bool = False, owner: str | None = None
    ) -> None:
        """Note new memory, which belongs to the current stream unless another owns it."""
        if not _has_memory(tensor):
            return
        storage = tensor.untyped_storage()
        span = _whole(storage)
        block = Block(span, owner or self.current.name, on_host, op)
        self._memory.add(block, is_allocated=owner is None)
        self._alive[span.begin] = weakref.ref(storage, lambda _: self._memory.free(block))

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Have memory given away after what ``stream`` has when it is freed."""
        self._seen(tensor)
        block = self._memory.find(tensor.untyped_storage().data_ptr())
        assert block is not None
        block.recorded.add(stream.name)

    def resized(self, storage: torch.UntypedStorage, resize: Callable[[], None]) -> None:
        """Note that memory goes, or comes, whose storage object stays."""
        before = self._memory.find(storage.data_ptr()) if storage.nbytes() else None
        if before is not None:
            self._memory.free(before)
        resize()
        if storage.nbytes():
            byte = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.allocated(byte, before.comes_from if before else "a resized storage")

    def _seen(self, tensor: torch.Tensor) -> Span:
        """Return what a tensor spans; memory from before belongs to the compute stream."""
        whole = _whole(tensor.untyped_storage())
        block = self._memory.find(whole.begin)
        if block is None or not block.span.holds(whole):
            self.allocated(tensor, "earlier times", owner=COMPUTE)
        return _span(tensor)

    # Collectives ----------------------------------------------------------------------------

    def collective(self, name: str, real: Callable[..., Any], group: Any, *args: Any) -> Any:
        """Make a collective at once; return what a stream waits for it with."""
        reads, writes = _sent_and_received(name, args)
        is_beside = all(getattr(option, "asyncOp", True) for option in args)
        where = f"the stream of {group.group_name}" if is_beside else self.current.name
        self.order.wait(where, self.order.moment(self.current.name))
        work = self.run(name, reads, writes, where)
        self.activity.collectives[name] += 1
        self.activity.communication.append(work)
        event = Event(moment=self.order.moment(where))
        with unnoticed():
            handle = real(group, *args)
            if handle is not None:
                handle.wait()
        return _Launched(handle, event)


class _Launched:
    """A collective that has been made; a stream that waits for it continues after it."""

    def __init__(self, handle: Any, event: Event) -> None:
        self._handle = handle
        self._event = event

    def wait(self, *_: Any) -> bool:
        self._event.wait()
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def _sent_and_received(
    name: str, args: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what a collective reads and writes; c10d names what is received first."""
    tensors = list(map(_torch.tensors_of, args[:2]))
    first, second = (*tensors, [])[:2]
    if name == "send":
        return first, []
    if not second:
        return first, first
    return second, first


# How what is done comes to be noted ---------------------------------------------------------------


class _Operations(_torch.DispatchMode):
    """Notes every operation on plain tensors."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = self._device
        if device.is_paused or func.namespace in _ELSEWHERE or _are_fake(types):
            return func(*args, **kwargs)
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # it comes back as operations on plain tensors
        pins = bool(kwargs.pop("pin_memory", False))
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result, pins=pins)
        return result

    def _note(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, *, pins: bool
    ) -> None:
        device, op = self._device, func.overloadpacket.__name__
        if any(t.layout != torch.strided for t in _torch.tensors_of(args, kwargs, result)):
            return  # of sparse ones the parts are noted
        reads, writes = _read_and_written(func, args, kwargs)
        known = {_torch.storage_number(t) for t in (*reads, *writes)}
        made = [t for t in _torch.tensors_of(result) if _torch.storage_number(t) not in known]
        if func.is_view or func in _VIEWS:
            return
        given = [device.is_of_host(t) for t in (*reads, *writes) if _has_memory(t)]
        is_on_host = pins or (bool(given) and all(given))
        for tensor in made:
            device.allocated(tensor, op, on_host=is_on_host)
        if _torch.reads_a_value(func) or func in _WAITS:
            device.read_on_host(reads[0], op)
            return
        if func in _ALLOCATES:
            return
        if is_on_host and all(given):
            device.run(op, reads, [*writes, *made], HOST)
            return
        work = device.run(op, reads, [*writes, *made], device.current.name)
        device.activity.launches[op] += _num_launches(op, reads, writes)
        flops = _torch.flops_of(func, args, kwargs, result)
        if flops:
            device.activity.flops.append((flops, work))
        blocks = not (kwargs.get("non_blocking") or (op == "copy_" and args[2:] == (True,)))
        if (any(given) or is_on_host) and blocks:
            device.wait_on_host(device.order.moment(device.current.name), "a copy")


def _are_fake(types: Sequence[type]) -> bool:
    return any(issubclass(kind, FakeTensor) for kind in types)


def _read_and_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads and those that it writes, by its schema."""
    reads, writes = list[torch.Tensor](), list[torch.Tensor]()
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        tensors = _torch.tensors_of(value)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(tensors)
        if is_written and not argument.is_out:
            reads += tensors
    return reads, writes


_VIEWS = {
    torch.ops.aten.set_.source_Storage_storage_offset,
    torch.ops.aten.set_.source_Storage,
    torch.ops.aten.set_.source_Tensor,
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten._unsafe_view.default,
}
_ELSEWHERE = ("c10d", "_c10d_functional", "profiler")  # collectives are noted where they are called
_ALLOCATES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_WAITS = {torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}


def _num_launches(op: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> int:
    if not op.startswith("_foreach"):
        return 1
    some = writes or reads
    return 1 if all(t.is_contiguous() for t in (*reads, *writes)) else len(some)


def _has_memory(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()  # that of a fake tensor is on no device
    return tensor.numel() > 0 and storage.device.type == "cpu" and storage.size() > 0


def _whole(storage: torch.UntypedStorage) -> Span:
    begin = storage.data_ptr()
    return Span(begin, begin + storage.nbytes())


def _span(tensor: torch.Tensor) -> Span:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    begin = tensor.data_ptr()
    return Span(begin, begin + (last + 1) * tensor.itemsize)


_COLLECTIVES = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "reduce_scatter_single"),
    *("all_gather_single_coalesced", "reduce_scatter_single_coalesced", "all_to_all_single"),
    *("allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce"),
    *("allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "recv", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor_coalesced", "scatter", "send"),
)


def _patches(device: SimulatedDevice) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Yield what lets the CPU count as a device, and its work be noted."""
    instead: dict[str, Any] = {
        "has_streams": lambda _: True,
        "aligns": lambda _: True,
        "current_stream": lambda _: device.current,
        "make_stream": Stream,
        "on_stream": lambda stream: stream,
        "pins_memory": lambda: True,
    }
    for name, value in instead.items():
        yield mock.patch.object(_torch, name, value)
    for streams in (host.uploads, host.downloads, pending.side_streams):
        yield mock.patch.dict(streams, clear=True)
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: stream or contextlib.nullcontext(),
        "current_stream": lambda *_: device.current,
    }.items():
        yield mock.patch.object(torch.cpu, name, value)
    yield mock.patch.object(torch, "Event", Event)
    yield mock.patch.object(torch.accelerator, "current_stream", lambda *_: device.current)
    for name in _COLLECTIVES:
        real = getattr(dist.ProcessGroup, name, None)
        if real is not None:
            yield mock.patch.object(dist.ProcessGroup, name, _noted(device, name, real))
    resize, to_list = torch.UntypedStorage.resize_, torch.Tensor.tolist

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        device.resized(storage, lambda: resize(storage, size))
        return storage

    def listed(tensor: torch.Tensor) -> Any:
        if type(tensor) is torch.Tensor and not device.is_paused:
            device.read_on_host(tensor, "tolist")
        return to_list(tensor)

    yield mock.patch.object(torch.UntypedStorage, "resize_", resized)
    yield mock.patch.object(torch.Tensor, "tolist", listed)
    yield mock.patch.object(
        torch.Tensor, "record_stream", lambda tensor, stream: device.record_stream(tensor, stream)
    )


def _noted(device: SimulatedDevice, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def launch(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if device.is_paused:
            return real(group, *args, **kwargs)
        return device.collective(name, real, group, *args, *kwargs.values())

    return launch


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Do what is inside beside the simulated device, if there is one: it does not count."""
    device = _entered
    if device is None:
        yield
        return
    was_paused, device.is_paused = device.is_paused, True
    try:
        yield
    finally:
        device.is_paused = was_paused


@contextlib.contextmanager
def on_simulated_device() -> Iterator[list[str]]:
    """Let `assert_trains_like_unsharded` train on a simulated device, whose faults are differences.

    Comparisons do not count as work of the device.
    """
    faults: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in ("differences", "differs"):
            beside = unnoticed()(getattr(Unsharded, name))
            stack.enter_context(mock.patch.object(Unsharded, name, beside))
        with SimulatedDevice() as device:
            yield faults
        faults += device.faults


_entered: SimulatedDevice | None = None


def _device() -> SimulatedDevice:
    assert _entered is not None, "Expected to be inside of a SimulatedDevice"
    return _entered


def _leave() -> None:
    global _entered
    _entered = None
