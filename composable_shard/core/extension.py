"""Tensor subclasses: the gathers of parameters and the reductions of gradients.

**Gathers.** A local shard with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` chooses the
tensors to gather, and builds the unsharded parameter from them. A wrapper subclass without these
hooks is gathered inner tensor by inner tensor. Each parameter has its own bucket, with the same
interface as other buckets. Between two uses, the memory of the gathered tensors and of the inner
tensors that the post hook returned is freed. Other tensors that the unsharded parameter holds, such
as scales, stay: autograd may have saved them, and no gather would fill them again.

**Gradients.** `SplitReduction` splits gradients that are wrapper subclasses into inner tensors, and
rebuilds the reduced gradients. `EncodedReduction` calls ``fsdp_pre_reduce_scatter`` of the local
shard, which turns the parts of a gradient, one for each rank, into the tensors to send, and
``fsdp_post_reduce_scatter``, which sums the received tensors. Each rank sends each other rank a row
of bytes: the tensors of every gradient end to end, aligned, then a flag for each gradient that the
rank has. The bytes of missing gradients are zero. Only a rank with a gradient knows its codec or
its encoded formats, so it sends these to the other ranks, once in the life of the parameter.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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
    RELEASE,
    Codec,
    Format,
    Formats,
    StorageViews,
    bound_hook,
    check_same_formats,
    checked_result,
    codec_of,
    flatten,
    formats_of,
    has_extension,
    has_grad_extension,
    needs_extension,
    padded,
    storage_views,
    to_text,
)
from composable_shard.core.layout import aligned
from composable_shard.core.reduction import Reduction, Scale, refuse_sparse, stage_of
from composable_shard.core.storage import Bucket, FlatBucket, GatherOps, ShardedParam
from composable_shard.core.transport.channel import Channel
from composable_shard.core.transport.collectives import Tensors
from composable_shard.core.transport.pending import Pending, launching_stream
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
    """The bucket of one parameter; see `Bucket` for the attributes that the core uses.

    Attributes:
        formats: For each rank, the formats of the tensors that it sends. Ranks exchange them before
            the first gather.
    """

    message_cost: int | None = None
    unwritten: Sequence[tuple[int, int]] = ()
    formats: list[Formats] | None

    def __init__(self, param: ShardedParam, shard: torch.Tensor) -> None:
        self.param, self.params, self.locals = param, [param], [shard]
        self.mesh, self.compute_dtype = param.mesh, param.policy.compute_dtype(shard.dtype)
        param.shares_storage = False
        self.formats = None
        self._message: _Message | None = None
        self._gathered: list[torch.Tensor] = []  # the tensors of all ranks, flat
        self._inner: list[torch.Tensor] = []  # memory of the inner tensors of the post hook
        self._out: torch.Tensor | None = None  # the unsharded tensor, which the post hook fills
        self._versioned: list[torch.Tensor] = []  # a gather must not bump their versions
        self._releases_gathered = self._gathered_ahead = False

    @property
    def reduction(self) -> type[Reduction]:
        """The class that reduces the gradient; valid once the unsharded parameter exists."""
        is_shared = self.mesh.num_shards > 1 and self.param.layout.flat.numel > 0
        encodes = is_shared and has_grad_extension(self.param.local)
        return EncodedReduction if encodes else SplitReduction

    @property
    def has_unsharded(self) -> bool:
        """Whether a gather has made the unsharded parameter."""
        return self._out is not None

    def gather_ops(self, shards: Tensors, channel: Channel, *, keeps_storage: bool) -> GatherOps:
        """Return the operations that gather the shard."""
        launch = partial(self.launch, shards[0], channel)
        free = [] if keeps_storage else [self.free]
        return GatherOps([launch], [self.complete], [self.drop], free)

    def gather_first(self, shard: torch.Tensor, channel: Channel) -> None:
        """Gather once to make the unsharded parameter; keep the memory for the next use.

        Collective: the all-gather. The ranks must have agreed on the formats.
        """
        self.launch(shard, channel)
        self.complete()
        self._gathered_ahead = True

    def encode(self, shard: Any) -> Formats:
        """Call the pre hook and keep the result; return the formats of the tensors to send."""
        inputs, metadata = self.call_pre(shard)
        flat, rebuild = flatten(inputs)
        tensors = [self._gathered_dim_first(tensor) for tensor in flat]
        self._message = _Message(shard, tensors, rebuild, metadata)
        return formats_of(tensors)

    def call_pre(self, shard: Any) -> tuple[Sequence[torch.Tensor], Any]:
        """Call the pre hook; return the tensors to send, and the metadata for the post hook."""
        if not has_extension(shard):
            return (shard,), None
        if shard.device != self.mesh.device:  # offloaded; the hooks compute on the device
            moved = shard.to(self.mesh.device, non_blocking=True)
            shard = moved if has_extension(moved) else shard
        hook, param = bound_hook(getattr(shard, PRE), shard), self.param
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
        if tensor.ndim == 0:
            tensor = tensor.reshape(1)
        return tensor.movedim(self._dim_of(tensor), 0).detach().to(self.mesh.device).contiguous()

    def _dim_of(self, tensor: torch.Tensor) -> int:
        """Return the gathered dim of a tensor: the parameter's if their numbers of dims agree."""
        layout = self.param.layout
        return layout.dim or 0 if tensor.ndim == len(layout.shape) else 0

    def launch(self, shard: torch.Tensor, channel: Channel) -> None:
        """Call the pre hook, allocate memory and launch the all-gather."""
        if self._gathered_ahead:  # `gather_first` has gathered, and no use has consumed it
            return
        assert self.formats is not None
        if self._message is None:
            self.encode(shard)
        assert self._message is not None
        agreed, current = self.formats[self.mesh.shard_rank], formats_of(self._message.tensors)
        if current != agreed:
            raise ExtensionError(
                f"Expected {PRE} of {self.param.name} to return the same tensors as at the first "
                f"unshard, {to_text(agreed)}, got {to_text(current)}"
            )
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
        if self.mesh.num_shards == 1:
            for gathered, source in zip(self._gathered, inputs, strict=True):
                gathered.copy_(source)
            self._pending = Pending([])
            return
        works = channel.gather(self._gathered, inputs)
        stream = launching_stream(self.mesh.device)
        self._pending = Pending(works, channel.gathering, stream, inputs)

    def drop(self) -> None:
        """Abandon the gather: wait until no collective writes to the memory any more."""
        self._gathered_ahead, self._message = False, None
        pending = self.__dict__.pop("_pending", None)
        if pending is not None:
            pending.drop()

    def complete(self) -> None:
        """Wait for the all-gather, and call the post hook on the rows of all ranks."""
        if self._gathered_ahead:
            self._gathered_ahead = False
            return
        self._pending.wait()
        del self._pending
        assert self._message is not None
        (shard, _, rebuild, metadata), self._message = self._message, None
        pairs = zip(self._gathered, self._num_rows(), strict=True)
        outputs = rebuild([self._all_rows(i, *pair) for i, pair in enumerate(pairs)])
        # Autograd may have saved views of the gathered tensors, which the post hook gets, so a
        # refill must not bump their versions.
        _torch.set_versions(tuple(self._gathered), self._versions)
        has_hooks = has_extension(shard)
        hook = bound_hook(getattr(shard, POST), shard) if has_hooks else _post_all_gather
        post = partial(hook, outputs, metadata, self.compute_dtype)
        with torch.inference_mode(False), torch.no_grad():
            if self._out is None:
                tensor, inner = self._checked(post())
                self._releases_gathered = has_hooks and self._asks_to_release(shard)
                self._create_unsharded(tensor, inner)
            else:
                with _torch.preserved_versions(self._versioned):
                    post(out=self._out)
            if self._releases_gathered:
                _free(self._gathered)

    def free(self) -> bool:
        """Free the memory that the next gather fills again.

        Returns:
            Always ``False``: this bucket does not look for arrays that share its memory.
        """
        self._gathered_ahead = False
        _free([*self._gathered, *self._inner])
        return False

    def _num_rows(self) -> list[list[int]]:
        """Return, for each tensor, the number of rows that each rank sends."""
        assert self.formats is not None
        return [[format.shape[0] for format in each] for each in zip(*self.formats, strict=True)]

    def _all_rows(self, index: int, gathered: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """View a gathered tensor as hooks get it; move rows forward over gaps of padding."""
        assert self.formats is not None
        num_padded, end = max(counts), 0
        rows = gathered.view(len(counts) * num_padded, *self.formats[0][index].shape[1:])
        for rank, count in enumerate(counts):
            start = rank * num_padded
            if count and end != start:
                rows[end : end + count] = rows[start : start + count].clone()
            end += count
        return rows[:end].movedim(0, self._dim_of(rows))

    # The unsharded parameter ----------------------------------------------------------------

    def _checked(self, result: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the result of a post hook; raise if it is not a tensor and its inner tensors."""
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
        gathered, of_inner = storage_views(self._gathered), storage_views(inner)
        known = {*gathered, *storage_views([param.local])}
        others = {number: of_inner[number] for number in of_inner if number not in known}
        self._inner = list(others.values())
        read = [*self._inner, *self._read_after_post(gathered, inner)]
        self._read_in_backward = [memory.view(torch.uint8) for memory in read]
        leaves = _torch.leaves(unsharded)
        if _torch.is_subclass(unsharded):
            freed = {*gathered, *others}
            param.freed_inner = [leaf for leaf in leaves if _torch.storage_number(leaf) in freed]
        self._versioned = [param.unsharded, self._out, *leaves, *inner]

    def _read_after_post(self, gathered: StorageViews, inner: Sequence[torch.Tensor]) -> Tensors:
        """Return the gathered memory that is needed after the post hook, the same on all ranks.

        A class without ``__tensor_flatten__`` may need all of it.
        """
        unsharded = self.param.unsharded_local
        if self._releases_gathered:
            return []
        used = storage_views([unsharded, *inner])
        if _torch.is_subclass(unsharded) and not _torch.is_wrapper_subclass(unsharded):
            used = gathered
        return [memory for number, memory in gathered.items() if number in used]

    def memory_for_backward(self) -> Sequence[torch.Tensor]:
        """Return the memory of the unsharded parameter."""
        return self._read_in_backward

    def _asks_to_release(self, shard: Any) -> bool:
        """Return whether the gathered tensors may be freed once the post hook has run."""
        hook = getattr(shard, RELEASE, None)
        answer = False if hook is None else hook()
        if not isinstance(answer, bool):
            raise ExtensionError(
                f"Expected {RELEASE} of {self.param.name} to return a bool, got "
                f"{type(answer).__name__}"
            )
        return answer


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


def _free(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        _torch.free(tensor)


def _agree_on_formats(buckets: Sequence[ExtensionBucket]) -> None:
    """Exchange the formats of the tensors that each rank sends, before the first gather.

    Args:
        buckets: Buckets over one mesh, the same on all ranks.

    Raises:
        ExtensionError: On all ranks, if a hook failed on one, or the formats do not fit.

    Collective: one all-gather of a small object for each mesh axis.
    """
    mesh = buckets[0].mesh
    result: list[Formats] | str
    cause = None
    try:
        result = [bucket.encode(bucket.param.local) for bucket in buckets]
    except Exception as error:  # noqa: BLE001 - any failure of user code is raised on all ranks
        result, cause = f"{type(error).__name__}: {error}", error
    sent = gather_by_rank(result, mesh.process_groups, "agreeing on the tensors of subclasses")
    failures = [f"rank {rank}: {text}" for rank, text in sent.items() if isinstance(text, str)]
    if failures:
        raise ExtensionError(f"{PRE} failed on " + "; ".join(failures)) from cause
    group = mesh.shard_group
    ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
    for index, bucket in enumerate(buckets):
        by_rank = {rank: formats[index] for rank, formats in sent.items()}
        check_same_formats(PRE, bucket.param.name, by_rank)
        bucket.formats = [by_rank[rank] for rank in ranks]


def run_first_gathers(buckets: Sequence[Bucket], channels: dict[ShardMesh, Channel]) -> None:
    """Run the first gather of buckets without an unsharded parameter.

    Collective: for each mesh, an all-gather of a small object for each axis, and an all-gather of
        each such parameter.
    """
    by_mesh: dict[ShardMesh, list[ExtensionBucket]] = {}
    for bucket in buckets:
        if isinstance(bucket, ExtensionBucket) and not bucket.has_unsharded:
            by_mesh.setdefault(bucket.mesh, []).append(bucket)
    for mesh, unknown in by_mesh.items():
        _agree_on_formats(unknown)
        for bucket in unknown:
            bucket.gather_first(bucket.param.local, channels[mesh])


# The buckets of a group, flat ones and those of tensor subclasses ---------------------------------


def build_buckets(params: Sequence[ShardedParam], shards: Sequence[torch.Tensor]) -> list[Bucket]:
    """Copy shards into buckets: one for each mesh, dtype and device; subclasses have their own.

    Args:
        params: The parameters.
        shards: This rank's shard of each parameter.
    """
    kinds: dict[tuple[Any, ...], list[tuple[ShardedParam, torch.Tensor]]] = {}
    for param, shard in zip(params, shards, strict=True):
        dtypes = shard.dtype, param.policy.compute_dtype(shard.dtype)
        alone = param if needs_extension(shard) else None
        kind = param.mesh, *dtypes, shard.device, param.bucket_class or FlatBucket, alone
        kinds.setdefault(kind, []).append((param, shard))
    return [
        bucket_class(*zip(*pairs, strict=True)) if alone is None else ExtensionBucket(*pairs[0])
        for (*_, bucket_class, alone), pairs in kinds.items()
    ]


@torch.no_grad()
def move_into_buckets(params: Sequence[ShardedParam]) -> list[Bucket]:
    """Copy the shards of sharded parameters into new buckets, which hold them from now on."""
    with torch.inference_mode(False):
        buckets = build_buckets(params, [_torch.local_tensor(param.sharded) for param in params])
        for bucket in buckets:
            for param, local in zip(bucket.params, bucket.locals, strict=True):
                param.set_local(local)
    return buckets


def create_unsharded(buckets: Sequence[Bucket], channels: dict[ShardMesh, Channel]) -> None:
    """Make the unsharded parameters of buckets, before their first gather.

    Collective: for tensor subclasses only; see :func:`run_first_gathers`.
    """
    for bucket in buckets:
        if isinstance(bucket, FlatBucket) and not hasattr(bucket, "unsharded"):
            bucket.create_unsharded()
    run_first_gathers(buckets, channels)


def have_plain_shards(buckets: Sequence[Bucket]) -> bool:
    """Return whether all shards of flat buckets are still plain tensors."""
    flat = (bucket for bucket in buckets if isinstance(bucket, FlatBucket))
    return not any(needs_extension(param.local) for bucket in flat for param in bucket.params)


# Gradients that are tensor subclasses -------------------------------------------------------------

# The codec of each parameter's gradients; ``None`` if they are plain tensors.
_codecs: weakref.WeakKeyDictionary[ShardedParam, Codec | None] = weakref.WeakKeyDictionary()


def _is_unknown(param: ShardedParam) -> bool:
    """Return whether the inner tensors of gradients are unknown: no rank has had a gradient yet."""
    return param not in _codecs and _torch.is_wrapper_subclass(param.unsharded_local)


def num_tensors(param: ShardedParam) -> int:
    """Return the number of inner tensors of a gradient; 1 if the number is not known yet."""
    codec = _codecs.get(param)
    return 1 if codec is None else len(codec.names)


def _agree_on_codecs(params: Sequence[ShardedParam], grads: Sequence[Any], mesh: ShardMesh) -> None:
    """Exchange the inner tensors of gradients that only some ranks have.

    Collective: an all-gather of a small object for each mesh axis, unless all are known.
    """
    known: dict[int, Codec | None] = {}
    unknown = [index for index, param in enumerate(params) if _is_unknown(param)]
    for index in unknown:
        old_grad: Any = params[index].sharded.grad
        if grads[index] is not None:
            known[index] = codec_of(grads[index])
        elif stage_of(params[index], old_grad) == "reduced_over_shards":
            known[index] = codec_of(_torch.local_tensor(old_grad))
    if unknown:
        op = "agreeing on the inner tensors of gradients"
        for theirs in gather_by_rank(known, mesh.process_groups, op).values():
            known |= theirs
    for index, codec in known.items():
        _codecs[params[index]] = codec


class SplitReduction(Reduction):
    """The reduction of gradients that may be tensor subclasses, for several buckets.

    Each inner tensor is reduced like the gradient of a separate parameter.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._plan_members()

    def _plan_members(self) -> None:
        self._spans, self._all_known = [], not any(map(_is_unknown, self.params))
        self.members = []
        for param in self.params:
            start = len(self.members)
            self.members += [param] * num_tensors(param)
            self._spans.append((param, _codecs.get(param), slice(start, len(self.members))))
        self._plan_messages()
        self._plan_results()

    def launch(self) -> None:
        """Launch the reduce-scatter of all inner tensors.

        Collective: the reduce-scatter, and before it those of :func:`_agree_on_codecs`.
        """
        if not self._all_known:
            _agree_on_codecs(self.params, self._grads, self._mesh)
            self._plan_members()
        inner: list[torch.Tensor | None] = []
        for (_, codec, span), grad in zip(self._spans, self._grads, strict=True):
            if grad is None or codec is None:
                inner += [grad] * (span.stop - span.start)
            else:
                inner += codec.inner_tensors(grad)
        self._grads = inner
        super().launch()

    def _take_reduced_over_shards(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index, grad in super()._take_reduced_over_shards():
            _, codec, span = self._spans[index]
            inner = [grad] if codec is None else codec.inner_tensors(grad)
            yield from zip(range(span.start, span.stop), inner, strict=True)

    def _results(self) -> Iterable[tuple[ShardedParam, torch.Tensor, _torch.DTensorSpec]]:
        shards = self._shards_of(self.reduced)
        flags = [1.0] * len(self.members)
        if not (self._all_have_grads or self._writes_unused):
            flags = self.reduced[-self.num_flags :].tolist()
        del self.reduced
        for param, codec, span in self._spans:
            if not flags[span.start] or _is_unknown(param):
                continue
            grad = shards[span.start]
            if codec is not None:  # a class may require equal storage offsets
                grad = codec.rebuild(map(torch.clone, shards[span]))
                grad = grad.to(self._final_dtypes[span.start])
            yield param, grad, self._specs[span.start]


# Gradients that hooks encode ----------------------------------------------------------------------


class GradExtension:
    """The hooks of one parameter, for gradients of one dtype.

    Attributes:
        formats: The formats of the tensors that each rank sends; ``None`` until a rank has had a
            gradient and the ranks have exchanged the formats.
    """

    def __init__(self, param: ShardedParam) -> None:
        self.param: ShardedParam = weakref.proxy(param)  # weak, since `param` is the key of this
        self.formats: Formats | None = None
        self._metadata: Any = None

    def encode(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Call the first hook; return the tensors to send, with a row for each rank.

        Args:
            parts: The part of the gradient that each rank needs, [num_shards, shard_numel].
        """
        result = self._hook(GRAD_PRE)(parts, self.param.mesh.shard_axis)
        tensors, self._metadata = checked_result(GRAD_PRE, self.param.name, result)
        shapes = [list(tensor.shape) for tensor in tensors]
        if any(shape[:1] != [len(parts)] for shape in shapes):
            expected = f"tensors with a row for each of {len(parts)} ranks"
            raise self._error(expected, shapes)
        formats = formats_of(tensors)
        if self.formats is not None and self.formats != formats:
            expected = f"{to_text(self.formats)} as before"
            raise self._error(expected, to_text(formats))
        return list(tensors)

    def decode(self, received: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Call the second hook, which fills ``out``, [shard_numel], with the sum over all ranks.

        Args:
            received: The tensors that all ranks sent to this one, a row from each.
            out: The tensor to fill.
        """
        self._hook(GRAD_POST)(received, self._metadata, out)

    def _hook(self, name: str) -> Any:
        local = self.param.local
        return bound_hook(getattr(local, name), local)

    def _error(self, expected: str, got: object) -> ExtensionError:
        return ExtensionError(
            f"Expected {GRAD_PRE} of {self.param.name} to return {expected}, got {got}"
        )


# The hooks of each parameter, for gradients of each dtype.
_extensions: weakref.WeakKeyDictionary[ShardedParam, dict[torch.dtype, GradExtension]]
_extensions = weakref.WeakKeyDictionary()

# Tensors within a row start at a multiple of this, so that any dtype can be viewed.
ALIGNMENT_NBYTES = 16


class EncodedReduction(Reduction):
    """The reduction of encoded gradients: exchanged all to all, decoded and summed."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._extensions = list(map(self.extension_of, self.params))
        self.scale = Scale(1.0, None, 1.0)  # `wait` divides

    def extension_of(self, param: ShardedParam) -> GradExtension:
        """Return the object that encodes and decodes the gradients of a parameter."""
        return _extensions.setdefault(param, {}).setdefault(self.dtype, GradExtension(param))

    @torch.no_grad()
    def launch(self) -> None:
        """Encode the gradients, and send each rank its parts.

        Collective: an all-to-all; before it, for new gradients, those of
        :meth:`_encode_and_agree`.
        """
        grads = self._grads
        del self._grads
        refuse_sparse(self.params, grads)
        if all(extension.formats is not None for extension in self._extensions):
            encoded = list(map(self._encode, range(len(grads)), grads))
        else:
            encoded = self._encode_and_agree(grads)
        self._plan_rows()
        sizes = self._mesh.num_shards, self._row_nbytes
        rows = torch.zeros(*sizes, dtype=torch.uint8, device=self._mesh.device)
        for tensors, places in zip(encoded, self._row_places, strict=True):
            for tensor, place in zip(tensors or (), places, strict=tensors is not None):
                _view(rows, *place).copy_(tensor)
        has_grad = [grad is not None for grad in grads]
        self._all_have_grads = all(has_grad)
        rows[:, self._row_nbytes - self.num_flags :] = rows.new_tensor(has_grad)
        self._received = _torch.empty_like(rows)
        works = self._channel.exchange(self._received, rows)
        stream = launching_stream(rows.device)
        self._pending = [Pending(works, self._channel.reducing, stream, [rows])]

    def _encode(self, index: int, grad: torch.Tensor | None) -> list[torch.Tensor] | None:
        if grad is None:
            return None
        layout = self.params[index].layout
        return self._extensions[index].encode(layout.padded_shards(grad.to(self.dtype)))

    def _encode_and_agree(
        self, grads: Sequence[torch.Tensor | None]
    ) -> list[list[torch.Tensor] | None]:
        """Encode the gradients, and exchange the formats of the encoded tensors.

        Raises:
            ExtensionError: On all ranks, if a hook failed on one, a gradient is a tensor subclass,
                or formats differ.

        Collective: one all-gather of a small object for each mesh axis.
        """
        encoded = list[list[torch.Tensor] | None]()
        result: Any = {}
        cause = None
        for index, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            codec = None if grad is None else codec_of(grad)
            if codec is not None:
                result = (
                    f"Expected a plain gradient of {param.name} to pass to {GRAD_PRE}, got "
                    f"{codec.kind.__name__}; let {POST} return a plain tensor"
                )
                break
            try:
                encoded.append(self._encode(index, grad))
            except Exception as error:  # noqa: BLE001 - any failure of user code, for all ranks
                result = f"{GRAD_PRE} of {param.name} failed: {type(error).__name__}: {error}"
                cause = error
                break
            if encoded[-1] is not None:
                result[index] = formats_of(encoded[-1])
        op = "agreeing on the formats of encoded gradients"
        results = gather_by_rank(result, self._mesh.process_groups, op)
        failures = [text for text in results.values() if isinstance(text, str)]
        if failures:
            raise ExtensionError("; ".join(dict.fromkeys(failures))) from cause
        for index, param in enumerate(self.params):
            sent = {rank: formats[index] for rank, formats in results.items() if index in formats}
            if sent:
                check_same_formats(GRAD_PRE, param.name, sent)
                self._extensions[index].formats = next(iter(sent.values()))
        return encoded

    def _plan_rows(self) -> None:
        """Plan the offsets of all tensors in a row, and the bytes of a row."""
        self._row_places, end = [], 0
        for extension in self._extensions:
            places = []
            for format in extension.formats or ():
                places.append((end, format))
                end += aligned(_nbytes(format), ALIGNMENT_NBYTES)
            self._row_places.append(places)
        self._row_nbytes = aligned(end + self.num_flags, ALIGNMENT_NBYTES)

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the parts of all ranks, or for the replicas; sum and divide the parts."""
        super().wait()
        rows = self.__dict__.pop("_received", None)
        if rows is None:
            return
        self.reduced = rows.new_zeros(self._numel, dtype=self.dtype)
        for param, (*_, start), extension, places in zip(
            self.params, self._view_args, self._extensions, self._row_places, strict=True
        ):
            part = self.reduced[start : start + param.layout.flat.shard_numel]
            if extension.formats is not None:
                total = part.to(torch.promote_types(part.dtype, torch.float32))
                extension.decode(tuple(_view(rows, *place) for place in places), total)
                part.copy_(total.div_(self._divisor))
        self.reduced[-self.num_flags :] = rows[:, self._row_nbytes - self.num_flags :].amax(0)

    def discard(self) -> None:
        """Drop all gradients that are not in ``.grad`` yet."""
        super().discard()
        self.__dict__.pop("_received", None)


def _nbytes(format: Format) -> int:
    """Return the number of bytes of one row: the part for one rank."""
    return prod(format.shape[1:]) * format.dtype.itemsize


def _view(rows: torch.Tensor, start: int, format: Format) -> torch.Tensor:
    """View a tensor, [num_shards, ...], in rows of bytes."""
    return rows[:, start : start + _nbytes(format)].view(format.dtype).view(format.shape)
