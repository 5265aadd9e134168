"""One step of a sharded model, run without memory as the first of ranks that are not there."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from composable_shard import _torch, core
from composable_shard.core import hooks, nested, optimizers, reduction, storage
from composable_shard.core.group import ParamGroup
from composable_shard.core.storage import Bucket, ShardedParam
from composable_shard.core.transport.collectives import (
    AllGatherLaunch,
    ReduceScatterLaunch,
    Tensors,
)
from composable_shard.core.transport.pending import Waitable
from composable_shard.insight.events import listening
from composable_shard.module import group_of

# Which bytes live at each moment of a step that runs without memory -------------------------------

# Frames of the core stand behind what the library allocates, but for those that cast what modules
# take and give, which is part of compute.
_CORE = f"{core.__name__}."
_COMPUTES = {module.__name__ for module in (hooks, nested, optimizers)}


class Live(NamedTuple):
    """Bytes that live at one moment.

    Attributes:
        gathered: Unsharded parameters, and what gathers need besides.
        gradients: Gradients: as autograd leaves them, on their way, and reduced.
        activations: What compute made and still needs.
    """

    gathered: int = 0
    gradients: int = 0
    activations: int = 0


class LiveBytes(_torch.DispatchMode):
    """Follows the storages that operations make.

    Attributes:
        peak: The moment with the most bytes since the last :meth:`restart`.
        flops: Floating-point operations since then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = Live()
        self.flops = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._gathered: set[int] = set()  # these are resized
        self._counted: dict[int, tuple[str, int]] = {}
        self._totals: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back as operations on local tensors
        if _torch.reads_a_value(func) and _maker() != "activations":
            return 0  # whether another rank has a gradient that this one lacks: nobody is there
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += _torch.flops_of(func, args, kwargs, result)
        new = [tensor for tensor in _torch.tensors_of(result) if not self._knows(tensor)]
        if new:
            self.count(new, _maker())
        return result

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these as what was there before."""
        for tensor in tensors:
            if not self._knows(tensor):
                self._remember(tensor.untyped_storage())

    def count(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count storages as one of the kinds of :class:`Live` from now on."""
        for tensor in tensors:
            memory = tensor.untyped_storage()
            if not self._knows(tensor):
                self._remember(memory)
            if kind == "gathered":
                self._gathered.add(id(memory))
            elif id(memory) not in self._counted:
                self._counted[id(memory)] = kind, memory.nbytes()
                self._totals[kind] += memory.nbytes()
        if kind == "gathered":
            self.look()
        self.peak = max(self.peak, self.now, key=sum)

    def look(self) -> None:
        """Look how large gathered memory is now, which is resized unseen."""
        resized = (self._known[key]() for key in self._gathered)
        nbytes = sum(memory.nbytes() for memory in resized if memory is not None)
        self._totals["gathered"] = nbytes
        self.peak = max(self.peak, self.now, key=sum)

    def forget(self) -> None:
        """Count what lives now as what was there before, but for what is gathered."""
        self._counted.clear()
        self._totals.clear()
        self.look()
        self.restart()

    def restart(self) -> None:
        """Begin to look for a peak, and to count, from here."""
        self.peak, self.flops = self.now, 0

    @property
    def now(self) -> Live:
        """What lives."""
        return Live(*(self._totals[kind] for kind in Live._fields))

    def call_gradient(self, grad: torch.Tensor) -> None:
        """Count a tensor as the gradient of an unsharded parameter from now on."""
        if self.drop(grad, "activations"):
            self.count([grad], "gradients")

    def drop(self, tensor: torch.Tensor, kind: str) -> bool:
        """Count a tensor no more, if it is counted as one of this kind; return whether it was."""
        key = id(tensor.untyped_storage())
        is_counted = self._counted.get(key, ("", 0))[0] == kind
        if is_counted:
            self._totals[kind] -= self._counted.pop(key)[1]
        return is_counted

    def _knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._known

    def _remember(self, memory: torch.UntypedStorage) -> None:
        key = id(memory)
        self._known[key] = weakref.ref(memory, lambda _: self._die(key))

    def _die(self, key: int) -> None:
        """Forget a storage that is no more."""
        del self._known[key]
        self._gathered.discard(key)
        kind, nbytes = self._counted.pop(key, ("", 0))
        self._totals[kind] -= nbytes


def _maker() -> str:
    """Tell whether a gather, a reduction or compute runs, as :class:`Live` calls what they make."""
    frame: FrameType | None = sys._getframe(2)
    made = "activations"
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in (storage.__name__, reduction.__name__):
            return "gathered" if name == storage.__name__ else "gradients"
        if name.startswith(_CORE) and name not in _COMPUTES:
            made = "gradients"
        frame = frame.f_back
    return made


# What an optimizer keeps for the shards of one rank, and what its step needs besides --------------

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of one rank.

    Attributes:
        state: What it keeps from step to step.
        besides: What a step needs besides at its peak.
    """

    state: int = 0
    besides: int = 0


def optimizer_bytes(
    factory: OptimizerFactory, like: Sequence[torch.Tensor], *, at_once: bool
) -> OptimizerBytes:
    """Let an optimizer step on shards without memory.

    Args:
        factory: Makes the optimizer.
        like: Tensors of the shapes and dtypes that one rank holds.
        at_once: Whether it takes all parameters at once, as torch's own do on an accelerator, if
            the user has not chosen.

    Raises:
        ValueError: If the optimizer asks for values.
    """
    if not like:
        return OptimizerBytes()
    shards = [nn.Parameter(torch.empty_like(tensor)) for tensor in like]
    optimizer = factory(shards)
    for group in optimizer.param_groups:
        if at_once and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    live = LiveBytes()
    for shard in shards:
        shard.grad = torch.empty_like(shard)
        live.ignore([shard, shard.grad])
    try:
        with live:
            optimizer.step()
            state = live.now.activations
            live.restart()
            optimizer.step()
    except _torch.ReadsValues as error:
        raise ValueError(
            f"Expected an optimizer whose step reads no values, got {type(optimizer).__name__}; "
            "pass another one with as much state, or optimizer=None to leave it out"
        ) from error
    return OptimizerBytes(state, live.peak.activations - state)


# Building, sharding and running a model without memory --------------------------------------------


class Moment(NamedTuple):
    """An event of a group, and what happened since the one before.

    Attributes:
        event: Which; empty at the end of the step.
        group: The place of the group; -1 at the end.
        peak: The most that lived since.
        flops: Floating-point operations since.
    """

    event: str
    group: int
    peak: Live
    flops: int


@dataclass(frozen=True)
class Rehearsal:
    """A model on the first of some ranks, none of which is there, and one step of it.

    Attributes:
        model: The sharded model.
        groups: Its groups.
        moments: The step.
        lasting: Tensors that are not sharded: parameters, buffers, the batch.
        used: The parameters that got a gradient.
        at_end: What lives when all gradients are reduced.
        offloaded_grads: Bytes of reduced gradients that are kept on the CPU.
    """

    model: nn.Module
    groups: Sequence[ParamGroup]
    moments: Sequence[Moment]
    lasting: Sequence[torch.Tensor]
    used: set[ShardedParam]
    at_end: Live
    offloaded_grads: int


@contextlib.contextmanager
def rehearsed(
    build_model: Callable[[], nn.Module],
    shard: Callable[[nn.Module, DeviceMesh], object],
    batch: Any,
    loss: Callable[[Any, Any], torch.Tensor],
    mesh_shape: tuple[int, ...],
    device_type: str,
) -> Iterator[Rehearsal]:
    """Run a step without memory; the model can be asked for more within the context.

    See :func:`composable_shard.estimate` for the arguments, and for what it raises.
    """
    from composable_shard.testing.ranks import fake_ranks

    names = ("replicate", "shard")[-len(mesh_shape) :]
    backend = dist.Backend.default_device_backend_map.get(device_type, "nccl")
    with (
        fake_ranks(torch.Size(mesh_shape).numel()),
        _torch.pretended_backend(backend),
        _torch.poisoned_memory(False),  # which keeps memory for a while
        _values_are_not_asked_for(),
    ):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        fake = _torch.fake_tensors()
        with fake:
            model = build_model()
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"Expected build_model to return an nn.Module, got {type(model).__name__}"
                )
            _take_off_meta(model)
            shard(model, mesh)
        groups = _groups_of(model)
        for tree in dict.fromkeys(group.tree for group in groups):
            tree.agree()  # it compares numbers, which fake tensors do not have
        for channel in (channel for group in groups for channel in group.channels.values()):
            channel.all_gather = SilentAllGather()
            channel.reduce_scatter = SilentReduceScatter(widens=device_type == "cpu")
        with fake:
            given = batch() if callable(batch) else _torch.without_memory(batch)

            def run() -> None:
                loss(_call(model, given), given).backward()

            yield _run(model, groups, given, run, is_accelerator=device_type != "cpu")


@contextlib.contextmanager
def _values_are_not_asked_for() -> Iterator[None]:
    try:
        yield
    except _torch.ReadsValues as error:
        error.add_note(
            "estimate runs the model on tensors without values, and something in it, or in "
            "the loss, asks one for its value"
        )
        raise


def _take_off_meta(model: nn.Module) -> None:
    """Replace what is on the meta device by tensors that pass for real, ties kept."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or tensor.device.type != "meta":
                    continue
                if tensor not in made:
                    like = torch.empty_like(tensor, device="cpu")
                    is_param = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(like, tensor.requires_grad) if is_param else like
                held[name] = made[tensor]  # type: ignore[assignment]


def _groups_of(model: nn.Module) -> list[ParamGroup]:
    found = (group_of(module) for module in model.modules())
    groups = list(dict.fromkeys(group for group in found if group is not None))
    if not groups:
        raise ValueError(
            f"Expected shard to apply fully_shard to {type(model).__name__}, got no sharded module"
        )
    if not all(isinstance(bucket, Bucket) for group in groups for bucket in group.buckets):
        raise ValueError(
            "Expected plain parameters, which can be laid out for any number of ranks, got a "
            "tensor subclass; estimate the model before its parameters are converted"
        )
    return groups


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


class SilentAllGather(AllGatherLaunch):
    """Sends nothing, and leaves the output as it was."""

    def launch(self, outputs: Tensors, inputs: Tensors, group: Any, tag: int) -> list[Waitable]:
        """Return at once."""
        return []


class SilentReduceScatter(ReduceScatterLaunch):
    """Sends nothing, and leaves the output as it was."""

    def __init__(self, *, widens: bool) -> None:
        self.widens = self.keeps_inputs = widens  # as those of the library for the CPU do

    def averages(self, group: Any, device: torch.device) -> bool:
        """Divide nothing by operations."""
        return True

    def launch(
        self, outputs: Tensors, inputs: Tensors, group: Any, op: Any, tag: int
    ) -> list[Waitable]:
        """Return at once."""
        return []


def _run(
    model: nn.Module,
    groups: Sequence[ParamGroup],
    batch: Any,
    run: Callable[[], None],
    *,
    is_accelerator: bool,
) -> Rehearsal:
    """Run a step twice and record the second one, which knows the order."""
    params = [param for group in groups for param in group.params]
    buckets = [bucket for group in groups for bucket in group.buckets if isinstance(bucket, Bucket)]
    ours = {id(param.sharded) for param in params}
    others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in ours]
    lasting = [*others, *_torch.tensors_of(batch)]
    live, used = LiveBytes(), set[ShardedParam]()
    live.ignore([*lasting, *(p.local for p in params), *(one.sharded for one in buckets)])
    moments: list[Moment] = []
    offloaded: dict[ShardedParam, int] = {}

    def hear(places: Mapping[str, int], event: str, name: str) -> None:
        live.look()
        place = places[name]
        for param in groups[place].params:
            if event == "post_backward" and param.unsharded.grad is not None:
                live.call_gradient(param.unsharded.grad)
                used.add(param)
            grad = param.sharded.grad
            if is_accelerator and param.offload is not None and grad is not None:
                local = _torch.local_tensor(grad)
                live.drop(local, "gradients")
                offloaded[param] = local.nbytes
        moments.append(Moment(event, place, live.peak, live.flops))
        live.restart()

    with live, contextlib.ExitStack() as stack:
        run()
        model.zero_grad()
        live.forget()
        for tree in dict.fromkeys(group.tree for group in groups):
            places = {group.name: i for i, group in enumerate(groups) if group.tree is tree}
            stack.enter_context(listening(tree, partial(hear, places)))
        for param in params:
            if param.unsharded.requires_grad:
                hook = param.unsharded.register_hook(live.call_gradient)
                stack.callback(hook.remove)
        run()
        moments.append(Moment("", -1, live.peak, live.flops))
        at_end = live.now
        model.zero_grad()
    return Rehearsal(model, groups, moments, lasting, used, at_end, sum(offloaded.values()))
