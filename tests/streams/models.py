"""What trains on a simulated device: blocks, on streams of their own if asked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.simulated_device import SimulatedDevice, Stream
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor
from transport.own_collectives import Allocating
from two_tensors import two_tensor_hooks, two_tensor_mlp

from composable_shard import (
    AllGather,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ReduceScatter,
    _torch,
    fully_shard,
    sit_out,
    weigh,
)

WIDTH = 24
NUM_BLOCKS = 4
LOW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
OFFLOAD = CPUOffloadPolicy()


class Block(nn.Module):
    """A block whose parameters travel in messages of their own and packed, even and uneven."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 400 * width)
        self.narrow = nn.Linear(400 * width, width)
        self.norm = nn.LayerNorm(width)
        self.odd = nn.Parameter(torch.ones(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.narrow(self.wide(x).relu())) * self.odd.mean()


class _Hop(torch.autograd.Function):
    """Goes on on another stream, and back again in backward, as autograd does."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, device: SimulatedDevice, to: Stream, waits: bool
    ) -> torch.Tensor:
        ctx.device, ctx.back, ctx.waits = device, device.current, waits
        _go(x, device, to, waits)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        _go(grads[0], ctx.device, ctx.back, ctx.waits)
        return grads[0], None, None, None


def _go(value: torch.Tensor, device: SimulatedDevice, to: Stream, waits: bool) -> None:
    if waits:
        to.wait_stream(device.current)
        value.record_stream(to)  # type: ignore[arg-type]
    device.current = to


def run_on(
    module: nn.Module,
    device: SimulatedDevice,
    stream: Stream,
    *,
    enters: bool = True,
    leaves: bool = True,
) -> None:
    """Let the calls of a module, and their backwards, be given to a stream.

    Its input comes from another stream, for which this one waits, unless ``enters`` is false; its
    output goes to another, which waits for this one, unless ``leaves`` is.
    """
    outer: list[Stream] = []

    def enter(_: nn.Module, args: Any) -> Any:
        outer.append(device.current)
        return (_Hop.apply(args[0], device, stream, enters),)

    def leave(_: nn.Module, args: Any, output: torch.Tensor) -> Any:
        return _Hop.apply(output, device, outer.pop(), leaves)

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave)


@dataclass(frozen=True)
class Training:
    """Some iterations on a simulated device.

    ``shards`` ranks share a parameter, and ``replicas`` hold the same shards. ``around`` is what an
    iteration runs in. Where it accumulates, only every other iteration has a step.
    """

    replicas: int = 1
    shards: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any, SimulatedDevice], object] = lambda *_: None
    around: Callable[[Any, SimulatedDevice, int], contextlib.AbstractContextManager[object]] = (
        lambda *_: contextlib.nullcontext()
    )
    after_backward: Callable[[SimulatedDevice], object] = lambda _: None
    accumulates: bool = False
    has_subclasses: bool = False
    weighs: bool = False

    @property
    def is_for_any_device(self) -> bool:
        """Whether nothing in it is given to a stream."""
        return self.prepare in _OF_ANY_DEVICE and self.around in _OF_ANY_DEVICE

    def model(self) -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        if self.has_subclasses:
            model = two_tensor_mlp(dim=WIDTH)
        options = dict(self.options)
        if self.replicas > 1:
            names = ("replicate", "shard")
            options["mesh"] = init_device_mesh(
                "cpu", (self.replicas, self.shards), mesh_dim_names=names
            )
        for block in model:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def run(
        self, num_steps: int = 3, *, simulated: bool = True
    ) -> tuple[list[str], list[torch.Tensor]]:
        """Train; return what a device may do in a wrong order, and this rank's parameters."""
        hooks = two_tensor_hooks() if self.has_subclasses else contextlib.nullcontext()
        device: Any = SimulatedDevice() if simulated else mock.Mock(faults=[], current=None)
        with hooks, device if simulated else contextlib.nullcontext():
            model = self.model()
            self.prepare(model, device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(num_steps):
                random = torch.Generator().manual_seed(step)
                x = torch.randn(3, WIDTH, generator=random)
                with self.around(model, device, step):
                    with weigh(model) if self.weighs else contextlib.nullcontext() as weighing:
                        loss = model(x).square().mean()
                        if weighing is not None:
                            loss = weighing.add(torch.tensor(step + 1.0), loss)
                        if simulated:
                            loss.register_hook(partial(_end_where_it_began, device, device.current))
                        loss.backward()
                        self.after_backward(device)
                    if step % 2 == 1 or not self.accumulates:
                        optimizer.step()
                        optimizer.zero_grad()
            shards = [_plain(param.to_local()).clone() for param in model.parameters()]
        return device.faults, shards


def _plain(shard: Any) -> torch.Tensor:
    plain: torch.Tensor = shard.a if isinstance(shard, TwoTensor) else shard
    return plain.detach()


def _end_where_it_began(device: SimulatedDevice, stream: Stream, _: torch.Tensor) -> None:
    """Let the end of a backward be on the stream of its caller, as autograd does."""

    def end() -> None:
        stream.wait_stream(device.current)
        device.current = stream

    _torch.on_backward_end(end)


@contextlib.contextmanager
def on_another_stream(model: Any, device: SimulatedDevice, step: int) -> Iterator[None]:
    """Run an iteration on one of two streams, in turn."""
    stream = _streams(device)[step % 2]
    stream.wait_stream(device.current)
    with stream:
        yield
    device.current.wait_stream(stream)


@contextlib.contextmanager
def gathered_beside(model: Any, device: SimulatedDevice, step: int) -> Iterator[None]:
    stream = _streams(device)[0]
    stream.wait_stream(device.current)
    with stream:
        model[2].unshard(async_op=step % 2 == 1)
    parts = (model[2].norm, model[3])  # before it is freed, and after
    handles = [part.register_forward_pre_hook(lambda *_: _work_on(stream)) for part in parts]
    yield
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def first_both_then_one(model: Any, device: SimulatedDevice, step: int) -> Iterator[None]:
    """Accumulate in both branches, and reduce when one of them has run again."""
    model.is_left_only = step % 2 == 1
    model.set_requires_gradient_sync(step % 2 == 1)
    yield


@contextlib.contextmanager
def kept_and_gathered_without_waiting(
    model: Any, device: SimulatedDevice, step: int
) -> Iterator[None]:
    """Gather into kept memory on a stream that waits for nobody, as no shard has changed since.

    What was used before is no backward, whose reduction would wait for it, and the gather for that.
    """
    stream = _streams(device)[0]
    model.set_keep_unsharded_storage(True)
    if step % 2 == 0:
        stream.wait_stream(device.current)
    else:
        with torch.no_grad():
            model[2](torch.ones(3, WIDTH))
        with stream:
            model[2].unshard()
    yield


@contextlib.contextmanager
def used_beside_and_freed_here(model: Any, device: SimulatedDevice, step: int) -> Iterator[None]:
    """Free what another stream uses by hand, on the stream that has gathered it."""
    stream = _streams(device)[0]
    model[2].unshard()
    stream.wait_stream(device.current)
    with stream, torch.no_grad():
        model[2](torch.ones(3, WIDTH))
    model[2].reshard()
    _work_on(device.current)
    yield


def _work_on(stream: Stream) -> None:
    """Allocate on a stream, for which nothing has to be waited for."""
    with stream:
        torch.ones(3)


@contextlib.contextmanager
def optimizer_beside(model: Any, device: SimulatedDevice, step: int) -> Iterator[None]:
    """Change the parameters on another stream, and say when that is done."""
    stream = _streams(device)[0]
    stream.wait_stream(device.current)
    with stream, torch.no_grad():
        for param in model.parameters():
            param.to_local().mul_(0.5)
    model.set_post_optim_event(stream.record_event())
    yield


def blocks_on_streams(model: Any, device: SimulatedDevice) -> None:
    for block, stream in zip(model[1::2], _streams(device), strict=True):
        run_on(block, device, stream)


def branches(model: Any, device: SimulatedDevice) -> None:
    """Let two branches run on two streams, which wait for each other at the ends only."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        if model.is_left_only:
            return model[2](model[0](x))
        left, right = model[0](x), model[1](x)
        left, right = model[2](left), model[3](right)
        return left + right

    stream = _streams(device)[0]
    run_on(model[0], device, device.current, enters=False, leaves=False)
    run_on(model[1], device, stream, leaves=False)
    run_on(model[2], device, device.current, enters=False, leaves=False)
    run_on(model[3], device, stream, enters=False)
    model.is_left_only = False
    model.forward = forward


def hook_on_a_stream(model: Any, device: SimulatedDevice) -> None:
    stream: Any = _streams(device)[0]
    model.set_all_reduce_hook(lambda buffer: buffer.mul_(0.5), stream=stream)
    for block in model:
        block.set_all_reduce_hook(lambda buffer: buffer.mul_(0.5), stream=stream)


_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gather(Allocating, AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: Any = 0) -> Any:
        return _all_gather(output_tensor, input_tensor, group, async_op)


class _Reduce(Allocating, ReduceScatter):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: Any = 0
    ) -> Any:
        return _reduce_scatter(output_tensor, input_tensor, op, group, async_op)


def custom(model: Any, device: SimulatedDevice) -> None:
    """Bring collectives along, which allocate for themselves."""
    for module in (*model, model):
        module.set_custom_all_gather(_Gather())
        module.set_custom_reduce_scatter(_Reduce())


def custom_on_branches(model: Any, device: SimulatedDevice) -> None:
    custom(model, device)
    branches(model, device)


def without_some_gradients(model: Any, device: SimulatedDevice) -> None:
    for block in model if dist.get_rank() == 0 else ():
        block.forward = lambda x, block=block: block.norm(x + block.narrow(block.wide(x).relu()))


def sits_out(model: Any, device: SimulatedDevice) -> None:
    """Sit out two blocks, or all, now and then; another time on each rank."""
    num_calls = dist.get_rank()

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        for number, block in enumerate(model):
            is_out = num_calls % 4 == 2 or (num_calls % 4 == 0 and number in (1, 3))
            x = x + sit_out(block) if is_out else block(x)
        return x

    model.forward = forward


@contextlib.contextmanager
def sometimes_without_all_reduce(model: Any, device: SimulatedDevice, step: int) -> Iterator[None]:
    model.set_requires_all_reduce(step % 2 == 1)
    yield


@contextlib.contextmanager
def dropped(model: Any, device: SimulatedDevice, step: int) -> Iterator[None]:
    """Drop a gather that is under way, and what a backward has launched."""
    model[1].unshard(async_op=True)
    model[1].reshard()
    yield


def _streams(device: SimulatedDevice) -> list[Stream]:
    streams: list[Stream] = device.__dict__.setdefault("of_the_test", [])
    if not streams:
        streams += [Stream(), Stream()]
    return streams


_OF_ANY_DEVICE = (
    Training.prepare,
    Training.around,
    custom,
    without_some_gradients,
    sits_out,
    sometimes_without_all_reduce,
    dropped,
)

LOW_OPTIONS, OFFLOADED = {"mp_policy": LOW}, {"offload_policy": OFFLOAD}
KEPT, FEWER = {"reshard_after_forward": False}, {"reshard_after_forward": 2}
LOW_AND_OFFLOADED = {**LOW_OPTIONS, **OFFLOADED}
INT8 = MixedPrecisionPolicy(gather_wire=torch.int8, reduce_wire=torch.int8)
PARTS = {"sharding": "hybrid"}

PROGRAMS: dict[str, Training] = {
    "bf16": Training(options=LOW_OPTIONS),
    "one shard": Training(shards=1, options=LOW_OPTIONS),
    "replicas alone": Training(shards=1, replicas=2),
    "kept after forward": Training(options=KEPT),
    "replicas, now and then": Training(
        replicas=2, around=sometimes_without_all_reduce, accumulates=True
    ),
    "offload, one shard": Training(shards=1, options=OFFLOADED),
    "subclasses, fewer ranks": Training(shards=4, has_subclasses=True, options=FEWER),
    "parts, bf16, now and then": Training(
        replicas=2,
        options={**LOW_OPTIONS, **PARTS},
        around=sometimes_without_all_reduce,
        accumulates=True,
    ),
    "missing gradients, replicas": Training(replicas=2, prepare=without_some_gradients),
    "sitting out, offload": Training(prepare=sits_out, options=OFFLOADED),
    "weighed, replicas": Training(replicas=2, weighs=True),
    "custom, subclasses": Training(prepare=custom, has_subclasses=True),
    "dropped": Training(around=dropped, options=LOW_OPTIONS),
    "once in a step": Training(options={"sharding": "zero1", **LOW_OPTIONS}, accumulates=True),
    # In a brief run only faults are planted in these.
    "plain": Training(),
    "replicas": Training(replicas=2),
    "replicas, bf16": Training(replicas=2, options=LOW_OPTIONS),
    "offload": Training(options=OFFLOADED),
    "missing gradients": Training(prepare=without_some_gradients),
    # What gives work to streams.
    "another stream": Training(around=on_another_stream, options=LOW_OPTIONS),
    "gathered beside": Training(around=gathered_beside),
    "gathered beside, bf16": Training(around=gathered_beside, options=LOW_OPTIONS),
    "gathered beside, one shard": Training(shards=1, around=gathered_beside, options=LOW_OPTIONS),
    "kept, gathered without waiting": Training(
        around=kept_and_gathered_without_waiting, accumulates=True
    ),
    "used beside, freed here": Training(around=used_beside_and_freed_here, options=KEPT),
    "optimizer beside": Training(around=optimizer_beside),
    "blocks on streams, replicas": Training(replicas=2, prepare=blocks_on_streams),
    "blocks on streams, once in a step": Training(
        prepare=blocks_on_streams, options={"sharding": "zero2", **OFFLOADED}, accumulates=True
    ),
    "encoded, offload, gathered beside": Training(
        around=gathered_beside, options={"mp_policy": INT8, **OFFLOADED}
    ),
    "encoded, branches, replicas": Training(
        replicas=2, prepare=branches, options={"mp_policy": INT8}
    ),
    "blocks on streams, fewer ranks": Training(shards=4, prepare=blocks_on_streams, options=FEWER),
    "branches, replicas": Training(replicas=2, prepare=branches),
    "parts, another stream": Training(replicas=2, options=PARTS, around=on_another_stream),
    "parts, blocks on streams": Training(replicas=2, options=PARTS, prepare=blocks_on_streams),
    "parts, optimizer beside": Training(replicas=2, options=PARTS, around=optimizer_beside),
    "branches, one of them at first": Training(
        prepare=branches,
        around=first_both_then_one,
        after_backward=lambda device: _work_on(_streams(device)[0]),
        accumulates=True,
    ),
    "a hook": Training(prepare=hook_on_a_stream),
    "custom, offload, branches": Training(prepare=custom_on_branches, options=OFFLOADED),
    "custom, offload, gathered beside": Training(
        prepare=custom, around=gathered_beside, options=OFFLOADED
    ),
    "offload, branches, bf16": Training(prepare=branches, options=LOW_AND_OFFLOADED),
    "offload, blocks on streams": Training(prepare=blocks_on_streams, options=OFFLOADED),
}
