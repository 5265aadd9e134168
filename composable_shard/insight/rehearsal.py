"""One step of a sharded model, run without memory on a few ranks that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable_shard import _torch
from composable_shard.core.group import ParamGroup
from composable_shard.core.storage import ShardedParam
from composable_shard.core.transport.collectives import (
    AllGatherLaunch,
    ReduceScatterLaunch,
    Tensors,
)
from composable_shard.core.transport.pending import Waitable
from composable_shard.errors import ShardError
from composable_shard.insight.events import listening
from composable_shard.insight.group_plan import Elsewhere, GroupPlan, is_plain, read_group
from composable_shard.insight.layout_plan import plan_layouts
from composable_shard.insight.live_bytes import (
    Live,
    LiveBytes,
    OptimizerBytes,
    OptimizerFactory,
    optimizer_bytes,
    shards_of,
)
from composable_shard.module import group_of
from composable_shard.optim.layouts import Fits, Layout
from composable_shard.optim.plan import LayoutSteps

# What is asked of ``estimate``, checked before anything is built ----------------------------------

NEIGHBOURS = 2
"""From how many ranks the rehearsing ones gather, for any number of neighbours."""

Shard = Callable[[nn.Module, DeviceMesh], object]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Ranks:
    """A mesh of ``num_replicas`` times ``num_shards`` ranks.

    Attributes:
        num_replicas: Ranks that hold the same shards.
        num_shards: Ranks that share each parameter.
        is_hybrid: Whether the mesh has an axis for the replicas.
        num_neighbours: What ``reshard_after_forward`` is, if it is a number of ranks between.
    """

    num_replicas: int
    num_shards: int
    is_hybrid: bool
    num_neighbours: int | None

    @property
    def rehearsing(self) -> tuple[int, int]:
        """Replicas and shards of the smallest mesh on which a step takes the same course."""
        shards = min(self.num_shards, 2) if self.num_neighbours is None else 2 * NEIGHBOURS
        return min(self.num_replicas, 2), shards


@dataclass(frozen=True)
class Question:
    """How to build, shard and train the model.

    Attributes:
        build_model: Makes it.
        shard: Applies ``fully_shard`` to it.
        batch: What one rank's forward takes, or a function that makes it.
        loss: Makes a scalar of the output and the batch.
        optimizer: Makes the optimizer, or says how each parameter is stepped.
        device_type: For which devices.
    """

    build_model: Callable[[], nn.Module]
    shard: Shard
    batch: Any
    loss: Loss
    optimizer: OptimizerFactory | Mapping[Fits, Layout] | None
    device_type: str

    @property
    def is_accelerator(self) -> bool:
        """Whether it is for an accelerator rather than the CPU."""
        return self.device_type != "cpu"

    @property
    def backend(self) -> str | None:
        """The backend that such devices have by themselves."""
        return dist.Backend.default_device_backend_map.get(self.device_type)


def checked_ranks(mesh_shape: object, reshard_after_forward: Any) -> Ranks:
    """Return the mesh that is asked for.

    Raises:
        ValueError: If it is no number of ranks, nor ``(replicas, shards)``, or cannot be divided.
    """
    shape: Any = (mesh_shape,) if isinstance(mesh_shape, int) else mesh_shape
    is_shape = isinstance(shape, (tuple, list)) and len(shape) in (1, 2)
    if not is_shape or not all(map(_is_count, shape)):
        raise ValueError(
            f"Expected mesh_shape to be a number of ranks or (replicas, shards), got {mesh_shape!r}"
        )
    num_shards = shape[-1]
    neighbours = reshard_after_forward if _is_count(reshard_after_forward) else None
    if neighbours is not None and num_shards % neighbours:
        raise ValueError(
            "Expected reshard_after_forward to divide the number of shards, got "
            f"{neighbours} for {num_shards} shards"
        )
    if neighbours in (1, num_shards):
        neighbours = None
    is_hybrid = len(shape) == 2
    return Ranks(shape[0] if is_hybrid else 1, num_shards, is_hybrid, neighbours)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def rehearsing_arguments(ranks: Ranks, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of ``fully_shard`` that mean on few ranks what they mean on many."""
    reshard = kwargs.get("reshard_after_forward")
    if not _is_count(reshard):
        return dict(kwargs)
    if ranks.num_neighbours is not None:
        meant: bool | int = NEIGHBOURS
    else:
        meant = reshard == ranks.num_shards and ranks.num_shards > 1
    return {**kwargs, "reshard_after_forward": meant}


def check_no_process_group() -> None:
    """Raise ``ShardError`` if this process has a process group, which must not be disturbed."""
    if dist.is_initialized():
        raise ShardError(
            "Expected estimate in a process without a process group, got one of backend "
            f"'{dist.get_backend()}'; call it before init_process_group, or in a process of its own"
        )


def default_loss(output: Any, batch: Any) -> torch.Tensor:
    """Take the ``loss`` of an output that has one, else the sum of a tensor.

    Raises:
        TypeError: If it is neither.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if not isinstance(output, torch.Tensor):
        raise TypeError(
            "Expected forward to return a tensor, or an output with a loss, got "
            f"{type(output).__name__}; pass loss=, a function of the output and the batch"
        )
    return output.sum()


# Building, sharding and running a model without memory, on few ranks that are not there -----------


@dataclass(frozen=True)
class Rehearsal:
    """What was found out.

    Attributes:
        moments: A step.
        groups: The plans of all groups, for the number of ranks that was asked for.
        num_parameters: Elements of all parameters.
        unsharded: Bytes of what is not sharded: parameters, buffers, the batch.
        optimizer: What the optimizer needs for the shards on the device.
        offloaded_optimizer: The same for those on the CPU.
        layouts: What a step of whole matrices does, if there is one.
    """

    moments: tuple[Moment, ...]
    groups: tuple[GroupPlan, ...]
    num_parameters: int
    unsharded: int
    optimizer: OptimizerBytes
    offloaded_optimizer: OptimizerBytes
    layouts: LayoutSteps | None


def rehearse(question: Question, ranks: Ranks) -> Rehearsal:
    """Run a step without memory; see :func:`composable_shard.estimate` for what it raises."""
    from composable_shard.testing.ranks import fake_ranks

    replicas, shards = ranks.rehearsing
    with fake_ranks(replicas * shards):
        mesh = _mesh(ranks.is_hybrid, replicas, shards)
        fake = _torch.fake_tensors()
        with fake:
            model = question.build_model()
            if not isinstance(model, nn.Module):
                raise TypeError(
                    f"Expected build_model to return an nn.Module, got {type(model).__name__}"
                )
            _take_off_meta(model)
            question.shard(model, mesh)
        groups = _groups_of(model)
        for context in dict.fromkeys(group.tree for group in groups):
            context.agree()  # it compares numbers, which fake tensors do not have
        silence(groups, widens=not question.is_accelerator)
        with fake:
            try:
                return _run(question, ranks, model, groups)
            except _torch.ReadsValues as error:
                error.add_note(
                    "estimate runs the model on tensors without values, and something in it, or in "
                    "the loss, asks one for its value"
                )
                raise


def _mesh(is_hybrid: bool, replicas: int, shards: int) -> DeviceMesh:
    if not is_hybrid:
        return init_device_mesh("cpu", (shards,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


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
    for group in groups:
        if not is_plain(group):
            raise ValueError(
                "Expected plain parameters, which can be laid out for any number of ranks, got a "
                "tensor subclass; estimate the model before its parameters are converted"
            )
        for param in group.params:
            if not _is_known(param, group):
                raise ValueError(
                    "Expected parameters over the shards of the mesh, or over all of it, got "
                    f"'{param.name}' over others; estimate knows one axis of shards and one of "
                    "replicas"
                )
    return groups


def _is_known(param: ShardedParam, group: ParamGroup) -> bool:
    axes = param.mesh.mesh.mesh_dim_names
    return param.mesh == group.mesh and param.placement.model is None and axes != ("replicate",)


def _run(
    question: Question, ranks: Ranks, model: nn.Module, groups: Sequence[ParamGroup]
) -> Rehearsal:
    names = {module: name for name, module in model.named_modules()}
    batch = question.batch() if callable(question.batch) else _torch.without_memory(question.batch)
    sharded = [param.sharded for group in groups for param in group.params]
    ours = {id(tensor) for tensor in sharded}
    others = [t for t in (*model.parameters(), *model.buffers()) if id(t) not in ours]
    lasting = [*others, *_torch.tensors_of(batch)]
    locals_ = [param.local for group in groups for param in group.params]

    def run() -> None:
        question.loss(_call(model, batch), batch).backward()
        model.zero_grad()

    moments, used = record_step(groups, [*lasting, *locals_], run)
    elsewhere = Elsewhere(
        ranks.num_shards,
        ranks.num_replicas,
        ranks.num_neighbours or 1,
        question.is_accelerator,
        question.backend,
    )
    layouts, nothing = None, OptimizerBytes(0, 0)
    if isinstance(question.optimizer, Mapping):
        _refuse_offload(question, groups)
        lengths = {"shard": ranks.num_shards, "replicate": ranks.num_replicas}
        at_once = question.is_accelerator
        layouts, resident = plan_layouts(model, question.optimizer, lengths, at_once=at_once)
        offloaded = nothing
    else:
        resident, offloaded = _optimizers(question, ranks, used)
    return Rehearsal(
        moments,
        tuple(read_group(group, group.name, names, elsewhere) for group in groups),
        sum(param.numel() for param in model.parameters()),
        sum(tensor.numel() * tensor.itemsize for tensor in lasting),
        resident,
        offloaded,
        layouts,
    )


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _refuse_offload(question: Question, groups: Sequence[ParamGroup]) -> None:
    for param in (param for group in groups for param in group.params):
        if param.offload is not None and question.is_accelerator:
            raise ValueError(
                "Expected parameters on the device for an estimate of layouts, got "
                f"'{param.name}', which is offloaded; leave out the offload_policy, or pass what "
                "makes an optimizer of parameters"
            )


def _optimizers(
    question: Question, ranks: Ranks, params: Iterable[ShardedParam]
) -> tuple[OptimizerBytes, OptimizerBytes]:
    found = []
    for is_away in (False, True):
        some = [p for p in params if (p.offload is not None and question.is_accelerator) is is_away]
        shards = shards_of(some, ranks.num_shards)
        if question.optimizer is None or isinstance(question.optimizer, Mapping) or not shards:
            found.append(OptimizerBytes(0, 0))
            continue
        at_once = question.is_accelerator and not is_away
        found.append(optimizer_bytes(question.optimizer, shards, at_once=at_once))
    return found[0], found[1]


# One step of a sharded model, run without memory on a few ranks that are not there ----------------


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


def silence(groups: Sequence[ParamGroup], *, widens: bool) -> None:
    """Let groups communicate with nobody."""
    for group in groups:
        for channel in group.channels.values():
            channel.all_gather = SilentAllGather()
            channel.reduce_scatter = SilentReduceScatter(widens=widens)


def record_step(
    groups: Sequence[ParamGroup], lasting: Sequence[torch.Tensor], run: Callable[[], None]
) -> tuple[tuple[Moment, ...], set[ShardedParam]]:
    """Run a step twice and return what happens in the second one, which knows the order.

    Args:
        groups: All groups.
        lasting: Tensors that live before and after.
        run: Does forward and backward, and clears the gradients.

    Returns:
        Its moments, and the parameters that got a gradient.
    """
    live = LiveBytes()
    live.ignore(lasting)
    with live:
        run()
        live.forget()
        with _Recorder(groups, live) as recorder:
            run()
    return (*recorder.moments, Moment("", -1, live.peak, live.flops)), recorder.used


class _Recorder(contextlib.AbstractContextManager[Any]):
    """Notes the events of groups, with what happened between them."""

    def __init__(self, groups: Sequence[ParamGroup], live: LiveBytes) -> None:
        self.moments: list[Moment] = []
        self.used: set[ShardedParam] = set()
        self._groups = list(groups)
        self._live = live
        self._grads: dict[int, list[torch.Tensor]] = {}
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> _Recorder:
        for context in dict.fromkeys(group.tree for group in self._groups):
            places = {g.name: i for i, g in enumerate(self._groups) if g.tree is context}
            self._hooks.enter_context(listening(context, partial(self._hear, places)))
        for tensor in self._unsharded(range(len(self._groups))):
            if tensor.requires_grad:
                handle = tensor.register_hook(self._live.call_gradient)
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _unsharded(self, places: Sequence[int]) -> Iterator[torch.Tensor]:
        for place in places:
            for param in self._groups[place].params:
                if param.unsharded is not None:
                    yield param.unsharded

    def _hear(self, places: Mapping[str, int], event: str, name: str) -> None:
        place = places[name]
        if event == "post_backward":
            grads = [t.grad for t in self._unsharded([place]) if t.grad is not None]
            for grad in grads:
                self._live.call_gradient(grad)
            self.used.update(
                param
                for param in self._groups[place].params
                if param.unsharded is not None and param.unsharded.grad is not None
            )
            self._grads[place] = grads
        elif event == "reduce_scatter":
            self._live.hand_over(self._grads.pop(place, []))
        live = self._live
        self.moments.append(Moment(event, place, live.peak, live.flops))
        live.restart()
