"""Initial values: those of the unsharded model with the same seed, or those of one rank.

Every rank runs the same initialization with the same random numbers, module by module, and keeps
its own rows of each full tensor. Initializing shards directly would be wrong: ranks with the same
seed would all get the same rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from composable_shard import _torch, arguments
from composable_shard.errors import MaterializationError, ShardError
from composable_shard.mesh import default_device_type, start_process_group
from composable_shard.train.full import as_bytes, count_write, full_copy, sharded_axes
from composable_shard.train.ranks import Ranks
from composable_shard.train.weights.entries import Entry, contents_of, listed, materialize
from composable_shard.train.weights.gathering import runs_within


def init_sharded(
    model: nn.Module,
    fn: Callable[[nn.Module], object] | None = None,
    *,
    seed: int,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Initialize a sharded model with the values of the unsharded one.

    The values are bitwise those of ``torch.manual_seed(seed); model.apply(fn)`` on the unsharded
    model on the same device, on any number of ranks and with any sharding. Parameters and buffers
    on the meta device first get memory on their device. While ``fn`` runs, torch functions get the
    full tensor in place of each shard, also for shards of other modules.

    Args:
        model: The model, sharded or not, the same on all ranks.
        fn: Called with each module, children before parents, as by ``model.apply``. By default
            calls ``reset_parameters()`` where a module has it. Must do the same on all ranks, with
            random functions of torch only.
        seed: The seed of the random numbers. The generators of this process are not changed.
        process_group: The ranks that hold this model; all of them if absent.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``seed`` is negative.
        MaterializationError: On all ranks, if a tensor has no values at the end: a meta tensor that
            ``fn`` has not touched, or, without ``fn``, any parameter of a module without
            ``reset_parameters()``.
        ShardError: On all ranks, if a parameter is a tensor subclass of several tensors, or if
            ``fn`` fails on some ranks. In a forward or backward.
        RankMismatchError: On all ranks, if models or seeds differ.

    Collective: two all-gathers of a small object. An all-gather of each parameter with values when
        ``fn`` first touches it; none for meta tensors.
    Memory: besides the shards, the full tensors that one call of ``fn`` touches.

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def build():
        ...     with torch.device("meta"):
        ...         layer = fully_shard(nn.Linear(2, 4))
        ...     init_sharded(layer, lambda module: nn.init.ones_(module.weight), seed=0)
    """
    ranks, entries = Ranks(process_group, "initializing a model"), list[Entry]()
    with ranks.checking():
        arguments.check_function("fn", fn)
        arguments.check_int("seed", seed, 0)
        entries = contents_of(model, "init_sharded", has_volatile=True)
        for entry in entries:
            if entry.plain is None:
                raise ShardError(
                    f"Expected parameters of one plain tensor each, got '{entry.names[0]}', a "
                    f"{type(entry.local).__name__}; give it its values before fully_shard"
                )
    ranks.agree(f"seed {seed}", *(entry.fact() for entry in entries), what="model and seed")
    with ranks.checking():
        fresh = [entry for entry in entries if entry.is_meta]
        params = {id(param) for param in model.parameters()} if fn is None else set[int]()
        needed = [e for e in entries if e.is_meta or id(e.tensor) in params]
        with torch.inference_mode(False), torch.no_grad(), _forked_generators():
            materialize(model, entries)
            full = _FullTensors(entries, fresh)
            torch.manual_seed(seed)
            model.apply(partial(full.run, _reset if fn is None else fn))
        missing = [e.names[0] for e in needed if id(e.tensor) not in full.touched]
        if missing:
            by = "reset_parameters()" if fn is None else "fn"
            raise MaterializationError(
                f"Expected {by} to initialize {listed(missing)}, got no values; pass another fn"
            )
    ranks.agree()


def _reset(module: nn.Module) -> None:
    reset: Callable[[], object] = getattr(module, "reset_parameters", lambda: None)
    reset()


def _forked_generators() -> contextlib.AbstractContextManager[None]:
    """Restore the generators of the CPU and of the current device at the end."""
    kind = default_device_type()
    devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    return torch.random.fork_rng(devices, device_type=kind)


class _FullTensors(TorchFunctionMode):
    """Gives torch functions full tensors in place of shards, and keeps this rank's rows.

    Args:
        entries: The tensors of a model.
        fresh: The entries without values.

    Attributes:
        touched: The ids of the tensors that were passed to a function.
    """

    def __init__(self, entries: Iterable[Entry], fresh: Iterable[Entry]) -> None:
        super().__init__()
        self.touched: set[int] = set()
        self._entries = {id(entry.tensor): entry for entry in entries}
        self._fresh = {id(entry.tensor) for entry in fresh}
        self._full: dict[int, torch.Tensor] = {}

    def run(self, fn: Callable[[nn.Module], object], module: nn.Module) -> None:
        """Initialize one module."""
        with self:
            fn(module)
        for key, full in self._full.items():
            entry = self._entries[key]
            assert isinstance(entry.tensor, DTensor)
            entry.local.copy_(_torch.cut(full, entry.tensor.device_mesh, entry.tensor.placements))
            entry.tensor.requires_grad_(full.requires_grad)
        self._full.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = _torch.map_tensors(self._whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)
        if key not in self._entries:
            return tensor
        self.touched.add(key)
        if not isinstance(tensor, DTensor):
            return tensor
        if key not in self._full:
            entry, strides = self._entries[key], tensor.stride()
            like = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device="meta")
            full = _torch.empty_like(like, device=entry.local.device)
            if key in self._fresh:
                self._fresh.remove(key)
            else:
                full.copy_(full_copy(tensor, entry.names[0]))
            self._full[key] = full.requires_grad_(tensor.requires_grad)
        return self._full[key]


# All ranks start from the values of one -----------------------------------------------------------


@torch.no_grad()
def sync_module_states(
    module: nn.Module,
    *,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
    keep_shards: bool = False,
    bucket_nbytes: int = 32 * 2**20,
) -> None:
    """Overwrite the parameters and buffers of a module by those of one rank, in place.

    Call it before ``fully_shard``, which keeps each rank's own rows of its own values. If some
    ranks built the module on the meta device, call ``to_empty`` there first.

    One rank no longer has all rows of a sharded parameter, so a sharded module raises an error.
    With ``keep_shards``, shards keep their values; buffers, plain parameters, and replicas of a
    shard are synchronized.

    Args:
        module: The module, the same on all ranks except for its values.
        src_rank: The global rank that sends its values; for replicas of a shard, the first replica
            does.
        process_group: The ranks to synchronize; all of them if absent. As in ``fully_shard``, the
            default process group is then started from the environment if there is none.
        keep_shards: Whether sharded parameters keep their rows.
        bucket_nbytes: The bytes of tensors that are sent together; a larger tensor is sent alone.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``src_rank`` is not in the group, ``bucket_nbytes`` is not positive, or
            ``keep_shards`` is no bool.
        MaterializationError: If a tensor is on the meta device on all ranks.
        RankMismatchError: On all ranks, if names, shapes, dtypes or arguments differ.
        ShardError: On all ranks, if a parameter is sharded and ``keep_shards`` is not set, if an
            argument is wrong or a tensor is on the meta device on some ranks, or if the module is
            parked or on other ranks.

    Collective: broadcasts of all bytes, in buckets; before, an all-gather of a small object.
    Memory: one bucket, or the largest tensor that cannot be sent in place, such as a non-contiguous
        one.
    Source: ``sync_module_states`` of ``FullyShardedDataParallel`` (FSDP1).

    Example:
        >>> from composable_shard import fully_shard
        >>> from composable_shard.testing import run_threads
        >>> def start():
        ...     layer = nn.Linear(2, 2, bias=False)
        ...     nn.init.constant_(layer.weight, dist.get_rank() + 1)
        ...     sync_module_states(layer)
        ...     return fully_shard(layer).weight.to_local().tolist()
        >>> run_threads(start, 2)
        [[[1.0, 1.0]], [[1.0, 1.0]]]
    """
    if process_group is None and "RANK" in os.environ:  # else this process may be alone
        start_process_group()
    ranks, entries = Ranks(process_group, f"synchronizing {type(module).__name__}"), list[Entry]()
    with ranks.checking():
        arguments.check_module("module", module)
        arguments.check_int("src_rank", src_rank, 0)
        known = f"to be one of the ranks {ranks.numbers}"
        arguments.check_value("src_rank", src_rank, src_rank in ranks.numbers, known)
        arguments.check_flags(keep_shards=keep_shards)
        arguments.check_int("bucket_nbytes", bucket_nbytes, 1)
        entries = contents_of(module, "sync_module_states", has_volatile=True)
        for entry in entries:
            name, tensor = entry.names[0], entry.tensor
            is_sharded = isinstance(tensor, DTensor) and sharded_axes(
                tensor.device_mesh, tensor.placements
            )
            if is_sharded and not keep_shards:
                raise ShardError(
                    f"Expected {type(module).__name__} before it is sharded, got '{name}' sharded; "
                    "call sync_module_states before fully_shard, or set keep_shards=True"
                )
            if entry.is_meta:
                raise MaterializationError(
                    f"Expected '{name}' with values, got it on meta; call module.to_empty() first"
                )
    facts = [f"src_rank {src_rank}, keep_shards {keep_shards}, bucket_nbytes {bucket_nbytes}"]
    facts += [entry.fact() for entry in entries]
    ranks.agree(*facts, what="arguments, parameters and buffers")
    if ranks.group is not None and len(ranks.numbers) > 1:
        plain = [entry.local for entry in entries if not isinstance(entry.tensor, DTensor)]
        _broadcast(plain, ranks.group, ranks.numbers.index(src_rank), bucket_nbytes)
    for entry in entries:
        if isinstance(entry.tensor, DTensor):
            mesh = entry.tensor.device_mesh
            for axis, placement in enumerate(entry.tensor.placements):
                if placement.is_replicate() and mesh.size(axis) > 1:
                    _broadcast([entry.local], mesh.get_group(axis), 0, bucket_nbytes)


def _broadcast(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int, bucket_nbytes: int
) -> None:
    """Send tensors in buckets."""
    leaves = [leaf for tensor in tensors for leaf in _torch.leaves(tensor.detach()) if leaf.numel()]
    leaves.sort(key=lambda leaf: -leaf.itemsize)  # each is aligned in a bucket
    for device in dict.fromkeys(leaf.device for leaf in leaves):
        near = [leaf for leaf in leaves if leaf.device == device]
        for bucket in runs_within(near, bucket_nbytes):
            _send(bucket, group, source)


def _send(bucket: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Send the bytes of tensors together; a single contiguous tensor is sent in place."""
    device = _torch.device_for(group, bucket[0].device)
    numbers = [as_bytes(leaf).to(device) for leaf in bucket]
    sent = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
    dist.broadcast(sent, group=group, group_src=source)
    for leaf, part in zip(bucket, sent.split([len(part) for part in numbers]), strict=True):
        if part.data_ptr() == leaf.data_ptr():
            count_write(leaf)  # the collective does not count it
        else:
            leaf.copy_(part.view(leaf.dtype).view(leaf.shape))
