"""The memory of a group: its parameters, the flat buffers of a bucket, and the all-gather.

The tensors of a parameter:

- original: the parameter that the module held before ``fully_shard``.
- sharded: a DTensor parameter, registered outside of compute; its local tensor is a view of the
  flat sharded buffer of a bucket.
- unsharded: a plain parameter, or under tensor parallelism a DTensor, registered during compute. It
  is the leaf of autograd and a view of the bucket's unsharded buffer. Between uses, its memory is
  freed, but the object stays, until the bucket is rebuilt.

A *bucket* holds parameters of a group (`group.py`) with one mesh, dtype and compute dtype. The
all-gather of a bucket sends messages: a *direct* parameter has its own message; the others share
the *packed* message (`layout.py`).
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.codec import AttributeCopier, Codec, attributes_of_user, has_extension
from composable_shard.core.layout import message_cost, plan_bucket
from composable_shard.core.placement import (
    GradStage,
    TensorLayout,
    matching_pieces,
    packing_alignment,
    plan_placement,
    plan_tensor,
)
from composable_shard.core.plugins import Op
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import Tensors
from composable_shard.core.transport.host import upload, upload_stream
from composable_shard.core.transport.pending import Pending, Waitable, launching_stream
from composable_shard.errors import StaleParameterError
from composable_shard.mesh import ShardMesh
from composable_shard.policy import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    copies_overlap_compute,
    pins,
)

# One parameter ------------------------------------------------------------------------------------

USER_GRAD_DTYPE = "_composable_shard_user_grad_dtype"
"""The attribute that records the user's ``grad_dtype`` while the library has set it to ``None``."""


# The owners of sharded tensors, by id of the tensor. Another tensor may have the same id by now.
_sharded: weakref.WeakValueDictionary[int, ShardedParam] = weakref.WeakValueDictionary()


def owner_of_sharded(tensor: torch.Tensor) -> ShardedParam | None:
    """Return the `ShardedParam` of a sharded tensor; ``None`` for any other tensor."""
    param = _sharded.get(id(tensor))
    return param if param is not None and param.sharded is tensor else None


# By id of a full tensor (an original, an unsharded parameter or a full copy, in a module now or
# earlier): weak references to the tensor and to its `ShardedParam`.
_full_tensors: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[ShardedParam]]] = {}


def record_full_tensor(tensor: torch.Tensor, param: ShardedParam) -> None:
    """Record that a module holds ``tensor``, or has held it, in place of a sharded parameter.

    The record refers weakly to ``tensor`` and to ``param``, but not to ``param.sharded``: torch
    cannot convert a module if there are weak references to its parameters.
    """
    key = id(tensor)
    full = weakref.ref(tensor, lambda _: _full_tensors.pop(key, None))
    _full_tensors[key] = full, weakref.ref(param)


def owner_of_full(tensor: torch.Tensor) -> ShardedParam | None:
    """Return the `ShardedParam` of a full tensor; ``None`` for any other tensor."""
    record = _full_tensors.get(id(tensor))
    return None if record is None else record[1]()


def as_sharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sharded tensor in place of a full tensor; any other tensor unchanged."""
    param = owner_of_full(tensor)
    return tensor if param is None else param.sharded


def num_full_tensors(tensors: Iterable[torch.Tensor]) -> int:
    """Count the tensors that are full tensors of sharded parameters."""
    found = _full_tensors.keys() & set(map(id, tensors))
    return sum(_full_tensors[key][1]() is not None for key in found)


class FlatPosition(NamedTuple):
    """The position of a shard in the flat buffer of its bucket.

    Attributes:
        buffer: The buffer, with all shards of the bucket.
        start: The offset of the shard, in elements.
        next_start: The offset of the next shard; ``None`` for the last shard.
    """

    buffer: torch.Tensor
    start: int
    next_start: int | None


@dataclass(frozen=True)
class Slot:
    """A name under which a module holds a parameter; tied parameters have several slots.

    Attributes:
        module: The module.
        name: The name of the parameter in the module.
        is_unsafe: Whether registering a parameter bypasses an overridden ``__setattr__`` of the
            module. An environment variable decides this when the slot is made.
    """

    module: nn.Module
    name: str
    is_unsafe: bool = field(  # the variable of torch's FSDP1
        default_factory=lambda: os.environ.get("FSDP_USE_UNSAFE_SETATTR") == "1", compare=False
    )

    @property
    def is_plain(self) -> bool:
        """Whether a parameter is registered by an entry of ``_parameters`` alone."""
        return self.is_unsafe or type(self.module).__setattr__ is nn.Module.__setattr__

    def put(self, param: nn.Parameter) -> None:
        """Register a parameter under the name."""
        if self.is_plain:
            self.module._parameters[self.name] = param
        else:
            setattr(self.module, self.name, param)

    def get(self) -> nn.Parameter | None:
        """Return the parameter that is registered under the name."""
        return self.module._parameters.get(self.name)


class ShardedParam:
    """One parameter of a group.

    Attributes:
        name: The qualified name of the parameter below the group's module.
        slots: The modules that hold the parameter, and its name in each of them.
        shape: The global shape.
        mesh: The data-parallel ranks.
        policy: The mixed-precision policy.
        offload: The offload policy; ``None`` if the shard is not kept on the CPU.
        device: The device on which the shard belongs.
        layout: The layout of the parameter in flat buffers.
        dtype: The dtype of the shard.
        placement: The mesh and placements of the DTensors: the parameter and its gradients.
        began_on_meta: Whether the original parameter was on the meta device.
        local: This rank's shard: a view of the bucket, until a load or a conversion replaces it.
        outer_storage: The id of the storage of the DTensor itself, not of its local tensor.
            Assigning ``.data`` of the DTensor changes this id.
        sharded: The DTensor that is registered outside forward and backward.
        unsharded: The parameter used in compute.
        unsharded_local: ``unsharded`` itself; under tensor parallelism, its local tensor.
        is_counted: Whether a hook counts the gradient accumulations of ``unsharded``.
        shares_storage: Whether ``unsharded`` is a view of the sharded buffer.
        group: The group of the parameter.
        bucket_class: The class of the bucket, if a feature has set one; else ``None``, for
            `FlatBucket`. Parameters that are tensor subclasses ignore this attribute.
        version_when_made: The result of :meth:`version` when ``fully_shard`` made the sharded
            parameter.
        freed_inner: Inner tensors of a subclass with memory that is freed between uses. Autograd
            may save these tensors, so the program sets their version counters, too.
        flat_position: The position of the shard in a flat buffer; ``None`` without such a buffer.
        user_state: The attributes and the ``grad_dtype`` before a load or a conversion: torch loses
            both if it swaps the contents of the sharded parameter.
        grad_codec: Splits gradients into plain tensors (`codec.py`); ``None`` as long as no rank
            has had a gradient, and if no gradient can be a tensor subclass.
        attributes: Copies attributes of users from the sharded to the unsharded parameter, and
            back; ``None`` if both share one ``__dict__``.
    """

    bucket_class: type[FlatBucket] | None = None
    group: Any
    local: torch.Tensor
    user_state: tuple[dict[str, Any], tuple[bool, torch.dtype | None]]
    sharded: nn.Parameter
    unsharded: nn.Parameter
    unsharded_local: torch.Tensor

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        original: nn.Parameter,
        dim: int | None,
        mesh: ShardMesh,
        policy: MixedPrecisionPolicy,
        offload: CPUOffloadPolicy | None = None,
    ) -> None:
        self.name, self.slots = name, list(slots)
        self.mesh, self.policy, self.offload = mesh, policy, offload
        self.device = torch.device("cpu") if offload is not None else mesh.device
        self.placement = plan_placement(name, original, dim, mesh)
        self.layout = plan_tensor(_torch.local_part(original), dim, mesh.num_shards)
        self.shape, self._stride = original.shape, original.stride()
        if self.layout.order is None:  # not dense: shards are contiguous all the same
            self._stride = torch.empty(original.shape, device="meta").stride()
        self.dtype = original.dtype
        self.began_on_meta = original.is_meta
        self.shares_storage = False
        self.freed_inner: list[torch.Tensor] = []
        self.flat_position: FlatPosition | None = None
        self.attributes: AttributeCopier | None = None
        self.grad_codec: Codec | None = None
        self._user_class = _torch.class_in_memory(original)  # None for torch's classes

    def __getstate__(self) -> dict[str, Any]:
        """Pickle only the sharded parameter."""
        omitted = {"group", "local", "flat_position", "user_state"}  # set again after loading
        omitted |= {"unsharded", "unsharded_local", "freed_inner", "attributes"}  # made anew
        state = {name: value for name, value in self.__dict__.items() if name not in omitted}
        return {**state, "user_grad_dtype": user_grad_dtype(self.sharded)}  # torch loses it

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_set, grad_dtype = state.pop("user_grad_dtype")
        self.__dict__.update(state)
        self.flat_position = None
        self.forget_unsharded()
        if not self.sharded.is_leaf:  # torch loads a DTensor on the meta device as a view
            local = _torch.local_tensor(self.sharded).detach()
            tensor = _torch.from_local(local, _torch.spec_of(self.sharded))
            leaf = _torch.parameter_of(tensor, self.sharded.requires_grad)
            leaf.__dict__.update(self.sharded.__dict__)
            torch.utils.swap_tensors(self.sharded, leaf)
        # Pickled meshes have no process groups.
        for spec in (self.placement.unsharded_spec, _torch.spec_of(self.sharded)):
            if spec is not None:
                _torch.rebind(spec.mesh)
        _torch.rebind(self.placement.mesh)
        self.sharded.__dict__.pop(USER_GRAD_DTYPE, None)
        if is_set:
            self.sharded.grad_dtype = grad_dtype
        self.set_sharded(self.sharded)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        """Copy the slots and the sharded parameter; share the mesh and the policies."""
        copied = memo[id(self)] = object.__new__(ShardedParam)
        copied.__dict__.update(self.__dict__)
        copied.slots, copied.sharded = copy.deepcopy((self.slots, self.sharded), memo)
        copied.forget_unsharded()
        return copied

    def facts(self) -> tuple[Sequence[int], int | None, object]:
        """Return the facts that ranks compare: shape, sharded dim, ``grad_dtype`` of the user."""
        is_set, grad_dtype = user_grad_dtype(self.sharded)
        takes_any = is_set and grad_dtype is None and self.policy.reduce_dtype is None
        return self.layout.shape, self.layout.dim, "any dtype" if takes_any else grad_dtype

    @property
    def grad_layout(self) -> TensorLayout:
        """The layout of the gradient; inner tensors are stacked along a new last dim."""
        codec = self.grad_codec
        if codec is None or codec.kind is None:
            return self.layout
        return self.layout.stacked(len(codec.names))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the unsharded parameter."""
        return self.policy.compute_dtype(self.dtype)

    def shard_of(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a full tensor, which may be a DTensor like the original."""
        return self.layout.shard_of(self.tensor_parallel_part(full), self.mesh.shard_rank).detach()

    def tensor_parallel_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's tensor-parallel part of a full tensor; without any, all of it."""
        if isinstance(full, DTensor):
            return _torch.local_tensor(full)
        spec = self.placement.unsharded_spec
        return full if spec is None else _torch.cut(full, spec.mesh, spec.placements)

    def spec(self, stage: GradStage, dtype: torch.dtype) -> _torch.DTensorSpec:
        """Return the spec of a gradient at a stage; stage ``sharded`` has the parameter's."""
        meta = _torch.TensorMeta(self.shape, self._stride, dtype)
        return _torch.make_spec(self.placement.mesh, getattr(self.placement, stage), meta)

    def create_sharded(self, local: torch.Tensor, original: nn.Parameter) -> None:
        """Make the sharded parameter around ``local``; keep the original's hooks and attributes."""
        tensor = _torch.from_local(local, self.spec("sharded", local.dtype))
        self.sharded = _torch.parameter_of(tensor, original.requires_grad)
        self.sharded.__dict__.update(attributes_of_user(original))
        _torch.share_hooks(original, self.sharded)
        if original.grad_dtype != original.dtype:
            self.sharded.grad_dtype = original.grad_dtype
        self.set_local(local)
        self.version_when_made = self.version()

    def set_local(self, local: torch.Tensor) -> None:
        """Make ``local`` this rank's shard."""
        # The DTensor must hold this very object: a copy would have another version counter.
        _torch.set_local_tensor(self.sharded, local)
        self.set_sharded(self.sharded)

    def set_sharded(self, sharded: nn.Parameter) -> None:
        """Make a DTensor the sharded parameter."""
        self.sharded, self.local = sharded, _torch.local_tensor(sharded)
        self.dtype, self.outer_storage = self.local.dtype, _torch.storage_number(sharded)
        _sharded[id(sharded)] = self
        self.record_user_state()

    def record_user_state(self) -> None:
        """Record the attributes and the ``grad_dtype`` of the user in ``user_state``."""
        self.user_state = self.sharded.__dict__, user_grad_dtype(self.sharded)

    def version(self) -> int:
        """Return a number that grows when the shard changes in place."""
        return int(self.sharded._version + self.local._version)

    @property
    def is_untouched(self) -> bool:
        """Whether the group is still unused, and the sharded parameter unchanged."""
        is_unused = not self.group.is_compiled and self.version() == self.version_when_made
        return is_unused and all(slot.get() is self.sharded for slot in self.slots)

    def put(self, param: nn.Parameter) -> None:
        """Register a parameter under all names."""
        for slot in self.slots:
            slot.put(param)

    def find_registered(self) -> nn.Parameter | None:
        """Return what users have registered in place of our parameters; else the sharded one."""
        sharded, unsharded = self.sharded, self.__dict__.get("unsharded", self.sharded)
        params = (slot.get() for slot in self.slots)
        return next((p for p in params if p is not sharded and p is not unsharded), sharded)

    def retire_unsharded(self) -> None:
        """Forget the unsharded parameter; a backward that still accumulates into it raises."""
        unsharded = self.__dict__.get("unsharded")
        if unsharded is not None and unsharded.requires_grad:
            unsharded.register_hook(partial(_refuse_stale, self.name))
        self.forget_unsharded()

    def all_unsharded(self) -> list[torch.Tensor]:
        """Return the unsharded parameter, and the tensors inside it with versions of their own."""
        is_local = self.unsharded_local is self.unsharded
        return [self.unsharded, *([] if is_local else [self.unsharded_local]), *self.freed_inner]

    def forget_unsharded(self) -> None:
        """Forget the unsharded parameter; the next gather makes a new parameter."""
        self.__dict__.pop("unsharded", None)
        self.__dict__.pop("unsharded_local", None)
        self.freed_inner, self.attributes = [], None

    def create_unsharded(self, tensor: torch.Tensor) -> None:
        """Make the unsharded parameter, the leaf of autograd.

        Args:
            tensor: The full values; under tensor parallelism, this rank's part of them.
        """
        self.is_counted, self.attributes = False, None
        spec = self.placement.unsharded_spec
        if spec is not None:
            tensor = _torch.from_local(tensor, _torch.spec_with_dtype(spec, tensor.dtype))
        self.unsharded = self.leaf_around(tensor)
        self.unsharded_local = _torch.local_part(self.unsharded)
        record_full_tensor(self.unsharded, self)

    def leaf_around(self, tensor: torch.Tensor) -> nn.Parameter:
        """Make a parameter of a full tensor, in the class of the original parameter.

        If the shard has all-gather hooks, these have already chosen the class of the tensor.
        """
        requires_grad = self.sharded.requires_grad
        if self._user_class is None or has_extension(self.local):
            return _torch.parameter_of(tensor, requires_grad)
        return _torch.parameter_of_class(tensor, self._user_class, requires_grad)


def user_grad_dtype(sharded: nn.Parameter) -> tuple[bool, torch.dtype | None]:
    """Return whether the user has set ``grad_dtype`` of a sharded parameter, and to what."""
    dtype = sharded.grad_dtype
    if dtype is None and USER_GRAD_DTYPE in sharded.__dict__:  # the user has set no dtype since
        recorded: tuple[bool, torch.dtype | None] = sharded.__dict__[USER_GRAD_DTYPE]
        return recorded
    return (False, None) if dtype == sharded.dtype else (True, dtype)


def _refuse_stale(name: str, _: torch.Tensor) -> None:
    raise StaleParameterError(
        f"Expected no change of parameters between a forward and its backward, got '{name}' "
        "replaced by a load or a conversion in between; run backward before replacing them"
    )


# The interface of a bucket ------------------------------------------------------------------------


class GatherOps(NamedTuple):
    """The operations that gather a bucket, or a group.

    Attributes:
        launch: Allocate memory and launch the all-gather.
        wait: Wait for the all-gather and fill the unsharded parameters.
        drop: Abandon the all-gather: wait until nothing writes to the memory any more.
        free: Free the memory of the unsharded parameters.
    """

    launch: Sequence[Op]
    wait: Sequence[Op]
    drop: Sequence[Op]
    free: Sequence[Op]


class Bucket(Protocol):
    """The interface of a bucket: a `FlatBucket`, or the bucket of a tensor subclass.

    Attributes:
        params: Its parameters.
        locals: The shard of each parameter.
        mesh: The data-parallel ranks.
        compute_dtype: The dtype of the unsharded parameters.
        message_cost: The cost of a message, in bytes (`layout.py`): a gradient with more bytes
            gets its own message. ``None`` if all gradients share one message.
        reduction: A subclass of `Reduction` for the gradients; ``None`` for `Reduction` itself.
    """

    params: list[ShardedParam]
    locals: list[torch.Tensor]
    mesh: ShardMesh
    compute_dtype: torch.dtype
    message_cost: int | None

    @property
    def reduction(self) -> type[Any] | None: ...

    def create_unsharded(self, channel: Channel) -> None:
        """Make the unsharded parameters, before the first gather.

        Collective for tensor subclasses only: it runs the all-gather.
        """

    def gather_ops(self, shards: Tensors, channel: Channel, *, keeps_storage: bool) -> GatherOps:
        """Return the operations that gather these shards, one shard per parameter.

        Args:
            shards: The local shards; users may have replaced them.
            channel: The collectives.
            keeps_storage: Whether the unsharded memory stays allocated.
        """

    def free(self) -> bool:
        """Free the unsharded memory, unless NumPy arrays share it; return whether they do."""

    def memory_for_backward(self) -> Sequence[torch.Tensor]:
        """Return the flat memory that a backward may read, of the same length on all ranks."""


class Regather:
    """Keeps one of k equal parts of unsharded memory, and gathers all k from neighbouring ranks."""

    def __init__(self, bucket: Bucket, channel: Channel, num_ranks: int) -> None:
        """Plan to gather from ``num_ranks`` neighbours. Collective: makes their process group."""
        self._memory, self._channel = bucket.memory_for_backward(), channel
        self._num_ranks = num_ranks
        self._part = channel.mesh.shard_rank % num_ranks
        self._kept: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._pending = Pending([])
        channel.prepare_regather(num_ranks)

    def keep(self) -> None:
        """Copy this rank's part; the last part may be padded."""
        for whole in self._memory:
            numel = -(-whole.numel() // self._num_ranks)
            source = whole[self._part * numel : (self._part + 1) * numel]
            part = source.new_zeros(numel)
            part[: source.numel()].copy_(source)
            self._kept.append(_torch.poison_when_unused(part))

    def launch(self) -> None:
        """Allocate the memory and launch the all-gather."""
        parts, count = self._kept, self._num_ranks
        for whole in self._memory:
            _torch.allocate(whole)
        self._outputs = [
            whole
            if whole.numel() == count * part.numel()
            else _torch.empty(count * part.numel(), dtype=part.dtype, device=part.device)
            for whole, part in zip(self._memory, parts, strict=True)
        ]
        works = self._channel.gather(self._outputs, parts, count)
        stream = launching_stream(self._channel.mesh.device)
        self._pending = Pending(works, self._channel.gathering, stream, parts)

    def wait(self) -> None:
        """Wait for the all-gather; copy padded parts to the memory without their padding."""
        self._pending.wait()
        for whole, output in zip(self._memory, self._outputs, strict=True):
            if output is not whole:
                whole.copy_(output[: whole.numel()])
        self.free()

    def drop(self) -> None:
        """Wait until nothing writes to the memory any more; free this rank's part."""
        self._pending.drop()
        self.free()

    def free(self) -> None:
        """Free this rank's part."""
        self._kept, self._outputs = [], []


# The bucket of plain parameters -------------------------------------------------------------------


class FlatBucket:
    """Parameters of a group with one mesh, one dtype and one compute dtype, and their flat buffers.

    Attributes:
        input_dtype: The dtype of the inputs of the all-gather: the compute dtype, unless a subclass
            encodes the inputs.
        sharded: This rank's shards [shard_numel].
        locals: The shard of each parameter, a view of ``sharded``.
        unsharded: All parameters [unsharded_numel], from the first gather on; this buffer has no
            memory between uses. With one shard, no cast and no offloading, the buffer is
            ``sharded`` itself, and nothing is copied.
        is_offloaded: Whether shards are not kept on the compute device.
        is_uploaded: Whether shards are copied from pinned host memory during compute.
        has_arrays: Whether NumPy arrays share the memory of ``unsharded``, which then stays.
        gather_outputs: The output of each message: in ``unsharded``, or in ``staging`` if packed.
        staging: The packed message of all ranks; it has no memory between uses.
    """

    reduction: type[Any] | None = None

    def __init__(self, params: Sequence[ShardedParam], shards: Sequence[torch.Tensor]) -> None:
        """Lay out the buffers and copy the shards into them: the copies are in :attr:`locals`.

        Args:
            params: The parameters, with one mesh and one compute dtype.
            shards: This rank's shards of them, all of one dtype and on one device.
        """
        first = params[0]
        self.mesh, self.dtype = first.mesh, shards[0].dtype
        self.compute_dtype = self.input_dtype = first.policy.compute_dtype(self.dtype)
        group = self.mesh.shard_group
        backend = None if group is None else _torch.message_backend(group, self.mesh.device)
        self.message_cost: int | None = message_cost(backend, self.mesh.num_shards)
        self.layout = plan_bucket(
            tuple(param.layout.flat for param in params),
            self.compute_dtype.itemsize,
            self.message_cost,
            packing_alignment((self.dtype, self.compute_dtype), self.mesh.device),
        )
        self.params = [params[index] for index in self.layout.order]
        # `aligns` is true for accelerators, and for a simulated one on the CPU.
        self.is_offloaded = first.offload is not None and _torch.aligns(self.mesh.device)
        self.is_uploaded = copies_overlap_compute(first.offload, self.mesh.device)
        self.has_arrays = False
        is_cast = self.dtype != self.compute_dtype
        self.shares_storage = self.mesh.num_shards == 1 and not is_cast and not self.is_offloaded
        for param in params:
            param.shares_storage = self.shares_storage
        numel, device = self.layout.shard_numel, shards[0].device
        pin_memory = first.offload is not None and pins(first.offload)
        self.sharded = torch.zeros(numel, dtype=self.dtype, device=device, pin_memory=pin_memory)
        self.locals = self.shard_views(self.sharded)
        starts = self.layout.shard_offsets
        for param, start, next_start in zip(self.params, starts, [*starts[1:], None], strict=True):
            param.flat_position = FlatPosition(self.sharded, start, next_start)
        if not self.sharded.is_meta:
            _torch.copy_all_(self.locals, [shards[index] for index in self.layout.order])

    def gather_ops(self, shards: Tensors, channel: Channel, *, keeps_storage: bool) -> GatherOps:
        """Return the operations that gather these shards, which may be outside of ``sharded``."""
        if self.shares_storage:
            return GatherOps((), (), (), ())
        return _AllGather(self, shards, channel, keeps_storage=keeps_storage).ops

    def free(self) -> bool:
        """Free the unsharded buffer, unless NumPy arrays share it; return whether they do."""
        if not self.shares_storage and hasattr(self, "unsharded"):
            self.has_arrays = not _torch.free(self.unsharded)
        return self.has_arrays

    def memory_for_backward(self) -> Sequence[torch.Tensor]:
        """Return the unsharded buffer."""
        return () if self.shares_storage else (self.unsharded,)

    def shard_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's shard in a buffer with the layout of ``sharded``.

        A DTensor reports the storage offset of its local tensor, and code that copies or saves
        tensors misreads offsets other than 0. So each shard has its own storage object in the same
        memory.
        """
        offsets, rank = self.layout.shard_offsets, self.mesh.shard_rank
        return [
            _torch.with_own_storage(param.layout.local(flat[offset:], rank))
            for param, offset in zip(self.params, offsets, strict=True)
        ]

    def create_unsharded(self, channel: Channel) -> None:
        """Make the unsharded and the staging buffer, and all views of them; then free both.

        Called right before the first gather, which needs this memory. Earlier, the device may have
        room for the shards only.
        """
        layout, mesh = self.layout, self.mesh
        self.unsharded = self.sharded  # with `shares_storage`, both layouts are equal
        if not self.shares_storage:
            self.unsharded = channel.allocate(layout.unsharded_numel, dtype=self.compute_dtype)
        for param, offset in zip(self.params, layout.unsharded_offsets, strict=True):
            view = param.layout.whole(self.unsharded[offset:])
            # A view with its own version counter: no gather bumps it, and `program.py` sets it.
            param.create_unsharded(_torch.fresh_storage_view(view))
        if self.shares_storage:
            return
        direct = zip(layout.unsharded_offsets[: layout.num_direct], layout.params, strict=False)
        self.gather_outputs = [
            self.unsharded[start : start + mesh.num_shards * param.shard_numel]
            for start, param in direct
        ]
        self.staging: Staging | None = None
        if layout.packed_numel:
            self.staging = Staging(self)
            self.gather_outputs.append(self.staging.message)
        _torch.free(self.unsharded)


class _AllGather:
    """The all-gather of a bucket: a message for each large parameter, and a packed message.

    Copies of shards from pinned host memory to the device overlap with compute.

    Attributes:
        ops: The operations.
    """

    def __init__(
        self, bucket: FlatBucket, shards: Tensors, channel: Channel, *, keeps_storage: bool
    ) -> None:
        self._bucket, self._shards, self._channel = bucket, shards, channel
        self._has_streams = _torch.has_streams(bucket.mesh.device)
        self._uploads = upload_stream(bucket.mesh.device) if bucket.is_uploaded else None
        self._pending = Pending([])
        self._are_in_bucket = all(map(is_, shards, bucket.locals))
        may_stay = keeps_storage or bucket.has_arrays
        allocate, free = _torch.memory_ops(bucket.unsharded, may_stay=may_stay)
        gather: list[Op] = [allocate]
        wait: list[Op] = [self.wait]
        await_copy: list[Op] = [] if self._uploads is None else [self._wait_for_copy]
        # A launch may fail between the copy and the gather.
        drop: list[Op] = [*await_copy, self.drop]
        if bucket.mesh.num_shards == 1:
            gather += [partial(self._copy_in, bucket.unsharded)]
            wait = drop = await_copy
        else:
            sent, spans = bucket.sharded, bucket.layout.message_spans
            is_cast = bucket.dtype != bucket.input_dtype
            if is_cast or not self._are_in_bucket or bucket.is_offloaded:
                numel, dtype, device = sent.numel(), bucket.input_dtype, bucket.mesh.device
                sent = _torch.empty(numel, dtype=dtype, device=device)
            self._inputs = [sent[start : start + numel] for start, numel in spans]
            if sent is not bucket.sharded:
                _torch.free(sent)
                allocate_input, free_input = _torch.memory_ops(sent)
                gather += [allocate_input, partial(self._copy_in, sent)]
                wait += [free_input]
                drop += [free_input]
            if bucket.staging is not None:
                allocate_staging, free_staging = _torch.memory_ops(bucket.staging.flat)
                gather += [allocate_staging]
                wait += [*bucket.staging.copy_out, free_staging]
                drop += [free_staging]
            gather += [self.launch]
        self.ops = GatherOps(gather, wait, drop, [] if keeps_storage else [free])

    def _copy_in(self, into: torch.Tensor) -> None:
        """Copy the shards to ``into``, in its dtype and on the compute device."""
        flat = self._bucket.sharded
        if not self._are_in_bucket:  # users have replaced sharded parameters
            flat = torch.zeros_like(flat)
            _torch.copy_all_(self._bucket.shard_views(flat), self._shards)
        if self._uploads is not None:
            upload(flat, into)
        else:
            into.copy_(flat)

    def _wait_for_copy(self) -> None:
        assert self._uploads is not None
        self._uploads.copies_event().wait()

    def launch(self) -> None:
        """Launch the all-gather, after the copy to the device if the shards are uploaded."""
        bucket, uploads = self._bucket, self._uploads
        gather = partial(self._channel.gather, bucket.gather_outputs, self._inputs)
        if uploads is None:
            works: list[Waitable] = gather()
        else:
            with uploads.after_compute():
                works = gather()
            # Wait for the copy, then for the gather; then let the copy stream reuse its memory.
            works = [uploads.copies_event(), *works, uploads.reuse_guard()]
        stream = launching_stream(bucket.mesh.device) if self._has_streams else None
        self._pending = Pending(works, self._channel.gathering, stream)

    def wait(self) -> None:
        self._pending.wait()

    def drop(self) -> None:
        self._pending.drop()


class Staging:
    """Holds the packed messages of all ranks until their parameters are copied out.

    Attributes:
        flat: Its memory, freed between uses.
        message: The part of ``flat`` for the gathered message.
        copy_out: The operations that copy the parameters to the unsharded buffer. On devices, one
            kernel splits the message. It writes parameters with ``gathers_in_place`` to the
            unsharded buffer, and everything else to the end of ``flat``. From there, a second
            operation copies the other parameters.
    """

    def __init__(self, bucket: FlatBucket) -> None:
        layout, mesh, gap_start = bucket.layout, bucket.mesh, 0
        self.copy_out: list[Op] = []
        num_ranks, is_fused = mesh.num_shards, _torch.has_streams(mesh.device)
        numel = num_ranks * layout.packed_numel
        params = layout.params[layout.num_direct :]
        in_place_numel = sum(param.shard_numel for param in params if param.gathers_in_place)
        rest_numel = num_ranks * (layout.packed_numel - in_place_numel) if is_fused else 0
        self.flat = _torch.empty(numel + rest_numel, dtype=bucket.compute_dtype, device=mesh.device)
        self.message = self.flat[:numel]
        columns, end = self.message.view(num_ranks, -1), numel
        pairs, outputs = [], []

        def rest_columns(width: int) -> torch.Tensor:
            nonlocal end
            end += num_ranks * width
            return self.flat[end - num_ranks * width : end].view(num_ranks, width)

        for index, param in enumerate(params, layout.num_direct):
            target = bucket.unsharded[layout.unsharded_offsets[index] :]
            offset, width = layout.shard_offsets[index] - layout.packed_offset, param.shard_numel
            column = columns[:, offset : offset + width]
            whole = None
            if param.gathers_in_place:  # the padding comes last, so whole shards are copied
                whole = target[: num_ranks * width].view(num_ranks, width)
            if is_fused:  # outputs from left to right: gap, parameter, gap, parameter, ...
                outputs.append(rest_columns(offset - gap_start))
                outputs.append(rest_columns(width) if whole is None else whole)
                column, gap_start = outputs[-1], offset + width
            if whole is None:
                pairs += matching_pieces(param, target, column)
            elif column is not whole:  # otherwise the kernel has written it in place
                pairs.append((whole[: param.num_nonempty], column[: param.num_nonempty]))
        if is_fused:
            outputs.append(rest_columns(layout.packed_numel - gap_start))
            outputs = [output for output in outputs if output.numel()]
            sizes = [output.shape[1] for output in outputs]
            kernel = torch.split_with_sizes_copy
            self.copy_out.append(partial(kernel, columns, sizes, dim=1, out=outputs))
        if pairs:
            into, sources = map(list, zip(*pairs, strict=True))
            self.copy_out.append(partial(_torch.copy_each_, into, sources))
        _torch.free(self.flat)
