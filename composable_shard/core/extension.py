"""Tensor subclasses: the gathers of parameters and the reductions of gradients.

**Gathers.** A local shard with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` chooses the
tensors to gather, and builds the unsharded parameter from them. A wrapper subclass without these
hooks is gathered inner tensor by inner tensor. Each parameter has its own bucket, with the same
interface as other buckets. Between two uses, the memory of the gathered tensors and of the inner
tensors that the post hook returned is freed. Other tensors that the unsharded parameter holds, such
as scales, stay: autograd may have saved them, and no gather would fill them again.

**Gradients.** `StackedReduction` stacks the inner tensors of gradients that are wrapper subclasses,
and rebuilds the reduced gradients. `EncodedReduction` calls two hooks of the local shard:
``fsdp_pre_reduce_scatter`` turns the parts of a gradient, one for each rank, into the tensors to
send, and ``fsdp_post_reduce_scatter`` sums the received tensors. Each rank sends each rank a row of
bytes: the tensors of all gradients end to end, then a flag for each parameter, which is 1 if the
sender has a gradient of the parameter. The bytes of missing gradients are zero. Only ranks with a
gradient know its `Codec` (how to split it) or the formats (shapes and dtypes) of its encoded
tensors, so they send these to the other ranks, once.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable_shard import _torch
from composable_shard.core.codec import (
    GRAD_POST,
    GRAD_PRE,
    POST,
    PRE,
    Format,
    Formats,
    asks_to_release,
    check_same_formats,
    checked_post_result,
    checked_result,
    codec_of,
    flatten,
    formats_of,
    has_extension,
    has_grad_extension,
    hook_of,
    needs_extension,
    padded,
    storage_views,
    to_text,
    wrong_result,
)
from composable_shard.core.reduction import Division, Reduction, refuse_sparse
from composable_shard.core.storage import Bucket, FlatBucket, GatherOps, ShardedParam
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import Tensors
from composable_shard.core.transport.pending import Pending, Waitable, launching_stream
from composable_shard.core.transport.process_groups import gather_by_rank
from composable_shard.errors import ExtensionError
from composable_shard.mesh import ShardMesh

# Gathers ------------------------------------------------------------------------------------------


class _Message(NamedTuple):
    """The tensors of a shard that this rank sends.

    Attributes:
        shard: The shard.
        tensors: The tensors, contiguous, with the gathered dim first.
        rebuild: Makes the first argument of the post hook from the gathered tensors.
        metadata: The metadata that the pre hook returned for the post hook.
    """

    shard: torch.Tensor
    tensors: list[torch.Tensor]
    rebuild: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    metadata: Any


class ExtensionBucket:
    """The bucket of one subclass parameter; see `Bucket` for the attributes that the core uses.

    Attributes:
        formats: For each rank, the formats of the tensors that it sends. Ranks exchange them before
            the first gather.
    """

    message_cost: int | None = None

    def __init__(self, param: ShardedParam, shard: torch.Tensor) -> None:
        self.param, self.params, self.locals = param, [param], [shard]
        self.mesh, self.compute_dtype = param.mesh, param.policy.compute_dtype(shard.dtype)
        param.shares_storage = False
        self.formats: list[Formats] | None = None
        self._message: _Message | None = None
        self._pending = Pending([])
        self._gathered: list[torch.Tensor] = []  # the tensors of all ranks, flat
        self._inner: list[torch.Tensor] = []  # memory of the post hook's inner tensors
        self._out: torch.Tensor | None = None  # the unsharded tensor, which the post hook fills
        self._fixed_versions: list[torch.Tensor] = []  # a gather must not bump their versions
        self._releases_gathered = self._gathered_ahead = False
        self._grad_extensions: dict[torch.dtype, GradExtension] = {}

    @property
    def reduction(self) -> type[Reduction]:
        """The class that reduces the gradient."""
        is_sharded = self.mesh.num_shards > 1 and self.param.layout.flat.numel > 0
        encodes = is_sharded and has_grad_extension(self.param.local)
        return EncodedReduction if encodes else StackedReduction

    def grad_extension(self, dtype: torch.dtype) -> GradExtension:
        """Return the one `GradExtension` of the parameter for a dtype."""
        return self._grad_extensions.setdefault(dtype, GradExtension(self.param))

    def gather_ops(self, shards: Tensors, channel: Channel, *, keeps_storage: bool) -> GatherOps:
        """Return the operations that gather the shard."""
        launch = partial(self.launch, shards[0], channel)
        free = [] if keeps_storage else [self.free]
        return GatherOps([launch], [self.complete], [self.drop], free)

    def create_unsharded(self, channel: Channel) -> None:
        """Gather once to make the unsharded parameter; the next launch skips its gather.

        Collective: the all-gather. The ranks must have exchanged the formats.
        """
        self.launch(self.param.local, channel)
        self.complete()
        self._gathered_ahead = True

    def encode(self, shard: Any) -> list[torch.Tensor]:
        """Call the pre hook and keep the result; return the tensors to send."""
        inputs, metadata = self.call_pre(shard)
        flat, rebuild = flatten(inputs)
        tensors = [self._gathered_dim_first(tensor) for tensor in flat]
        self._message = _Message(shard, tensors, rebuild, metadata)
        return tensors

    def call_pre(self, shard: Any) -> tuple[Sequence[torch.Tensor], Any]:
        """Call the pre hook; return the tensors to send, and the metadata for the post hook."""
        if not has_extension(shard):
            return (shard,), None
        if shard.device != self.mesh.device:  # offloaded; the hooks compute on the device
            moved = shard.to(self.mesh.device, non_blocking=True)
            shard = moved if has_extension(moved) else shard  # `to` loses hooks set on the tensor
        hook, param = hook_of(shard, PRE), self.param
        shape = torch.Size(param.layout.shape)
        outer = shape, torch.empty(shape, device="meta").stride()
        all_args = (self.mesh.shard_axis, *outer, param.slots[0].module, param.policy)
        num_args = len(inspect.signature(hook).parameters)
        if num_args not in (0, 1, len(all_args)):
            raise ExtensionError(
                f"Expected {PRE} of {param.name} to take (mesh) or (mesh, outer_size, "
                f"outer_stride, module, mp_policy), got {num_args} parameters: "
                f"{inspect.signature(hook)}"
            )
        with torch.inference_mode(False), torch.no_grad():
            return checked_result(PRE, param.name, hook(*all_args[:num_args]))

    def _gathered_dim_first(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = torch.atleast_1d(tensor)
        return tensor.movedim(self._dim_of(tensor), 0).detach().to(self.mesh.device).contiguous()

    def _dim_of(self, tensor: torch.Tensor) -> int:
        """Return the sharded dim if ``tensor`` has as many dims as the parameter; otherwise 0."""
        layout = self.param.layout
        return (layout.dim or 0) if tensor.ndim == len(layout.shape) else 0

    def launch(self, shard: torch.Tensor, channel: Channel) -> None:
        """Call the pre hook, allocate memory and launch the all-gather."""
        if self._gathered_ahead:  # by `create_unsharded`, for this use
            return
        if self._message is None:
            self.encode(shard)
        assert self._message is not None and self.formats is not None
        agreed, current = self.formats[self.mesh.shard_rank], formats_of(self._message.tensors)
        if current != agreed:
            expected = f"the same tensors as at the first unshard, {to_text(agreed)}"
            raise wrong_result(PRE, self.param.name, expected, to_text(current))
        pairs = zip(self._message.tensors, self._num_rows(), strict=True)
        inputs = [padded(tensor, max(counts)) for tensor, counts in pairs]
        if not self._gathered:
            with torch.inference_mode(False):
                self._gathered = [
                    _torch.empty(self.mesh.num_shards * x.numel(), dtype=x.dtype, device=x.device)
                    for x in inputs
                ]
        for memory in (*self._gathered, *self._inner):
            _torch.allocate(memory)
        self._versions = tuple(gathered._version for gathered in self._gathered)
        works: Sequence[Waitable] = ()
        if self.mesh.num_shards == 1:
            _torch.copy_all_(self._gathered, inputs)
        else:
            works = channel.gather(self._gathered, inputs)
        stream = launching_stream(self.mesh.device)
        self._pending = Pending(works, channel.gathering, stream, inputs)

    def drop(self) -> None:
        """Abandon the gather: wait until no collective writes to the memory any more."""
        self._gathered_ahead, self._message = False, None
        self._pending.drop()

    def complete(self) -> None:
        """Wait for the all-gather, and call the post hook on the rows of all ranks."""
        if self._gathered_ahead:
            self._gathered_ahead = False
            return
        self._pending.wait()
        assert self._message is not None
        (shard, _, rebuild, metadata), self._message = self._message, None
        pairs = zip(self._gathered, self._num_rows(), strict=True)
        outputs = rebuild([self._all_rows(i, *pair) for i, pair in enumerate(pairs)])
        # The unsharded parameter may be a view of the gathered tensors, and autograd may have saved
        # it. So the next gather must not bump their versions.
        _torch.set_versions(tuple(self._gathered), self._versions)
        has_hooks = has_extension(shard)
        hook = hook_of(shard, POST) if has_hooks else _post_all_gather
        post = partial(hook, outputs, metadata, self.compute_dtype)
        with torch.inference_mode(False), torch.no_grad():
            if self._out is None:
                tensor, inner = checked_post_result(self.param.name, post())
                self._releases_gathered = has_hooks and asks_to_release(self.param.name, shard)
                self._create_unsharded(tensor, inner)
            else:
                with _torch.preserved_versions(self._fixed_versions):
                    post(out=self._out)
            if self._releases_gathered:
                for gathered in self._gathered:
                    _torch.free(gathered)

    def free(self) -> bool:
        """Free the memory that the next gather fills again.

        Returns:
            Whether NumPy arrays share the memory: always ``False``, as this class does not check.
        """
        self._gathered_ahead = False
        for memory in (*self._gathered, *self._inner):
            _torch.free(memory)
        return False

    def _num_rows(self) -> list[list[int]]:
        """Return, for each tensor, the number of rows that each rank sends."""
        assert self.formats is not None
        return [[format.shape[0] for format in each] for each in zip(*self.formats, strict=True)]

    def _all_rows(self, index: int, gathered: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Remove the padding between the rows of the ranks, in place; return the rows."""
        assert self.formats is not None
        padded_rows, end = max(counts), 0
        rows = gathered.view(len(counts) * padded_rows, *self.formats[0][index].shape[1:])
        for rank, count in enumerate(counts):
            start = rank * padded_rows
            if count and end != start:
                rows[end : end + count] = rows[start : start + count].clone()
            end += count
        return rows[:end].movedim(0, self._dim_of(rows))

    # The unsharded parameter ----------------------------------------------------------------

    def _create_unsharded(self, tensor: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        """Make the unsharded parameter; as in torch, ``tensor`` may end with rows of padding."""
        param, expected = self.param, self.param.layout.shape
        is_padded = tensor.shape[1:] == expected[1:] and tensor.shape[:1] > expected[:1]
        fitting = tensor[: expected[0]] if is_padded else tensor
        if tuple(fitting.shape) != expected:
            raise ExtensionError(
                f"Expected the unsharded tensor of {param.name} to have shape "
                f"{list(expected)}, got {list(tensor.shape)} from {type(tensor).__name__}"
            )
        param.create_unsharded(fitting)
        unsharded = param.unsharded_local
        self._out = tensor if is_padded else unsharded
        # `free` also frees the memory of inner tensors, except memory of the shard.
        gathered, of_inner = storage_views(self._gathered), storage_views(inner)
        known = {*gathered, *storage_views([param.local])}
        others = {number: of_inner[number] for number in of_inner if number not in known}
        self._inner = list(others.values())
        leaves = _torch.leaves(unsharded)
        if _torch.is_subclass(unsharded):
            freed = {*gathered, *others}
            param.freed_inner = [leaf for leaf in leaves if _torch.storage_number(leaf) in freed]
        self._fixed_versions = [param.unsharded, self._out, *leaves, *inner]

    def memory_for_backward(self) -> Sequence[torch.Tensor]:
        """Return the memory to gather again for backward, as bytes: some backends send no fp8."""
        gathered = [] if self._releases_gathered else self._gathered
        return [memory.view(torch.uint8) for memory in (*self._inner, *gathered)]


def _post_all_gather(
    outputs: tuple[torch.Tensor, ...], _: None, dtype: torch.dtype, *, out: Any = None
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """Build or fill the unsharded tensor of a wrapper subclass that has no hooks."""
    (whole,) = outputs
    if out is not None:
        pairs = zip(_torch.leaves(out), _torch.leaves(whole), strict=True)
        if any(into.data_ptr() != source.data_ptr() for into, source in pairs):
            out.copy_(whole)
        return None
    whole = whole.to(dtype)
    return whole, _torch.leaves(whole)


# The name of a parameter, and a function that calls its hook. The function returns the tensors to
# send, or ``None`` if this rank has no gradient.
_Call = tuple[str, Callable[[], list[torch.Tensor] | None]]


def _encode_first(
    hook: str, calls: Sequence[_Call], mesh: ShardMesh
) -> tuple[list[list[torch.Tensor] | None], list[dict[int, Formats]]]:
    """Call pre hooks for the first time, and exchange the formats of the tensors to send.

    Args:
        hook: The name of the hook.
        calls: The calls, one for each parameter.
        mesh: The ranks.

    Returns:
        The results of the calls; for each parameter, the formats of the tensors to send, by rank.

    Raises:
        ExtensionError: On all ranks, if a call failed on any rank, or if formats of two ranks
            differ in more than the size of dim 0.

    Collective: one all-gather of a small object for each mesh axis.
    """
    encoded: list[list[torch.Tensor] | None] = []
    text, failure = "", None
    for name, call in calls:
        try:
            encoded.append(call())
        except Exception as error:  # noqa: BLE001 - any failure of user code is raised on all ranks
            failure, text = error, str(error)
            if not isinstance(error, ExtensionError):
                text = f"{hook} of {name} failed: {type(error).__name__}: {error}"
            break
    formats = [None if tensors is None else formats_of(tensors) for tensors in encoded]
    doing = "agreeing on the tensors of subclasses"
    by_rank = gather_by_rank((text, formats), mesh.process_groups, doing)
    raise_on_all({rank: text for rank, (text, _) in by_rank.items()}, failure)
    sent_by_param = []
    for index, (name, _) in enumerate(calls):
        known = ((rank, theirs[index]) for rank, (_, theirs) in by_rank.items())
        sent = {rank: of_param for rank, of_param in known if of_param is not None}
        check_same_formats(hook, name, sent)
        sent_by_param.append(sent)
    return encoded, sent_by_param


def raise_on_all(texts: Mapping[int, str | None], cause: Exception | None) -> None:
    """Raise ``ExtensionError`` if user code has failed on any rank.

    Args:
        texts: The text of the error of each rank; empty if there is none.
        cause: The error of this rank.
    """
    failures = {rank: text for rank, text in texts.items() if text}
    distinct = set(failures.values())
    if len(failures) == len(texts) and len(distinct) == 1:
        raise ExtensionError(distinct.pop()) from cause
    if failures:
        lines = (f"rank {rank}: {text}" for rank, text in failures.items())
        raise ExtensionError("; ".join(lines)) from cause


# The buckets of a group, flat ones and those of tensor subclasses ---------------------------------


def build_buckets(params: Sequence[ShardedParam], shards: Sequence[torch.Tensor]) -> list[Bucket]:
    """Copy shards into new buckets: one per mesh, dtypes, device, class; one per subclass tensor.

    Args:
        params: The parameters.
        shards: This rank's shard of each parameter.
    """
    pairs_by_key: dict[tuple[Any, ...], list[tuple[ShardedParam, torch.Tensor]]] = {}
    for param, shard in zip(params, shards, strict=True):
        dtypes = shard.dtype, param.policy.compute_dtype(shard.dtype)
        subclass = param if needs_extension(shard) else None
        key = param.mesh, *dtypes, shard.device, param.bucket_class or FlatBucket, subclass
        pairs_by_key.setdefault(key, []).append((param, shard))
    return [
        bucket_class(*zip(*pairs, strict=True)) if subclass is None else ExtensionBucket(*pairs[0])
        for (*_, bucket_class, subclass), pairs in pairs_by_key.items()
    ]


def create_unsharded(buckets: Iterable[Bucket], channels: Mapping[ShardMesh, Channel]) -> None:
    """Make the unsharded parameters of buckets that have none, before their first gather.

    Raises:
        ExtensionError: On all ranks, if a pre hook failed on any rank, or if formats of two ranks
            differ in more than the size of dim 0. On a single rank, if the post hook returned a
            wrong result there.

    Collective: for tensor subclasses, an all-gather of a small object for each mesh axis, then the
        all-gathers of the shards.
    """
    new = [bucket for bucket in buckets if not hasattr(bucket.params[0], "unsharded")]
    extended: dict[ShardMesh, list[ExtensionBucket]] = {}
    for bucket in new:
        if isinstance(bucket, ExtensionBucket):
            extended.setdefault(bucket.mesh, []).append(bucket)
    for mesh, of_mesh in extended.items():
        calls = [(each.param.name, partial(each.encode, each.param.local)) for each in of_mesh]
        _, sent_by_param = _encode_first(PRE, calls, mesh)
        group = mesh.shard_group
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        for each, sent in zip(of_mesh, sent_by_param, strict=True):
            each.formats = [sent[rank] for rank in ranks]
    for bucket in new:
        bucket.create_unsharded(channels[bucket.mesh])


@torch.no_grad()
def move_into_buckets(params: Sequence[ShardedParam]) -> list[Bucket]:
    """Copy the shards of sharded parameters into new buckets, which hold them from now on."""
    with torch.inference_mode(False):
        buckets = build_buckets(params, [_torch.local_tensor(param.sharded) for param in params])
        for bucket in buckets:
            for param, local in zip(bucket.params, bucket.locals, strict=True):
                param.set_local(local)
    return buckets


def have_plain_shards(buckets: Sequence[Bucket]) -> bool:
    """Return whether all shards of flat buckets are still plain tensors."""
    flat = (bucket for bucket in buckets if isinstance(bucket, FlatBucket))
    return not any(needs_extension(param.local) for bucket in flat for param in bucket.params)


# Gradients that are tensor subclasses -------------------------------------------------------------


class StackedReduction(Reduction):
    """The reduction of gradients that may be tensor subclasses, for several buckets.

    The inner tensors of a gradient are stacked and reduced like one plain gradient.
    """

    def launch(self) -> None:
        """Launch the reduce-scatter of all inner tensors.

        While codecs are unknown, ranks first exchange those of their gradients, which only ranks
        with a gradient know, and plan again.

        Collective: the reduce-scatter; before it, while codecs are unknown, an all-gather of a
            small object for each mesh axis.
        """
        if any(map(_is_unknown, self.params)):
            grads = enumerate(self._grads)
            known = {index: codec_of(grad) for index, grad in grads if grad is not None}
            doing = "agreeing on the inner tensors of gradients"
            for theirs in gather_by_rank(known, self._mesh.process_groups, doing).values():
                for index, codec in theirs.items():
                    self.params[index].grad_codec = codec
            self._plan()
        pairs = zip(self.params, self._grads, strict=True)
        self._grads = [None if grad is None else _stacked(param, grad) for param, grad in pairs]
        super().launch()

    def _take_reduced_over_shards(self) -> Iterator[tuple[int, torch.Tensor]]:
        # `launch` has stacked the new gradients; the earlier ones in ``.grad`` are added to them.
        for index, grad in super()._take_reduced_over_shards():
            yield index, _stacked(self.params[index], grad)

    def _results(self) -> Iterable[tuple[int, torch.Tensor, _torch.DTensorSpec]]:
        for index, shard, spec in super()._results():
            codec = self.params[index].grad_codec
            if codec is not None and codec.kind is not None:
                # Clones have equal storage offsets, which a class may require.
                inner = map(torch.clone, shard.unbind(-1))
                shard = codec.rebuild(inner).to(shard.dtype)
            if not _is_unknown(self.params[index]):
                yield index, shard, spec


def _is_unknown(param: ShardedParam) -> bool:
    """Return whether the inner tensors of gradients are unknown: no rank has had a gradient yet."""
    return param.grad_codec is None and _torch.is_wrapper_subclass(param.unsharded_local)


def _stacked(param: ShardedParam, grad: torch.Tensor) -> torch.Tensor:
    """Stack the inner tensors of a gradient along a new last dim; leave a plain one unchanged."""
    codec = param.grad_codec
    if codec is None or codec.kind is None:
        return grad
    return torch.stack(codec.inner_tensors(grad), -1)


# Gradients that hooks encode ----------------------------------------------------------------------


class GradExtension:
    """The gradient hooks of one parameter, for one dtype of gradients.

    Attributes:
        formats: The formats of the tensors that each rank sends; ``None`` until a rank has had a
            gradient and the ranks have exchanged the formats.
    """

    def __init__(self, param: ShardedParam) -> None:
        self.param = param
        self.formats: Formats | None = None
        self._metadata: Any = None

    def encode_grad(
        self, grad: torch.Tensor | None, dtype: torch.dtype
    ) -> list[torch.Tensor] | None:
        """Encode a gradient in the dtype of the reduction; return ``None`` if there is none."""
        if grad is None:
            return None
        if _torch.is_wrapper_subclass(grad):
            raise ExtensionError(
                f"Expected a plain gradient of {self.param.name} to pass to {GRAD_PRE}, got "
                f"{type(grad).__name__}; let {POST} return a plain tensor"
            )
        return self.encode(self.param.layout.padded_shards(grad.to(dtype)))

    def encode(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Call ``fsdp_pre_reduce_scatter``; return the tensors to send, with a row for each rank.

        Args:
            parts: The part of the gradient that each rank needs, [num_shards, shard_numel].
        """
        result = hook_of(self.param.local, GRAD_PRE)(parts, self.param.mesh.shard_axis)
        tensors, self._metadata = checked_result(GRAD_PRE, self.param.name, result)
        shapes = [list(tensor.shape) for tensor in tensors]
        if any(shape[:1] != [len(parts)] for shape in shapes):
            expected = f"tensors with a row for each of {len(parts)} ranks"
            raise wrong_result(GRAD_PRE, self.param.name, expected, shapes)
        formats = formats_of(tensors)
        if self.formats is not None and self.formats != formats:
            expected = f"{to_text(self.formats)} as before"
            raise wrong_result(GRAD_PRE, self.param.name, expected, to_text(formats))
        return list(tensors)

    def decode(self, received: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Call ``fsdp_post_reduce_scatter``, which fills ``out`` with the sum over all ranks.

        Args:
            received: The tensors that all ranks sent to this one, a row from each.
            out: The tensor to fill, [shard_numel].
        """
        hook_of(self.param.local, GRAD_POST)(received, self._metadata, out)


class ExchangedReduction(Reduction, ABC):
    """A reduction that exchanges encoded gradients all to all, then decodes and sums them."""

    is_exchanged = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.division = Division(1.0, None, 1.0)  # `wait` divides

    @abstractmethod
    def encode(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the bytes to send: tensors with a row for each rank."""

    @abstractmethod
    def decode(self, rows: torch.Tensor, shards: Tensors) -> None:
        """Decode the received gradients of all ranks and add them to ``shards``.

        Args:
            rows: The bytes that each rank sent to this one.
            shards: This rank's shard of each gradient, [shard_numel]: zeros, in fp32 or wider.
        """

    @torch.no_grad()
    def launch(self) -> None:
        """Encode the gradients, and send each rank its parts and the flags.

        Collective: an all-to-all, after the collectives of :meth:`encode`.
        """
        grads = self._grads
        del self._grads
        refuse_sparse(self.params, grads)
        columns = self.encode(grads)
        has_grad = [grad is not None for grad in grads]
        self._all_have_grads = all(has_grad)
        flags = torch.tensor([has_grad] * self._mesh.num_shards, dtype=torch.uint8)
        rows = torch.cat([*columns, flags.to(self._mesh.device)], 1)
        self._received = _torch.empty_like(rows)
        works = self._channel.exchange(self._received, rows)
        stream = launching_stream(rows.device)
        self._pending = [Pending(works, self._channel.reducing, stream, [rows])]

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the parts of all ranks, then sum and divide them.

        After :meth:`launch_over_replicas`, a second call waits for the all-reduce.
        """
        super().wait()
        rows = self.__dict__.pop("_received", None)
        if rows is None:
            return
        rows, flags = rows.tensor_split([-self.num_flags], 1)
        total = rows.new_zeros(self._numel, dtype=torch.promote_types(self.dtype, torch.float32))
        numels = (param.layout.flat.shard_numel for param in self.params)
        *_, starts = self._view_args  # of the shards in `reduced`
        self.decode(rows, [total.narrow(0, *span) for span in zip(starts, numels, strict=True)])
        total.div_(self._divisor)
        total[-self.num_flags :] = flags.amax(0)
        self.reduced = total.to(self.dtype)


class EncodedReduction(ExchangedReduction):
    """The reduction of gradients that hooks encode."""

    def __init__(self, buckets: Sequence[ExtensionBucket], *args: Any) -> None:
        super().__init__(buckets, *args)
        bucket_of = {bucket.param: bucket for bucket in buckets}
        self._extensions = [bucket_of[p].grad_extension(self.dtype) for p in self.params]

    def encode(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Call ``fsdp_pre_reduce_scatter`` for each gradient.

        Collective: while formats are unknown, the all-gathers of :func:`_encode_first`.
        """
        calls = [
            (extension.param.name, partial(extension.encode_grad, grad, self.dtype))
            for extension, grad in zip(self._extensions, grads, strict=True)
        ]
        if all(extension.formats is not None for extension in self._extensions):
            encoded = [call() for _, call in calls]
        else:
            encoded, sent = _encode_first(GRAD_PRE, calls, self._mesh)
            for extension, formats in zip(self._extensions, sent, strict=True):
                # Ranks with a gradient have equal formats. If no rank has one, keep the old ones.
                extension.formats = next(iter(formats.values()), extension.formats)
        columns: list[torch.Tensor] = []
        for extension, tensors in zip(self._extensions, encoded, strict=True):
            if tensors is None:
                nbytes = sum(map(_nbytes, extension.formats or ()))
                shape = self._mesh.num_shards, nbytes
                columns.append(self._all_flags.new_zeros(shape, dtype=torch.uint8))
            else:
                columns += map(_to_bytes, tensors)
        return columns

    def decode(self, rows: torch.Tensor, shards: Tensors) -> None:
        """Call ``fsdp_post_reduce_scatter`` for each gradient."""
        formats = [format for each in self._extensions for format in each.formats or ()]
        received = map(_from_bytes, rows.split(list(map(_nbytes, formats)), 1), formats)
        for extension, shard in zip(self._extensions, shards, strict=True):
            if extension.formats is not None:
                extension.decode(tuple(islice(received, len(extension.formats))), shard)


def _nbytes(format: Format) -> int:
    """Return the number of bytes of one row: the part for one rank."""
    return prod(format.shape[1:]) * format.dtype.itemsize


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, a row for each rank."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat.view(len(tensor), flat.numel() // len(tensor))


def _from_bytes(rows: torch.Tensor, format: Format) -> torch.Tensor:
    """Copy a tensor from its bytes, which are a part of longer rows."""
    copied = rows.clone(memory_format=torch.contiguous_format)
    return copied.view(-1).view(format.dtype).view(format.shape)
