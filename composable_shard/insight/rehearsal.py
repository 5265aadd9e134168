"""One step of a sharded model without memory, on the first of ranks that do not exist."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from composable_shard.core.transport.collectives import ReduceScatterLaunch
from composable_shard.core.transport.pending import Waitable
from composable_shard.insight.events import groups_in, listening
from composable_shard.optim.blocks import Block, LayoutSteps
from composable_shard.optim.layouts import (
    BUCKET_NBYTES,
    Fits,
    Layout,
    Sharded,
    check,
    cut_rule,
    plan_group,
    sort_by_layout,
)
from composable_shard.optim.stepping import plan_bucket

# The bytes that live at each moment of a step without memory --------------------------------------

# An allocation of the library has a frame of the core on the stack. Frames that cast the inputs and
# outputs of modules do not count: they are part of compute.
_MAKERS = {storage.__name__: "gathered", reduction.__name__: "gradients"}
_COMPUTES = {module.__name__ for module in (hooks, nested, optimizers)}


class Live(NamedTuple):
    """Bytes that live at one moment.

    Attributes:
        gathered: Unsharded parameters, and the other memory of gathers.
        gradients: Gradients: from autograd, in flight, and reduced.
        activations: Tensors that compute made and still needs.
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
        self.peak, self.flops = Live(), 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._counted: dict[int, tuple[str, int]] = {}
        self._gathered: set[int] = set()  # these are resized
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
            return 0  # no other rank has a gradient that this rank lacks
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.flops += _torch.flops_of(func, args, kwargs, result)
        made = _torch.tensors_of(result)
        new = [tensor for tensor in made if id(tensor.untyped_storage()) not in self._known]
        if new:
            self.count(new, _maker())
        return result

    def count(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Count storages as one of the kinds of :class:`Live` from now on; not at all as ``""``."""
        for tensor in tensors:
            memory = tensor.untyped_storage()
            key = id(memory)
            if key not in self._known:
                self._known[key] = weakref.ref(memory, partial(self._forget, key))
            self._set(key, kind, memory.nbytes())
            (self._gathered.add if kind == "gathered" else self._gathered.discard)(key)
        if kind == "gathered":
            self.look()
        self.peak = max(self.peak, self.now, key=sum)

    def recount(self, tensor: torch.Tensor, before: str, after: str) -> None:
        """Count a storage as another kind from now on, if it is counted as ``before``."""
        if self._counted.get(id(tensor.untyped_storage()), ("", 0))[0] == before:
            self.count([tensor], after)

    def look(self) -> None:
        """Read the size of gathered memory, which is resized without an operation."""
        for key in self._gathered:
            memory = self._known[key]()
            self._set(key, "gathered", 0 if memory is None else memory.nbytes())
        self.peak = max(self.peak, self.now, key=sum)

    def leave_out(self) -> None:
        """Count nothing that lives now any more, except gathered memory."""
        for key in self._counted.keys() - self._gathered:
            self._set(key, "", 0)
        self.look()
        self.restart()

    def restart(self) -> None:
        """Forget the peak and the operations so far."""
        self.peak, self.flops = self.now, 0

    @property
    def now(self) -> Live:
        """The bytes that live."""
        return Live(*(self._totals[kind] for kind in Live._fields))

    def _set(self, key: int, kind: str, nbytes: int) -> None:
        before, old_nbytes = self._counted.get(key, ("", 0))
        self._totals[before] -= old_nbytes
        self._totals[kind] += nbytes
        self._counted[key] = kind, nbytes

    def _forget(self, key: int, _: object) -> None:
        """Forget a storage that has been freed."""
        self._set(key, "", 0)
        self._gathered.discard(key)
        del self._known[key], self._counted[key]


def _maker() -> str:
    """Return the attribute of :class:`Live` for memory that the running code allocates."""
    frame: FrameType | None = sys._getframe(2)
    made = "activations"
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _MAKERS:
            return _MAKERS[name]
        if name.startswith(f"{core.__name__}.") and name not in _COMPUTES:
            made = "gradients"
        frame = frame.f_back
    return made


# The memory of an optimizer for the shards of one rank --------------------------------------------

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class OptimizerBytes(NamedTuple):
    """Bytes of one rank.

    Attributes:
        state: The state that it keeps from step to step.
        besides: Further bytes of a step at its peak.
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
        at_once: Whether it steps all parameters at once, if the user has not chosen: torch's own
            optimizers do on an accelerator.

    Raises:
        ValueError: If the optimizer reads values.
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
        live.count([shard, shard.grad], "")
    try:
        with live:
            optimizer.step()
            state = live.now.activations
            live.restart()
            optimizer.step()
    except _torch.ReadsValues as error:
        raise ValueError(
            f"Expected an optimizer step that reads no values, got {type(optimizer).__name__}; "
            "pass another one with as much state, or optimizer=None to leave it out"
        ) from error
    return OptimizerBytes(state, live.peak.activations - state)


# The step of an optimizer of whole matrices, on the rank with the most work -----------------------


def plan_layouts(
    model: nn.Module, layouts: Mapping[Fits, Layout], *, at_once: bool
) -> tuple[LayoutSteps, OptimizerBytes]:
    """Return the step of the rank with the most work, and the bytes that its optimizers need.

    Args:
        model: A sharded model.
        layouts: As for ``with_layout``.
        at_once: See :func:`optimizer_bytes`.

    Raises:
        ValueError: If a parameter does not fit its layout.
    """
    rules = sort_by_layout(model, layouts)
    loads: dict[tuple[int, ...], list[int]] = {}
    cuts: list[list[list[Block]]] = []
    for layout, params in rules:
        check(layout, params)
        meshes = [() if param.mesh is None else tuple(param.mesh.shape) for param in params]
        cuts.append([])
        if not isinstance(layout, Sharded):
            cut = cut_rule(layout, params, meshes, loads, BUCKET_NBYTES)
            cuts[-1] = [blocks for _, blocks in cut]
    load = next(iter(loads.values()), [0])
    rank = load.index(max(load))
    groups, needed = [], [OptimizerBytes()]
    for (layout, params), buckets in zip(rules, cuts, strict=True):
        stepped, plans = [], []
        for blocks in buckets:
            place = rank % len(blocks[0].spread.boxes)
            plans.append(plan_bucket(params, blocks, place, params[0].local().device))
            dtypes = [params[block.param].tensor.dtype for block in plans[-1].owned]
            pairs = zip(plans[-1].owned, dtypes, strict=True)
            stepped.append([torch.empty(block.shape, dtype=dtype) for block, dtype in pairs])
        num_tensors = None
        if isinstance(layout, Sharded):
            stepped = [[param.local() for param in params if param.tensor.requires_grad]]
            num_tensors = len(stepped[0])
        groups.append(plan_group(layout, params, plans, num_tensors))
        make = partial(_make_optimizer, layout)
        needed += [optimizer_bytes(make, like, at_once=at_once) for like in stepped]
    steps = LayoutSteps(tuple(groups), tuple(loads.values()))
    besides = steps.most_held + max(one.besides for one in needed)
    return steps, OptimizerBytes(sum(one.state for one in needed), besides)


def _make_optimizer(layout: Layout, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return layout.optimizer([{"params": list(params)}])


# Building, sharding and running a model without memory --------------------------------------------


class Moment(NamedTuple):
    """An event of a group, and the work since the event before.

    Attributes:
        event: The event; empty at the end of the step.
        group: The group; ``None`` at the end.
        peak: The most bytes that lived since.
        flops: Floating-point operations since.
    """

    event: str
    group: ParamGroup | None
    peak: Live
    flops: int


@contextlib.contextmanager
def rehearsed(
    build_model: Callable[[], nn.Module],
    shard: Callable[[nn.Module, DeviceMesh], object],
    batch: Any,
    loss: Callable[[Any, Any], torch.Tensor],
    mesh_shape: tuple[int, ...],
    device_type: str,
) -> Iterator[Rehearsal]:
    """Run a step without memory; the model can be examined further within the context.

    See :func:`composable_shard.estimate` for the arguments and the errors.
    """
    from composable_shard.testing.ranks import fake_ranks

    names = ("replicate", "shard")[-len(mesh_shape) :]
    backend = dist.Backend.default_device_backend_map.get(device_type, "nccl")
    with (
        fake_ranks(torch.Size(mesh_shape).numel()),
        _torch.pretended_backend(backend),
        _torch.poisoned_memory(False),  # which keeps memory for a while
    ):
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        fake = _torch.fake_tensors()
        with fake:
            model = build_model()
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"Expected build_model to return an nn.Module, got {type(model).__name__}"
                )
            shard(model, mesh)
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                model.to_empty(device="cpu")
        groups = groups_in(model)
        if not all(isinstance(bucket, Bucket) for group in groups for bucket in group.buckets):
            raise ValueError(
                "Expected plain parameters, which can be laid out for any number of ranks, got a "
                "tensor subclass; estimate the model before its parameters are converted"
            )
        for tree in dict.fromkeys(group.tree for group in groups):
            tree.agree()  # it compares numbers, which fake tensors do not have
        for channel in (channel for group in groups for channel in group.channels.values()):
            channel.all_gather = channel.reduce_scatter = Silent(is_widening=device_type == "cpu")
        with fake:
            given = batch() if callable(batch) else _torch.without_memory(batch)
            rehearsal = Rehearsal(model, groups, given, is_accelerator=device_type != "cpu")
            rehearsal.record(lambda: loss(_call(model, given), given).backward())
            yield rehearsal


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


class Silent(ReduceScatterLaunch):
    """A gather or reduction that sends nothing, and leaves the outputs as they were."""

    def __init__(self, *, is_widening: bool) -> None:
        self.widens = self.keeps_inputs = is_widening  # as those of the library for the CPU do

    def averages(self, group: Any, device: torch.device) -> bool:
        """Claim to average, so that the library divides nothing."""
        return True

    def launch(self, *_: Any, **__: Any) -> list[Waitable]:
        """Return at once."""
        return []


class Rehearsal:
    """One step of a model on the first of some ranks that do not exist.

    Attributes:
        model: The sharded model.
        groups: Its groups.
        moments: The step.
        lasting: Tensors that are not sharded: parameters, buffers, the batch.
        used: The parameters that got a gradient.
        at_end: The bytes that live when all gradients are reduced.
        offloaded: Bytes of the reduced gradients that are kept on the CPU.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[ParamGroup], batch: Any, *, is_accelerator: bool
    ) -> None:
        self.model, self.groups, self._is_accelerator = model, groups, is_accelerator
        self._live = LiveBytes()
        self._params = [param for group in groups for param in group.params]
        ours = {id(param.sharded) for param in self._params}
        others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in ours]
        self.lasting = [*others, *_torch.tensors_of(batch)]
        self.moments, self.used = list[Moment](), set[ShardedParam]()
        self.at_end = Live()
        self.offloaded: dict[ShardedParam, int] = {}

    def record(self, run: Callable[[], None]) -> None:
        """Run a step twice and record the second, which has an execution order."""
        live = self._live
        with live, contextlib.ExitStack() as stack:
            run()
            self.model.zero_grad()
            buckets = [b for group in self.groups for b in group.buckets if isinstance(b, Bucket)]
            shards = [*(param.local for param in self._params), *(b.sharded for b in buckets)]
            live.count([*self.lasting, *shards], "")
            live.leave_out()
            for tree in dict.fromkeys(group.tree for group in self.groups):
                named = {group.name: group for group in tree.groups}
                stack.enter_context(listening(tree, partial(self._hear, named)))
            for param in self._params:
                if param.unsharded.requires_grad:
                    hook = param.unsharded.register_hook(self._take_gradient)
                    stack.callback(hook.remove)
            run()
            self.moments.append(Moment("", None, live.peak, live.flops))
            self.at_end = live.now
            self.model.zero_grad()

    def _take_gradient(self, grad: torch.Tensor) -> None:
        self._live.recount(grad, "activations", "gradients")

    def _hear(self, groups: Mapping[str, ParamGroup], event: str, name: str) -> None:
        live, group = self._live, groups[name]
        live.look()
        for param in group.params:
            if event == "post_backward" and param.unsharded.grad is not None:
                self._take_gradient(param.unsharded.grad)
                self.used.add(param)
            grad = param.sharded.grad
            if self._is_accelerator and param.offload is not None and grad is not None:
                local = _torch.local_tensor(grad)
                live.recount(local, "gradients", "")
                self.offloaded[param] = local.nbytes
        self.moments.append(Moment(event, group, live.peak, live.flops))
        live.restart()
