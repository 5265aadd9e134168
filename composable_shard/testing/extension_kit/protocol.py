"""The hooks by themselves: what they are promised, what they must return.

Each check runs on every rank. The ranks are threads, which show each other what they would send;
so a hook is called with what ``fully_shard`` would call it with, and nothing is communicated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composable_shard import MixedPrecisionPolicy
from composable_shard._torch import leaves
from composable_shard.core.params.extension import POST, PRE, bound_hook, flatten, needs_extension
from composable_shard.testing.extension_kit.report import Broken
from composable_shard.testing.extension_kit.subject import (
    Shape,
    Subject,
    plain,
    shard_of,
    whole_mesh,
)

Show = Callable[[Any], list[Any]]
"""Shows something to the other ranks, and returns what each of them shows."""

LOW = torch.bfloat16


class Gathers:
    """The gathers of one weight, one after the other, through its hooks."""

    def __init__(self, subject: Subject, shape: Shape, show: Show, dtype: torch.dtype) -> None:
        self.subject, self.shape, self.show = subject, shape, show
        self.model = subject.sharded(shape)
        self.dtype = dtype
        self.local = shard_of(self.model)
        self.metadata: Any = None
        self._buffers: list[torch.Tensor] = []

    def send(self) -> list[torch.Tensor]:
        """Call the first hook; return what this rank sends."""
        hook = bound_hook(getattr(self.local, PRE), self.local)
        weight = self.model.get_parameter("0.weight")
        policy = MixedPrecisionPolicy(param_dtype=self.dtype)
        given = (whole_mesh(), weight.shape, weight.stride(), self.model[0], policy)
        result = hook(*given[: len(inspect.signature(hook).parameters)])
        if not (isinstance(result, tuple) and len(result) == 2):
            raise Broken(
                f"Expected {PRE} to return (tensors, metadata), got {type(result).__name__}"
            )
        sent, self.metadata = result
        if not isinstance(sent, (tuple, list)) or not all(map(torch.is_tensor, sent)):
            raise Broken(
                f"Expected {PRE} to return a tuple of tensors and metadata, got "
                f"{type(sent).__name__} as its first element"
            )
        flat, self._rebuild = flatten(sent)
        return [tensor.detach() if tensor.ndim else tensor.detach().view(1) for tensor in flat]

    def arrive(self, sent: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Put what all ranks send into the buffers, the same ones at each gather."""
        ranks = self.show(sent)
        whole = [torch.cat(parts) for parts in zip(*ranks, strict=True)]
        if not self._buffers:
            self._buffers = [torch.empty_like(tensor) for tensor in whole]
        for buffer, tensor in zip(self._buffers, whole, strict=True):
            buffer.copy_(tensor)
        arrived: tuple[torch.Tensor, ...] = self._rebuild(list(self._buffers))
        return arrived

    def receive(self, arrived: tuple[torch.Tensor, ...], out: torch.Tensor | None = None) -> Any:
        """Call the second hook."""
        hook = bound_hook(getattr(self.local, POST), self.local)
        return hook(arrived, self.metadata, self.dtype, **({} if out is None else {"out": out}))

    def first(self) -> tuple[torch.Tensor, set[int]]:
        """Gather for the first time; return the unsharded tensor and where its storages lie."""
        arrived = self.arrive(self.send())
        result = self.receive(arrived)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise Broken(
                f"Expected {POST} to return (tensor, inner tensors) when out is None, got "
                f"{type(result).__name__}"
            )
        tensor, inner = result
        return tensor, {place for one in (*arrived, *inner) for place in places(one)}

    def outputs(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Compute with an unsharded tensor."""
        with torch.no_grad():
            batch = self.subject.batch(self.shape, self.dtype)
            return plain(self.subject.compute(batch, tensor))


def dtypes_of(local: torch.Tensor) -> list[torch.dtype]:
    """Return the dtypes that a shard is asked to be gathered for."""
    return [local.dtype, LOW] if local.dtype.is_floating_point else [local.dtype]


def places(tensor: torch.Tensor) -> list[int]:
    """Return where the storages of a tensor lie."""
    return [leaf.untyped_storage().data_ptr() for leaf in leaves(tensor)]


def hooks(subject: Subject, shape: Shape, show: Show) -> None:
    """Both hooks exist, and the first takes (mesh) or all five arguments."""
    local = subject.tensor(shape)
    found = [name for name in (PRE, POST) if hasattr(local, name)]
    if len(found) == 1 or not (found or needs_extension(local)):
        got = f"{found[0]} alone" if found else "neither"
        raise Broken(f"Expected {PRE} and {POST}, got {got}")
    if found:
        signature = inspect.signature(bound_hook(getattr(local, PRE), local))
        if len(signature.parameters) not in (1, 5):
            raise Broken(
                f"Expected {PRE} to take (mesh) or (mesh, outer_size, outer_stride, module, "
                f"mp_policy), got {len(signature.parameters)} parameters: {signature}"
            )


def sent(subject: Subject, shape: Shape, show: Show) -> None:
    """All ranks send tensors of the same number, dtypes and trailing dims, with equal metadata."""
    gathers = Gathers(subject, shape, show, shard_dtype(subject, shape))
    formats = show([(tensor.dtype, list(tensor.shape[1:])) for tensor in gathers.send()])
    for rank, theirs in enumerate(formats):
        if theirs != formats[0]:
            raise Broken(
                "Expected tensors of the same number, dtypes and trailing dims from all ranks, got "
                f"{in_words(formats[0])} on rank 0 and {in_words(theirs)} on rank {rank}"
            )
    metadata = show(gathers.metadata)
    for rank, theirs in enumerate(metadata):
        if not alike(theirs, metadata[0]):
            raise Broken(
                "Expected equal metadata on all ranks, since each rank gets its own back, got "
                f"{metadata[0]} on rank 0 and {theirs} on rank {rank}; send what differs"
            )


def shard_dtype(subject: Subject, shape: Shape) -> torch.dtype:
    """Return the dtype that a tensor says it has."""
    return subject.tensor(shape).dtype


def in_words(formats: list[tuple[torch.dtype, list[int]]]) -> str:
    """Name dtypes and trailing dims."""
    return ", ".join(f"{dtype} {['rows', *dims]}".replace("'", "") for dtype, dims in formats)


def alike(mine: Any, theirs: Any) -> bool:
    """Compare metadata, tensors by value, and objects that cannot be compared by attributes."""
    if isinstance(mine, torch.Tensor) or type(mine) is not type(theirs):
        return isinstance(theirs, torch.Tensor) and same_bytes(mine, theirs)
    if isinstance(mine, (tuple, list)):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(alike(mine[key], theirs[key]) for key in mine)
    if type(mine).__eq__ is object.__eq__:
        return alike(getattr(mine, "__dict__", {}), getattr(theirs, "__dict__", {}))
    return bool(mine == theirs)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, also dtypes that know no comparison."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    first, second = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def shard(subject: Subject, shape: Shape, show: Show) -> None:
    """The hooks leave the shard as it is."""
    gathers = Gathers(subject, shape, show, shard_dtype(subject, shape))
    before = [leaf.detach().clone() for leaf in leaves(gathers.local)]
    arrived = gathers.arrive(gathers.send())
    _expect_unchanged(gathers.local, before, PRE)
    gathers.receive(arrived)
    _expect_unchanged(gathers.local, before, POST)


def _expect_unchanged(local: torch.Tensor, before: list[torch.Tensor], hook: str) -> None:
    for index, (now, then) in enumerate(zip(leaves(local), before, strict=True)):
        if not same_bytes(now, then):
            raise Broken(
                f"Expected {hook} to leave the shard as it is, got inner tensor {index} of it "
                "changed in place; work on a copy"
            )


def gathered(subject: Subject, shape: Shape, show: Show) -> None:
    """What comes back has the full shape, the dtype asked for, and the unsharded values."""
    whole = subject.tensor(shape)
    for dtype in dtypes_of(whole):
        gathers = Gathers(subject, shape, show, dtype)
        tensor, _ = gathers.first()
        if tensor.shape != whole.shape:
            raise Broken(
                f"Expected {POST} to return a tensor of shape {list(whole.shape)}, got "
                f"{list(tensor.shape)}"
            )
        if tensor.dtype != dtype:
            raise Broken(
                f"Expected {POST} to return a tensor of param_dtype, {dtype}, got {tensor.dtype}"
            )
        if dtype == whole.dtype:
            expected = gathers.outputs(whole)
            what = "to compute with the gathered tensor what the unsharded one gives"
            subject.expect_alike(gathers.outputs(tensor), expected, what)


def out(subject: Subject, shape: Shape, show: Show) -> None:
    """The second gather fills the tensor that the first one made, in the same storages."""
    for dtype in dtypes_of(subject.tensor(shape)):
        gathers = Gathers(subject, shape, show, dtype)
        tensor, lasting = gathers.first()
        before, old = places(tensor), [part.clone() for part in gathers.outputs(tensor)]
        gathers.local = shard_of(subject.sharded(shape, seed=1))
        arrived = gathers.arrive(gathers.send())
        gathers.receive(arrived, tensor)
        copies = tuple(one.clone() for one in arrived)
        expected = gathers.outputs(gathers.receive(copies)[0])
        found = gathers.outputs(tensor)
        if not all(map(torch.equal, found, expected)):
            kept = all(map(torch.equal, found, old))
            got = "those of the gather before" if kept else "others"
            raise Broken(
                f"Expected {POST} to write into out the values that arrived, got {got}; fill out "
                "where it is not the all-gather outputs themselves"
            )
        for then, now in zip(before, places(tensor), strict=True):
            if then in lasting and now != then:
                raise Broken(
                    f"Expected {POST} to keep the storages of out, which are freed and refilled, "
                    "got another one; copy into out instead of replacing what it is made of"
                )


def has_hooks(subject: Subject, shape: Shape) -> bool:
    """Tell whether there are hooks, or the tensor travels by its inner tensors."""
    return hasattr(subject.tensor(shape), PRE)


HOOK_CHECKS = (sent, shard, gathered, out)
