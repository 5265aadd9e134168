"""The gather of one parameter that is a tensor subclass or says itself what it sends.

The library pads what travels, agrees formats across ranks once, keeps the storage of what arrives,
and hands the same storage to every later call (``out=``).

Between two uses the memory of what arrives is freed, and that of the inner tensors that the post
hook returned. What else the unsharded tensor refers to, such as scales, is its own business:
autograd may have saved it, and nobody would fill it again.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.bucket import Transfer
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
from composable_shard.core.param import ShardedParam
from composable_shard.core.transport.process_groups import gather_objects
from composable_shard.errors import ExtensionError

# Gathering one parameter that is a tensor subclass or brings the protocol -------------------------


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
        self.formats: list[Formats] | None = None
        self._dim = param.form.dim or 0  # as hooks see it; the layout has dims as in memory
        shape = torch.Size(param.form.shape)
        self._outer = shape, torch.empty(shape, device="meta").stride()  # of the contiguous whole
        self._device = device
        self._dtype = param.compute_dtype
        self._arrived: list[torch.Tensor] = []  # with the padding, flat
        self._buffers: list[torch.Tensor] = []  # what hooks get, flat; mostly the same
        self._versions: list[int] = []
        self._returned: list[torch.Tensor] = []  # inner tensors, by the post hook
        self._inner: list[torch.Tensor] = []  # the memory of those, flat
        self._kept: list[torch.Tensor] = []  # bytes of what is regathered
        self._out: torch.Tensor  # what the post hook gets to fill
        self._releases_buffers = False
        self._metadata: Any = None
        self._rebuild: Any = None
        self._sent: list[torch.Tensor] = []

    # What travels ---------------------------------------------------------------------------

    def prepare(self) -> Formats:
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
        if local.device != self._device:  # offloaded: what hooks compute belongs where it is used
            moved = local.to(self._device, non_blocking=True)
            local = moved if has_extension(moved) else local
        hook = bound_hook(getattr(local, PRE), local)
        num_args = len(inspect.signature(hook).parameters)
        mesh = self.param.mesh.shard_axis
        full = (mesh, *self._outer, self.param.slots[0].module, self.param.policy)
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
        return tensor.detach().to(self._device).contiguous()

    def _follows_param(self, tensor: torch.Tensor) -> bool:
        return self._dim > 0 and tensor.ndim == len(self.param.form.shape)

    # The gather -----------------------------------------------------------------------------

    def start_gather(self) -> Transfer:
        """Allocate what arrives and name what is sent; :meth:`prepare` must have been called."""
        assert self.formats is not None
        self._check_unchanged(self.formats[self.param.mesh.shard_rank])
        padded_rows = [max(rows) for rows in self._rows()]
        inputs = [padded(t, rows) for t, rows in zip(self._sent, padded_rows, strict=True)]
        if not self._arrived:
            self._create_buffers(inputs)
        for memory in (*self._arrived, *self._buffers, *self._inner):
            _torch.allocate(memory)
        self._versions = [buffer._version for buffer in self._buffers]
        self._sent = []
        if self.param.mesh.num_shards == 1:
            for buffer, own in zip(self._buffers, inputs, strict=True):
                buffer.copy_(own)
            return Transfer()
        return Transfer(self._arrived, inputs)

    def _rows(self) -> list[list[int]]:
        """Return for each tensor how many rows each rank sends of it."""
        assert self.formats is not None
        return [[wire.shape[0] for wire in wires] for wires in zip(*self.formats, strict=True)]

    def _create_buffers(self, inputs: Sequence[torch.Tensor]) -> None:
        """Make what is received; what ends with the padding of the last ranks is used in place."""
        num_ranks = self.param.mesh.num_shards
        with torch.inference_mode(False):
            for own, rows in zip(inputs, self._rows(), strict=True):
                make = partial(_torch.empty, dtype=own.dtype, device=own.device)
                arrived = make(num_ranks * own.numel())
                row_numel = own.numel() // max(max(rows), 1)
                ends_in_order = all(b == 0 or a == max(rows) for a, b in pairwise(rows))
                self._arrived.append(arrived)
                self._buffers.append(arrived if ends_in_order else make(sum(rows) * row_numel))

    def _check_unchanged(self, agreed: Formats) -> None:
        now = tuple(Format(tensor.dtype, tuple(tensor.shape)) for tensor in self._sent)
        if now != agreed:
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to return what it returned at the first "
                f"unshard, {in_words(agreed)}, got {in_words(now)}"
            )

    def finish_gather(self, transfer: Transfer) -> None:
        """Call the post-all-gather hook on what arrived, without the padding."""
        outputs = self._rebuild([self._unpadded(index) for index in range(len(self._buffers))])
        # Refilling is no change of inner tensors, which autograd may have saved by themselves.
        _torch.set_versions(tuple(self._buffers), tuple(self._versions))
        self._rebuild = None
        local, param = self.param.local, self.param
        metadata, self._metadata = self._metadata, None
        with torch.inference_mode(False), torch.no_grad():
            if not has_extension(local):
                if param.unsharded is None:
                    whole = outputs[0].to(self._dtype)
                    self._create_unsharded(whole, _torch.leaves(whole))
                else:
                    self._overwrite(lambda out: copy_unless_same(out, outputs[0]))
                return
            hook = bound_hook(getattr(local, POST), local)
            if param.unsharded is None:
                result = self._checked(hook(outputs, metadata, self._dtype))
                self._releases_buffers = self._asks_to_release()
                self._create_unsharded(*result)
            else:
                self._overwrite(lambda out: hook(outputs, metadata, self._dtype, out=out))
            if self._releases_buffers:
                self._free(self._buffers)

    def _checked(self, result: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return what the post hook returned if it is a tensor and its inner tensors."""
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

    def free(self) -> None:
        self._free([*self._arrived, *self._buffers, *self._inner])

    def _free(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            _torch.free(tensor)

    def keep(self, part: int, num_parts: int) -> list[torch.Tensor]:
        """Copy one part of what was freed otherwise and the unsharded parameter may refer to."""
        kept = []
        for whole in self._kept:
            numel = -(-whole.numel() // num_parts)
            mine = whole[part * numel : (part + 1) * numel]
            copied = padded(mine, numel) if mine.numel() < numel else mine.clone()
            kept.append(_torch.poison_when_unused(copied))
        return kept

    def start_regather(self, kept: list[torch.Tensor], num_parts: int) -> Transfer:
        """Allocate what arrives; what does not divide evenly arrives beside its place."""
        for whole in self._kept:
            _torch.allocate(whole)
        outputs = [
            whole if whole.numel() == num_parts * part.numel() else part.repeat(num_parts)
            for whole, part in zip(self._kept, kept, strict=True)
        ]
        return Transfer(outputs, kept)

    def finish_regather(self, transfer: Transfer) -> None:
        """Copy what arrived beside its place; no hook is called."""
        for whole, arrived in zip(self._kept, transfer.outputs, strict=True):
            if arrived is not whole:
                whole.copy_(arrived[: whole.numel()])

    def _unpadded(self, index: int) -> torch.Tensor:
        """View what hooks get of one tensor, the rows of all ranks without the padding."""
        assert self.formats is not None
        rows, trailing = self._rows()[index], self.formats[0][index].shape[1:]
        arrived, buffer = self._arrived[index], self._buffers[index]
        if buffer is not arrived and self.param.mesh.num_shards > 1:
            parts = arrived.view(len(rows), max(rows), *trailing)
            own = [part[:count] for part, count in zip(parts, rows, strict=True)]
            torch.cat(own, out=buffer.view(sum(rows), *trailing))
            _torch.free(arrived)
        numel = sum(rows) * prod(trailing)
        tensor = buffer[:numel].view(sum(rows), *trailing)
        return tensor.movedim(0, self._dim) if self._follows_param(tensor) else tensor

    def _create_unsharded(self, tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        """Make the unsharded parameter of what the post hook returned.

        As with torch, that may have rows of padding at the end.
        """
        param, expected = self.param, self.param.form.shape
        is_padded = tensor.shape[1:] == expected[1:] and tensor.shape[:1] > expected[:1]
        fitting = tensor[: expected[0]] if is_padded else tensor
        if tuple(fitting.shape) != expected:
            raise ExtensionError(
                f"Expected the unsharded tensor of {param.name} to have shape "
                f"{list(expected)}, got {list(tensor.shape)} from {type(tensor).__name__}"
            )
        param.create_unsharded(fitting)
        self._out, self._returned = tensor if is_padded else param.unsharded_local(), list(inner)
        buffers, shard = storages_of(self._buffers), storages_of([param.local])
        besides = {
            number: one
            for number, one in storages_of(inner).items()
            if number not in buffers and number not in shard
        }
        self._inner = [flat_view(*one) for one in besides.values()]
        if _torch.is_subclass(param.unsharded_local()):
            leaves, freed = _torch.leaves(param.unsharded_local()), {*buffers, *besides}
            param.parts = [leaf for leaf in leaves if _torch.storage_number(leaf) in freed]
        kept = {**besides, **self._used_buffers(buffers, inner)}
        self._kept = [flat_view(storage, torch.uint8) for storage, _ in kept.values()]

    def _used_buffers(self, buffers: Storages, inner: Sequence[torch.Tensor]) -> Storages:
        """Return the storages of what arrived that are needed after the hook, alike on all ranks.

        Where a class does not say what the unsharded parameter is made of, all of them may be.
        """
        unsharded = self.param.unsharded_local()
        if self._releases_buffers:
            return {}
        if _torch.is_subclass(unsharded) and not _torch.is_wrapper_subclass(unsharded):
            return buffers
        used = storages_of([unsharded, *inner])
        return {key: value for key, value in buffers.items() if key in used}

    def _asks_to_release(self) -> bool:
        """Ask a class whether what arrived may be freed once its post hook has run."""
        ask = getattr(self.param.local, RELEASE, None)
        answer = False if ask is None else ask()
        if not isinstance(answer, bool):
            raise ExtensionError(
                f"Expected {RELEASE} of {self.param.name} to return a bool, got "
                f"{type(answer).__name__}"
            )
        return answer

    def _overwrite(self, fill: Any) -> None:
        """Let ``fill`` write the unsharded parameter without counting as a change of any part."""
        unsharded = self.param.unsharded
        assert unsharded is not None
        parts = _torch.leaves(self.param.unsharded_local())
        with _torch.preserved_versions([unsharded, self._out, *parts, *self._returned]):
            fill(self._out)


def agree_formats(gathers: Sequence[ExtensionGather]) -> None:
    """Prepare gathers over one mesh; at the first time, exchange what each rank sends.

    An error in a hook of one rank raises on all ranks, with the text of every rank that failed.

    Collective: one all-gather of a small object if any of ``gathers`` is new, else none.
    """
    if all(gather.formats is not None for gather in gathers):
        for gather in gathers:
            gather.prepare()
        return
    said: list[Formats] | str
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
    for gather, *formats in zip(gathers, *heard, strict=True):
        check_alike(gather.param.name, ranks, formats)
        gather.formats = formats
