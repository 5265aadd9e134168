"""Tensor subclasses: a bucket for a parameter whose class decides what is gathered.

A local shard with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` chooses the tensors to
gather, and builds the unsharded parameter from them. A wrapper subclass without these hooks is
gathered inner tensor by inner tensor. To the core such a bucket looks like any other.

Between two uses, the memory of the gathered tensors and of the inner tensors that the post hook
returned is freed. Other tensors that the unsharded parameter holds, such as scales, stay: autograd
may have saved them, and no gather would fill them again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.codec import (
    POST,
    PRE,
    RELEASE,
    Format,
    Formats,
    Storages,
    bound_hook,
    check_alike,
    copy_unless_same,
    flat_view,
    flatten,
    has_extension,
    in_words,
    padded,
    storages_of,
)
from composable_shard.core.features.grad_extension import reduction_of
from composable_shard.core.layout import MessageCost
from composable_shard.core.reduction import Reduction
from composable_shard.core.storage import GatherOps, ShardedParam, Storage
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.pending import Pending, launching_stream
from composable_shard.core.transport.process_groups import gather_objects
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh


class ExtensionBucket:
    """The bucket of one parameter; see `Storage` for the attributes that the core uses.

    Attributes:
        formats: For each rank, the tensors that it sends; agreed before the first gather.
    """

    message_cost: MessageCost | None = None
    unwritten: Sequence[tuple[int, int]] = ()

    def __init__(self, param: ShardedParam, shard: torch.Tensor) -> None:
        self.param, self.params, self.locals = param, [param], [shard]
        self.mesh, self.compute_dtype = param.mesh, param.policy.compute_dtype(shard.dtype)
        param.shares_storage = False
        self.is_known, self.formats = False, None
        self._dim = param.layout.dim or 0
        shape = torch.Size(param.layout.shape)
        self._outer = shape, torch.empty(shape, device="meta").stride()
        self._gathered: list[torch.Tensor] = []  # of all ranks, with padding, flat
        self._rows: list[torch.Tensor] = []  # the same without padding, flat
        self._inner: list[torch.Tensor] = []  # memory of the inner tensors of the post hook
        self._kept_parts: list[torch.Tensor] = []  # tensors whose versions a gather must not bump
        self._out: torch.Tensor
        self._releases_gathered = self._is_gathered = False

    formats: list[Formats] | None

    @property
    def reduction(self) -> type[Reduction]:
        """How the gradient is reduced, which is known once the unsharded parameter is."""
        return reduction_of(self.param)

    def gather_ops(
        self,
        shards: Sequence[torch.Tensor],
        channel: Channel,
        *,
        keeps_storage: bool,
    ) -> GatherOps:
        """Return the operations that gather the shard."""
        launch = partial(self.launch, shards[0], channel)
        free = [] if keeps_storage else [self.free]
        return GatherOps([launch], [self.complete], [self.drop], free)

    # Before the first gather ----------------------------------------------------------------

    def gather_first(self, shard: torch.Tensor, channel: Channel) -> None:
        """Gather once, to learn what the unsharded parameter is; the memory stays for the next use.

        Collective: the all-gather. :func:`agree_formats` must have been called.
        """
        self.launch(shard, channel)
        self.complete()
        self._is_gathered = self.is_known = True

    def encode(self, shard: Any) -> Formats:
        """Call the pre hook; return the formats of the tensors that this rank is about to send."""
        inputs, self._metadata = self._call_pre(shard)
        if isinstance(inputs, torch.Tensor) or not isinstance(inputs, Sequence):
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to return a tuple of tensors and metadata, "
                f"got {type(inputs).__name__} as its first element"
            )
        flat, self._rebuild = flatten(inputs)
        self._sent = [self._gathered_dim_first(tensor) for tensor in flat]
        return tuple(Format(tensor.dtype, tuple(tensor.shape)) for tensor in self._sent)

    def _call_pre(self, shard: Any) -> tuple[Sequence[torch.Tensor], Any]:
        if not has_extension(shard):
            return (shard,), None
        if shard.device != self.mesh.device:  # offloaded; the hooks compute on the device
            moved = shard.to(self.mesh.device, non_blocking=True)
            shard = moved if has_extension(moved) else shard
        hook = bound_hook(getattr(shard, PRE), shard)
        num_args = len(inspect.signature(hook).parameters)
        module, policy = self.param.slots[0].module, self.param.policy
        full = (self.mesh.shard_axis, *self._outer, module, policy)
        if num_args not in (0, 1, len(full)):
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to take (mesh) or (mesh, outer_size, "
                f"outer_stride, module, mp_policy), got {num_args} parameters: "
                f"{inspect.signature(hook)}"
            )
        with torch.inference_mode(False), torch.no_grad():
            result = hook(*full[:num_args])
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to return (tensors, metadata), "
                f"got {type(result).__name__}"
            )
        return result

    def _gathered_dim_first(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0:
            tensor = tensor.reshape(1)
        elif self._follows_param(tensor):
            tensor = tensor.movedim(self._dim, 0)
        return tensor.detach().to(self.mesh.device).contiguous()

    def _follows_param(self, tensor: torch.Tensor) -> bool:
        return self._dim > 0 and tensor.ndim == len(self.param.layout.shape)

    # The gather -----------------------------------------------------------------------------

    def launch(self, shard: torch.Tensor, channel: Channel) -> None:
        """Call the pre hook, allocate memory and launch the all-gather."""
        if self._is_gathered:  # by `gather_first`
            return
        assert self.formats is not None
        if not hasattr(self, "_sent"):
            self.encode(shard)
        self._check_unchanged(self.formats[self.mesh.shard_rank])
        num_rows = [max(rows) for rows in self._num_rows()]
        inputs = [padded(t, rows) for t, rows in zip(self._sent, num_rows, strict=True)]
        del self._sent
        if not self._gathered:
            self._create_buffers(inputs)
        for memory in (*self._gathered, *self._rows, *self._inner):
            _torch.allocate(memory)
        self._versions = [rows._version for rows in self._rows]
        self._shard = shard
        if self.mesh.num_shards == 1:
            for rows, own in zip(self._rows, inputs, strict=True):
                rows.copy_(own)
            self._pending = Pending([])
            return
        works = channel.gather(self._gathered, inputs)
        stream = launching_stream(self.mesh.device)
        self._pending = Pending(works, channel.gathering, stream, inputs)

    def drop(self) -> None:
        """Wait until nothing is written any more."""
        self._is_gathered = False
        pending = self.__dict__.pop("_pending", None)
        if pending is not None:
            pending.drop()
            del self._shard, self._metadata, self._rebuild

    def complete(self) -> None:
        """Wait for the all-gather, and call the post hook on the rows of all ranks."""
        if self._is_gathered:
            self._is_gathered = False
            return
        self._pending.wait()
        outputs = self._rebuild([self._unpadded(index) for index in range(len(self._rows))])
        # Filling them again is no change of inner tensors, which autograd may have saved.
        _torch.set_versions(tuple(self._rows), tuple(self._versions))
        shard: Any = self._shard
        metadata = self._metadata
        del self._pending, self._shard, self._metadata, self._rebuild
        with torch.inference_mode(False), torch.no_grad():
            if not has_extension(shard):
                self._build(outputs[0])
                return
            hook = bound_hook(getattr(shard, POST), shard)
            if not self.is_known:
                tensor, inner = self._checked(hook(outputs, metadata, self.compute_dtype))
                self._releases_gathered = self._asks_to_release(shard)
                self._create_unsharded(tensor, inner)
            else:
                self._fill(partial(hook, outputs, metadata, self.compute_dtype))
            if self._releases_gathered:
                self._free(self._rows)

    def free(self) -> bool:
        """Free the memory that the next gather fills again; no arrays share it."""
        self._is_gathered = False
        self._free([*self._gathered, *self._rows, *self._inner])
        return False

    def _free(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            _torch.free(tensor)

    def _num_rows(self) -> list[list[int]]:
        """Return, for each tensor, how many rows each rank sends."""
        assert self.formats is not None
        return [[one.shape[0] for one in formats] for formats in zip(*self.formats, strict=True)]

    def _create_buffers(self, inputs: Sequence[torch.Tensor]) -> None:
        """Make the buffers; the post hook reads in place if all padding is at the end."""
        num_ranks = self.mesh.num_shards
        with torch.inference_mode(False):
            for own, rows in zip(inputs, self._num_rows(), strict=True):
                make = partial(_torch.empty, dtype=own.dtype, device=own.device)
                gathered = make(num_ranks * own.numel())
                row_numel = own.numel() // max(max(rows), 1)
                ends_in_order = all(b == 0 or a == max(rows) for a, b in pairwise(rows))
                self._gathered.append(gathered)
                self._rows.append(gathered if ends_in_order else make(sum(rows) * row_numel))

    def _check_unchanged(self, agreed: Formats) -> None:
        now = tuple(Format(tensor.dtype, tuple(tensor.shape)) for tensor in self._sent)
        if now != agreed:
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to return what it returned at the first "
                f"unshard, {in_words(agreed)}, got {in_words(now)}"
            )

    def _unpadded(self, index: int) -> torch.Tensor:
        """View one gathered tensor without padding, as hooks get it."""
        assert self.formats is not None
        counts, trailing = self._num_rows()[index], self.formats[0][index].shape[1:]
        gathered, rows = self._gathered[index], self._rows[index]
        if rows is not gathered and self.mesh.num_shards > 1:
            parts = gathered.view(len(counts), max(counts), *trailing)
            own = [part[:count] for part, count in zip(parts, counts, strict=True)]
            torch.cat(own, out=rows.view(sum(counts), *trailing))
            _torch.free(gathered)
        numel = sum(counts) * prod(trailing)
        tensor = rows[:numel].view(sum(counts), *trailing)
        return tensor.movedim(0, self._dim) if self._follows_param(tensor) else tensor

    # The unsharded parameter ----------------------------------------------------------------

    def _build(self, whole: torch.Tensor) -> None:
        """Make, or fill, the unsharded parameter of a class without hooks."""
        if not self.is_known:
            whole = whole.to(self.compute_dtype)
            self._create_unsharded(whole, _torch.leaves(whole))
        else:
            self._fill(lambda out: copy_unless_same(out, whole))

    def _checked(self, result: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the result of a post hook if it is a tensor and its inner tensors."""
        got = type(result).__name__
        if isinstance(result, tuple) and len(result) == 2:
            tensor, inner = result
            is_sequence = isinstance(inner, Sequence) and all(map(torch.is_tensor, inner))
            if torch.is_tensor(tensor) and is_sequence:
                return tensor, inner
            got = f"({type(tensor).__name__}, {type(inner).__name__})"
        raise ExtensionError(
            f"Expected {POST} of {self.param.name} to return (tensor, inner tensors) when out is "
            f"None, got {got}"
        )

    def _create_unsharded(self, tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        """Make the unsharded parameter; like torch's, ``tensor`` may end with rows of padding."""
        param, expected = self.param, self.param.layout.shape
        is_padded = tensor.shape[1:] == expected[1:] and tensor.shape[:1] > expected[:1]
        fitting = tensor[: expected[0]] if is_padded else tensor
        if tuple(fitting.shape) != expected:
            raise ExtensionError(
                f"Expected the unsharded tensor of {param.name} to have shape "
                f"{list(expected)}, got {list(tensor.shape)} from {type(tensor).__name__}"
            )
        param.create_unsharded(fitting, is_encoded=has_extension(param.local))
        self._out = tensor if is_padded else param.unsharded_local
        gathered, shard = storages_of(self._rows), storages_of([param.local])
        besides = {
            number: one
            for number, one in storages_of(inner).items()
            if number not in gathered and number not in shard
        }
        self._inner = [flat_view(*one) for one in besides.values()]
        read = {**besides, **self._read_rows(gathered, inner)}
        self._read = [flat_view(storage, torch.uint8) for storage, _ in read.values()]
        leaves = _torch.leaves(param.unsharded_local)
        if _torch.is_subclass(param.unsharded_local):
            freed = {*gathered, *besides}
            param.parts = [leaf for leaf in leaves if _torch.storage_number(leaf) in freed]
        self._kept_parts = [param.unsharded, self._out, *leaves, *inner]

    def _read_rows(self, gathered: Storages, inner: Sequence[torch.Tensor]) -> Storages:
        """Return the gathered storages that are needed after the post hook, alike on all ranks.

        A class that does not name its inner tensors may need all of them.
        """
        unsharded = self.param.unsharded_local
        if self._releases_gathered:
            return {}
        if _torch.is_subclass(unsharded) and not _torch.is_wrapper_subclass(unsharded):
            return gathered
        used = storages_of([unsharded, *inner])
        return {number: one for number, one in gathered.items() if number in used}

    def memory_for_backward(self) -> Sequence[torch.Tensor]:
        """Return the memory of the unsharded parameter."""
        return self._read

    def _asks_to_release(self, shard: Any) -> bool:
        """Return whether the class lets gathered tensors be freed once its post hook has run."""
        ask = getattr(shard, RELEASE, None)
        answer = False if ask is None else ask()
        if not isinstance(answer, bool):
            raise ExtensionError(
                f"Expected {RELEASE} of {self.param.name} to return a bool, got "
                f"{type(answer).__name__}"
            )
        return answer

    def _fill(self, fill: Callable[..., object]) -> None:
        """Let ``fill`` write the unsharded parameter without a change of any version counter."""
        with _torch.preserved_versions(self._kept_parts):
            fill(out=self._out)


def agree_formats(buckets: Sequence[ExtensionBucket], shards: Sequence[torch.Tensor]) -> None:
    """Exchange the formats that each rank sends, before the first gather.

    Args:
        buckets: Buckets over one mesh, the same on all ranks.
        shards: The shard of each.

    Raises:
        ExtensionError: On all ranks, if a hook failed on one, or the formats do not fit.

    Collective: one all-gather of a small object.
    """
    said: list[Formats] | str
    cause = None
    try:
        said = [bucket.encode(shard) for bucket, shard in zip(buckets, shards, strict=True)]
    except Exception as error:  # noqa: BLE001 - any failure of user code is told to all ranks
        said, cause = f"{type(error).__name__}: {error}", error
    mesh = buckets[0].mesh
    heard: list[Any] = [said]
    ranks = [dist.get_rank()]
    if mesh.num_shards > 1:
        assert mesh.shard_group is not None
        heard = gather_objects(said, mesh.shard_group, "agreeing on what tensor subclasses send")
        ranks = dist.get_process_group_ranks(mesh.shard_group)
    told = zip(ranks, heard, strict=True)
    failures = [f"rank {rank}: {text}" for rank, text in told if isinstance(text, str)]
    if failures:
        raise ExtensionError(f"{PRE} failed on " + "; ".join(failures)) from cause
    for bucket, *formats in zip(buckets, *heard, strict=True):
        check_alike(bucket.param.name, ranks, formats)
        bucket.formats = formats


def gather_unknown(buckets: Sequence[Storage], channels: dict[ShardMesh, Channel]) -> None:
    """Gather for the first time the buckets whose unsharded parameter is not known yet.

    Collective: for each mesh, one all-gather of a small object and one of each such parameter.
    """
    by_mesh: dict[ShardMesh, list[ExtensionBucket]] = {}
    for bucket in buckets:
        if isinstance(bucket, ExtensionBucket) and not bucket.is_known:
            by_mesh.setdefault(bucket.mesh, []).append(bucket)
    for mesh, unknown in by_mesh.items():
        shards = [bucket.param.local for bucket in unknown]
        agree_formats(unknown, shards)
        for bucket, shard in zip(unknown, shards, strict=True):
            bucket.gather_first(shard, channels[mesh])
