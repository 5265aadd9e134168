"""Gathering one parameter that is a tensor subclass or brings the protocol.

The library pads what travels, agrees formats across ranks once, keeps the storage of what arrives,
and hands the same storage to every later call (``out=``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable_shard import _torch
from composable_shard.core.comms.objects import gather_objects
from composable_shard.core.params.bucket import Transfer
from composable_shard.core.params.extension import (
    POST,
    PRE,
    Format,
    bound_hook,
    flatten,
    has_extension,
)
from composable_shard.core.params.param import ShardedParam
from composable_shard.errors import ExtensionError


class ExtensionGather:
    """Gathers one parameter whose local shard is a tensor subclass or has the protocol.

    Attributes:
        param: The parameter.
        mesh: Over which ranks it is gathered.
        formats: For each rank, what it sends; agreed at the first gather, then fixed.
    """

    def __init__(self, param: ShardedParam, device: torch.device) -> None:
        self.param = param
        self.mesh = param.mesh
        self.formats: list[tuple[Format, ...]] | None = None
        self._dim = param.form.dim or 0  # as hooks see it; the layout has dims as in memory
        self._device = device
        self._dtype = param.compute_dtype
        self._buffers: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._memory: list[torch.Tensor] = []
        self._metadata: Any = None
        self._rebuild: Any = None
        self._lasting: list[torch.Tensor] = []
        self._sent: list[torch.Tensor] = []

    # What travels ---------------------------------------------------------------------------

    def prepare(self) -> tuple[Format, ...]:
        """Call the pre-all-gather hook and return what this rank is about to send."""
        inputs, self._metadata = self._call_pre()
        if isinstance(inputs, torch.Tensor) or not isinstance(inputs, Sequence):
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to return a tuple of tensors and metadata, "
                f"got {type(inputs).__name__} as its first element"
            )
        flat, self._rebuild = flatten(inputs)
        self._sent = [self._gathered_dim_first(tensor) for tensor in flat]
        return tuple(Format(tensor.dtype, tuple(tensor.shape)) for tensor in self._sent)

    def _call_pre(self) -> tuple[Sequence[torch.Tensor], Any]:
        local = self.param.local
        if not has_extension(local):
            return (local,), None
        hook = bound_hook(getattr(local, PRE), local)
        num_args = len(inspect.signature(hook).parameters)
        mesh = self.param.mesh.mesh
        meta = self.param.spec.tensor_meta
        assert meta is not None
        full = (mesh, meta.shape, meta.stride, self.param.slots[0].module, self.param.policy)
        if num_args not in (0, 1, len(full)):
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to take (mesh) or (mesh, outer_size, "
                f"outer_stride, module, mp_policy), got {num_args} parameters: "
                f"{inspect.signature(hook)}"
            )
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
        return tensor.detach().to(self._device).contiguous()

    def _follows_param(self, tensor: torch.Tensor) -> bool:
        return self._dim > 0 and tensor.ndim == len(self.param.form.shape)

    # The gather -----------------------------------------------------------------------------

    def agree(self, formats: list[tuple[Format, ...]]) -> None:
        """Accept what the ranks said they will send, or raise the same error on all of them."""
        first, group = formats[0], self.mesh.shard_group
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        for rank, theirs in zip(ranks, formats, strict=True):
            alike = len(theirs) == len(first) and all(
                a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
                for a, b in zip(theirs, first, strict=True)
            )
            if not alike:
                raise ExtensionError(
                    f"Expected {PRE} of {self.param.name} to return tensors of the same number, "
                    f"dtypes and trailing dims on all ranks, got "
                    f"[{', '.join(map(str, first))}] on rank {ranks[0]} and "
                    f"[{', '.join(map(str, theirs))}] on rank {rank}"
                )
        self.formats = formats

    def start_gather(self) -> Transfer:
        """Allocate what arrives and name what is sent; :meth:`prepare` must have been called."""
        assert self.formats is not None
        rank, num_ranks = self.param.mesh.shard_rank, self.param.mesh.num_shards
        self._check_unchanged(self.formats[rank])
        padded_rows = [
            max(theirs[index].shape[0] for theirs in self.formats)
            for index in range(len(self._sent))
        ]
        inputs = [_padded(t, rows) for t, rows in zip(self._sent, padded_rows, strict=True)]
        with torch.inference_mode(False):
            if not self._buffers:
                self._buffers = [own.new_empty(num_ranks * own.numel()) for own in inputs]
        self._allocate()
        self._versions = [buffer._version for buffer in self._buffers]
        self._sent = []
        if num_ranks == 1:
            for buffer, own in zip(self._buffers, inputs, strict=True):
                buffer.copy_(own)
            return Transfer()
        return Transfer(self._buffers, inputs)

    def _check_unchanged(self, agreed: tuple[Format, ...]) -> None:
        now = tuple(Format(tensor.dtype, tuple(tensor.shape)) for tensor in self._sent)
        if now != agreed:
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to return what it returned at the first "
                f"unshard, [{', '.join(map(str, agreed))}], got [{', '.join(map(str, now))}]"
            )

    def finish_gather(self, transfer: Transfer) -> None:
        """Call the post-all-gather hook on what arrived, without the padding."""
        # Refilling is no change of inner tensors, which autograd may have saved by themselves.
        _torch.set_versions(self._buffers, self._versions)
        outputs = self._rebuild([self._unpadded(index) for index in range(len(self._buffers))])
        self._rebuild = None
        local, param = self.param.local, self.param
        metadata, self._metadata = self._metadata, None
        if not has_extension(local):
            if param.unsharded is None:
                self._create_unsharded(outputs[0].to(self._dtype), ())
            else:
                self._overwrite(lambda out: _copy_unless_same(out, outputs[0]))
            return
        hook = bound_hook(getattr(local, POST), local)
        if param.unsharded is not None:
            self._overwrite(lambda out: hook(outputs, metadata, self._dtype, out=out))
            return
        result = hook(outputs, metadata, self._dtype)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ExtensionError(
                f"Expected {POST} of {param.name} to return (tensor, inner tensors) when out is "
                f"None, got {type(result).__name__}"
            )
        self._create_unsharded(*result)

    def free(self) -> None:
        for memory in self._memory:
            _torch.free(memory)

    def keep(self, part: int, num_parts: int) -> list[torch.Tensor]:
        """Copy one part of what the unsharded parameter is made of."""
        kept = []
        for whole in self._lasting:
            numel = -(-whole.numel() // num_parts)
            mine = whole[part * numel : (part + 1) * numel]
            kept.append(_padded(mine, numel) if mine.numel() < numel else mine.clone())
        return kept

    def start_regather(self, kept: list[torch.Tensor], num_parts: int) -> Transfer:
        """Allocate what arrives; what does not divide evenly arrives beside its place."""
        self._allocate()
        outputs = [
            whole if whole.numel() == num_parts * part.numel() else part.repeat(num_parts)
            for whole, part in zip(self._lasting, kept, strict=True)
        ]
        return Transfer(outputs, kept)

    def finish_regather(self, transfer: Transfer) -> None:
        """Copy what arrived beside its place; no hook is called."""
        for whole, arrived in zip(self._lasting, transfer.outputs, strict=True):
            if arrived is not whole:
                whole.copy_(arrived[: whole.numel()])

    def _allocate(self) -> None:
        for memory in self._memory:
            _torch.allocate(memory)

    def _unpadded(self, index: int) -> torch.Tensor:
        assert self.formats is not None
        rows = [theirs[index].shape[0] for theirs in self.formats]
        trailing = self.formats[0][index].shape[1:]
        gathered = self._buffers[index].view(len(rows) * max(rows), *trailing)
        ends_in_order = all(later == 0 or earlier == max(rows) for earlier, later in pairwise(rows))
        if ends_in_order:
            tensor = gathered[: sum(rows)]
        else:  # rows of a rank in the middle are missing: no view is contiguous
            parts = gathered.view(len(rows), max(rows), *trailing)
            tensor = torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
        return tensor.movedim(0, self._dim) if self._follows_param(tensor) else tensor

    def _create_unsharded(self, tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        expected = self.param.form.shape
        if tuple(tensor.shape) != expected:
            raise ExtensionError(
                f"Expected the unsharded tensor of {self.param.name} to have shape "
                f"{list(expected)}, got {list(tensor.shape)} from {type(tensor).__name__}"
            )
        with torch.inference_mode(False), torch.no_grad():
            unsharded = self.param.create_unsharded(tensor).detach()
            if isinstance(unsharded, DTensor):
                unsharded = _torch.local_tensor(unsharded)
            lasting = self._storages_of([*inner, unsharded])
            self._lasting = [_bytes_of(storage) for storage in lasting.values()]
            found = self._storages_of(self._buffers) | lasting
            self._memory = [_bytes_of(storage) for storage in found.values()]

    def _storages_of(self, tensors: Sequence[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        """Return the storages behind tensors, by address, but those of the local shard."""
        own = {leaf.untyped_storage().data_ptr() for leaf in _torch.leaves(self.param.local)}
        storages = [leaf.untyped_storage() for tensor in tensors for leaf in _torch.leaves(tensor)]
        return {s.data_ptr(): s for s in storages if s.size() and s.data_ptr() not in own}

    def _overwrite(self, fill: Any) -> None:
        """Let ``fill`` write the unsharded parameter without counting as a change of any part."""
        unsharded = self.param.unsharded
        assert unsharded is not None
        inner = _torch.leaves(self.param.unsharded_local())
        with _torch.preserved_versions([unsharded, *inner]), torch.no_grad():
            fill(unsharded)


def agree_formats(gathers: Sequence[ExtensionGather]) -> None:
    """Prepare gathers over one mesh; at the first time, exchange what each rank sends.

    An error in a hook of one rank raises on all ranks, with the text of every rank that failed.

    Collective: one all-gather of a small object if any of ``gathers`` is new, else none.
    """
    if all(gather.formats is not None for gather in gathers):
        for gather in gathers:
            gather.prepare()
        return
    said: list[tuple[Format, ...]] | str
    cause = None
    try:
        said = [gather.prepare() for gather in gathers]
    except Exception as error:  # noqa: BLE001 - any failure of user code is told to all ranks
        said, cause = f"{type(error).__name__}: {error}", error
    mesh = gathers[0].mesh
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
    for index, gather in enumerate(gathers):
        gather.agree([theirs[index] for theirs in heard])


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _padded(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    if tensor.shape[0] == rows:
        return tensor.view(-1)
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
    padded[: tensor.shape[0]] = tensor
    return padded.view(-1)


def _copy_unless_same(out: torch.Tensor, source: torch.Tensor) -> None:
    pairs = zip(_torch.leaves(out), _torch.leaves(source), strict=True)
    if any(mine.data_ptr() != theirs.data_ptr() for mine, theirs in pairs):
        out.copy_(source)
